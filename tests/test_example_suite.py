"""The deliberate regression of the example suite, and that README shows what a user will see."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the example suite trains transformers models")

ROOT = Path(__file__).parents[1]
TEST = "example_suite/test_regression.py::test_finetune"


def test_the_baseline_catches_the_kept_logits_and_readme_shows_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEP_LOGITS", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", TEST, f"--gpumem-json={figures}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1

    stored = json.loads((ROOT / "baselines/example_suite/test_regression.json").read_text())
    before = stored["tests"]["test_finetune"]["virtual A10G x1 single"]["categories"]
    after = json.loads(figures.read_text())["tests"][0]["ranks"][0]["category_peaks"]
    # fp32 logits: the last step's are still there when the next one makes its own. Before, the peak was a moment later, when
    # the loss had got its gradient of one float, a block of 512 bytes.
    copy = 8 * 512 * 50_257 * 4
    assert after["activations"] - before["activations"] == 2 * copy - 512
    assert {name: size for name, size in after.items() if name != "activations"} == {
        name: size for name, size in before.items() if name != "activations"
    }

    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"^gpumem: baseline failed.*?^all, at the peak.*?$", readme, re.DOTALL | re.MULTILINE)
    assert shown is not None
    # The README's run had the versions of the baseline. Where they differ, the message says so in lines of its own.
    printed = re.sub(
        r"^  recorded with other versions:.*?\n(?=  at step)", "", run.stdout, flags=re.DOTALL | re.MULTILINE
    )
    assert shown[0] in printed
