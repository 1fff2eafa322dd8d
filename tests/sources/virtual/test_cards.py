"""The table of cards, against sizes written here by hand, and the ways to name a card."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from pytest_gpumem.sources.virtual.cards import CARDS, Card, UnknownCard, find_card

# What the box says, in GB, and the compute capability of NVIDIA's list of CUDA GPUs.
MARKETED = {
    "P100-16GB": (16, (6, 0)),
    "V100-16GB": (16, (7, 0)),
    "V100-32GB": (32, (7, 0)),
    "T4": (16, (7, 5)),
    "Quadro-RTX-8000": (48, (7, 5)),
    "A10": (24, (8, 6)),
    "A10G": (24, (8, 6)),
    "A30": (24, (8, 0)),
    "A40": (48, (8, 6)),
    "RTX-A6000": (48, (8, 6)),
    "A100-40GB": (40, (8, 0)),
    "A100-80GB": (80, (8, 0)),
    "A800-80GB": (80, (8, 0)),
    "RTX-3080": (10, (8, 6)),
    "RTX-3090": (24, (8, 6)),
    "L4": (24, (8, 9)),
    "L40S": (48, (8, 9)),
    "RTX-6000-Ada": (48, (8, 9)),
    "RTX-4080": (16, (8, 9)),
    "RTX-4090": (24, (8, 9)),
    "H100-80GB": (80, (9, 0)),
    "H100-PCIe": (80, (9, 0)),
    "H100-NVL": (94, (9, 0)),
    "H20": (96, (9, 0)),
    "H200": (141, (9, 0)),
    "GH200": (96, (9, 0)),
    "B200": (180, (10, 0)),
    "RTX-5090": (32, (12, 0)),
}


def test_every_card_is_checked_here() -> None:
    assert list(CARDS) == list(MARKETED)
    assert all(key == card.key for key, card in CARDS.items())


@pytest.mark.parametrize("key", MARKETED)
def test_total_is_a_little_below_the_marketed_size(key: str) -> None:
    size, capability = MARKETED[key]
    card = CARDS[key]
    assert 0.90 * size * 2**30 <= card.total_memory + card.precision
    assert card.total_memory <= size * 2**30
    assert card.compute_capability == capability


# The figure with 2 decimals that out-of-memory messages show.
@pytest.mark.parametrize(
    ("key", "gib"),
    [
        ("V100-16GB", "15.77"),
        ("V100-32GB", "31.73"),
        ("T4", "14.74"),
        ("A10G", "21.99"),
        ("A30", "23.53"),
        ("A100-40GB", "39.39"),
        ("A100-80GB", "79.26"),
        ("A800-80GB", "79.33"),
        ("RTX-3090", "23.59"),
        ("L4", "21.95"),
        ("L40S", "44.52"),
        ("RTX-4090", "23.52"),
        ("H100-80GB", "79.19"),
        ("H100-NVL", "93.00"),
        ("H200", "139.80"),
        ("B200", "178.35"),
        ("RTX-5090", "31.37"),
    ],
)
def test_total_gib(key: str, gib: str) -> None:
    assert f"{CARDS[key].total_gib:.2f}" == gib


def test_no_two_cards_share_a_name() -> None:
    names = [card.name.lower() for card in CARDS.values()] + [key.lower() for key in CARDS]
    assert len(set(names)) == 2 * len(CARDS)


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_sources_and_the_rest_of_the_row(card: Card) -> None:
    assert len(card.source) > 20
    assert "\n" not in card.source
    assert card.precision in (0, 2**20, 2**30 // 200)
    assert card.precision != 2**20 or card.total_memory % 2**20 == 0
    assert 40 <= card.multi_processor_count <= 170
    assert card.l2_cache_bytes is None or 4 * 2**20 <= card.l2_cache_bytes <= 127 * 2**20
    assert card.max_threads_per_multi_processor in (1024, 1536, 2048)
    assert card.shared_memory_per_multiprocessor in (65536, 98304, 102400, 167936, 233472)
    assert (card.warp_size, card.regs_per_multiprocessor) == (32, 65536)


def test_per_architecture_limits_as_device_query_prints_them() -> None:
    seen = {
        key: (CARDS[key].max_threads_per_multi_processor, CARDS[key].shared_memory_per_multiprocessor)
        for key in ("V100-16GB", "T4", "A100-40GB", "RTX-A6000", "H200", "RTX-5090")
    }
    assert seen == {
        "V100-16GB": (2048, 98304),
        "T4": (1024, 65536),
        "A100-40GB": (2048, 167936),
        "RTX-A6000": (1536, 102400),
        "H200": (2048, 233472),
        "RTX-5090": (1536, 102400),
    }


@pytest.mark.parametrize("key", MARKETED)
def test_every_key_and_every_torch_name_finds_its_card(key: str) -> None:
    card = CARDS[key]
    loose = [key.lower(), key.replace("-", "_"), key.replace("-", " "), f"  nvidia {key} ", card.name.upper()]
    for spelling in [key, card.name, *loose]:
        assert find_card(spelling) is card, spelling


@pytest.mark.parametrize(
    ("spelling", "key"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("a100 80gb", "A100-80GB"),
        ("A100_40GB", "A100-40GB"),
        ("A100-SXM4-80GB", "A100-80GB"),
        ("4090", "RTX-4090"),
        ("RTX4090", "RTX-4090"),
        ("rtx 4090", "RTX-4090"),
        ("GeForce RTX 3090", "RTX-3090"),
        ("H100", "H100-80GB"),
        ("NVIDIA H100", "H100-80GB"),
        ("h100 pcie", "H100-PCIe"),
        ("P100", "P100-16GB"),
        ("A6000", "RTX-A6000"),
        ("RTX 8000", "Quadro-RTX-8000"),
        ("NVIDIA T4", "T4"),
        ("H20", "H20"),
        ("A10", "A10"),
    ],
)
def test_aliases(spelling: str, key: str) -> None:
    assert find_card(spelling).key == key


@pytest.mark.parametrize("name", ["A100", "NVIDIA A100", "a100"])
def test_an_ambiguous_name_lists_what_it_can_mean(name: str) -> None:
    with pytest.raises(UnknownCard) as error:
        find_card(name)
    assert str(error.value) == f'GPU "{name}" can be A100-40GB or A100-80GB; write which'


def test_v100_is_ambiguous_too() -> None:
    with pytest.raises(UnknownCard, match="V100-16GB or V100-32GB"):
        find_card("Tesla V100")


def test_an_unknown_name_gets_near_misses_and_the_list() -> None:
    with pytest.raises(UnknownCard) as error:
        find_card("A100-44GB")
    head, known = str(error.value).split(". Known: ")
    assert head.startswith('unknown GPU "A100-44GB"; near: ')
    assert set(head.split("near: ")[1].split(", ")[:2]) == {"A100-40GB", "A100-80GB"}
    assert known.split(", ") == list(CARDS)


@pytest.mark.parametrize(("typo", "key"), [("H10O-80GB", "H100-80GB"), ("RTX 4O90", "RTX-4090"), ("L40", "L40S")])
def test_near_misses(typo: str, key: str) -> None:
    with pytest.raises(UnknownCard) as error:
        find_card(typo)
    assert key in str(error.value).split(". Known: ")[0]


def test_near_misses_of_the_same_model_come_first() -> None:
    with pytest.raises(UnknownCard, match='unknown GPU "H100-96GB"; near: H100-80GB, '):
        find_card("H100-96GB")


@pytest.mark.parametrize("name", ["MI300X", "", "NVIDIA", "rtx", " - "])
def test_a_name_like_no_other_gets_the_list_only(name: str) -> None:
    with pytest.raises(ValueError) as error:
        find_card(name)
    assert str(error.value) == f'unknown GPU "{name}". Known: {", ".join(CARDS)}'


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CARDS["T4"] = CARDS["L4"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        CARDS["T4"].total_memory = 1  # type: ignore[misc]


def test_importing_the_table_does_not_import_torch() -> None:
    code = "import sys, pytest_gpumem.sources.virtual.cards; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
