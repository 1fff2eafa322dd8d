"""Sizes and tolerances as people write them, to and from integer bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([+-]?\d+(?:\.\d*)?(?:e\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
GB, GIB = 10**9, 2**30
_TOO_MUCH = 2**63


def parse_size(value: object, unit: int = 1) -> int:
    """Bytes from a number of `unit` bytes, or from a string such as "40 GiB", "512 MB" or "1024".

    GB is 10^9 and GiB is 2^30 bytes. Fractions of a byte are rounded down.
    Raises ValueError for anything else, and for a size below 0 or of 2^63 bytes or more.
    """
    if isinstance(value, bool):
        raise ValueError(f'{value!r} is not a size; write a number or a string such as "40 GiB"')
    if isinstance(value, (int, float)):
        written, scale = str(value), unit
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f'{value!r} is not a size; write a number or a string such as "40 GiB" or "512 MB"')
        written = match[1]
        scale = _UNITS[match[2].lower()] if match[2] else unit
    number = float(written)
    if number < 0:
        raise ValueError(f"{value!r} is negative; a size is 0 or more")
    # Exactly what is written: in floating point, 2.01 GB is one byte less than 2,010,000,000.
    nbytes = int(Fraction(written) * scale) if number * scale < 2**64 else _TOO_MUCH
    if nbytes >= _TOO_MUCH:
        raise ValueError(f"{value!r} is not a size; a size is a number of bytes below 2^63")
    return nbytes


@dataclass(frozen=True)
class Tolerance:
    """How far a figure may move from its baseline, in either direction: a fraction of it, plus bytes."""

    fraction: float = 0.0
    nbytes: int = 0

    def allows(self, baseline: int, now: int) -> bool:
        return abs(now - baseline) <= self.slack(baseline)

    def slack(self, baseline: int) -> int:
        """Bytes that a figure may differ from `baseline` bytes."""
        return int(baseline * Fraction(str(self.fraction))) + self.nbytes  # exactly: 29% of 100 is 29

    def __str__(self) -> str:
        if self.fraction and self.nbytes:
            return f"{self.fraction:.4g} of the baseline + {human(self.nbytes)}"
        if self.fraction:
            return f"{100 * self.fraction:.4g}%"
        return human(self.nbytes) if self.nbytes else "exact"


def parse_tolerance(value: object) -> Tolerance:
    """A Tolerance from "2%", "64 MiB" or a number of bytes. Raises ValueError for anything else."""
    if isinstance(value, Tolerance):
        return value
    if isinstance(value, str) and value.strip().endswith("%"):
        text = value.strip()[:-1].strip()
        try:
            percent = float(text)
        except ValueError:
            percent = math.nan
        if not 0 <= percent < math.inf:
            raise ValueError(f'{value!r} is not a tolerance; write "2%" or "64 MiB"')
        return Tolerance(fraction=float(Fraction(text) / 100))
    try:
        return Tolerance(nbytes=parse_size(value))
    except ValueError:
        raise ValueError(f'{value!r} is not a tolerance; write "2%" or "64 MiB"') from None


@dataclass(frozen=True)
class Unit:
    """The unit of a table's columns: `cell(nbytes)` is a number of it, with three decimals."""

    name: str
    nbytes: int

    def cell(self, nbytes: int) -> str:
        """ "50.205", and "<0.001" for what would read as zero but is not."""
        if 0 < abs(nbytes) < self.nbytes / 2000:
            return "<0.001" if nbytes > 0 else ">-0.001"
        return f"{nbytes / self.nbytes:.3f}"


def unit_for(sizes: Iterable[int]) -> Unit:
    """GiB; for a table whose largest figure is below a tenth of that MiB, and so on down to KiB."""
    largest = max((abs(size) for size in sizes), default=0)
    for name, nbytes in (("GiB", GIB), ("MiB", 2**20)):
        if largest >= nbytes / 10:
            return Unit(name, nbytes)
    return Unit("KiB", 2**10) if largest else Unit("GiB", GIB)


def human(nbytes: int) -> str:
    """With the binary unit that suits it: "50.205 GiB", "24.0 MiB", "512 B"."""
    size = abs(nbytes)
    sign = "-" if nbytes < 0 else ""
    if size >= GIB:
        return f"{sign}{size / GIB:.3f} GiB"
    if size >= 2**20:
        return f"{sign}{size / 2**20:.1f} MiB"
    if size >= 2**10:
        return f"{sign}{size / 2**10:.1f} KiB"
    return f"{sign}{size} B"


def apart(one: int, other: int) -> tuple[str, str]:
    """Two sizes side by side, as `human` gives them; in bytes where they differ by less than that shows."""
    words = human(one), human(other)
    return (f"{one:,} B", f"{other:,} B") if words[0] == words[1] and one != other else words


def change(nbytes: int) -> str:
    """A difference, with its sign: "+1.500 GiB", "-512 B", "0"."""
    return "0" if nbytes == 0 else f"{'+' if nbytes > 0 else ''}{human(nbytes)}"
