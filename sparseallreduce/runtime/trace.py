"""Counters of the bytes, messages, rounds, entries and time of this rank's operations."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Trace", "active", "entries_of", "trace"]


@dataclass(eq=False)
class Trace:
    """Counters of one rank, over the operations that ran while the trace was active.

    Bytes are those of messages, including headers. The messages of a dense MPI collective cannot be observed; it counts as the algorithm in
    the thesis: Rabenseifner's allreduce, or an allgather by recursive doubling. A sum in shared memory counts in the same way, a dense one
    as the former, and a sparse one as a split and an allgather in equal parts. The agreement that starts an operation is counted
    separately.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    header_bytes: int = 0  # part of bytes_sent
    agreement_bytes: int = 0  # sent in agreements, not included above
    messages: int = 0  # sent
    rounds: int = 0  # times that an algorithm waited for a message or a collective
    operations: int = 0  # completed
    entries_in: int = 0  # entries of this rank's streams
    entries_out: int = 0  # entries of the results
    seconds: float = 0.0  # from entering the trace to leaving it
    _start: float = field(default_factory=time.perf_counter, repr=False)

    @property
    def fill_in(self) -> float:
        """The entries of the results per entry of this rank's inputs: 1 for full overlap, P for disjoint positions."""
        return self.entries_out / self.entries_in if self.entries_in else 0.0

    def share(self, record: int, payload: int, ranks: int) -> None:
        """Count the record, and the payload in it, that a rank sends to all others before an operation, in bytes."""
        self.agreement_bytes += record * (ranks - 1)
        self.move(payload * (ranks - 1), 0, ranks - 1 if payload else 0)

    def move(self, sent: int, received: int, messages: int) -> None:
        """Count bytes sent and received, and messages sent."""
        self.bytes_sent += sent
        self.bytes_received += received
        self.messages += messages

    def complete(self, entries: int, result: Any) -> None:
        """Count a completed operation with ``entries`` entries of this rank."""
        self.operations += 1
        self.entries_in += entries
        self.entries_out += entries_of(result)

    def stop(self) -> None:
        """Store the elapsed time."""
        self.seconds = time.perf_counter() - self._start


active: list[Trace] = []


def entries_of(result: Any) -> int:
    """Return the entries of a result: a stream, several streams, or the update of a reducer; 0 if the operation failed."""
    if type(result) is tuple:
        return sum(map(entries_of, result))
    return int(getattr(getattr(result, "update", result), "stored", 0))


@contextmanager
def trace() -> Iterator[Trace]:
    """Count bytes, messages and other figures of this rank's operations inside a ``with`` block. Traces may nest.

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
