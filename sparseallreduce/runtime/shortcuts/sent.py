"""Send short streams with the ranks' records, so that an allgather or a broadcast takes one latency."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sparseallreduce.runtime.shortcuts.base import PACKED, Shortcut
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import Bytes, decode, encode, message_bytes

if TYPE_CHECKING:
    from sparseallreduce.runtime.handshake.base import Handshake

__all__ = ["Sent"]


class Sent(Shortcut):
    """Streams that are sent as whole messages in the records of a handshake, and joined by every rank. Several may be in flight.

    Parameters
    ----------
    sends : bool
        Whether this rank sends its stream; in a broadcast only the root does.
    entered : callable
        Returns a rank's stream as it is sent.
    joined : callable
        Returns the result, given the streams of those ranks that sent one, in the order of ranks.
    limit : int
        Largest message in bytes; with a longer one the shortcut is not armed.
    rank : int
    """

    __slots__ = ("_entered", "_joined", "_lengths", "_limit", "_message", "_rank", "_sends")
    flag: int
    spins: int

    flag, spins = PACKED, 1

    def __init__(
        self,
        sends: bool,
        entered: Callable[[SparseStream], SparseStream],
        joined: Callable[[Sequence[SparseStream]], Any],
        limit: int,
        rank: int,
    ) -> None:
        self._sends, self._entered, self._joined, self._limit, self._rank = sends, entered, joined, limit, rank
        self._message: Bytes | None = None  # from `arm` to `payload`
        self._lengths: list[int] = []  # of the latest messages

    def arm(self, sequence: int, stream: Any) -> int:
        self._message = None
        if not self._sends:
            return PACKED
        if stream._stored.nbytes > self._limit:
            return 0  # the values alone are too long, and those of the dense form are no shorter: nothing is copied
        entered = self._entered(stream)
        if message_bytes([entered]) > self._limit:
            return 0
        self._message = encode([entered])
        return PACKED

    def payload(self, stream: Any) -> Bytes | None:
        message, self._message = self._message, None
        return message

    def commit(self, sequence: int, flags: int, handshake: Handshake) -> Any:
        messages = handshake.payloads()
        self._lengths = list(map(len, messages))
        return self._joined([decode(message, copy=True)[0] for message in messages if len(message)])

    def poll(self, sequence: int, spins: int) -> SparseStream | None:
        raise AssertionError("the handshake has already returned the result")

    def moved(self) -> tuple[int, int, int]:
        return 0, sum(self._lengths) - self._lengths[self._rank], 0  # the sent bytes are counted with the record
