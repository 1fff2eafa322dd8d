"""The NVIDIA cards a virtual GPU can play, and how people write their names. Plain data, without torch.

Memory is in bytes (int). It is what the driver tells CUDA, and so what `torch.cuda.get_device_properties` and
the "total capacity" of an out-of-memory message say: 1 to 9 % below the size on the box. Cards of one model
differ: the driver's version and the host move the figure by up to 2 % (mostly down from driver to driver;
Windows reports more than Linux), and ECC takes another 6 % of a card where it can be switched on. Each card's
`source` says where its figure was seen and what else has been, and `precision` how exact that is. Where a
card had several, an exact one was taken before a rounded one, and of these mostly the newest driver's.

In `source`, "deviceQuery" is the CUDA sample of that name, which prints the same total in bytes;
"total_memory=...MB" is how torch prints a card's properties (its MB are MiB); and "CUDA 12.4" is the newest
CUDA that the driver knows (12.2: driver 535, 12.4: 550, 12.5: 555, 12.6: 560, 12.8: 570, 13.0: 580).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

MIB, GIB = 2**20, 2**30
BYTES, WHOLE_MIB, TWO_DECIMALS = 0, MIB, GIB // 200

_MAX_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}
_SHARED_MEMORY_KIB = {
    (6, 0): 64,
    (7, 0): 96,
    (7, 5): 64,
    (8, 0): 164,
    (8, 6): 100,
    (8, 9): 100,
    (9, 0): 228,
    (10, 0): 228,
    (12, 0): 100,
}


class UnknownCard(ValueError):
    """No card has this name, or several do. The message names the candidates."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One model of card.

    key: the name to write in `gpu="A100-40GB"`.
    name: what `torch.cuda.get_device_name()` says.
    total_memory: bytes.
    precision: how far `total_memory` may be from what the source's card reported, in bytes. 0: the source is
        exact. 2^20: it gives whole MiB, rounded down. 2^30 / 200: it gives GiB with 2 decimals.
    compute_capability: (major, minor).
    multi_processor_count: streaming multiprocessors.
    l2_cache_bytes: None where no source gives it.
    source: where `total_memory` was seen.
    """

    key: str
    name: str
    total_memory: int
    precision: int = BYTES
    compute_capability: tuple[int, int]
    multi_processor_count: int
    l2_cache_bytes: int | None = None
    source: str

    @property
    def total_gib(self) -> float:
        """`total_memory` in GiB (2^30 bytes); PyTorch's out-of-memory message rounds it to 2 decimals."""
        return self.total_memory / GIB

    @property
    def warp_size(self) -> int:
        """Threads: 32 on every NVIDIA card."""
        return 32

    @property
    def regs_per_multiprocessor(self) -> int:
        """32-bit registers: 65536 on each of these architectures (CUDA C++ Programming Guide)."""
        return 65536

    @property
    def max_threads_per_multi_processor(self) -> int:
        """Threads; fixed by the compute capability (CUDA C++ Programming Guide)."""
        return _MAX_THREADS.get(self.compute_capability, 2048)

    @property
    def shared_memory_per_multiprocessor(self) -> int:
        """Bytes; fixed by the compute capability (CUDA C++ Programming Guide)."""
        return _SHARED_MEMORY_KIB[self.compute_capability] * 1024


_ALL = (
    Card(
        key="P100-16GB",
        name="Tesla P100-PCIE-16GB",
        total_memory=17_071_734_784,
        compute_capability=(6, 0),
        multi_processor_count=56,
        l2_cache_bytes=4 * MIB,
        source="deviceQuery in the user guide of eth-cscs/sarus, CUDA 11.2; also seen: 16280 MiB",
    ),
    Card(
        key="V100-16GB",
        name="Tesla V100-SXM2-16GB",
        total_memory=16_928_342_016,
        compute_capability=(7, 0),
        multi_processor_count=80,
        l2_cache_bytes=6 * MIB,
        source="deviceQuery in thamada/gls, CUDA 12.4; also seen: 16128 to 16160 MiB",
    ),
    Card(
        key="V100-32GB",
        name="Tesla V100-SXM2-32GB",
        total_memory=34_072_559_616,
        compute_capability=(7, 0),
        multi_processor_count=80,
        l2_cache_bytes=6 * MIB,
        source="deviceQuery in public course notes, CUDA 12.9; also seen: 32480 to 32511 MiB",
    ),
    Card(
        key="T4",
        name="Tesla T4",
        total_memory=15_828_320_256,
        compute_capability=(7, 5),
        multi_processor_count=40,
        l2_cache_bytes=4 * MIB,
        source="15095.0625 MiB in PrunaAI's results on huggingface.co; also seen: 14918 to 15110 MiB",
    ),
    Card(
        key="Quadro-RTX-8000",
        name="Quadro RTX 8000",
        total_memory=48601 * MIB,
        precision=WHOLE_MIB,
        compute_capability=(7, 5),
        multi_processor_count=72,
        source="total_memory=48601MB, in a comment in public code",
    ),
    Card(
        key="A10",
        name="NVIDIA A10",
        total_memory=23_595_909_120,
        compute_capability=(8, 6),
        multi_processor_count=72,
        l2_cache_bytes=6 * MIB,
        source="deviceQuery in thamada/gls, CUDA 12.4; also seen: 22515 MiB, aalanwyr/face2cuda",
    ),
    Card(
        key="A10G",
        name="NVIDIA A10G",
        total_memory=23_609_475_072,
        compute_capability=(8, 6),
        multi_processor_count=80,
        l2_cache_bytes=6 * MIB,
        source="22515.75 MiB in PrunaAI's results on huggingface.co; also seen: 22587 and 22723 MiB",
    ),
    Card(
        key="A30",
        name="NVIDIA A30",
        total_memory=round(23.53 * GIB),
        precision=TWO_DECIMALS,
        compute_capability=(8, 0),
        multi_processor_count=56,
        source="total capacity of 23.53 GiB, google/RB-Modulation#5",
    ),
    Card(
        key="A40",
        name="NVIDIA A40",
        total_memory=47_608_692_736,
        compute_capability=(8, 6),
        multi_processor_count=84,
        l2_cache_bytes=6 * MIB,
        source="deviceQuery in thamada/nvidia-smi, CUDA 12.4, ECC on; also seen: 45416 MiB",
    ),
    Card(
        key="RTX-A6000",
        name="NVIDIA RTX A6000",
        total_memory=48676 * MIB,
        precision=WHOLE_MIB,
        compute_capability=(8, 6),
        multi_processor_count=84,
        l2_cache_bytes=6 * MIB,
        source="total_memory=48676MB, pytorch/ao; also seen: 48790 MiB, and 45619 MiB with ECC on",
    ),
    Card(
        key="A100-40GB",
        name="NVIDIA A100-SXM4-40GB",
        total_memory=42_298_834_944,
        compute_capability=(8, 0),
        multi_processor_count=108,
        l2_cache_bytes=40 * MIB,
        source="deviceQuery, CUDA 12.2, bottlerocket-os/bottlerocket#3873; also seen: 39.25 to 39.59 GiB",
    ),
    Card(
        key="A100-80GB",
        name="NVIDIA A100-SXM4-80GB",
        total_memory=85_100_068_864,
        compute_capability=(8, 0),
        multi_processor_count=108,
        l2_cache_bytes=40 * MIB,
        source="deviceQuery in thamada/nvidia-smi, CUDA 12.5; also seen: 81051 to 81251 MiB",
    ),
    Card(
        key="A800-80GB",
        name="NVIDIA A800-SXM4-80GB",
        total_memory=round(79.33 * GIB),
        precision=TWO_DECIMALS,
        compute_capability=(8, 0),
        multi_processor_count=108,
        source="total capacity of 79.33 GiB, MoonshotAI/Kimi-VL#51; which A800 is not said",
    ),
    Card(
        key="RTX-3080",
        name="NVIDIA GeForce RTX 3080",
        total_memory=10_485_956_608,
        compute_capability=(8, 6),
        multi_processor_count=68,
        l2_cache_bytes=5 * MIB,
        source="deviceQuery in thamada/gls, CUDA 12.4 (the 10 GB model); also seen: 9987 MiB (CUDA 12.0)",
    ),
    Card(
        key="RTX-3090",
        name="NVIDIA GeForce RTX 3090",
        total_memory=25_327_697_920,
        compute_capability=(8, 6),
        multi_processor_count=82,
        l2_cache_bytes=6 * MIB,
        source="deviceQuery in thamada/nvidia-smi, CUDA 12.6; also seen: 23.56 to 23.70 GiB",
    ),
    Card(
        key="L4",
        name="NVIDIA L4",
        total_memory=23_570_219_008,
        compute_capability=(8, 9),
        multi_processor_count=58,
        l2_cache_bytes=48 * MIB,
        source="deviceQuery in thamada/nvidia-smi, CUDA 12.4; also seen: 22491 and 22518 MiB",
    ),
    Card(
        key="L40S",
        name="NVIDIA L40S",
        total_memory=47_803_596_800,
        compute_capability=(8, 9),
        multi_processor_count=142,
        l2_cache_bytes=96 * MIB,
        source="deviceQuery in thamada/nvidia-smi, CUDA 12.4; also seen: 45373 MiB",
    ),
    Card(
        key="RTX-6000-Ada",
        name="NVIDIA RTX 6000 Ada Generation",
        total_memory=51_002_867_712,
        compute_capability=(8, 9),
        multi_processor_count=142,
        l2_cache_bytes=96 * MIB,
        source="deviceQuery in thamada/nvidia-smi, CUDA 12.4, ECC off",
    ),
    Card(
        key="RTX-4080",
        name="NVIDIA GeForce RTX 4080",
        total_memory=16049 * MIB,
        precision=WHOLE_MIB,
        compute_capability=(8, 9),
        multi_processor_count=76,
        source="total_memory=16049MB, in the set-up page of a public project",
    ),
    Card(
        key="RTX-4090",
        name="NVIDIA GeForce RTX 4090",
        total_memory=25_250_627_584,
        compute_capability=(8, 9),
        multi_processor_count=128,
        l2_cache_bytes=72 * MIB,
        source="deviceQuery, CUDA 13.0; 23.52 GiB, Soul-AILab/SoulX-FlashTalk#5; also seen: 24210 MiB",
    ),
    Card(
        key="H100-80GB",
        name="NVIDIA H100 80GB HBM3",
        total_memory=85_028_896_768,
        compute_capability=(9, 0),
        multi_processor_count=132,
        l2_cache_bytes=50 * MIB,
        source="deviceQuery, CUDA 12.8; also seen: 81079 (CUDA 13.0) to 81106 MiB (CUDA 12.7)",
    ),
    Card(
        key="H100-PCIe",
        name="NVIDIA H100 PCIe",
        total_memory=81008 * MIB,
        precision=WHOLE_MIB,
        compute_capability=(9, 0),
        multi_processor_count=114,
        source="total_memory=81008MB, in a comment in public code",
    ),
    Card(
        key="H100-NVL",
        name="NVIDIA H100 NVL",
        total_memory=99_861_594_112,
        compute_capability=(9, 0),
        multi_processor_count=132,
        l2_cache_bytes=60 * MIB,
        source="deviceQuery in thamada/nvidia-smi, CUDA 12.4; 93.00 GiB, ali-vilab/VACE#56",
    ),
    Card(
        key="H20",
        name="NVIDIA H20",
        total_memory=97285 * MIB,
        precision=WHOLE_MIB,
        compute_capability=(9, 0),
        multi_processor_count=78,
        source="total_memory=97285MB, in comments in public code",
    ),
    Card(
        key="H200",
        name="NVIDIA H200",
        total_memory=143156 * MIB,
        precision=WHOLE_MIB,
        compute_capability=(9, 0),
        multi_processor_count=132,
        l2_cache_bytes=60 * MIB,
        source="total_memory=143156MB, ai-bot-pro/achatbot; also seen: 143072 MiB, thamada/gls",
    ),
    Card(
        key="GH200",
        name="NVIDIA GH200 480GB",
        total_memory=101_468_602_368,
        compute_capability=(9, 0),
        multi_processor_count=132,
        l2_cache_bytes=60 * MIB,
        source="deviceQuery in thamada/gls, CUDA 12.4 (the 96 GB model); also seen: 97280 MiB (CUDA 12.2)",
    ),
    Card(
        key="B200",
        name="NVIDIA B200",
        total_memory=182631 * MIB,
        precision=WHOLE_MIB,
        compute_capability=(10, 0),
        multi_processor_count=148,
        l2_cache_bytes=253 * MIB // 2,
        source="total_memory=182631MB; 178.35 GiB, pytorch/ao#4002; also seen: 182642 MiB",
    ),
    Card(
        key="RTX-5090",
        name="NVIDIA GeForce RTX 5090",
        total_memory=33_680_457_728,
        compute_capability=(12, 0),
        multi_processor_count=170,
        l2_cache_bytes=96 * MIB,
        source="deviceQuery, CUDA 12.8, NVIDIA/nccl#1637 and thamada/gls",
    ),
)

CARDS: Mapping[str, Card] = MappingProxyType({card.key: card for card in _ALL})
"""Every card by its key, oldest architecture first."""

_BRANDS = ("nvidia", "geforce", "tesla", "quadro", "rtx")


def _plain(name: str) -> str:
    """`name` without case, separators and the words in front that every card of a family shares."""
    plain = re.sub(r"[\s_-]+", "", name).lower()
    while brand := next((brand for brand in _BRANDS if plain.startswith(brand)), None):
        plain = plain.removeprefix(brand)
    return plain


def _spellings() -> dict[str, list[Card]]:
    """Plain name -> the cards it can mean: by key, by torch's name, by the key without its memory size."""
    spellings: dict[str, list[Card]] = {}
    for card in CARDS.values():
        for spelling in {_plain(card.key), _plain(card.name), _plain(re.sub(r"-\d+GB$", "", card.key))}:
            spellings.setdefault(spelling, []).append(card)
    return spellings


_SPELLINGS = _spellings()


def find_card(name: str) -> Card:
    """The card called `name`: its key, torch's name for it, or a short form of its own ("H100", "4090").

    Case, spaces, dashes and underscores do not matter, nor do "NVIDIA", "GeForce", "Tesla", "Quadro" and
    "RTX" in front. Raises UnknownCard if no card fits, or more than one.
    """
    if name in CARDS:
        return CARDS[name]
    cards = _SPELLINGS.get(_plain(name), [])
    if len(cards) == 1:
        return cards[0]
    if cards:
        raise UnknownCard(f'GPU "{name}" can be {" or ".join(card.key for card in cards)}; write which')
    near = _near(name)
    hint = f"; near: {', '.join(near)}" if near else ""
    raise UnknownCard(f'unknown GPU "{name}"{hint}. Known: {", ".join(CARDS)}')


def _near(name: str) -> list[str]:
    """Keys spelled much like `name`: those of the same model first, then by likeness."""
    plain = _plain(name)
    matches = difflib.get_close_matches(plain, _SPELLINGS, n=4, cutoff=0.75)
    matches.sort(key=lambda match: match[:4] != plain[:4])
    keys = [card.key for match in matches for card in _SPELLINGS[match]]
    return list(dict.fromkeys(keys))[:4]
