"""Ranks as threads: enough of a communicator for what the trainer says besides its sums, and what such ranks read, joined again."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import scipy.sparse

from sparseallreduce.linear import Dataset


class ThreadRank:
    """One of several ranks that share a barrier and a board to write on."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict[int, Any], mail: dict[Any, queue.Queue]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._board, self._mail = barrier, board, mail

    def Dup(self) -> "ThreadRank":
        return self

    def Free(self) -> None:
        pass

    def send(self, value: Any, dest: int) -> None:
        self._mail[self.rank, dest].put(value)

    def recv(self, source: int) -> Any:
        return self._mail[source, self.rank].get(timeout=30)

    def allgather(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        values = [self._board[rank] for rank in range(self.size)]
        self._barrier.wait()
        return values

    def alltoall(self, values: list[Any]) -> list[Any]:
        return [row[self.rank] for row in self.allgather(values)]


def on_ranks(size: int, function: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `function(comm)` returns on each of `size` ranks; an exception it raises stands in the place of its result."""
    barrier, board = threading.Barrier(size, timeout=30), {}
    mail = {(source, dest): queue.Queue() for source in range(size) for dest in range(size)}

    def call(rank: int) -> Any:
        try:
            return function(ThreadRank(rank, size, barrier, board, mail))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))


def joined(parts: list[Dataset | Exception]) -> tuple[scipy.sparse.csr_array, np.ndarray]:
    """Return the samples and labels of all ranks, having checked that each rank has those behind the ranks before it.

    Parameters
    ----------
    parts
        What `on_ranks` returned for a function that loads a dataset. An exception among them is raised.
    """
    for part in parts:
        if isinstance(part, Exception):
            raise part
    assert [part.first_sample for part in parts] == np.cumsum([0, *(part.rows for part in parts[:-1])]).tolist()
    assert {part.total_samples for part in parts} == {sum(part.rows for part in parts)}
    return scipy.sparse.vstack([part.to_scipy() for part in parts], format="csr"), np.concatenate([part.labels for part in parts])
