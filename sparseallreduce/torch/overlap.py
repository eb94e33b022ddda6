"""Gradients that are summed while others are still computed: hooks that PyTorch calls when one has come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Overlap"]


class Overlap:
    """Hooks on parameters.

    Parameters
    ----------
    came : callable
        A bound method, told of every parameter whose gradient has come; its object is not kept alive.
    left : callable
        Another, told of an error that leaves a hook, and so back-propagation.
    """

    def __init__(self, came: Callable[[torch.Tensor], None], left: Callable[[BaseException], None]) -> None:
        self.paused = False
        self._came, self._left = weakref.WeakMethod(came), weakref.WeakMethod(left)
        self._watched: dict[torch.Tensor, Any] = {}

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Put a hook on those that have none yet and take part in differentiation."""
        for parameter in parameters:
            if parameter not in self._watched and parameter.requires_grad:
                self._watched[parameter] = parameter.register_post_accumulate_grad_hook(_Hook(weakref.ref(self)))

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._watched and parameter.requires_grad

    def tell(self, parameter: torch.Tensor) -> None:
        """What the hooks do."""
        came = self._came()
        if came is not None and not self.paused:
            came(parameter)

    def leave(self, error: BaseException) -> None:
        """Tell the owner of the hooks of an error that leaves back-propagation."""
        left = self._left()
        if left is not None and not self.paused:
            left(error)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Let gradients come, and add up, without telling of them."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __del__(self) -> None:
        for hook in self._watched.values():
            hook.remove()


class _Hook:
    """Forgets its optimiser when nobody else needs that."""

    def __init__(self, overlap: weakref.ref[Overlap]) -> None:
        self._overlap = overlap

    def __call__(self, parameter: torch.Tensor) -> None:
        overlap = self._overlap()
        if overlap is not None:
            try:
                overlap.tell(parameter)
            except BaseException as error:
                overlap.leave(error)
                raise
