"""The analytical model states, and the terms beyond them, beside what was measured.

N is the bytes of the trainable parameters, each storage once. AdamW keeps parameters N, gradients N and two moments of N
each (`exp_avg` and `exp_avg_sq`, made in `_init_group` of torch/optim/adam.py): 4N. Under FSDP each rank keeps its shard of
all of them. All sizes are requested bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from pytest_gpumem.categories import ACTIVATIONS, COMMUNICATION, GRADIENTS, MODEL_STATES, OPTIMIZER_STATE, PARAMETERS
from pytest_gpumem.report import RankReport
from pytest_gpumem.trace import MemoryTrace, OptimizerInfo

# State tensors of the parameter's own shape and dtype, from each optimizer's `_init_group` in torch/optim.
_STATES = {
    "Adam": 2,
    "AdamW": 2,
    "NAdam": 2,
    "RAdam": 2,
    "Adamax": 2,
    "Adadelta": 2,
    "Adagrad": 1,
    "SGD": 0,
    "RMSprop": 1,
}
_ADAM = ("Adam", "AdamW")
# Scalars that a parameter has on the GPU where `fused` or `capturable` is set (`step`; NAdam's `mu_product` too), each a
# float32: same places, and `_get_scalar_dtype` in torch/optim/optimizer.py.
_COUNTERS = {**dict.fromkeys(_STATES, 1), "NAdam": 2, "SGD": 0}
_COUNTER_BYTES = 4


@dataclass(frozen=True)
class Term:
    """One line of the budget, in requested bytes on this rank. `expected` is None where no rule tells it.

    `in_budget` is true for the model states, which the budget speaks of, and false for what comes on top.
    """

    name: str
    expected: int | None
    measured: int
    in_budget: bool
    note: str = ""


@dataclass(frozen=True)
class Budget:
    """Model states against the analytical figure, for one rank.

    `n_bytes` is N of the whole model; `n_local` what one rank keeps of it (with padding); `frozen_bytes` the frozen
    parameters that it keeps; `counter_bytes` the optimizer's step counters, where it keeps them on the GPU. `per_n` is how
    many N the optimizer's rules give, None where they are unknown.
    """

    n_bytes: int
    n_local: int
    frozen_bytes: int
    counter_bytes: int
    padding_bytes: int
    shards: int
    optimizer: str
    per_n: float | None
    measured_bytes: int
    terms: tuple[Term, ...]

    def limit(self, expression: float) -> int:
        """Bytes that a budget of `expression` N allows on this rank: what is no multiple of N comes on top of it."""
        return int(Fraction(str(expression)) * self.n_local) + self.beside_n

    @property
    def beside_n(self) -> int:
        """Bytes of model states that are no multiple of N: frozen parameters and step counters."""
        return self.frozen_bytes + self.counter_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Budget:
        return cls(**{**data, "terms": tuple(Term(**term) for term in data["terms"])})


def budget_of(trace: MemoryTrace, report: RankReport) -> Budget:
    """The budget of one rank, from what its trace knows of the model and what its report measured."""
    trainable = [p for p in trace.parameters if p.trainable]
    n_bytes = sum(p.nbytes for p in trainable)
    n_local = sum(p.local_nbytes for p in trainable)
    frozen = sum(p.local_nbytes for p in trace.parameters if not p.trainable)
    padding = sum(p.local_nbytes - p.nbytes // p.shards for p in trace.parameters)
    shards = max((p.shards for p in trace.parameters), default=1)
    factor = _states(trace.optimizers)
    counters = _counters(trace.optimizers) * len(trainable)
    names = " + ".join(optimizer.name for optimizer in trace.optimizers)
    states = report.model_states
    peaks = report.category_requested_peaks
    terms = [
        Term("parameters", n_local + frozen, states[PARAMETERS], True, _parameter_note(frozen, padding)),
        Term("gradients", n_local, states[GRADIENTS], True),
        Term(
            "optimizer state",
            None if factor is None else int(factor * n_local) + counters,
            states[OPTIMIZER_STATE],
            True,
            (names or "no optimizer stepped") + (f"; {counters:,} B of step counters" if counters else ""),
        ),
        _optimizer_temporaries(trace.optimizers, n_local, report.optimizer_temporaries),
        *_communication(trace, n_local, peaks[COMMUNICATION]),
        Term("activations", None, peaks[ACTIVATIONS], False, "grow with batch and sequence"),
    ]
    rest = [c for c in peaks if c not in (*MODEL_STATES, ACTIVATIONS, COMMUNICATION) and peaks[c]]
    terms += [Term(category, None, peaks[category], False) for category in rest]
    return Budget(
        n_bytes=n_bytes,
        n_local=n_local,
        frozen_bytes=frozen,
        counter_bytes=counters,
        padding_bytes=padding,
        shards=shards,
        optimizer=names,
        per_n=None if factor is None else 2 + factor,
        measured_bytes=sum(states.values()),
        terms=tuple(terms),
    )


def _parameter_note(frozen: int, padding: int) -> str:
    notes = [f"{frozen:,} B of them frozen"] if frozen else []
    if padding:
        notes.append(f"{padding:,} B of padding to equal shards")
    return "; ".join(notes)


def _states(optimizers: Sequence[OptimizerInfo]) -> float | None:
    """N of optimizer state per N of parameters; None where the optimizer is unknown, or several differ."""
    factors = {_states_of(optimizer) for optimizer in optimizers}
    return factors.pop() if len(factors) == 1 else None


def _states_of(optimizer: OptimizerInfo) -> float | None:
    states = _STATES.get(optimizer.name)
    if states is None:
        return None
    extra = sum(1 for option in ("momentum", "amsgrad", "centered") if optimizer.option(option))
    return float(states + extra)


def _counters(optimizers: Sequence[OptimizerInfo]) -> int:
    """Bytes of step counters on the GPU for each parameter; 0 where several optimizers differ."""
    each = {
        _COUNTERS.get(optimizer.name, 0) if optimizer.option("fused") or optimizer.option("capturable") else 0
        for optimizer in optimizers
    }
    return _COUNTER_BYTES * (each.pop() if len(each) == 1 else 0)


def _optimizer_temporaries(optimizers: Sequence[OptimizerInfo], n_local: int, measured: int) -> Term:
    """Foreach Adam makes the denominator of all parameters at once: `exp_avg_sq_sqrt` in `_multi_tensor_adam`."""
    adam = [o for o in optimizers if o.name in _ADAM]
    if not adam or len(optimizers) > 1:
        return Term("optimizer temporaries", None, measured, False)
    if adam[0].option("fused"):
        return Term("optimizer temporaries", 0, measured, False, "fused kernel")
    if adam[0].option("foreach") is False:
        return Term("optimizer temporaries", None, measured, False, "one parameter at a time")
    return Term("optimizer temporaries", n_local, measured, False, "foreach")


def _communication(trace: MemoryTrace, n_local: int, measured: int) -> list[Term]:
    if trace.strategy == "ddp":
        return [Term("DDP buckets", n_local, measured, False, "none with gradient_as_bucket_view")]
    if trace.strategy == "fsdp" and trace.units:
        return [Term("gathered units", None, measured, False, f"largest unit: {trace.units[0]:,} B")]
    return [Term("communication", None, measured, False)] if measured else []
