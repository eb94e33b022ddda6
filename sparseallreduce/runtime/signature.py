"""Cache what allreduces of streams of one kind on a channel have in common: the agreed terms, the shortcuts, and the choice of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from sparseallreduce.algorithms import AUTO, algorithm_of
from sparseallreduce.algorithms.agreement import Intent, digest_of
from sparseallreduce.algorithms.allreduce import Call, allreduce, takes_samples
from sparseallreduce.algorithms.choose import LONG, is_worth_a_sample, rounded
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.algorithms.overlap import Overlap, sample_bytes, share_records
from sparseallreduce.algorithms.steps import Schedule, Share
from sparseallreduce.runtime.collectives import DIRECT_RANKS, has_native_sum, takes_collective
from sparseallreduce.runtime.overlaps import REMEMBERED
from sparseallreduce.runtime.predictions import byte_limits, dense_share, expected_beginning, uneven_beginning
from sparseallreduce.runtime.shortcuts.base import Shortcut
from sparseallreduce.runtime.shortcuts.dense_shared import DenseShared
from sparseallreduce.runtime.shortcuts.mpi_sum import MPISum
from sparseallreduce.runtime.shortcuts.packed import Packed
from sparseallreduce.runtime.shortcuts.sparse_shared import SparseShared
from sparseallreduce.runtime.stalls import default_timeout
from sparseallreduce.runtime.work import BLOCKING, FIRST, OTHER, Work
from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream
from sparseallreduce.streams.wire import Encoding

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = ["Signature"]

_REMEMBERED = 256  # choices that are cached that are cached
_LONG = LONG  # expected seconds of messages above which ranks exchange samples of their positions
_NOTED = 9  # bytes of a note with a digest
_ROUNDS = 50  # an exchange of notes must be worth this many rounds of short messages

_EVEN = 1 / 8  # relative difference of the ranks' entries up to which each rank chooses by its own

Choice = tuple[int, tuple[Shortcut, ...]]  # the lowest level that may take the shortcuts, and these


class Uneven(NamedTuple):
    """A choice for all ranks, whatever the number of entries of each."""

    least: int  # as in a Choice
    shortcuts: tuple[Shortcut, ...]
    room: int  # largest stream, in bytes, that it applies to


class Signature(Work):
    """The work of operations on streams of one size, dtype and width, with one operator and algorithm.

    Parameters
    ----------
    call, intent
        Those of an example operation.
    channel : Channel
    """

    uneven: Uneven | None = None

    def __init__(self, call: Call, intent: Intent, channel: Channel) -> None:
        self._channel = channel
        self._call = call._replace(stream=None)  # which would otherwise live as long as the channel
        self._intent = intent
        self.digest: int = digest_of(intent.terms)
        self.itemsize: int = call.stream.dtype.itemsize
        self.encoding: Encoding = call.encoding
        self._reduction = Reduction(call.op, call.switch_density)
        self._layout = packed.Layout.of(call.stream, self._reduction)
        self._nbytes = math.prod(self._layout.shape) * self.itemsize  # size of the dense form in bytes
        self._choices: dict[tuple[float, int], Choice] = {}
        self._latest: tuple[int, Choice] = -2, (OTHER, ())  # entries of the latest stream (-1 if dense), and its choice
        self._unevens: dict[tuple[float, float], Uneven] = {}  # by the rounded total of entries, and the rounded maximum
        self._has_shortcuts = False
        self.on_device: Any = call.stream.on_device  # shortcuts access host memory, so streams on a GPU take none
        self.is_sum: bool = call.op.is_sum

    def _make_shortcuts(self) -> None:
        """Create the shortcuts, once the channel is ready."""
        channel, layout, op = self._channel, self._layout, self._call.op
        self._packed = Packed(layout, self._reduction, channel.rank)
        self._shared: tuple[Shortcut, ...] = ()
        if channel.sparse_memory is not None and op.is_sum:
            self._shared = (SparseShared(layout, self._reduction, channel.sparse_memory),)
        native = has_native_sum(op, layout.dtype, math.prod(layout.shape))
        # MPI's own sum cannot be interrupted by a timeout.
        self._dense: tuple[Shortcut, ...] = (MPISum(layout, channel),) if native and default_timeout() is None else ()
        self._dense_shared: DenseShared | None = None
        if native and channel.areas and all(self._nbytes <= area.capacity for area in channel.areas):
            self._dense_shared = DenseShared(layout, channel.areas, channel.spins)
        self._has_shortcuts = True

    def intent(self, stream: SparseStream | None) -> Intent:
        return self._intent._replace(entries=self.entries(stream))

    def entries(self, stream: SparseStream | None) -> int:
        return 0 if stream is None else len(stream._stored)

    def takes_collectives(self) -> bool:
        """Return True if the algorithm may call MPI collectives; for "auto" this is assumed."""
        algorithm = self._call.algorithm
        return algorithm == AUTO or takes_collective(self._channel, algorithm_of(algorithm).dense_steps)

    def schedule(self, stream: SparseStream | None, entries: Sequence[int], notes: Sequence[bytes] = ()) -> Schedule:
        assert stream is not None
        if self._call.algorithm == AUTO:
            self.record_entries(stream, entries)
        if any(notes):
            return self._reviewed(stream, entries, self._channel.overlaps.update(self.digest, notes, stream.size))
        if self._asks(stream, sum(entries) / len(entries)):
            return self._after_notes(stream, entries)
        return self._schedule(stream, entries, None)

    def _schedule(self, stream: SparseStream, entries: Sequence[int], overlap: Overlap | None) -> Schedule:
        channel, call = self._channel, self._call._replace(stream=stream)
        reduction = Reduction(call.op, call.switch_density)
        return allreduce(call, entries, channel.rank, channel.ranks, channel.machine, reduction, overlap, channel.hosts)

    def _reviewed(self, stream: SparseStream, entries: Sequence[int], overlap: Overlap | None) -> Schedule:
        """Run the schedule with a known overlap, and check the result against it."""
        result = yield from self._schedule(stream, entries, overlap)
        if overlap is not None:
            self._channel.overlaps.review(self.digest, result)
        return result

    def _worth(self, stream: SparseStream, entries: float) -> bool:
        channel, machine = self._channel, self._channel.machine
        if machine is None or not takes_samples(self._call.algorithm):
            return False
        return is_worth_a_sample(stream, entries, channel.ranks, machine, len(channel.near) == channel.ranks, _LONG)

    def _asks(self, stream: SparseStream, entries: float) -> bool:
        """Return True if ranks exchange notes first because there are too many ranks to send notes with the records."""
        channel, machine = self._channel, self._channel.machine
        if channel.ranks <= DIRECT_RANKS or machine is None or not self._worth(stream, entries):
            return False
        received = (channel.ranks - 1) * entries * (self.itemsize + 1) * machine.beta
        return received > _ROUNDS * (channel.ranks - 1).bit_length() * machine.alpha

    def _after_notes(self, stream: SparseStream, entries: Sequence[int]) -> Schedule:
        """Exchange digests of the remembered overlap, or new samples if the digests differ; then run the sum."""
        overlaps = self._channel.overlaps
        ours = overlaps.note(self.digest, stream)
        notes: list[bytes] = yield Share(ours if ours[:1] == REMEMBERED else bytes(_NOTED))
        if notes[0][:1] != REMEMBERED or any(note != notes[0] for note in notes):
            ours = overlaps.sample(stream) if ours[:1] == REMEMBERED else ours
            notes = yield from share_records(ours, 1 + sample_bytes(stream.size))
        return (yield from self._reviewed(stream, entries, overlaps.update(self.digest, notes, stream.size)))

    def note(self, stream: SparseStream | None) -> bytes:
        """Return a sample of this rank's positions or the digest of the remembered overlap, if messages take long enough; else b""."""
        if stream is None or not self._worth(stream, stream.stored):
            return b""
        return self._channel.overlaps.note(self.digest, stream)

    def choose(self, stream: SparseStream | None, level: int) -> Sequence[Shortcut]:
        """Return the shortcuts to try, assuming that all ranks have as many entries as this one.

        An algorithm given by name takes no shortcut, so that its steps and rounding are the same for blocking and non-blocking operations.
        """
        assert stream is not None
        if self.on_device:
            return ()
        uneven = self.uneven
        if uneven is not None and packed.packed_bytes(stream) <= uneven.room:
            return uneven.shortcuts if level >= uneven.least else ()
        held = -1 if stream._array is not None else len(stream._stored)
        if held == self._latest[0]:
            least, shortcuts = self._latest[1]
        else:
            key = self._key(stream)
            choice = self._choices.get(key)
            if choice is None:
                if len(self._choices) >= _REMEMBERED:
                    self._choices.clear()
                choice = self._choices[key] = self._chosen(stream)
            self._latest = held, choice
            least, shortcuts = choice
        return shortcuts if level >= least else ()

    def record_entries(self, stream: SparseStream | None, entries: Sequence[int]) -> None:
        """Choose for the next operation by the entries of all ranks, if these differ so much that each rank would choose differently.

        All ranks know the same numbers. If they are about equal, each rank chooses by its own.
        """
        assert stream is not None
        least, most = min(entries), max(entries)
        if self._call.algorithm != AUTO or not self.is_sum or self.on_device or most - least <= _EVEN * least:
            self.uneven = None
            return
        key = rounded(sum(entries)), rounded(most)
        self.uneven = self._unevens.get(key)
        if self.uneven is None:
            if len(self._unevens) >= _REMEMBERED:
                self._unevens.clear()
            name, room = uneven_beginning(stream, entries, self._reduction, self._machine, **self._surroundings)
            self.uneven = self._unevens[key] = Uneven(*self._choice(name), room)

    def _key(self, stream: SparseStream) -> tuple[float, int]:
        """Return the properties of a stream that a choice depends on: its rounded number of entries, and the size limits that it satisfies.

        Successive training steps rarely have the same number of entries, and a choice takes 70 microseconds.
        """
        if stream._array is not None:
            return -1.0, 0
        nbytes, (always, room, capacity) = packed.packed_bytes(stream), self._limits
        return rounded(len(stream._stored)), (nbytes <= always) + (nbytes <= room) + (nbytes <= capacity)

    @cached_property
    def _limits(self) -> tuple[int, int, int]:
        """The limits of :func:`byte_limits`; valid once the channel is ready."""
        channel = self._channel
        return byte_limits(channel.ranks, channel.shares_memory, 0 if channel.sparse_memory is None else channel.sparse_memory.capacity)

    def _chosen(self, stream: SparseStream) -> Choice:
        if self._call.algorithm != AUTO:
            return OTHER, ()
        return self._choice(expected_beginning(stream, self._channel.ranks, self._reduction, self._machine, **self._surroundings))

    def _choice(self, name: str) -> Choice:
        """Return the shortcuts of a name that :func:`~sparseallreduce.runtime.predictions.expected_beginning` returns."""
        if name == "packed":
            return OTHER, (self._packed,)
        if name == "sparse_shared":
            return FIRST, self._shared
        return (BLOCKING, self._dense_shortcuts()) if name == "dense" else (OTHER, ())

    @property
    def _machine(self) -> Machine:
        """The machine constants of the call, or those of the channel once it is ready."""
        return self._call.machine or self._channel.machine or Machine()

    @property
    def _surroundings(self) -> dict[str, Any]:
        """The other arguments that a choice depends on; valid once the channel is ready."""
        if not self._has_shortcuts:
            self._make_shortcuts()
        channel, shared = self._channel, self._dense_shared is not None and self._call.machine is None
        return {
            "shares_memory": channel.shares_memory,
            "capacity": 0 if channel.sparse_memory is None else channel.sparse_memory.capacity,
            "share": dense_share(self._nbytes, channel.oversubscribed) if shared else 1.0,
            "encoding": self.encoding,
            "hosts": channel.hosts,
        }

    def _dense_shortcuts(self) -> tuple[Shortcut, ...]:
        """Return the shortcuts of a dense sum: in shared memory if its memory is available, then MPI's own."""
        shared = self._dense_shared
        return self._dense if shared is None or not shared.is_possible() else (shared, *self._dense)
