"""Send short streams with the ranks' records, so that each rank reduces them itself and the operation takes one latency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseallreduce.runtime.shortcuts.base import PACKED, Shortcut
from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.handshake.base import Handshake

__all__ = ["Packed"]


class Packed(Shortcut):
    """A reduction of streams packed into the records of a handshake. Several operations may be in flight.

    Parameters
    ----------
    layout : packed.Layout
        Layout of the streams.
    reduction : Reduction
    rank : int
    """

    __slots__ = ("_handshake", "_layout", "_rank", "_reduction")
    flag: int
    spins: int

    flag, spins = PACKED, 1

    def __init__(self, layout: packed.Layout, reduction: Reduction, rank: int) -> None:
        self._layout, self._reduction, self._rank = layout, reduction, rank
        self._handshake: Handshake | None = None  # handshake of the latest operation

    def arm(self, sequence: int, stream: SparseStream) -> int:
        return PACKED

    def commit(self, sequence: int, flags: int, handshake: Handshake) -> SparseStream | None:
        self._handshake = handshake
        return handshake.reduced(self._layout, self._reduction)

    def poll(self, sequence: int, spins: int) -> SparseStream | None:
        raise AssertionError("the handshake has already returned the result")

    def moved(self) -> tuple[int, int, int]:
        assert self._handshake is not None
        lengths = self._handshake.lengths()
        return 0, sum(lengths) - lengths[self._rank], 0  # the sent bytes are counted with the record
