"""Exceptions in a backward on the PrivateUse1 device.

The Python-made device guard (`PythonDeviceGuard` in torch/csrc/acc/Module.cpp) asks Python for its type also while the
engine unwinds, with the exception still pending: the process ends ("terminate called without an active exception").
(Hooks that are registered on a graph node itself, `grad_fn.register_hook`, are out of reach: an exception in one of
these still ends the process, which fails the test with the crash.)

So an exception inside a backward is kept here, C++ is given a result that it must refuse (an error of its own, which
unwinds safely), and the kept exception is raised once the engine has returned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pytest_gpumem.sources.virtual.patches import Patches, private


class Backward:
    """Whether a backward is running, and the exception that ended it."""

    refused = object()  # no operation can return this

    def __init__(self) -> None:
        self._depth = 0
        self._error: BaseException | None = None

    @property
    def running(self) -> bool:
        return self._depth > 0

    @property
    def aborted(self) -> bool:
        return self._error is not None

    def abort(self, error: BaseException) -> object:
        """Keep the first exception; the result makes C++ give up."""
        if self._error is None:
            self._error = error
        return self.refused

    def patch(self, patches: Patches) -> None:
        """Wrap the engine and the hooks that it calls, until `patches.undo()`."""
        engine = private(torch.autograd, "_engine_run_backward")

        @functools.wraps(engine)
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                # One thread: the engine's device threads exist only if it was never used before the device was registered.
                with torch.autograd.set_multithreading_enabled(False):
                    return engine(*args, **kwargs)
            except BaseException:
                if self._error is None or self._depth > 1:
                    raise
            finally:
                self._depth -= 1
                if self._depth == 0 and self._error is not None:
                    error, self._error = self._error, None
                    raise error

        patches.set(torch.autograd, "_engine_run_backward", run_backward)
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            patches.set(torch.Tensor, name, self._registering(getattr(torch.Tensor, name)))
        for name in ("register_full_backward_hook", "register_full_backward_pre_hook"):
            patches.set(torch.nn.Module, name, self._registering(getattr(torch.nn.Module, name)))

    def _registering(self, register: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(register)
        def call(owner: Any, hook: Callable[..., Any], *rest: Any, **kwargs: Any) -> Any:
            @functools.wraps(hook)
            def guarded(*args: Any) -> Any:
                if self._error is not None:
                    return None
                try:
                    return hook(*args)
                except BaseException as error:
                    self.abort(error)
                    return None

            return register(owner, guarded, *rest, **kwargs)

        return call
