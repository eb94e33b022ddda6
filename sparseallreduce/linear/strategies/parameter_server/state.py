"""The state of a model stored on several servers: assembled on every rank, and divided again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparseallreduce.linear.strategies.parameter_server.mailbox import Mailbox

__all__ = ["gathered_state", "state_of_range"]


def gathered_state(mailbox: Mailbox, part: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state of the whole model on every rank, assembled from the servers' parts; other ranks pass None. Collective.

    Arrays are concatenated in rank order. Numbers are those of the last server, which has the intercept; all others are equal on all
    servers.
    """
    outline = None if part is None else {name: _outline(value) for name, value in part.items()}
    outlines = mailbox.gather(outline)
    whole: dict[str, Any] = {}
    for name, value in outlines[-1].items():
        if isinstance(value, _Array):
            array = np.empty(0, value.dtype) if part is None else part[name]
            whole[name] = mailbox.join(array, np.array([0 if other is None else other[name].length for other in outlines]))
        else:
            whole[name] = value
    return whole


def state_of_range(state: dict[str, Any], lo: int, hi: int, width: int = 1) -> dict[str, Any]:
    """Return the part of a state for the indices ``[lo, hi)`` of a model with ``width`` weights per index."""
    part = slice(lo * width, hi * width)
    return {name: value[part] if isinstance(value, np.ndarray) and value.ndim else value for name, value in state.items()}


class _Array:
    """Length and dtype of an array, sent before its content."""

    def __init__(self, array: np.ndarray) -> None:
        self.length, self.dtype = len(array), array.dtype


def _outline(value: Any) -> Any:
    return _Array(value) if isinstance(value, np.ndarray) and value.ndim else value
