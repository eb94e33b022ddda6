"""The state of a model that lies on several servers: put together on every rank, and taken apart again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sparseallreduce.linear.strategies.parameter_server.mailbox import Mailbox

__all__ = ["gathered_state", "state_of_range"]


def gathered_state(mailbox: Mailbox, part: dict[str, Any] | None) -> dict[str, Any]:
    """The state of the whole, on every rank, from the parts that servers give and other ranks (None) do not. Collective.

    Arrays are put one after another in the order of ranks; of numbers, which servers have in common unless they are about the
    intercept, the last server's is taken: it has the intercept.
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
    """The part for the indices ``[lo, hi)`` of a model with so many weights an index, all in flat arrays."""
    part = slice(lo * width, hi * width)
    return {name: value[part] if isinstance(value, np.ndarray) and value.ndim else value for name, value in state.items()}


class _Array:
    """What is said of an array before it is sent."""

    def __init__(self, array: np.ndarray) -> None:
        self.length, self.dtype = len(array), array.dtype


def _outline(value: Any) -> Any:
    return _Array(value) if isinstance(value, np.ndarray) and value.ndim else value
