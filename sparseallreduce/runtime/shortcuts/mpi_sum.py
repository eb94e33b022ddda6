"""MPI's own blocking dense sum, which a rank enters once it is certain that all ranks do.

It is the call that a user would make: on 2 cores, from 4 KiB to 16 MiB, it takes 0.64 to 1.0 of the time of the same sum polled at P = 4
and 8, and 0.7 to 1.5 at P = 3. No message can reach a rank inside it. A rank that fails after it has published that it is armed therefore
withdraws, unless another rank has already seen that all are armed; in that case it enters the sum, too, and raises afterwards.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.runtime.collectives import has_entered, unify_nans
from sparseallreduce.runtime.shortcuts.base import MPI_SUM, Shortcut
from sparseallreduce.runtime.stalls import blocked
from sparseallreduce.streams import kernels, memory, packed
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel
    from sparseallreduce.runtime.handshake.base import Handshake

__all__ = ["MPISum"]

_INSIDE = "an allreduce: all ranks have started it, but one has not finished its part of MPI's own sum, and MPI does not report which one"


class MPISum(Shortcut):
    """MPI's own dense sum, for vectors of one shape and dtype.

    Parameters
    ----------
    layout : packed.Layout
        Layout of the streams.
    channel : Channel
    """

    __slots__ = ("_armed", "_channel", "_committed", "_entered", "_layout", "_nbytes", "_source", "_total")
    flag: int
    spins: int

    flag, spins = MPI_SUM, 1

    def __init__(self, layout: packed.Layout, channel: Channel) -> None:
        self._layout, self._channel = layout, channel
        self._armed = 0  # the operation that it is armed for; 0 for none
        self._committed = self._entered = False
        self._source: NDArray[Any] | None = None  # MPI's input; the array of the total for a sum in place
        self._total: NDArray[Any] | None = None
        self._nbytes = math.prod(layout.shape) * layout.dtype.itemsize

    def arm(self, sequence: int, stream: SparseStream) -> int:
        self._committed = self._entered = False
        self._source = self._total = None
        source, total = _arrays(stream._array, self._layout, self._nbytes)
        _fill(source, stream, total)
        self._source, self._total = source, total
        self._armed = sequence
        return MPI_SUM

    def commit(self, sequence: int, flags: int, handshake: Handshake) -> SparseStream | None:
        self._committed = handshake.commit(sequence)
        return None

    def poll(self, sequence: int, spins: int) -> SparseStream | None:
        """Enter the sum and return its result; None if a rank has withdrawn, which notifies all others."""
        total = self._total
        if not self._committed or total is None:
            return None
        self._enter()
        unify_nans(None, total, self._channel.ranks)
        total.flags.writeable = False
        result = SparseStream._dense_form(total, self._layout.size)
        self._forget()
        return result

    def moved(self) -> tuple[int, int, int]:
        """Return the figures of Rabenseifner's algorithm."""
        ranks = self._channel.ranks
        nbytes = 2 * self._nbytes * (ranks - 1) // ranks
        return nbytes, nbytes, 2 * (ranks - 1).bit_length()

    def decline(self, sequence: int) -> None:
        self._forget()

    def cancel(self, sequence: int) -> None:
        if self._armed == sequence:
            self._forget()

    def fulfil(self, sequence: int, handshake: Handshake | None) -> bool:
        if self._armed != sequence:
            return False
        if not (self._committed or self._entered) and handshake is not None:
            self._committed = not handshake.withdraw(sequence)
        if self._committed and not self._entered:
            self._enter()
        return self._entered

    def _enter(self) -> None:
        source, total = self._source, self._total
        try:
            with blocked(self._channel.rank, self._channel.ranks, _INSIDE):
                self._channel.collectives.comm.Allreduce(MPI.IN_PLACE if source is total else source, total, MPI.SUM)
        except BaseException as error:
            self._entered = has_entered(error)
            raise
        self._entered = True

    def _forget(self) -> None:
        self._source = self._total = None
        self._armed = 0


def _arrays(dense: NDArray[Any] | None, layout: packed.Layout, nbytes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the input array for MPI and the array of the sum, which may be the same; the input may be a ``dense`` stream's own array.

    A sum in place takes 0.78 to 0.92 of the time of one into other memory: 32 and 128 MiB at P = 2 and 4, 64 MiB at P = 2, 3, 4 and 8. A
    dense stream is copied for that only if the copy is to fresh, zeroed memory.
    """
    shape, dtype = layout.shape, layout.dtype
    if nbytes <= memory.FRESH:
        array = np.zeros(shape, dtype) if dense is None else np.empty(shape, dtype)
        return array, array
    array = memory.empty(shape, dtype)
    return array if dense is None else dense, array


def _fill(source: NDArray[Any], stream: SparseStream, total: NDArray[Any]) -> None:
    """Write the stream into MPI's input array, unless that is the stream's own."""
    dense = stream._array
    if dense is None:
        if source.nbytes > memory.FRESH:
            source.fill(0)
        kernels.scatter_set(*stream._entries(), 0, source)
    elif source is total:
        np.copyto(total, dense)
