"""Tables and messages for the terminal, narrow enough for a phone (60 columns)."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from pytest_gpumem.budget import Budget
from pytest_gpumem.categories import CATEGORIES
from pytest_gpumem.checks import instant_of_peak
from pytest_gpumem.report import RankReport
from pytest_gpumem.results import TestResult
from pytest_gpumem.units import change, human, unit_for


def title(result: TestResult) -> str:
    """ "virtual A100-40GB x 8, fsdp, rank 0"."""
    where = result.environment
    ranks = ", ".join(str(rank.report.rank) for rank in result.ranks)
    world = f" x {where.world_size}, {where.strategy}, rank{'s' if len(result.ranks) > 1 else ''} {ranks}"
    return f"{where.source} {where.gpu}" + (world if where.world_size > 1 or where.strategy != "single" else "")


def failure(result: TestResult) -> str:
    """The message of a test whose checks failed: each failed check, then the tables."""
    failed = result.failed
    nothing = any(verdict.name == "measured" for verdict in failed)
    names = ", ".join(verdict.name for verdict in failed)
    peak = human(result.worst.peak_bytes[result.metric] or 0)
    # The first line is all that pytest's short summary shows.
    head = "gpumem: nothing was measured" if nothing else f"gpumem: {names} failed, peak {peak}"
    lines = [head, *_wrapped(title(result)), ""]
    for verdict in failed:
        lines += [*_wrapped(f"FAILED {verdict.name}: {verdict.message}"), ""]
    for verdict in result.verdicts:
        if verdict.passed:
            lines += _wrapped(f"passed {verdict.name}: {verdict.message}")
    if nothing:
        return "\n".join(lines).rstrip()
    return "\n".join(lines).rstrip() + "\n\n" + tables(result)


def passed(result: TestResult) -> str:
    """What a test that passed has to show: the checks it passed, then the tables, phases among them."""
    report = result.worst
    lines = [title(result), f"peak {human(report.allocated)} {instant_of_peak(report, len(result.ranks))}"]
    lines += [line for v in result.verdicts for line in _wrapped(f"passed {v.name}: {v.message}")]
    return "\n\n".join(["\n".join(lines), tables(result), phase_table(report)]).rstrip()


_SIZE = re.compile(r"(?<=\d) (?=(?:[KMG]i)?B\b)")


def _wrapped(message: str) -> list[str]:
    """Lines of at most 72 columns, the further ones indented; no command is broken, and no number parted from its unit."""
    lines = []
    for number, line in enumerate(message.splitlines()):
        indent = "  " if number else ""
        if "pytest " in line:
            lines.append(indent + line.strip())
        else:
            joined = _SIZE.sub("\0", line)
            wrapped = textwrap.wrap(joined, 72, initial_indent=indent, subsequent_indent="  ", break_on_hyphens=False)
            lines += [line.replace("\0", " ") for line in wrapped]
    return lines


def tables(result: TestResult) -> str:
    """The category table, and the budget's terms where one was asked for; then what the figures rest on."""
    parts = [category_table(result)]
    if result.budget_text and result.budget.n_local:
        parts.append(budget_table(result.budget, result.worst))
    parts += ["\n".join(_wrapped(f"assumed: {assumption}")) for assumption in result.assumptions]
    return "\n\n".join(parts)


def category_table(result: TestResult) -> str:
    """Categories of the worst rank: against the baseline where there is one, else at the peak and each one's own peak."""
    report = result.worst
    shown = [
        c for c in CATEGORIES if report.category_peaks[c] or (result.baseline and result.baseline.categories.get(c))
    ]
    if result.baseline is not None:
        stored = result.baseline
        rows = [_compared(c, stored.categories.get(c, 0), report.category_peaks[c]) for c in shown]
        rows.append(_compared("all, at the peak", stored.peak, report.peak_bytes[result.metric] or 0))
        return _table(rows, ("own peak, {unit}", "baseline", "now", "change"))
    rows = [(c, report.at_peak[c], report.category_peaks[c]) for c in shown]
    return _table([*rows, ("all", report.allocated, "")], ("{unit}", "at peak", "own peak"))


def _compared(name: str, was: int, now: int) -> tuple[str | int, ...]:
    return name, was, now, "" if now == was else change(now - was)


def budget_table(budget: Budget, report: RankReport) -> str:
    """Every term of the budget beside its measured value, in bytes and in N of this rank."""

    def in_n(nbytes: int) -> str:
        return f"{nbytes / budget.n_local:.2f}"

    unit = "N" if budget.shards == 1 else f"N/{budget.shards}"
    rows: list[tuple[str | int, ...]] = [
        (term.name, "" if term.expected is None else term.expected, term.measured, in_n(term.measured))
        for term in budget.terms
        if term.measured or term.expected
    ]
    states = sum(1 for term in budget.terms if term.in_budget and (term.measured or term.expected))
    expected = "" if budget.per_n is None else budget.limit(budget.per_n)
    rows.insert(states, ("= model states", expected, budget.measured_bytes, in_n(budget.measured_bytes)))
    requested = report.peak_bytes["requested"] or 0
    rows.append(("peak", "", requested, in_n(requested)))
    notes = [f"{term.name}: {term.note}" for term in budget.terms if term.note and (term.measured or term.expected)]
    head = f"{unit} = {human(budget.n_local)}; own peaks in requested bytes: no sum of the rows"
    below = [line for note in notes for line in _wrapped(note)]
    return "\n".join([*_wrapped(head), _table(rows, ("{unit}", "by rule", "measured", f"in {unit}")), *below])


def phase_table(report: RankReport) -> str:
    """Each phase's peak and what was live at its end, for the first two steps and the last; "" without steps."""
    shown = report.steps if len(report.steps) <= 3 else [*report.steps[:2], report.steps[-1]]
    rows = [
        (f"step {step.index} {name}", phase.peak, phase.end) for step in shown for name, phase in step.phases.items()
    ]
    return _table(rows, ("{unit}", "peak", "at its end")) if rows else ""


def out_of_memory(report: RankReport) -> str:
    """What held the memory when an allocation did not fit."""
    oom = report.out_of_memory
    if oom is None:
        return ""
    step = f"step {oom.step}, " if oom.step is not None else ""
    rows = [*((category, nbytes) for category, nbytes in oom.composition.items() if nbytes), ("all", oom.allocated)]
    head = (
        f"out of memory in {step}phase {oom.phase}, rank {report.rank}: {human(oom.requested)} more did not fit beside"
    )
    return "\n".join([*_wrapped(head), _table(rows, ("category", "{unit}"))])


def summary(results: Sequence[TestResult]) -> str:
    """One row a test, for the end of the run."""
    rows = []
    for result in results:
        budget = result.budget
        states = f"{budget.measured_bytes / budget.n_bytes * budget.shards:.2f}N" if budget.n_bytes else ""
        failed = ", ".join(verdict.name for verdict in result.failed)
        verdict = f"FAILED {failed}" if failed and result.outcome != "xfailed" else result.outcome
        if result.worst.out_of_memory is not None:
            verdict += " (OOM)"
        name = result.nodeid.partition("::")[2]
        where = f"{result.environment.gpu} x {result.environment.world_size} {result.environment.strategy}"
        rows.append((f"{name}\n  {where}", result.worst.allocated, states, verdict))
    return _table(rows, ("test", "peak {unit}", "states", ""))


def updates(rows: Sequence[tuple[str, str, dict[str, int], dict[str, int]]]) -> str:
    """What an update stored: (test, environment, old sizes by name, new sizes by name)."""
    parts = []
    for nodeid, environment, old, new in rows:
        lines = [
            (
                name,
                old.get(name, "-"),
                size,
                "new" if name not in old else change(size - old[name]),
            )
            for name, size in new.items()
            if size or old.get(name)
        ]
        parts.append(f"{nodeid}\n{environment}\n" + _table(lines, ("{unit}", "old", "new", "change")))
    return "\n\n".join(parts)


def _table(rows: Sequence[Sequence[str | int]], headers: Sequence[str]) -> str:
    """Integers are bytes; all are shown in the one unit that suits the largest, which `{unit}` in the headers names."""
    unit = unit_for(cell for row in rows for cell in row if isinstance(cell, int))
    cells = [[unit.cell(cell) if isinstance(cell, int) else cell for cell in row] for row in rows]
    align = ("left", *("right" for _ in headers[1:]))
    return tabulate(
        cells,
        headers=[header.format(unit=unit.name) for header in headers],
        tablefmt="simple",
        disable_numparse=True,
        colalign=align if rows else None,
    )
