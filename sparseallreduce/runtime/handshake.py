"""What each rank tells the others first in an operation, by messages or on a board, and what it takes from theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from sparseallreduce.algorithms.agreement import RECORD
from sparseallreduce.algorithms.allreduce import READY as SAYS_READY
from sparseallreduce.algorithms.allreduce import room
from sparseallreduce.algorithms.steps import Share
from sparseallreduce.runtime import collectives
from sparseallreduce.runtime.board import PREFIX
from sparseallreduce.runtime.collectives import exchange

if TYPE_CHECKING:
    from sparseallreduce.runtime.channel import Channel

__all__ = ["UNWELL", "all_ready", "heard", "rows_for", "tell", "text_of"]

# What a rank says that has given up before it has said anything. It leaves no room for more, as no operation of many ranks does.
UNWELL = Share(RECORD.pack(False, 0, 0, 0))


def rows_for(step: Share, channel: Channel, first: bool) -> NDArray[np.uint8]:
    """Memory for what all ranks tell by ``step``. That with which an operation begins is as long for every kind of operation."""
    most = max(len(step.record) + step.room, RECORD.size + room(channel.ranks)) if first else len(step.record) + step.room
    return np.empty((channel.ranks, PREFIX.size + most), np.uint8)


def tell(step: Share, channel: Channel, tag: int, first: bool, rows: NDArray[np.uint8], requests: list[MPI.Request]) -> None:
    """Tell all ranks what ``step`` says; what they say comes into the rows."""
    ours = text_of(step, channel)
    if first and channel.ranks > collectives.DIRECT_RANKS:
        # Goes out as the operation starts, in the order of the calls, which is that of all ranks.
        padded = np.frombuffer(ours.ljust(rows.shape[1], b"\0"), np.uint8)
        requests.append(channel.messages.Iallgather([padded, MPI.BYTE], [rows, MPI.BYTE]))
    else:
        exchange(np.frombuffer(ours, np.uint8), list(rows), channel, tag, requests)


def text_of(step: Share, channel: Channel) -> bytes:
    """The words in which ``step`` is told."""
    return PREFIX.pack(channel.native.usable, len(step.payload)) + step.record + step.payload


def heard(step: Share, texts: Iterable[memoryview]) -> tuple[list[bytes], bool]:
    """What the ranks have said, and whether the channel is sound on all of them."""
    said, all_sound, record = [], True, PREFIX.size + len(step.record)
    for text in texts:
        sound, payload = PREFIX.unpack_from(text)
        said.append(bytes(text[PREFIX.size : record + payload]))
        all_sound = all_sound and sound
    return said, all_sound


def all_ready(said: Sequence[bytes], sound: bool) -> bool:
    """Whether all ranks have said that they enter MPI's own sum, and mean the same operation."""
    if not sound:
        return False
    records = [RECORD.unpack_from(text) for text in said]
    return all(well and flags & SAYS_READY and digest == records[0][2] for well, flags, digest, _ in records)
