"""Sizes and tolerances: GB is 10^9 bytes, GiB 2^30, and nothing is lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.units import GB, GIB, Tolerance, Unit, apart, change, human, parse_size, parse_tolerance, unit_for

sizes = st.integers(0, 2**63 - 1)


# -- parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("1024", 1024),
        ("512 B", 512),
        ("1 KB", 1000),
        ("1 MB", 1_000_000),
        ("1 GB", 1_000_000_000),
        ("1 TB", 1_000_000_000_000),
        ("1 KiB", 1024),
        ("1 MiB", 1024 * 1024),
        ("1 GiB", 1024 * 1024 * 1024),
        ("1 TiB", 1024 * 1024 * 1024 * 1024),
        ("40 GiB", 42_949_672_960),
        ("40GB", 40_000_000_000),
        ("  40   gib  ", 42_949_672_960),
        ("+2 kib", 2048),
        ("1.5 KiB", 1536),
        ("2. KB", 2000),
        ("1e3", 1000),
        ("2e3 MB", 2_000_000_000),
        ("0.9 B", 0),
        ("1.9999 KB", 1999),
    ],
)
def test_a_size_as_a_string(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("value", "unit", "nbytes"),
    [
        (40, GB, 40_000_000_000),
        (40, GIB, 42_949_672_960),
        (0.5, GIB, 536_870_912),
        (512, 1, 512),
        (1.9, 1, 1),
        (0, GB, 0),
        ("40", GB, 40_000_000_000),
        ("40 MB", GB, 40_000_000),  # a unit that is written beats the argument's own
        (9_007_199_254_740_993, 1, 9_007_199_254_740_993),  # 2^53 + 1, which no float holds
    ],
)
def test_a_number_counts_in_the_given_unit(value: object, unit: int, nbytes: int) -> None:
    assert parse_size(value, unit) == nbytes


@given(sizes)
@settings(deadline=None)
def test_bytes_are_kept_exactly(nbytes: int) -> None:
    assert parse_size(f"{nbytes} B") == nbytes
    assert parse_size(nbytes) == nbytes


@given(st.integers(0, 10**8))
@settings(deadline=None)
def test_decimals_are_taken_as_written(hundredths: int) -> None:
    """2.01 GB is 2,010,000,000 bytes, although 2.01 * 10**9 is a little less in floating point."""
    written = f"{hundredths // 100}.{hundredths % 100:02}"
    assert parse_size(f"{written} GB") == hundredths * 10**7
    assert parse_size(float(written), GB) == hundredths * 10**7


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "lots",
        "GiB",
        "40 XB",
        "40 GiB GiB",
        "1,5 GB",
        "4 0",
        "0x10",
        "1e",
        None,
        True,
        False,
        [40],
        b"40",
        1 + 2j,
    ],
)
def test_what_is_no_size(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size; write a number or a string such as"):
        parse_size(value)


@pytest.mark.parametrize("value", [-1, -0.5, "-1", "-1 GiB", float("-inf")])
def test_no_negative_size(value: object) -> None:
    with pytest.raises(ValueError, match="is negative; a size is 0 or more"):
        parse_size(value)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "1e400", 2**63, 10**400, "1e308 TB", "8388608 TiB", "9223372036854775808 B"]
)
def test_no_size_beyond_what_an_address_holds(value: object) -> None:
    with pytest.raises(ValueError, match=r"is not a size; a size is a number of bytes below 2\^63"):
        parse_size(value)


# -- tolerances


@pytest.mark.parametrize(
    ("value", "tolerance"),
    [
        ("2%", Tolerance(fraction=0.02)),
        (" 2.5 % ", Tolerance(fraction=0.025)),
        ("0%", Tolerance()),
        ("150%", Tolerance(fraction=1.5)),
        ("64 MiB", Tolerance(nbytes=64 * 1024 * 1024)),
        ("512", Tolerance(nbytes=512)),
        (512, Tolerance(nbytes=512)),
        (0, Tolerance()),
        (Tolerance(0.5, 7), Tolerance(0.5, 7)),
    ],
)
def test_a_tolerance(value: object, tolerance: Tolerance) -> None:
    assert parse_tolerance(value) == tolerance


@pytest.mark.parametrize(
    "value",
    ["", "%", "two%", "-2%", "nan%", "inf%", "2%%", "2% of it", "some", "-64 MiB", -1, None, True, {}, float("nan")],
)
def test_what_is_no_tolerance(value: object) -> None:
    with pytest.raises(ValueError, match='is not a tolerance; write "2%" or "64 MiB"'):
        parse_tolerance(value)


@pytest.mark.parametrize(
    ("tolerance", "baseline", "slack"),
    [
        (Tolerance(), 1000, 0),
        (Tolerance(fraction=0.02), 1000, 20),
        (Tolerance(fraction=0.02), 99, 1),  # 1.98 rounded down
        (Tolerance(fraction=0.29), 100, 29),  # 100 * 0.29 is 28.999... in floating point
        (Tolerance(nbytes=64), 1000, 64),
        (Tolerance(fraction=0.02, nbytes=64), 1000, 20 + 64),
        (Tolerance(fraction=0.5), 0, 0),
    ],
)
def test_a_figure_may_move_by_the_slack_and_not_one_byte_more(tolerance: Tolerance, baseline: int, slack: int) -> None:
    assert tolerance.slack(baseline) == slack
    assert tolerance.allows(baseline, baseline + slack)
    assert tolerance.allows(baseline, baseline - slack)
    assert not tolerance.allows(baseline, baseline + slack + 1)
    assert not tolerance.allows(baseline, baseline - slack - 1)


@given(st.floats(0, 10), sizes, sizes)
@settings(deadline=None)
def test_what_did_not_move_is_always_allowed(fraction: float, nbytes: int, size: int) -> None:
    assert Tolerance(fraction, nbytes).allows(size, size)


@given(st.integers(0, 10_000), st.integers(0, 10**6))
@settings(deadline=None)
def test_a_percentage_is_exact(hundredths: int, hundreds: int) -> None:
    """x% of 10,000 n bytes is 100 x n bytes."""
    tolerance = parse_tolerance(f"{hundredths / 100:.2f}%")
    assert tolerance.slack(hundreds * 10_000) == hundredths * hundreds


@pytest.mark.parametrize(
    ("tolerance", "text"),
    [
        (Tolerance(), "exact"),
        (Tolerance(fraction=0.02), "2%"),
        (Tolerance(fraction=0.025), "2.5%"),
        (Tolerance(nbytes=64 * 2**20), "64.0 MiB"),
        (Tolerance(fraction=0.02, nbytes=512), "0.02 of the baseline + 512 B"),
    ],
)
def test_a_tolerance_in_words(tolerance: Tolerance, text: str) -> None:
    assert str(tolerance) == text


# -- to text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.000"),
        (1, "<0.001"),
        (-1, ">-0.001"),
        (536_870, "<0.001"),  # 2^30 / 2000 is 536,870.9
        (536_871, "0.001"),
        (-536_870, ">-0.001"),
        (-536_871, "-0.001"),
        (GIB, "1.000"),
        (GIB + GIB // 4, "1.250"),
        (-3 * GIB // 2, "-1.500"),
    ],
)
def test_a_column_of_gib(nbytes: int, text: str) -> None:
    assert Unit("GiB", GIB).cell(nbytes) == text


@given(st.integers(-(10**15), 10**15).filter(bool))
@settings(deadline=None)
def test_a_column_of_gib_never_shows_zero_for_something(nbytes: int) -> None:
    assert Unit("GiB", GIB).cell(nbytes).strip("-") != "0.000"


@pytest.mark.parametrize(
    ("sizes", "unit"),
    [
        ([], "GiB"),
        ([0, 0], "GiB"),
        ([1], "KiB"),
        ([104_857], "KiB"),  # a tenth of 2^20 is 104,857.6
        ([104_858, 3], "MiB"),
        ([107_374_182], "MiB"),  # a tenth of 2^30 is 107,374,182.4
        ([3, 107_374_183], "GiB"),
        ([-107_374_183], "GiB"),
    ],
)
def test_the_unit_of_a_table_suits_its_largest_size(sizes: list[int], unit: str) -> None:
    assert unit_for(sizes).name == unit


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        (GIB, 2 * GIB, ("1.000 GiB", "2.000 GiB")),
        (GIB, GIB, ("1.000 GiB", "1.000 GiB")),
        (GIB, GIB + 1, ("1,073,741,824 B", "1,073,741,825 B")),
        (5, 6, ("5 B", "6 B")),
    ],
)
def test_two_sizes_that_differ_read_differently(one: int, other: int, text: tuple[str, str]) -> None:
    assert apart(one, other) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1_048_575, "1024.0 KiB"),
        (1_048_576, "1.0 MiB"),
        (24 * 1_048_576, "24.0 MiB"),
        (1_073_741_823, "1024.0 MiB"),
        (1_073_741_824, "1.000 GiB"),
        (1_610_612_736, "1.500 GiB"),
        (-512, "-512 B"),
        (-2048, "-2.0 KiB"),
        (-1_610_612_736, "-1.500 GiB"),
    ],
)
def test_a_size_in_words(nbytes: int, text: str) -> None:
    assert human(nbytes) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0"), (1, "+1 B"), (-512, "-512 B"), (1_610_612_736, "+1.500 GiB"), (-1_610_612_736, "-1.500 GiB")],
)
def test_a_difference_has_its_sign(nbytes: int, text: str) -> None:
    assert change(nbytes) == text
