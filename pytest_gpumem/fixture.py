"""The `gpumem` fixture: what a test says to be measured step by step."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from pytest_gpumem import strategies
from pytest_gpumem.measurement import Measurement
from pytest_gpumem.report import MemoryReport

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class TrainingError(Exception):
    """A test's training step is not one: the message says what was seen and what would be right."""


def _hidden(function: F) -> F:
    """Errors that the user can mend end at the user's own line, not inside this file."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            return function(*args, **kwargs)
        except (TrainingError, ValueError, TypeError) as error:
            if _raised_here(error):
                raise error.with_traceback(None) from None
            raise

    return call  # type: ignore[return-value]


def _raised_here(error: BaseException) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_globals.get("__name__", "").startswith("pytest_gpumem.")


class GpuMem:
    """One rank of the test. `device` reads cuda:0 on virtual GPUs too; `source` is "virtual".

    `rank` is this process's rank, `world_size` the number of ranks.
    """

    def __init__(self, measurement: Measurement) -> None:
        self._measurement = measurement
        self._recorder = measurement.gpu.recorder
        self.device = torch.device("cuda", 0)
        self.rank = measurement.rank
        self.world_size = measurement.settings.world_size
        self.source = measurement.trace.source

    @property
    def report(self) -> MemoryReport:
        """The figures of this rank so far, sizes in bytes."""
        result = self._measurement.result()
        trace = self._measurement.trace
        return MemoryReport(
            trace.source, trace.gpu, trace.strategy, trace.world_size, [result.report], trace.assumptions
        )

    @_hidden
    def parallelize(
        self, model: torch.nn.Module, strategy: str | None = None, *, wrap: Sequence[type] = (), **options: Any
    ) -> torch.nn.Module:
        """Spread `model` over the ranks: "single", "ddp" or "fsdp"; the marker's strategy where none is given.

        `wrap` names the classes of the submodules that become FSDP units; `options` go to DistributedDataParallel or
        `fully_shard`. Raises ValueError for an unknown strategy and for a class in `wrap` that matches nothing.
        """
        name = self._strategy(strategy)
        chosen = strategies.find(name)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if name != "single":
            self._measurement.gpu.world.start()
        self._measurement.trace.strategy = name
        return chosen.parallelize(model, self.device, wrap, options)

    def _strategy(self, asked: str | None) -> str:
        name = asked or self._measurement.settings.strategy or ("single" if self.world_size == 1 else None)
        if name is None:
            raise ValueError(f'world_size={self.world_size} needs a strategy: write strategy="ddp" or strategy="fsdp"')
        if name == "single" and self.world_size > 1:
            raise ValueError(
                f'strategy="single" in a world of {self.world_size}: each rank would train alone; '
                'write "ddp" or "fsdp", or world_size=1'
            )
        return name

    @_hidden
    def train(
        self,
        *,
        model: Callable[[], torch.nn.Module],
        batch: Callable[[], Any] | Iterable[Any],
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        strategy: str | None = None,
        wrap: Sequence[type] = (),
        dtype: torch.dtype | None = None,
        steps: int = 3,
        accumulate: int = 1,
        checkpoint: bool = False,
        init: str | None = None,
        **options: Any,
    ) -> MemoryReport:
        """Train for `steps` steps and report.

        `model` builds the model. Sharded strategies build it on the meta device and materialise it after sharding; others
        build it on the GPU. `init="cpu"` or `"device"` say otherwise. `dtype` is the parameters'.
        `batch` is called for each micro-batch, or is an iterable of them; tensors move to the GPU. A dict goes to the model
        as keyword arguments, a tuple as positional ones, anything else as it is. `loss(output, batch)` gives the loss; left
        out, it is the output's `.loss`, or the output where it is a scalar. With `loss`, a pair (inputs, target) is
        `loss(model(inputs), target)`. `optimizer` is called with the parameters. `accumulate` micro-batches make a step;
        under DDP all but the last run in `no_sync`. `checkpoint` turns on activation checkpointing: the model's own
        `gradient_checkpointing_enable`, or one checkpoint for each module in `wrap`. `options` go to the strategy.

        Raises TrainingError for a step that trains nothing, ValueError and TypeError for wrong arguments.
        """
        for name, number in (("steps", steps), ("accumulate", accumulate)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name}={number!r}: a whole number of 1 or more")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype={dtype!r}: expected a floating-point dtype such as torch.bfloat16")
        chosen = strategies.find(self._strategy(strategy))
        where = init or ("meta" if chosen.SHARDED else "device")
        if where not in ("meta", "cpu", "device") or (init == "meta"):
            raise ValueError(f'init={init!r}: write "cpu" or "device", or leave it out')
        net = self._build(model, where, dtype)
        if checkpoint:
            _checkpoint(net, wrap)
        parallel = self.parallelize(net, strategy, wrap=wrap, **options)
        del net
        parallel.train()
        if not callable(optimizer):
            raise TypeError(
                f"optimizer: expected a class or a callable that takes the parameters, got {type(optimizer).__name__}; "
                "write optimizer=torch.optim.AdamW, or lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
            )
        stepper = optimizer(parallel.parameters())
        for name in ("step", "zero_grad"):
            if not callable(getattr(stepper, name, None)):
                raise TypeError(f"optimizer: expected an optimizer from {optimizer!r}, got {type(stepper).__name__}")
        batches = _batches(batch, steps * accumulate)
        for index in range(steps):
            self._recorder.step(index, begins=True)
            try:
                self._train_step(index, parallel, stepper, batches, loss, accumulate)
            finally:
                self._recorder.step(index, begins=False)
        return self.report

    def _train_step(
        self, index: int, model: Any, optimizer: Any, batches: Iterator[Any], loss: Any, accumulate: int
    ) -> None:
        stepped = self._recorder.steps_of_optimizers
        for micro in range(accumulate):
            last = micro == accumulate - 1
            sync = contextlib.nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync()
            with sync:
                value = _scalar_loss(model, self._to_device(next(batches)), loss)
                (value / accumulate if accumulate > 1 else value).backward()
                del value
        if not any(parameter.grad is not None for parameter in model.parameters()):
            raise TrainingError(
                f"step {index}: no parameter of the model got a gradient; the loss does not depend on them"
            )
        optimizer.step()
        if self._recorder.steps_of_optimizers == stepped:
            raise TrainingError(
                f"step {index}: {type(optimizer).__name__}.step() ran, but no torch.optim.Optimizer stepped: "
                "its state cannot be told from the rest"
            )
        optimizer.zero_grad()

    def _build(self, model: Callable[[], torch.nn.Module], where: str, dtype: torch.dtype | None) -> torch.nn.Module:
        if isinstance(model, torch.nn.Module) or not callable(model):
            raise TypeError(
                f"model: expected a callable that builds the model, got {type(model).__name__}; write model=lambda: MyModel()"
            )
        default = torch.get_default_dtype()
        device = self.device if where == "device" else torch.device(where)
        try:
            torch.set_default_dtype(dtype or default)
            with torch.device(device):
                net = model()
        finally:
            torch.set_default_dtype(default)
        if not isinstance(net, torch.nn.Module):
            raise TypeError(f"model: the callable returned {type(net).__name__}, not a torch.nn.Module")
        if dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in net.parameters()):
            net = net.to(dtype)
        return net

    def _to_device(self, value: Any) -> Any:
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.device.type not in ("cpu", self.device.type):
                raise ValueError(f"batch: a tensor is on {leaf.device}; put it on the CPU or on {self.device}")
        return tree_map(lambda leaf: leaf.to(self.device) if isinstance(leaf, torch.Tensor) else leaf, value)

    @_hidden
    def steps(self, over: int | Iterable[T]) -> Iterator[Any]:
        """`for batch in gpumem.steps(loader)` or `gpumem.steps(3)`: each turn of the loop is a step.

        Raises TrainingError after a turn that called no backward, and after a loop in which no optimizer stepped.
        """
        if isinstance(over, (bool, str)) or not isinstance(over, (int, Iterable)):
            raise TypeError(f"steps: expected a number or an iterable of batches, got {type(over).__name__}")
        if isinstance(over, int) and over < 1:
            raise ValueError(f"steps: {over} steps measure nothing; write 1 or more")
        return self._steps(range(over) if isinstance(over, int) else over)

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        __tracebackhide__ = True
        recorder = self._recorder
        stepped, index = recorder.steps_of_optimizers, -1
        for index, item in enumerate(items):
            backwards = recorder.backwards
            recorder.step(index, begins=True)
            try:
                yield item
            finally:
                recorder.step(index, begins=False)
            if recorder.backwards == backwards:
                raise TrainingError(
                    f"step {index} called no backward: it trained nothing. Call loss.backward() in it; "
                    'measure evaluation with gpumem.measure("eval")'
                )
        if index >= 0 and recorder.steps_of_optimizers == stepped:
            raise TrainingError(
                f"{index + 1} steps, and no optimizer stepped: call optimizer.step() in them, so that its state is measured"
            )

    @_hidden
    def measure(self, name: str = "measure") -> contextlib.AbstractContextManager[None]:
        """Name a phase: `with gpumem.measure("eval"): ...`. Nests; reports even if the body raises."""
        if not isinstance(name, str) or not name or "/" in name:
            raise ValueError(f'measure: {name!r} cannot be a phase\'s name; write a word such as "eval"')
        return self._recorder.named(name)


def _batches(batch: Any, wanted: int) -> Iterator[Any]:
    if callable(batch):
        while True:
            yield batch()
    if isinstance(batch, (str, bytes, torch.Tensor, dict)) or not isinstance(batch, Iterable):
        raise TypeError(
            f"batch: expected a callable that makes a batch, or an iterable of batches, got {type(batch).__name__}; "
            "write batch=lambda: my_batch"
        )
    given = 0
    for item in batch:
        given += 1
        yield item
    raise ValueError(f"batch: the iterable ended after {given}; steps x accumulate = {wanted} batches are needed")


def _scalar_loss(model: Any, batch: Any, loss: Any) -> torch.Tensor:
    pair = loss is not None and isinstance(batch, (tuple, list)) and len(batch) == 2
    if isinstance(batch, dict):
        output = model(**batch)
    elif isinstance(batch, (tuple, list)) and not pair:
        output = model(*batch)
    else:
        output = model(batch[0] if pair else batch)
    if loss is not None:
        value = loss(output, batch[1] if pair else batch)
    else:
        value = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
        if value is None:
            raise TrainingError(
                f"the model returned {type(output).__name__} without a loss: put labels into the batch, or give loss=..."
            )
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        hint = "the loss must be" if loss is not None else "give loss=..., or let the model return"
        raise TrainingError(f"the loss is {shape}; {hint} a scalar tensor")
    if not value.requires_grad:
        raise TrainingError("the loss does not require grad: no parameter is trainable, or gradients are disabled")
    return value


def _checkpoint(model: torch.nn.Module, wrap: Sequence[type]) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):
        arguments = inspect.signature(enable).parameters
        enable(**({"gradient_checkpointing_kwargs": {"use_reentrant": False}} if arguments else {}))
        return
    if not wrap:
        raise ValueError("checkpoint=True: name the classes of the modules to checkpoint in wrap=[...]")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    strategies.wrapped_modules(model, wrap)  # says so where a class matches nothing
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, tuple(wrap)))
