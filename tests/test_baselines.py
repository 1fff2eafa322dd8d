"""The store of baselines: what is written can be read in a diff, and nothing that was not touched changes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem import baselines
from pytest_gpumem.baselines import Baseline, BaselineError, BaselineStore, Environment, read_file, split_nodeid
from pytest_gpumem.categories import CATEGORIES

FSDP = Environment("virtual", "A100-40GB", 8, "fsdp")
SINGLE = Environment("cuda", "H100-80GB", 1, "single")
ONE = Baseline(
    peak=300,
    categories={"parameters": 200, "activations": 150},
    at_peak={"parameters": 200, "activations": 100},
    allocator="expandable_segments:True",
    versions={"torch": "2.13.0", "pytest-gpumem": "1"},
)
TWO = Baseline(peak=7, categories={}, at_peak={"other": 7}, metric="requested")


@pytest.fixture
def store(tmp_path: Path) -> BaselineStore:
    return BaselineStore(tmp_path / "baselines")


def again(store: BaselineStore) -> BaselineStore:
    """Another run's store, over the same files."""
    return BaselineStore(store.directory)


def written(store: BaselineStore, *entries: tuple[str, Environment, Baseline]) -> Path:
    """The file of these entries, all of one module."""
    for nodeid, environment, baseline in entries:
        store.put(nodeid, environment, baseline)
    module = split_nodeid(entries[0][0])[0]
    store.write([module])
    return store.path(module)


def files(store: BaselineStore) -> list[str]:
    return sorted(path.relative_to(store.directory).as_posix() for path in store.directory.rglob("*") if path.is_file())


# -- names


@pytest.mark.parametrize(
    ("nodeid", "module", "name"),
    [
        ("tests/test_a.py::test_b", "tests/test_a.py", "test_b"),
        ("tests/test_a.py::TestC::test_b[x::y]", "tests/test_a.py", "TestC::test_b[x::y]"),
        ("test_a.py", "test_a.py", ""),
    ],
)
def test_a_node_id_is_a_module_and_a_name(nodeid: str, module: str, name: str) -> None:
    assert split_nodeid(nodeid) == (module, name)


def test_an_environment_s_key() -> None:
    assert FSDP.key == "virtual A100-40GB x8 fsdp"
    assert SINGLE.key == "cuda H100-80GB x1 single"


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("test_a.py", "test_a.json"),
        ("tests/unit/test_a.py", "tests/unit/test_a.json"),
        ("../other/test_a.py", "other/test_a.json"),
        ("tests/../../test_a.py", "tests/test_a.json"),
        ("/elsewhere/test_a.py", "elsewhere/test_a.json"),
        ("tests/test_a.b.py", "tests/test_a.b.json"),
    ],
)
def test_a_module_s_file_lies_below_the_directory(store: BaselineStore, module: str, file: str) -> None:
    assert store.path(module) == store.directory.joinpath(*file.split("/"))


# -- round trips


def test_what_was_written_is_found(store: BaselineStore) -> None:
    written(store, ("tests/test_a.py::TestB::test_c[x]", FSDP, ONE))
    current = {"torch": "2.14.0"}
    found = again(store).find("tests/test_a.py::TestB::test_c[x]", FSDP, current)
    assert found == Baseline(**{**ONE.to_json(), "current": current})


@pytest.mark.parametrize(
    ("nodeid", "environment"),
    [
        ("tests/test_a.py::test_b", SINGLE),
        ("tests/test_a.py::test_b", Environment("virtual", "A100-40GB", 4, "fsdp")),
        ("tests/test_a.py::test_b", Environment("virtual", "A100-40GB", 8, "ddp")),
        ("tests/test_a.py::test_b[x]", FSDP),
        ("tests/test_b.py::test_b", FSDP),
    ],
)
def test_what_was_not_written_is_not_found(store: BaselineStore, nodeid: str, environment: Environment) -> None:
    written(store, ("tests/test_a.py::test_b", FSDP, ONE))
    assert again(store).find(nodeid, environment, {}) is None


def test_nothing_is_found_where_there_is_no_directory(store: BaselineStore) -> None:
    assert store.find("tests/test_a.py::test_b", FSDP, {}) is None
    assert store.modules() == []
    assert not store.directory.exists()  # looking makes none


nbytes = st.integers(0, 2**63 - 1)
by_category = st.dictionaries(st.sampled_from(CATEGORIES), nbytes)
some_baselines = st.builds(
    Baseline,
    peak=nbytes,
    categories=by_category,
    at_peak=by_category,
    metric=st.sampled_from(["allocated", "requested"]),
    allocator=st.text(),
    versions=st.dictionaries(st.text(), st.text(), max_size=3),
)
environments = st.sampled_from([FSDP, SINGLE])


@given(st.dictionaries(st.tuples(st.text(), environments), some_baselines, min_size=1, max_size=4))
@settings(deadline=None, max_examples=50)
def test_any_names_and_sizes_come_back(
    tmp_path_factory: pytest.TempPathFactory, entries: dict[tuple[str, Environment], Baseline]
) -> None:
    store = BaselineStore(tmp_path_factory.mktemp("store"))
    written(
        store, *((f"test_a.py::{name}", environment, baseline) for (name, environment), baseline in entries.items())
    )
    reread = again(store)
    for (name, environment), baseline in entries.items():
        assert reread.find(f"test_a.py::{name}", environment, {}) == baseline
    assert set(reread.tests("test_a.py")) == {name for name, _ in entries}


def test_the_file_reads_well_in_a_diff(store: BaselineStore) -> None:
    path = written(store, ("test_a.py::test_b", FSDP, ONE))
    assert path.read_text(encoding="utf-8") == (
        """\
{
  "schema_version": 1,
  "tests": {
    "test_b": {
      "virtual A100-40GB x8 fsdp": {
        "aggregation": "worst rank",
        "allocator": "expandable_segments:True",
        "at_peak": {
          "activations": 100,
          "parameters": 200
        },
        "categories": {
          "activations": 150,
          "parameters": 200
        },
        "metric": "allocated",
        "peak": 300,
        "versions": {
          "pytest-gpumem": "1",
          "torch": "2.13.0"
        }
      }
    }
  }
}
"""
    )


def test_the_order_of_writing_does_not_show(store: BaselineStore, tmp_path: Path) -> None:
    entries = [("test_a.py::test_z", FSDP, ONE), ("test_a.py::test_b", SINGLE, TWO), ("test_a.py::test_b", FSDP, ONE)]
    backwards = BaselineStore(tmp_path / "backwards")
    assert written(store, *entries).read_bytes() == written(backwards, *reversed(entries)).read_bytes()


# -- merging


def test_an_update_touches_one_entry_only(store: BaselineStore) -> None:
    path = written(
        store,
        ("test_a.py::test_b", FSDP, ONE),
        ("test_a.py::test_b", SINGLE, ONE),
        ("test_a.py::test_c", FSDP, ONE),
    )
    expected = json.loads(path.read_text())
    expected["tests"]["test_b"][FSDP.key] = TWO.to_json()
    written(again(store), ("test_a.py::test_b", FSDP, TWO))
    assert json.loads(path.read_text()) == expected


def test_a_put_is_found_before_it_is_written(store: BaselineStore) -> None:
    store.put("test_a.py::test_b", FSDP, ONE)
    assert store.find("test_a.py::test_b", FSDP, {}) == ONE
    assert not store.directory.exists()


def test_only_the_named_modules_are_written(store: BaselineStore) -> None:
    store.put("test_a.py::test_b", FSDP, ONE)
    store.put("sub/test_c.py::test_d", FSDP, ONE)
    store.put("sub/test_e.py::test_f", FSDP, ONE)
    store.write(["sub/test_c.py", "test_a.py", "test_a.py"])
    assert files(store) == ["sub/test_c.json", "test_a.json"]
    assert again(store).modules() == ["sub/test_c.py", "test_a.py"]


def test_removing_a_test_takes_all_its_environments_and_nothing_else(store: BaselineStore) -> None:
    path = written(
        store,
        ("test_a.py::test_b", FSDP, ONE),
        ("test_a.py::test_b", SINGLE, ONE),
        ("test_a.py::test_c", FSDP, TWO),
    )
    later = again(store)
    later.remove("test_a.py", "test_b")
    later.remove("test_a.py", "never there")
    later.write(["test_a.py"])
    assert json.loads(path.read_text())["tests"] == {"test_c": {FSDP.key: TWO.to_json()}}


def test_a_file_without_tests_is_deleted(store: BaselineStore) -> None:
    written(store, ("test_a.py::test_b", FSDP, ONE))
    written(store, ("test_c.py::test_d", FSDP, ONE))
    later = again(store)
    later.remove("test_a.py", "test_b")
    later.write(["test_a.py"])
    assert files(store) == ["test_c.json"]
    later.write(["test_a.py"])  # it is gone already
    assert files(store) == ["test_c.json"]


# -- versions


@pytest.mark.parametrize(
    ("current", "differing"),
    [
        ({}, []),  # not known, so nothing can be said
        ({"torch": "2.13.0", "pytest-gpumem": "1"}, []),
        ({"torch": "2.13.0", "pytest-gpumem": "1", "cuda": "13.0"}, []),
        ({"torch": "2.14.0", "pytest-gpumem": "1"}, ["torch 2.13.0 (now 2.14.0)"]),
        ({"torch": "2.14.0"}, ["pytest-gpumem 1 (now absent)", "torch 2.13.0 (now 2.14.0)"]),
    ],
)
def test_versions_that_differ_are_named(current: dict[str, str], differing: list[str]) -> None:
    assert Baseline(1, {}, {}, versions=ONE.versions, current=current).differing_versions() == differing


# -- writing fails


def failing(error: BaseException) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("module", "function", "error", "seen"),
    [
        (os, "replace", OSError(28, "No space left on device"), BaselineError),
        (os, "chmod", PermissionError(1, "Operation not permitted"), BaselineError),
        (os, "fdopen", OSError(24, "Too many open files"), BaselineError),
        (json, "dumps", TypeError("not serializable"), TypeError),
        (os, "replace", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    store: BaselineStore,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    function: str,
    error: BaseException,
    seen: type[BaseException],
) -> None:
    path = written(store, ("test_a.py::test_b", FSDP, ONE))
    old = path.read_bytes()
    later = again(store)
    later.put("test_a.py::test_b", FSDP, TWO)
    with monkeypatch.context() as patch:
        patch.setattr(module, function, failing(error))
        with pytest.raises(seen):
            later.write(["test_a.py"])
    assert files(store) == ["test_a.json"]
    assert path.read_bytes() == old
    later.write(["test_a.py"])  # what was put is not lost
    assert again(store).find("test_a.py::test_b", FSDP, {}) == TWO


def test_a_failed_write_names_the_file_and_the_reason(store: BaselineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("test_a.py::test_b", FSDP, ONE)
    monkeypatch.setattr(os, "replace", failing(OSError(28, "No space left on device")))
    with pytest.raises(BaselineError) as caught:
        store.write(["test_a.py"])
    assert str(caught.value) == f"{store.path('test_a.py')}: the baseline cannot be written: No space left on device"
    assert files(store) == []


def test_a_file_where_a_directory_should_be(store: BaselineStore) -> None:
    store.directory.mkdir()
    (store.directory / "sub").write_text("in the way")
    store.put("sub/test_a.py::test_b", FSDP, ONE)
    with pytest.raises(BaselineError, match=r"sub/test_a\.json: the baseline cannot be written: "):
        store.write(["sub/test_a.py"])


def test_the_new_file_takes_the_old_one_s_place_while_the_text_is_whole(
    store: BaselineStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads at the moment of the replacement sees one file or the other, never a part."""
    path = written(store, ("test_a.py::test_b", FSDP, ONE))
    replace, seen = os.replace, []

    def watched(source: str, target: Path) -> None:
        seen.append((read_file(Path(source)), read_file(target), Path(source).parent == Path(target).parent))
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    written(again(store), ("test_a.py::test_b", FSDP, TWO))
    assert seen == [({"test_b": {FSDP.key: TWO.to_json()}}, {"test_b": {FSDP.key: ONE.to_json()}}, True)]
    assert read_file(path) == {"test_b": {FSDP.key: TWO.to_json()}}


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_permissions_are_kept_and_new_files_follow_the_umask(store: BaselineStore) -> None:
    umask = os.umask(0o027)
    try:
        path = written(store, ("test_a.py::test_b", FSDP, ONE))
        assert path.stat().st_mode & 0o777 == 0o666 & ~0o027
        path.chmod(0o604)
        written(again(store), ("test_a.py::test_b", FSDP, TWO))
        assert path.stat().st_mode & 0o777 == 0o604
    finally:
        assert os.umask(umask) == 0o027  # writing left it as it was


# -- files that are not as they should be


def entry(**changed: Any) -> dict[str, Any]:
    return {**ONE.to_json(), **changed}


def text_of(figures: Any) -> str:
    return json.dumps({"schema_version": 1, "tests": {"test_b": {FSDP.key: figures}}}, indent=2)


def complaint(store: BaselineStore, content: bytes) -> str:
    """What reading a file with this content says, after its own path; and that the file stays as it is."""
    path = store.path("test_a.py")
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for look in (
        lambda: store.find("test_a.py::test_b", FSDP, {}),
        lambda: store.put("test_a.py::test_b", FSDP, TWO),
        lambda: store.remove("test_a.py", "test_b"),
    ):
        with pytest.raises(BaselineError) as caught:
            look()
    assert path.read_bytes() == content
    assert str(caught.value).startswith(f"{path}:")
    return str(caught.value).removeprefix(f"{path}:")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "1: the baseline file is not JSON: Expecting value. Restore it from git."),
        ('{"schema_version": 1,\n"tests": {\n<<<<<<< HEAD\n', "3: the baseline file is not JSON: Expecting"),
        ('{"schema_version": 1,\n"tests": {}\n}}', "3: the baseline file is not JSON: Extra data"),
        ("[" * 100_000, "1: the baseline file is not JSON: nested too deeply"),
        ('{"schema_version": 2, "tests": {}}', " schema_version 2 is newer than this pytest-gpumem reads (1): update"),
        ('{"schema_version": 2}', " schema_version 2 is newer than this pytest-gpumem reads (1): update"),
        ('{"schema_version": 0, "tests": {}}', " not a baseline file: it needs schema_version 1 and tests."),
        ('{"schema_version": "2", "tests": {}}', " not a baseline file: it needs schema_version 1 and tests."),
        ('{"tests": {}}', " not a baseline file: it needs schema_version 1 and tests."),
        ('{"schema_version": 1}', " not a baseline file: it needs schema_version 1 and tests."),
        ('{"schema_version": 1, "tests": []}', " not a baseline file: it needs schema_version 1 and tests."),
        ("[]", " not a baseline file: it needs schema_version 1 and tests."),
        ("null", " not a baseline file: it needs schema_version 1 and tests."),
        ('{"schema_version": 1, "tests": {"test_b": 7}}', " test_b: expected environments, found int"),
        (text_of([]), "5: test_b (virtual A100-40GB x8 fsdp): expected figures, found list"),
        (text_of({}), "5: test_b (virtual A100-40GB x8 fsdp): peak should be a whole number"),
    ],
)
def test_a_corrupt_file_is_named_with_the_line(store: BaselineStore, content: str, said: str) -> None:
    assert complaint(store, content.encode()).startswith(said)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"peak": -1}, "peak is -1; a size is not negative"),
        ({"peak": 1.5}, "peak should be a whole number"),
        ({"peak": "1"}, "peak should be a whole number"),
        ({"peak": True}, "peak should be a whole number"),
        ({"peak": None}, "peak should be a whole number"),
        ({"categories": {"inputs": -5}}, "categories.inputs is -5; a size is not negative"),
        ({"categories": {"inputs": 5.0}}, "categories.inputs is 5.0; a size is a whole number of bytes"),
        ({"at_peak": {"inputs": -5}}, "at_peak.inputs is -5; a size is not negative"),
        ({"at_peak": {"inputs": "5"}}, "at_peak.inputs is '5'; a size is a whole number of bytes"),
        ({"at_peak": {"inputs": True}}, "at_peak.inputs is True; a size is a whole number of bytes"),
        ({"at_peak": {"inputs": float("nan")}}, "at_peak.inputs is nan; a size is a whole number of bytes"),
        ({"categories": {"weights": 5}}, "categories: unknown category 'weights'"),
        ({"at_peak": {"weights": 5}}, "at_peak: unknown category 'weights'"),
        ({"categories": []}, "categories should be dict"),
        ({"at_peak": None}, "at_peak should be dict"),
        ({"metric": 1}, "metric should be str"),
        ({"aggregation": None}, "aggregation should be str"),
        ({"allocator": 1}, "allocator should be str"),
        ({"versions": "2.13"}, "versions should be dict"),
    ],
)
def test_a_wrong_figure_is_named_with_its_test_and_line(
    store: BaselineStore, changed: dict[str, Any], said: str
) -> None:
    assert complaint(store, text_of(entry(**changed)).encode()) == f"5: test_b ({FSDP.key}): {said}"


@pytest.mark.parametrize("field", ["peak", "categories", "at_peak", "metric", "aggregation", "allocator", "versions"])
def test_a_figure_that_is_missing_is_named(store: BaselineStore, field: str) -> None:
    figures = entry()
    del figures[field]
    assert complaint(store, text_of(figures).encode()).startswith(f"5: test_b ({FSDP.key}): {field} should be ")


def test_the_line_is_that_of_the_wrong_entry_and_not_of_the_first(store: BaselineStore) -> None:
    tests = {"test_a": {FSDP.key: entry()}, "test_b": {SINGLE.key: entry(), FSDP.key: entry(peak=-1)}}
    text = json.dumps({"schema_version": 1, "tests": tests}, indent=2)
    _, line = (number for number, line in enumerate(text.splitlines(), 1) if FSDP.key in line)
    assert complaint(store, text.encode()).startswith(f"{line}: test_b ({FSDP.key}): ")


def test_a_file_that_is_not_text(store: BaselineStore) -> None:
    assert complaint(store, b"\xff\xfe{}").startswith(" the baseline file cannot be read: ")


def test_a_file_that_cannot_be_opened(store: BaselineStore) -> None:
    path = store.path("test_a.py")
    path.mkdir(parents=True)  # a folder by that name: not even root can read it as a file
    with pytest.raises(BaselineError) as caught:
        store.find("test_a.py::test_b", FSDP, {})
    assert str(caught.value).startswith(f"{path}: the baseline file cannot be read: ")


def test_one_corrupt_file_does_not_hide_the_others(store: BaselineStore) -> None:
    written(store, ("test_c.py::test_d", FSDP, ONE))
    (store.directory / "test_a.json").write_text("{")
    later = again(store)
    with pytest.raises(BaselineError):
        later.tests("test_a.py")
    assert later.find("test_c.py::test_d", FSDP, {}) == ONE


def test_files_are_read_once(store: BaselineStore, monkeypatch: pytest.MonkeyPatch) -> None:
    written(store, ("test_a.py::test_b", FSDP, ONE))
    later, reads = again(store), []
    read = baselines.read_file
    monkeypatch.setattr(baselines, "read_file", lambda path: reads.append(path) or read(path))
    for _ in range(3):
        assert later.find("test_a.py::test_b", FSDP, {}) == ONE
    assert reads == [store.path("test_a.py")]
