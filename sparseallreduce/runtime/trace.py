"""What the operations of this rank moved: bytes, messages, rounds, fill-in and time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Trace", "active", "entries_of", "trace"]


@dataclass(eq=False)
class Trace:
    """Counts of one rank, over the operations that ran while the trace was on.

    Bytes are those of messages, headers included. A dense collective of the MPI library, whose messages nobody sees, counts as
    the algorithm of the thesis would move: Rabenseifner's allreduce, an allgather by recursive doubling. So does a sum in memory that
    the ranks share, of dense vectors as the former, of sparse streams as a split and an allgather in equal parts. The agreement that
    starts an operation is counted apart.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    header_bytes: int = 0  # of the bytes sent
    agreement_bytes: int = 0  # sent, not among the bytes above
    messages: int = 0  # sent
    rounds: int = 0  # times that an algorithm waited for a message or a collective
    operations: int = 0  # completed
    entries_in: int = 0  # entries of our streams
    entries_out: int = 0  # entries of the results
    seconds: float = 0.0  # from entering the trace to leaving it
    _start: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def fill_in(self) -> float:
        """Entries of the results for each entry that we put in: 1 for full overlap, P for disjoint positions."""
        return self.entries_out / self.entries_in if self.entries_in else 0.0

    def share(self, record: int, payload: int, ranks: int) -> None:
        """Count what a rank tells all others before an operation, in bytes."""
        self.agreement_bytes += record * (ranks - 1)
        self.move(payload * (ranks - 1), 0, ranks - 1 if payload else 0)

    def move(self, sent: int, received: int, messages: int) -> None:
        """Count bytes that went out and came in, and the messages in which they went."""
        self.bytes_sent += sent
        self.bytes_received += received
        self.messages += messages

    def complete(self, entries: int, result: Any) -> None:
        """Count an operation on so many entries of ours."""
        self.operations += 1
        self.entries_in += entries
        self.entries_out += entries_of(result)

    def stop(self) -> None:
        """Take the time."""
        self.seconds = time.perf_counter() - self._start


active: list[Trace] = []


def entries_of(result: Any) -> int:
    """Entries of what an operation came to: of a stream, of several, or of the update of a reducer; 0 if it failed."""
    if type(result) is tuple:
        return sum(map(entries_of, result))
    return int(getattr(getattr(result, "update", result), "stored", 0))


@contextmanager
def trace() -> Iterator[Trace]:
    """Count what the operations of this rank do inside a ``with`` block. Traces may nest.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> with sar.trace() as t:
    ...     _ = sar.allreduce(sar.SparseStream([1], [1.0], 4), comm=sar.SERIAL)
    >>> t.operations, t.bytes_sent
    (1, 0)
    """
    counts = Trace()
    active.append(counts)
    try:
        yield counts
    finally:
        active.remove(counts)
        counts.stop()
