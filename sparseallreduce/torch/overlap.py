"""Hooks by which PyTorch reports each gradient as soon as it is computed, so that sums overlap with back-propagation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["Overlap"]


class Overlap:
    """Hooks on parameters, which call an optimiser for each computed gradient.

    Parameters
    ----------
    ready : callable
        A bound method, called with each parameter whose gradient has been computed. Its object is only referenced weakly.
    left : callable
        A bound method, called with an error in a hook, which ends back-propagation.
    """

    def __init__(self, ready: Callable[[torch.Tensor], None], left: Callable[[BaseException], None]) -> None:
        self.paused: bool = False
        self._ready, self._left = weakref.WeakMethod(ready), weakref.WeakMethod(left)
        self._watched: dict[torch.Tensor, Any] = {}

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Add a hook to each parameter that requires a gradient and has no hook yet."""
        for parameter in parameters:
            if parameter not in self._watched and parameter.requires_grad:
                self._watched[parameter] = parameter.register_post_accumulate_grad_hook(_Hook(weakref.ref(self)))

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._watched and parameter.requires_grad

    def report(self, parameter: torch.Tensor) -> None:
        """Report that the gradient of a parameter has been computed."""
        ready = self._ready()
        if ready is not None and not self.paused:
            ready(parameter)

    def leave(self, error: BaseException) -> None:
        """Report an error that ends back-propagation."""
        left = self._left()
        if left is not None and not self.paused:
            left(error)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Return a context in which gradients are not reported."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def __del__(self) -> None:
        for hook in self._watched.values():
            hook.remove()


class _Hook:
    """A hook on one parameter, with only a weak reference to the optimiser."""

    def __init__(self, overlap: weakref.ref[Overlap]) -> None:
        self._overlap = overlap

    def __call__(self, parameter: torch.Tensor) -> None:
        overlap = self._overlap()
        if overlap is not None:
            try:
                overlap.report(parameter)
            except BaseException as error:
                overlap.leave(error)
                raise
