"""What the plugin costs a run: its import, and the process of its own that each marked test gets.

    python benchmarks/overhead.py

Prints milliseconds and ratios, all measured in this one run: compare the ratios, not the milliseconds, between machines.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 7
IMPORT = "import time, pytest; start = time.perf_counter(); import {}; print(time.perf_counter() - start)"
SUITE = """
import pytest, torch

@pytest.mark.gpumem(isolate={isolate})
@pytest.mark.parametrize("number", range({tests}))
def test_it(number):
    torch.empty(1000, device="cuda")
"""


def main() -> None:
    pytest_import = median(lambda: imported("json"))
    plugin_import = median(lambda: imported("pytest_gpumem.plugin"))
    torch_import = median(lambda: imported("torch"), rounds=3)
    print(f"import pytest_gpumem.plugin, with pytest there: {plugin_import * 1e3:.1f} ms")
    print(f"  of the import of torch, which it does without: {plugin_import / torch_import:.2%}")
    print(f"  (an import that is there already: {pytest_import * 1e3:.2f} ms)")
    isolated, in_place = each_test(isolate=True), each_test(isolate=False)
    print(
        f"a marked test in a process of its own: {isolated * 1e3:.0f} ms; in pytest's own process: {in_place * 1e3:.0f} ms"
    )
    print(
        f"  isolation costs {(isolated - in_place) * 1e3:.0f} ms a test, {isolated / in_place:.1f} times the test in place"
    )


def imported(module: str) -> float:
    """Seconds that a fresh interpreter needs to import `module`, after pytest."""
    return float(subprocess.check_output([sys.executable, "-c", IMPORT.format(module)], text=True))


def each_test(isolate: bool) -> float:
    """Seconds that each further test of a run costs."""
    few, many = 5, 45
    return (suite(isolate, many) - suite(isolate, few)) / (many - few)


def suite(isolate: bool, tests: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_it.py").write_text(SUITE.format(isolate=isolate, tests=tests))
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder], check=True, stdout=-3)
        return time.perf_counter() - start


def median(measure: object, rounds: int = ROUNDS) -> float:
    assert callable(measure)
    return statistics.median(measure() for _ in range(rounds))


if __name__ == "__main__":
    main()
