"""Messages between workers and parameter servers over MPI, with tags, from any source, and with errors shared by all ranks.

Messages are sent on a duplicate of the user's communicator. A waiting rank polls, as in :mod:`sparseallreduce.runtime.progress`, and
yields the core to other processes: a server that polled without a pause would slow down the workers that it waits for.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import common_error
from sparseallreduce.errors import SparseAllreduceError
from sparseallreduce.runtime import freeing, progress
from sparseallreduce.runtime.hosts import count_cores, same_host, this_place
from sparseallreduce.runtime.objects import gather
from sparseallreduce.runtime.stalls import LongWait, blocked
from sparseallreduce.runtime.trace import active as traces
from sparseallreduce.streams import memory

__all__ = ["Mailbox", "Message", "mailbox"]

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

_GIVEN_UP = 0  # tag of the message by which a rank asks all others to agree on an error; callers use other tags
_RECORD_BYTES = 1024  # size of a rank's record in that agreement
_TIMEOUT = 10.0  # seconds after which a rank fails alone if the others do not take part
_SPINS = 64  # polls before a waiting rank yields its core
_NAPS = (20e-6, 200e-6)  # seconds, first and longest, for which it then sleeps if there are more ranks than cores


class Message(NamedTuple):
    """A received message."""

    source: int
    kind: int
    payload: Bytes


@dataclass
class _Arrival:
    message: Message
    request: MPI.Request


class Mailbox:
    """One rank's end of the communication. Messages of one sender are received in the order in which they were sent.

    Every call that waits raises the error shared by all ranks if any rank has given up.
    """

    rank: int
    ranks: int

    def __init__(self, messages: MPI.Intracomm, verdicts: MPI.Intracomm, oversubscribed: bool) -> None:
        self.rank, self.ranks = messages.rank, messages.size
        self.sound: bool = True  # False once a rank has given up
        self._comm = messages
        self._verdicts = verdicts
        self._oversubscribed = oversubscribed
        self._arriving: deque[_Arrival] = deque()
        self._leaving: list[tuple[MPI.Request, Bytes]] = []
        self._groups: dict[int, MPI.Comm] = {}

    def first_ranks(self, count: int) -> MPI.Comm | None:
        """Return a communicator of the first ``count`` ranks, or None on the other ranks. The first call for a ``count`` is collective."""
        if count not in self._groups:
            with blocked(self.rank, self.ranks, "the parting of workers from parameter servers"):
                self._groups[count] = self._comm.Split(0 if self.rank < count else MPI.UNDEFINED)
        return self._groups[count] or None

    def watchful(self, comm: MPI.Comm) -> WatchfulCommunicator:
        """Return a communicator of the ranks of ``comm`` whose waits raise an error if a rank has given up."""
        return WatchfulCommunicator(self, comm)

    def send(self, dest: int, kind: int, *parts: Array) -> None:
        """Send the bytes of some arrays as one message without waiting; ``kind``, its tag, is a number from 1."""
        message = np.concatenate([np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts] or [np.empty(0, np.uint8)])
        for counts in traces:
            counts.bytes_sent += len(message)
            counts.messages += 1
        self._leaving.append((self._comm.Isend([message, MPI.BYTE], dest, kind), message))

    def receive(self) -> Message:
        """Wait for the next message and return it."""
        nap = self._nap("no message has come")
        while (message := self._next()) is None:
            nap.rest()
        return message

    def flush(self) -> None:
        """Wait until all messages are sent: a large one is sent only while this rank calls MPI."""
        nap = self._nap("a message has not been received yet")
        while not self._has_left():
            self._take_in()
            nap.rest()

    def gather(self, value: Any, comm: MPI.Comm | None = None) -> list[Any]:
        """Return the values of all ranks of ``comm``, by default of all ranks, in rank order. Collective."""
        comm = comm or self._comm
        record, lengths = np.frombuffer(pickle.dumps(value), np.uint8), np.empty(comm.size, np.int64)
        self._wait(comm.Iallgather(np.array([len(record)], np.int64), lengths))
        records = np.split(self.join(record, lengths, comm), np.cumsum(lengths)[:-1])
        return [pickle.loads(each.tobytes()) for each in records]

    def join(self, array: Array, lengths: Array, comm: MPI.Comm | None = None) -> Array:
        """Return the arrays of all ranks of ``comm``, by default of all ranks, concatenated; their lengths are given. Collective."""
        comm = comm or self._comm
        joined = np.empty(int(lengths.sum()), array.dtype)
        datatype = MPI.Datatype.fromcode(array.dtype.char)
        places = np.cumsum(lengths) - lengths
        self._wait(comm.Iallgatherv([array, datatype], [joined, lengths.tolist(), places.tolist(), datatype]))
        for counts in traces:
            counts.bytes_sent += array.nbytes * (comm.size - 1)
        return joined

    def give_up(self, error: Exception) -> Exception:
        """End the collective work because of an error on this rank; return the error that all ranks raise."""
        if getattr(error, "on_all_ranks", False) or not self.sound:
            return error
        for dest in range(self.ranks):
            if dest != self.rank:
                self.send(dest, _GIVEN_UP)
        common = self._verdict({"error": type(error).__name__[:100], "text": str(error)})
        if common is None:
            return error
        common.__cause__ = error
        return common

    def _next(self) -> Message | None:
        """Return the next complete message, or None."""
        self._has_left()
        self._take_in()
        incomplete = set()
        for position, arrival in enumerate(self._arriving):
            source = arrival.message.source
            if source in incomplete:
                continue
            if arrival.request.Test():
                del self._arriving[position]
                return arrival.message
            incomplete.add(source)
        return None

    def _take_in(self) -> None:
        """Start receiving messages that have arrived; raise an error if a rank has given up."""
        status = MPI.Status()
        while (matched := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
            payload = memory.empty(status.Get_count(MPI.BYTE), np.uint8)
            message = Message(status.Get_source(), status.Get_tag(), payload)
            self._arriving.append(_Arrival(message, matched.Irecv([payload, MPI.BYTE])))
            if message.kind == _GIVEN_UP:
                raise self._verdict({}) or SparseAllreduceError(f"rank {message.source} gave up, and not all ranks could hear of it")

    def _has_left(self) -> bool:
        self._leaving = [(request, message) for request, message in self._leaving if not request.Test()]
        return not self._leaving

    def _wait(self, request: MPI.Request) -> None:
        nap = self._nap("MPI does not report which ranks have not entered an exchange")
        while not request.Test():
            self._take_in()
            nap.rest()

    def _nap(self, awaited: str) -> _Nap:
        who, where = f"rank {self.rank} of {self.ranks}", f"the work of workers and parameter servers: {awaited}"
        return _Nap(self._oversubscribed, lambda: (who, where))

    def _verdict(self, own: dict[str, str]) -> SparseAllreduceError | None:
        """Return the error on which all ranks agree, or None if some ranks do not take part in time."""
        self.sound = False
        _farewells.append(self)
        record = np.frombuffer(_record(own), np.uint8)
        records = np.empty((self.ranks, _RECORD_BYTES), np.uint8)
        request = self._verdicts.Iallgather(record, records)
        nap, end = _Nap(self._oversubscribed), time.monotonic() + _TIMEOUT
        while not request.Test():
            if time.monotonic() > end:
                _farewells.append((request, record, records))
                return None
            nap.rest()
        return common_error([json.loads(row.tobytes()) for row in records])

    def given_back(self) -> Generator[bool, None, None]:
        """Free the communicators."""
        return freeing.returned(*filter(None, self._groups.values()), self._comm, self._verdicts)


def _record(own: dict[str, str]) -> bytes:
    """Return a rank's record for the agreement, with its text shortened to fit."""
    text = own.get("text", "")
    kept = min(len(text), _RECORD_BYTES)
    while True:
        shown = own if kept >= len(text) else own | {"text": text[:kept] + "..."}
        record = json.dumps(shown).encode()
        if len(record) <= _RECORD_BYTES:
            return record.ljust(_RECORD_BYTES)
        kept -= max(1, (len(record) - _RECORD_BYTES) // 12)  # a character takes up to twelve bytes


class WatchfulCommunicator:
    """The part of a communicator's interface by which ranks agree with each other."""

    rank: int
    size: int

    def __init__(self, mailbox: Mailbox, comm: MPI.Comm) -> None:
        self.rank, self.size = comm.rank, comm.size
        self._mailbox = mailbox
        self._comm = comm

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order."""
        return self._mailbox.gather(value, self._comm)


class _Nap:
    """The pauses of a rank between two polls of its mailbox."""

    def __init__(self, oversubscribed: bool, describe: Callable[[], tuple[str, str]] | None = None) -> None:
        self._oversubscribed, self._describe = oversubscribed, describe
        self._wait: LongWait | None = None  # set once the wait is long
        self._rounds = 0
        self._seconds = _NAPS[0]

    def rest(self) -> None:
        """Yield the core after some polls, and sleep longer the longer no message arrives."""
        progress.advance()
        self._rounds += 1
        if self._rounds < _SPINS and not self._oversubscribed:
            return
        if self._wait is not None:
            self._wait.check()
        elif self._describe is not None and self._rounds >= _SPINS:
            self._wait = LongWait(self._describe, limited=True)
        if self._rounds < _SPINS or not self._oversubscribed:
            os.sched_yield()
        else:
            time.sleep(self._seconds)
            self._seconds = min(2 * self._seconds, _NAPS[1])


# Keeps the buffers of messages that may never complete.
_farewells: list[Any] = []
_keyval: int | None = None


def mailbox(comm: MPI.Intracomm) -> Mailbox:
    """Return this rank's mailbox of a communicator, created by the first call and cached as an attribute. Collective."""
    global _keyval
    if _keyval is None:
        _keyval = freeing.keyval(Mailbox.given_back)
    kept: Any = comm.Get_attr(_keyval)
    if kept is None or not kept.sound:
        oversubscribed = _is_oversubscribed(comm)  # first, so that no rank duplicates the communicator alone if another has failed
        duplicates = []
        for _ in range(2):
            duplicate, request = comm.Idup()
            progress.wait_until(
                request.Test, lambda: (f"rank {comm.rank} of {comm.size}", "the duplication of the communicator, which all have entered")
            )
            duplicates.append(duplicate)
        kept = Mailbox(duplicates[0], duplicates[1], oversubscribed)
        comm.Set_attr(_keyval, kept)
    found: Mailbox = kept
    return found


def _is_oversubscribed(comm: MPI.Intracomm) -> bool:
    """Return True if a communicator has more ranks on this host than cores that they may run on."""
    places = gather(comm, this_place())
    here = same_host(places, comm.rank)
    return len(here) > count_cores(places[rank] for rank in here)
