"""GNU OpenMP across a fork: its threads are gone in the copy, which then waits for them for ever."""

from __future__ import annotations

import re
from pathlib import Path

_GNU_OPENMP = re.compile(r"\S*/libgomp[^/\s]*\.so[^/\s]*$", re.MULTILINE)
_PAUSE_HARD = 2  # omp_pause_hard, OpenMP 5.0; in libgomp from GCC 9 on


def end_threads() -> None:
    """Let every GNU OpenMP in this process end its idle threads; the next parallel region starts new ones."""
    try:
        libraries = set(_GNU_OPENMP.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return
    if not libraries:
        return
    import ctypes

    for library in libraries:
        try:
            ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_HARD)
        except (AttributeError, OSError):
            pass  # too old, or not loaded by that name any more
