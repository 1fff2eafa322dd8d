"""Replacing attributes of torch for a while, and putting every one of them back."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class PrivateApiGone(RuntimeError):
    """A private name of torch that virtual GPUs rest on is not there in the installed version."""


class Patches:
    """Attributes that were replaced, in order. `undo` restores them, the last first."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, new: Any, *, optional: bool = False) -> None:
        """Replace `owner.name`. Raises PrivateApiGone where there is nothing to replace, unless `optional`."""
        old = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else _MISSING
        if old is _MISSING and not optional and not hasattr(owner, name):
            raise PrivateApiGone(_gone(f"{getattr(owner, '__name__', owner)}.{name}"))
        self._undo.append((owner, name, old))
        setattr(owner, name, new)

    def undo(self) -> None:
        while self._undo:
            owner, name, old = self._undo.pop()
            if old is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, old)


def _gone(name: str) -> str:
    import torch

    return (
        f"{name} is not there in torch {torch.__version__}: virtual GPUs were tried on torch 2.11 to 2.14. "
        "Use one of these, or look for a newer pytest-gpumem."
    )


def private(owner: Any, name: str) -> Any:
    """`owner.name`, a private name of torch. Raises PrivateApiGone where it is gone."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise PrivateApiGone(_gone(f"{getattr(owner, '__name__', owner)}.{name}")) from None
