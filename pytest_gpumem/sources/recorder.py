"""Writes the memory trace of one rank: blocks as they come and go, phases as they are seen, and who holds what.

Works the same over real and fake tensors. Phases need no help from the user:

* forward: from the first call of a module (outside a backward) until a backward begins; with gradients disabled, until
  that call returns. So a loss worked out after the model's call belongs to the forward.
* backward: while the autograd engine runs. A module called in there is a recomputed forward (activation checkpointing).
* optimizer: `Optimizer.step`, through torch's global step hooks.

Who holds what is looked up at the edges of phases: parameters, `.grad`s and buffers of every module that was seen, the
state of every optimizer that stepped, and the tensors that a module was called with.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._pytree import tree_leaves

from pytest_gpumem.categories import BUFFERS, COMMUNICATION, GRADIENTS, INPUTS, OPTIMIZER_STATE, PARAMETERS
from pytest_gpumem.sources.model_info import describe
from pytest_gpumem.sources.storages import Storages
from pytest_gpumem.sources.virtual.allocator import Allocator, OutOfDeviceMemory
from pytest_gpumem.sources.virtual.patches import Patches, private
from pytest_gpumem.trace import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    Alloc,
    Free,
    MemoryTrace,
    OutOfMemory,
    Own,
    Phase,
    Recompute,
    Step,
)


class Recorder:
    """The one that appends to `trace.events`. `allocator` hands out the blocks.

    `belongs(tensor)` says whether a tensor lies on the measured device.
    """

    def __init__(self, trace: MemoryTrace, allocator: Allocator, belongs: Callable[[torch.Tensor], bool]) -> None:
        self.trace = trace
        self.allocator = allocator
        self.belongs = belongs
        self.storages = Storages(self)
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.steps_of_optimizers = 0
        self.backwards = 0
        self._phases: list[str] = []
        self._calls = self._applies = 0
        self._named: list[str] = []
        self._claimed: set[tuple[int | None, str, bool]] = set()
        self._interrupted = False
        self._handles: list[Any] = []
        allocator.on_out_of_memory = self._out_of_memory

    # -- blocks (the `Memory` that storages take theirs from)

    def alloc(self, nbytes: int, op: str, from_host: bool, again: int | None) -> int:
        try:
            block, size = self.allocator.malloc(nbytes)
        except OutOfDeviceMemory as error:
            raise torch.OutOfMemoryError(self.allocator.message(error.requested)) from None
        self.trace.events.append(Alloc(block, nbytes, size, op, from_host, again))
        return block

    def free(self, block: int) -> None:
        self.allocator.free(block)
        self.trace.events.append(Free(block))

    def _out_of_memory(self, requested: int) -> None:
        self.survey()
        self.trace.events.append(OutOfMemory(requested))
        self._interrupted = True

    # -- phases and steps

    def begin(self, name: str, grad: bool = True) -> None:
        """A phase begins: a named one, or one of forward, backward, optimizer."""
        self._recover()
        path = "/".join((*self._named, name))
        self._phases.append(path)
        self.trace.events.append(Phase(path, True, grad))

    def end(self, name: str) -> None:
        """The innermost phase of this name ends; those still open inside it end with it."""
        path = "/".join((*self._named, name))
        if path not in self._phases:
            return
        while self._phases:
            phase = self._phases.pop()
            self.trace.events.append(Phase(phase, False))
            if phase == path:
                return

    def end_forward(self) -> None:
        if self._phases and self._phases[-1].rpartition("/")[2] == FORWARD:
            self.survey()
            self.end(FORWARD)

    def _recover(self) -> None:
        """After an out-of-memory error that the test caught, no automatic phase is open any more."""
        if self._interrupted:
            self._interrupted = False
            self._calls = 0
            while self._phases and self._phases[-1].rpartition("/")[2] in (FORWARD, BACKWARD, OPTIMIZER):
                self.trace.events.append(Phase(self._phases.pop(), False))

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        """`gpumem.measure(name)`."""
        self.end_forward()
        self.begin(name)
        self._named.append(name)
        try:
            yield
        finally:
            self.end_forward()
            self._named.pop()
            self.end(name)

    def step(self, index: int, begins: bool) -> None:
        if not begins:
            self.end_forward()
            self.survey()
        self.trace.events.append(Step(index, begins))

    # -- who holds what

    def claim(self, tensor: object, category: str, weak: bool = False) -> None:
        """Whoever holds `tensor` makes its block `category`."""
        for local in _local_tensors(tensor):
            if not self.belongs(local):
                continue
            block = self.storages.block_of(local)
            if block is not None and (block, category, weak) not in self._claimed:
                self._claimed.add((block, category, weak))
                self.trace.events.append(Own(block, category, weak))

    def claim_since(self, event: int, category: str) -> None:
        """Claim every block that was handed out since `len(trace.events)` was `event`, and is still live."""
        for alloc in [e for e in self.trace.events[event:] if isinstance(e, Alloc)]:
            if alloc.block in self.allocator.live:
                self._claimed.add((alloc.block, category, False))
                self.trace.events.append(Own(alloc.block, category))

    def survey(self) -> None:
        """Look up what modules and optimizers hold now."""
        for module in list(self.modules):
            for parameter in module._parameters.values():
                self._claim_parameter(parameter)
            for buffer in module._buffers.values():
                self.claim(buffer, BUFFERS)
        for optimizer in list(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    self._claim_parameter(parameter)
            for state in list(optimizer.state.values()):
                for leaf in tree_leaves(state):
                    self.claim(leaf, OPTIMIZER_STATE)

    def _claim_parameter(self, parameter: torch.Tensor | None) -> None:
        if parameter is not None:
            self.claim(parameter, PARAMETERS)
            self.claim(parameter.grad, GRADIENTS)

    def _kept_block(self, parameter: torch.Tensor) -> int | None:
        """The block of a parameter on the device; None for one that lies elsewhere, or that FSDP has gathered for a while."""
        block = self.storages.block_of(parameter) if self.belongs(parameter) else None
        return None if (block, COMMUNICATION, False) in self._claimed else block

    def _claim_inputs(self, values: Iterable[object]) -> None:
        if self._phases and self._phases[-1].rpartition("/")[2] == FORWARD:
            return  # what one module of an open forward hands to the next
        for leaf in values:
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is None:
                self.claim(leaf, INPUTS)

    def describe(self) -> None:
        """Note in the trace what parameters and optimizers there are."""
        self.trace.parameters, self.trace.units, self.trace.optimizers = describe(
            list(self.modules), list(self.optimizers), self._kept_block
        )

    # -- hooks

    def patch(self, patches: Patches) -> None:
        """Watch modules, the autograd engine and optimizers, until `patches.undo()` and `unhook()`."""
        patches.set(torch.nn.Module, "__call__", self._calling(torch.nn.Module.__call__))
        engine = private(torch.autograd, "_engine_run_backward")
        patches.set(torch.autograd, "_engine_run_backward", self._running_backward(engine))

        # Claimed at once: a parameter that FSDP shards, or that moves, is gone before the next edge of a phase.
        def parameter_registered(module: torch.nn.Module, name: str, value: object) -> None:
            self.modules.add(module)
            self.claim(value, PARAMETERS)

        def buffer_registered(module: torch.nn.Module, name: str, value: object) -> None:
            self.modules.add(module)
            self.claim(value, BUFFERS)

        patches.set(torch.nn.Module, "_apply", self._applying(private(torch.nn.Module, "_apply")))
        self._handles = [
            module_hooks.register_module_parameter_registration_hook(parameter_registered),
            module_hooks.register_module_buffer_registration_hook(buffer_registered),
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_step),
        ]

    def unhook(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _calling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def __call__(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            if self._calls and not self._interrupted:
                return call(module, *args, **kwargs)
            self._recover()
            recompute = bool(self._phases) and self._phases[-1].rpartition("/")[2] == BACKWARD
            self._enter(module, args, kwargs, recompute)
            self._calls = 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._calls = 0
                self._leave(recompute)

        return __call__

    def _applying(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Module.to, .cuda, .half, to_empty: parameters and buffers have moved."""

        @functools.wraps(apply)
        def _apply(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._applies += 1
            try:
                return apply(module, *args, **kwargs)
            finally:
                self._applies -= 1
                if not self._applies:
                    self.modules.update(module.modules())
                    self.survey()

        return _apply

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any, recompute: bool) -> None:
        if recompute:
            self.trace.events.append(Recompute(True))
            return
        if module not in self._roots:
            self._roots.add(module)
            self.modules.update(module.modules())
            self._note_strategy(module)
        self.survey()
        self._claim_inputs(tree_leaves((args, kwargs)))
        if not self._phases or self._phases[-1].rpartition("/")[2] != FORWARD:
            self.begin(FORWARD, grad=torch.is_grad_enabled())

    def _note_strategy(self, root: torch.nn.Module) -> None:
        """A loop that wraps its model itself, in DDP or FSDP2, need not say so."""
        if self.trace.strategy == "single":
            names = {cls.__name__ for module in root.modules() for cls in type(module).__mro__}
            if "DistributedDataParallel" in names:
                self.trace.strategy = "ddp"
            elif "FSDPModule" in names:
                self.trace.strategy = "fsdp"

    def _leave(self, recompute: bool) -> None:
        if recompute:
            self.trace.events.append(Recompute(False))
        elif not torch.is_grad_enabled():
            self.end_forward()

    def _running_backward(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(engine)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._phases and self._phases[-1].rpartition("/")[2] == BACKWARD and not self._interrupted:
                return engine(*args, **kwargs)  # reentrant checkpointing: a backward inside the backward
            self.end_forward()
            self.begin(BACKWARD)
            self.backwards += 1
            calls, self._calls = self._calls, 0
            try:
                return engine(*args, **kwargs)
            finally:
                self._calls = calls
                self.survey()
                if not self.steps_of_optimizers:  # a model that no optimizer steps may be gone when the test ends
                    self.describe()
                self.end(BACKWARD)

        return run_backward

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.end_forward()
        self.optimizers.add(optimizer)
        self.survey()
        self.begin(OPTIMIZER)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.steps_of_optimizers += 1
        self.survey()
        self.describe()
        self.end(OPTIMIZER)


def _local_tensors(tensor: object) -> Iterator[torch.Tensor]:
    """The plain tensors that hold a tensor's memory: itself, or what a wrapper (DTensor, a quantised weight) wraps."""
    if not isinstance(tensor, torch.Tensor):
        return
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        yield local
    elif hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _local_tensors(getattr(tensor, name))
    else:
        yield tensor
