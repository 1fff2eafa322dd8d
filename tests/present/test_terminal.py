"""Tables whose cells are the figures, and messages that fit a narrow screen."""

from __future__ import annotations

import re

import pytest
from figures import baseline, budget, rank_report, result, sizes, term
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.baselines import Environment
from pytest_gpumem.budget import Budget
from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.checks import Verdict
from pytest_gpumem.present import terminal
from pytest_gpumem.report import OutOfMemoryReport, RankReport

GIB = 1024**3
COMMAND = (
    "pytest tests/a_rather_long_folder/test_a_rather_long_name.py::test_it[with-parameters] --gpumem-update-baselines"
)
FSDP = Environment("virtual", "A100-40GB", 8, "fsdp")


def cells(table: str) -> list[list[str]]:
    """The rows of a table without its headers and its rule. A cell that is empty is left out."""
    lines = table.splitlines()
    rule = next(number for number, line in enumerate(lines) if set(line) <= {"-", " "} and line.strip())
    return [re.split(r"\s{2,}", line.strip()) for line in lines[rule + 1 :] if line.strip()]


def header(table: str) -> list[str]:
    lines = table.splitlines()
    rule = next(number for number, line in enumerate(lines) if set(line) <= {"-", " "} and line.strip())
    return re.split(r"\s{2,}", lines[rule - 1].strip())


def llama(shards: int = 1) -> tuple[RankReport, Budget]:
    """1 GiB of parameters here, AdamW, and 3 GiB of activations: a peak of 1 + 1 + 2 + 3 = 7 GiB."""
    report = rank_report(
        at_peak={"parameters": GIB, "gradients": GIB, "optimizer_state": 2 * GIB, "activations": 3 * GIB},
        category_peaks={"activations": 4 * GIB, "inputs": 1},
        requested=7 * GIB - GIB // 4,
    )
    terms = (
        term("parameters", GIB, GIB, True, "5 B of them frozen"),
        term("gradients", GIB, GIB, True),
        term("optimizer state", 2 * GIB, 2 * GIB, True, "AdamW"),
        term("optimizer temporaries", GIB, 0, False, "foreach"),
        term("communication", None, 0, False, "a note on nothing"),
        term("activations", None, 4 * GIB, False, "grow with batch and sequence"),
    )
    return report, budget(GIB, 4 * GIB, n_bytes=shards * GIB, shards=shards, terms=terms)


# -- title


@pytest.mark.parametrize(
    ("environment", "ranks", "title"),
    [
        (Environment("virtual", "A100-40GB", 1, "single"), [0], "virtual A100-40GB"),
        (Environment("cuda", "H100-80GB", 1, "ddp"), [0], "cuda H100-80GB x 1, ddp, rank 0"),
        (Environment("virtual", "A100-40GB", 8, "fsdp"), [3], "virtual A100-40GB x 8, fsdp, rank 3"),
        (Environment("virtual", "A100-40GB", 8, "fsdp"), [0, 7], "virtual A100-40GB x 8, fsdp, ranks 0, 7"),
        (Environment("virtual", "A100-40GB", 2, "single"), [0], "virtual A100-40GB x 2, single, rank 0"),
    ],
)
def test_the_title(environment: Environment, ranks: list[int], title: str) -> None:
    assert terminal.title(result([rank_report(rank) for rank in ranks], environment=environment)) == title


# -- the category table


def test_categories_at_the_peak_and_their_own_peaks() -> None:
    report, its_budget = llama()
    table = terminal.category_table(result([report], [its_budget]))
    assert header(table) == ["GiB", "at peak", "own peak"]
    assert cells(table) == [
        ["parameters", "1.000", "1.000"],
        ["gradients", "1.000", "1.000"],
        ["optimizer_state", "2.000", "2.000"],
        ["activations", "3.000", "4.000"],
        ["inputs", "0.000", "<0.001"],
        ["all", "7.000"],
    ]


def test_the_table_shows_the_worst_rank() -> None:
    reports = [rank_report(rank, at_peak={"inputs": nbytes}) for rank, nbytes in ((0, GIB), (1, 3 * GIB), (2, 2 * GIB))]
    assert cells(terminal.category_table(result(reports)))[-1] == ["all", "3.000"]


def test_categories_against_the_baseline() -> None:
    report, its_budget = llama()
    stored = baseline(
        6 * GIB,
        {"parameters": GIB, "gradients": 2 * GIB, "activations": 4 * GIB - 512, "communication": GIB // 2, "inputs": 1},
    )
    table = terminal.category_table(result([report], [its_budget], baseline=stored))
    assert header(table) == ["own peak, GiB", "baseline", "now", "change"]
    assert cells(table) == [
        ["parameters", "1.000", "1.000"],
        ["gradients", "2.000", "1.000", "-1.000 GiB"],
        ["optimizer_state", "0.000", "2.000", "+2.000 GiB"],
        ["activations", "4.000", "4.000", "+512 B"],
        ["inputs", "<0.001", "<0.001"],
        ["communication", "0.500", "0.000", "-512.0 MiB"],
        ["all, at the peak", "6.000", "7.000", "+1.000 GiB"],
    ]


def test_the_baseline_s_peak_is_compared_in_its_own_metric() -> None:
    report, its_budget = llama()
    stored = baseline(7 * GIB, {}, metric="requested")
    table = terminal.category_table(result([report], [its_budget], baseline=stored, metric="requested"))
    assert cells(table)[-1] == ["all, at the peak", "7.000", "6.750", "-256.0 MiB"]


# -- the budget table


@pytest.mark.parametrize(("shards", "unit"), [(1, "N"), (8, "N/8")])
def test_every_term_beside_its_rule(shards: int, unit: str) -> None:
    report, its_budget = llama(shards)
    lines = terminal.budget_table(its_budget, report).splitlines()
    head, table, notes = lines[0], lines[1:-4], lines[-4:]
    assert head == f"{unit} = 1.000 GiB; own peaks in requested bytes: no sum of the rows"
    assert header("\n".join(table)) == ["GiB", "by rule", "measured", f"in {unit}"]
    assert cells("\n".join(table)) == [
        ["parameters", "1.000", "1.000", "1.00"],
        ["gradients", "1.000", "1.000", "1.00"],
        ["optimizer state", "2.000", "2.000", "2.00"],
        ["= model states", "4.000", "4.000", "4.00"],
        ["optimizer temporaries", "1.000", "0.000", "0.00"],
        ["activations", "4.000", "4.00"],
        ["peak", "6.750", "6.75"],
    ]
    assert notes == [
        "parameters: 5 B of them frozen",
        "optimizer state: AdamW",
        "optimizer temporaries: foreach",
        "activations: grow with batch and sequence",
    ]


def test_frozen_parameters_are_in_the_sum_by_rule() -> None:
    report, _ = llama()
    its_budget = budget(GIB, 5 * GIB, frozen_bytes=GIB, terms=(term("parameters", 2 * GIB, 2 * GIB, True),))
    assert ["= model states", "5.000", "5.000", "5.00"] in cells(terminal.budget_table(its_budget, report))


def test_without_a_rule_the_sum_is_left_empty() -> None:
    report, _ = llama()
    its_budget = budget(GIB, 3 * GIB, per_n=None, terms=(term("optimizer state", None, 2 * GIB, True),))
    assert cells(terminal.budget_table(its_budget, report))[:2] == [
        ["optimizer state", "2.000", "2.00"],
        ["= model states", "3.000", "3.00"],
    ]


def test_the_budget_is_shown_where_one_was_asked_for() -> None:
    report, its_budget = llama()
    assert "by rule" in terminal.tables(result([report], [its_budget], budget_text="4N"))
    assert "by rule" not in terminal.tables(result([report], [its_budget]))
    assert "by rule" not in terminal.tables(result([report], [budget(0, 0)], budget_text="4N"))


def test_what_the_figures_rest_on_is_said_once() -> None:
    reports = [rank_report(0, at_peak={"inputs": 1}), rank_report(1)]
    text = terminal.tables(result(reports, assumptions=("routing is balanced", "all sequences are full")))
    assert text.endswith("\n\nassumed: all sequences are full\n\nassumed: routing is balanced")
    assert text.count("routing is balanced") == 1


# -- failures


def failed(*verdicts: Verdict) -> str:
    report, its_budget = llama(shards=8)
    return terminal.failure(
        result(
            [report],
            [its_budget],
            environment=FSDP,
            verdicts=list(verdicts),
            budget_text="4N",
            assumptions=("so " * 40,),
        )
    )


def test_a_failure_begins_with_what_failed_and_ends_with_the_tables() -> None:
    text = failed(
        Verdict("max", False, "peak 7.000 GiB is over the limit,\nat step 1"),
        Verdict("budget", True, "model states 4.000 GiB"),
        Verdict("baseline", False, "grew"),
    )
    assert text.startswith(
        "gpumem: max, baseline failed, peak 7.000 GiB\n"
        "virtual A100-40GB x 8, fsdp, rank 0\n"
        "\n"
        "FAILED max: peak 7.000 GiB is over the limit,\n"
        "  at step 1\n"
        "\n"
        "FAILED baseline: grew\n"
        "\n"
        "passed budget: model states 4.000 GiB\n"
        "\n"
        "GiB "
    )
    assert "\nall                  7.000" in text
    assert "= model states" in text


@pytest.mark.parametrize(
    ("verdicts", "head"),
    [
        ([("max", False)], "gpumem: max failed, peak 7.000 GiB"),
        ([("max", False), ("budget", False)], "gpumem: max, budget failed, peak 7.000 GiB"),
        ([("max", True), ("baseline", False)], "gpumem: baseline failed, peak 7.000 GiB"),
        ([("measured", False)], "gpumem: nothing was measured"),
    ],
)
def test_the_first_line_is_enough_for_a_short_summary(verdicts: list[tuple[str, bool]], head: str) -> None:
    assert failed(*(Verdict(name, passed, "so") for name, passed in verdicts)).splitlines()[0] == head


def test_where_nothing_was_measured_there_is_no_table() -> None:
    text = failed(Verdict("measured", False, "nothing was put on the GPU"))
    assert text.endswith("FAILED measured: nothing was put on the GPU")


def test_a_command_is_never_broken() -> None:
    lines = failed(Verdict("baseline", False, f"no baseline is stored. Record one:\n  {COMMAND}")).splitlines()
    assert len(COMMAND) > 72
    assert f"  {COMMAND}" in lines


def too_long(text: str) -> list[str]:
    return [line for line in text.splitlines() if len(line) > 72 and "pytest " not in line]


words = st.lists(st.text("abc-:,", min_size=1, max_size=30), min_size=1, max_size=30).map(" ".join)
nbytes = st.integers(0, 99_999 * GIB)


@given(
    st.lists(
        st.tuples(st.sampled_from(["max", "limits[optimizer_state]", "baseline"]), st.booleans(), words), min_size=1
    ),
    st.dictionaries(st.sampled_from(CATEGORIES), nbytes, max_size=10),
    st.none() | st.dictionaries(st.sampled_from(CATEGORIES), nbytes),
    st.integers(1, 300),
    words,
)
@settings(deadline=None, max_examples=60)
def test_no_line_is_longer_than_72_columns(
    verdicts: list[tuple[str, bool, str]],
    figures: dict[str, int],
    stored: dict[str, int] | None,
    ranks: int,
    assumption: str,
) -> None:
    reports = [rank_report(rank, at_peak=figures) for rank in range(ranks)]
    terms = tuple(
        term(name, size, size, True, f"{size:,} B of padding to equal shards, and more")
        for name, size in figures.items()
    )
    text = terminal.failure(
        result(
            reports,
            [budget(GIB, sum(figures.values()), shards=ranks, terms=terms)] * ranks,
            environment=Environment("virtual", "RTX-6000-Ada-48GB", ranks, "fsdp"),
            verdicts=[*(Verdict(*each) for each in verdicts), Verdict("budget", False, "over")],
            baseline=None if stored is None else baseline(sum(stored.values()), stored),
            budget_text="4N",
            assumptions=(assumption,),
        )
    )
    _, *below = text.splitlines()  # the first line grows with what failed
    assert too_long("\n".join(below)) == []
    assert text.count("FAILED") == sum(not passed for _, passed, _ in verdicts) + 1


# -- out of memory


def test_what_held_the_memory_when_it_ran_out() -> None:
    oom = OutOfMemoryReport(GIB // 2, 3 * GIB, sizes(parameters=GIB, activations=2 * GIB), "train/backward", 12)
    text = terminal.out_of_memory(rank_report(7, out_of_memory=oom))
    assert " ".join(text.partition("\ncategory")[0].split()) == (
        "out of memory in step 12, phase train/backward, rank 7: 512.0 MiB more did not fit beside"
    )
    assert header(text) == ["category", "GiB"]
    assert cells(text) == [["parameters", "1.000"], ["activations", "2.000"], ["all", "3.000"]]
    assert too_long(text) == []


def test_out_of_memory_outside_all_steps() -> None:
    oom = OutOfMemoryReport(1, 0, sizes(), "between", None)
    text = terminal.out_of_memory(rank_report(out_of_memory=oom))
    assert text.startswith("out of memory in phase between, rank 0: 1 B more did not fit beside\n")
    assert cells(text) == [["all", "0.000"]]


def test_enough_memory_is_no_message() -> None:
    assert terminal.out_of_memory(rank_report()) == ""


# -- the end of the run


def test_the_summary_has_a_row_for_each_test() -> None:
    report, its_budget = llama(shards=8)
    sharded = result([report], [its_budget], nodeid="tests/test_a.py::TestB::test_c[x]", environment=FSDP)
    failing = result(
        [rank_report(at_peak={"inputs": GIB})],
        verdicts=[Verdict("max", False, ""), Verdict("budget", True, ""), Verdict("baseline", False, "")],
        outcome="failed",
    )
    oom = result(
        [rank_report(at_peak={"inputs": 2 * GIB}, out_of_memory=OutOfMemoryReport(1, 0, sizes(), "forward", 0))],
        outcome="failed",
    )
    table = terminal.summary([sharded, failing, oom])
    assert header(table) == ["test", "peak GiB", "states"]
    assert cells(table) == [
        ["TestB::test_c[x]", "7.000", "4.00N", "passed"],
        ["A100-40GB x 8 fsdp"],
        ["test_a", "1.000", "FAILED max, baseline"],
        ["A100-40GB x 1 single"],
        ["test_a", "2.000", "failed (OOM)"],
        ["A100-40GB x 1 single"],
    ]
    assert too_long(table) == []


def test_an_update_shows_old_new_and_change() -> None:
    text = terminal.updates(
        [
            (
                "tests/test_a.py::test_b",
                "virtual A100-40GB x8 fsdp",
                {"parameters": GIB, "gradients": 2 * GIB, "inputs": 0, "buffers": 3 * GIB},
                {"parameters": GIB, "gradients": GIB, "inputs": 0, "buffers": 0, "activations": GIB // 4, "other": 0},
            ),
            ("tests/test_a.py::test_c", "cuda H100-80GB x1 single", {}, {"all, at the peak": GIB}),
        ]
    )
    first, second = text.split("\n\n")
    assert first.splitlines()[:2] == ["tests/test_a.py::test_b", "virtual A100-40GB x8 fsdp"]
    assert header(first) == ["GiB", "old", "new", "change"]
    assert cells(first) == [
        ["parameters", "1.000", "1.000", "0"],
        ["gradients", "2.000", "1.000", "-1.000 GiB"],
        ["buffers", "3.000", "0.000", "-3.000 GiB"],
        ["activations", "-", "0.250", "new"],
    ]
    assert second.splitlines()[:2] == ["tests/test_a.py::test_c", "cuda H100-80GB x1 single"]
    assert cells(second) == [["all, at the peak", "-", "1.000", "new"]]
    assert too_long(text) == []


def test_no_updates_no_text() -> None:
    assert terminal.updates([]) == ""
