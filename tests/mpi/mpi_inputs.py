"""Streams for the MPI cases: every rank makes those of all ranks from a seed, and so knows the result without asking anyone."""

import hashlib
import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
from oracle import Entries, Expected, bits

import sparseallreduce as sar
from sparseallreduce.streams.operator import as_operator

FLOATS = ("float16", "float32", "float64")
DTYPES = (*FLOATS, "int32", "int64")


@dataclass(frozen=True)
class Inputs:
    """What each rank contributes to one operation; without `entries` a different k on each: none, one, a few, many, all."""

    ranks: int
    size: int
    dtype: str = "float64"
    width: int | None = None
    seed: int = 0
    entries: int | tuple[int, ...] | None = None  # of every rank, or of each

    @property
    def parts(self):
        """Indices and values of each rank."""
        return _parts(self)

    def stream(self, rank, switch_density=None):
        indices, values = self.parts[rank]
        return sar.SparseStream(indices, values, self.size, switch_density=switch_density)

    def dense_form(self, rank):
        """The stream of a rank made from an array, so that zeros among the values are not entries."""
        array = np.zeros((self.size,) if self.width is None else (self.size, self.width), self.dtype)
        array[self.parts[rank].indices] = self.parts[rank].values
        return sar.SparseStream.from_dense(array)

    def check(self, result, op="sum"):
        """`result` is the reduction of all ranks' streams."""
        _expected(self, as_operator(op)).check(result, exact=False)

    def _part(self, rank):
        rng = np.random.default_rng([self.seed, rank, self.size])
        size = self.size
        nnz = self.entries
        if isinstance(nnz, tuple):
            nnz = nnz[rank]
        elif nnz is None:
            nnz = min(size, (size // 7 + 1, 0, size, 1, size // 20, size // 2, size // 3, size)[(rank + self.seed) % 8])
        shape = (nnz,) if self.width is None else (nnz, self.width)
        signs = rng.choice([-1, 1], shape)
        # Of a magnitude that eight of them, multiplied, fit every dtype. None is zero.
        if self.dtype.startswith("complex"):
            values = rng.uniform(0.5, 1.5, shape) * np.exp(1j * rng.uniform(0, 2 * np.pi, shape))
        else:
            values = rng.integers(1, 4, shape) * signs if self.dtype.startswith("int") else rng.uniform(0.5, 1.5, shape) * signs
        return Entries(np.sort(rng.choice(size, nnz, replace=False)).astype(np.uint64), values.astype(self.dtype))


@lru_cache(maxsize=64)
def _parts(inputs):
    return [inputs._part(rank) for rank in range(inputs.ranks)]


@lru_cache(maxsize=32)  # so that what is worked out for one algorithm is there for the next
def _expected(inputs, op):
    return Expected(inputs.parts, inputs.size, op)


def same_everywhere(comm, *streams):
    """The bits of the streams, which all ranks hold."""
    ours = [bits(stream) for stream in streams]
    digest = digest_of(ours)
    for rank, theirs in enumerate(comm.allgather(digest)):
        assert theirs == digest, f"rank {rank} holds other bits"
    return ours


def digest_of(streams):
    """Of what `bits` says of streams, without a copy of it."""
    digest = hashlib.sha256()
    for part in (part for stream in streams for part in stream):
        octets = part if isinstance(part, bytes) else repr(part).encode()
        digest.update(len(octets).to_bytes(8, "little"))
        digest.update(octets)
    return digest.digest()


def check_usable(comm, algorithm="ssar_recursive_doubling"):
    """The next operation on the communicator gives the right result."""
    result = sar.allreduce(sar.SparseStream([comm.rank, comm.size], [1.0, 2.0], comm.size + 1), comm, algorithm=algorithm)
    assert result.to_dense().tolist() == [1.0] * comm.size + [2.0 * comm.size], result.to_dense()


def raise_what_is_owed(comm, outcome, ours=None):
    """If an operation failed on some ranks and was completed by others, the next one raises the same on all."""
    failed = comm.allgather(isinstance(outcome, BaseException))
    if any(failed) and not all(failed):
        with pytest.raises(sar.SparseAllreduceError, match=r"rank \d+ gave up") as raised:
            check_usable(ours or comm)
        assert len(set(comm.allgather((type(raised.value).__name__, str(raised.value))))) == 1


def raise_what_may_be_owed(comm, outcomes, ours=None):
    """The same of several operations that were in flight together: the next one gives the right result, or raises one of their errors."""
    texts = {str(outcome) for outcome in outcomes if isinstance(outcome, sar.SparseAllreduceError)}
    texts = set().union(*comm.allgather(texts))
    try:
        check_usable(ours or comm)
        raised = None
    except sar.SparseAllreduceError as error:
        raised = str(error)
        assert raised in texts, (raised, texts)
    assert len(set(comm.allgather(raised))) == 1


def simulated_once(comm, simulate):
    """This rank's element of the list that `simulate()` makes for all ranks: on rank 0 alone, for on each it would take P times as long."""
    return comm.scatter(simulate() if comm.rank == 0 else None)


def tell_the_others(comm):
    """That this rank is where they may go on, each of which calls `hear_from`."""
    for rank in range(comm.size):
        if rank != comm.rank:
            comm.send(None, rank)


def hear_from(comm, rank):
    """Wait for the word of another rank, and leave the core to it meanwhile: inside MPI's own wait this rank would keep it."""
    while not comm.iprobe(rank):
        time.sleep(1e-3)
    comm.recv(source=rank)
