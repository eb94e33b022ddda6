"""Measure the constants of the cost model, by all ranks together, once per communicator."""

from __future__ import annotations

import math
import struct
from collections.abc import Generator
from itertools import pairwise
from typing import Any

import numpy as np

from sparseallreduce.algorithms.cost import OVERLAP, Machine
from sparseallreduce.algorithms.device_measuring import measure_device
from sparseallreduce.algorithms.steps import Clock, DenseAllgather, DenseAllreduce, Share, Shift, Step
from sparseallreduce.streams import kernels, memory
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.operator import SUM
from sparseallreduce.streams.partition import boundaries
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.stream import SparseStream

__all__ = ["exchange_seconds", "measure", "pack_machine", "unpack_machine"]

_LEAST_BLOCKING = 0.25  # lower bound of beta_blocking, relative to beta_dense
_NAMES = ("header", "small", "large", "gathered", "gamma", "gamma_dense", "dense", "alpha_dense", "codec", "near_small", "near_large")
# The error of the model: at N = 2**24, P = 2 and 50 % density, the split was expected to take 0.75 of the dense allreduce's time in
# shared memory, and took 1.4 times as long.
_TRUST, _TRUST_BETWEEN_HOSTS = 0.7, 0.95

_PAIRS = (("large", "small"), ("near_large", "near_small"))

_SIZE = 1 << 20
_SMALL, _LARGE = 1 << 12, 1 << 17  # entries of messages
_FAR = 1 << 23  # size of an array that does not fit into the caches

_SECONDS = struct.Struct("<d")
_LAYOUT = struct.Struct(f"<{len(Machine._fields)}d")


def measure(
    rank: int,
    ranks: int,
    sharing: float = 1.0,
    faster_blocking: bool = True,
    *,
    pieces: bool = False,
    neighbours: tuple[int, int] | None = None,
    gpu: tuple[Any, float] | None = None,
) -> Generator[Step, Any, Machine]:
    """Measure the constants of this network, the worst over all ranks; a few milliseconds, once per communicator.

    Each is the fastest of some repetitions: messages of a header alone, of 32 KiB and of 1 MiB to the rank half way round, additions of
    streams, and dense allreduces of one value and of 4 MiB. The latency is that of 32 KiB, which are sent in parts; if ranks share cores,
    each part waits for its turn. ``sharing`` is the number of ranks per core of this host, by which times of messages and additions are
    multiplied, since the other ranks were idle; the time per byte is then that of a dense allgather of 4 MiB, in which all take part. A
    blocking MPI sum cannot be measured, since a measuring rank must not block there: ``faster_blocking`` says whether it may be faster than
    a polled one.

    With ``pieces``, messages are encoded and sent in pieces, and passes over arrays of 32 MiB are measured, which takes some tens of
    milliseconds. ``neighbours`` are the next and previous ranks on this host, if any. ``gpu`` is CuPy and the number of ranks that share
    the GPU; without it, the GPU constants keep their defaults.
    """
    times = _Times(dict.fromkeys((*_NAMES, "gamma_far"), 0.0))
    yield from _time_messages(times, rank, ranks, neighbours)
    yield from _time_computations(times, pieces)
    if ranks > 1:
        yield from _time_dense(times, rank, ranks)
    of_gpu = {} if gpu is None else (yield from measure_device(*gpu))
    ours = _machine(times, ranks, sharing, faster_blocking, pieces, neighbours is not None)._replace(**of_gpu)
    if ranks == 1:
        return ours
    records: list[bytes] = yield Share(pack_machine(ours))
    return Machine(*(max(values) for values in zip(*map(_LAYOUT.unpack, records), strict=True)))


class _Times(dict[str, float]):
    """The shortest measured time of each part, in seconds; 0 for a part that has not been measured."""

    def add(self, name: str, start: float, end: float) -> None:
        self[name] = min(self[name] or end - start, end - start)


def _time_messages(times: _Times, rank: int, ranks: int, neighbours: tuple[int, int] | None) -> Generator[Step, Any, None]:
    """Time messages of three sizes to the rank half way round, and of two to the next rank on this host, if any."""
    ahead, behind = (rank + ranks // 2) % ranks, (rank - ranks // 2) % ranks
    for name, entries, repetitions in (("header", 0, 6), ("small", _SMALL, 6), ("large", _LARGE, 4)):
        message = _evenly(entries, _SIZE)
        for _ in range(repetitions):
            start = yield Clock()
            if ranks > 1:
                yield Shift(ahead, message, behind)
            times.add(name, start, (yield Clock()))
    if neighbours is not None:
        for name, entries in (("near_small", _SMALL), ("near_large", _LARGE)):
            message = _evenly(entries, _SIZE)
            for _ in range(6):
                start = yield Clock()
                yield Shift(neighbours[0], message, neighbours[1])
                times.add(name, start, (yield Clock()))


def _time_computations(times: _Times, pieces: bool) -> Generator[Step, Any, None]:
    """Time additions of streams and conversions to dense arrays; with ``pieces`` also codecs, and arrays that do not fit into caches."""
    reduction, none = Reduction(), _evenly(0, _SIZE)
    # Random positions, as in the model: with evenly spread ones, a merge takes more than twice as long.
    one, other = (_randomly(_LARGE, _SIZE, seed) for seed in (0, 1))
    reduction.pair(one, other)  # compiles
    if pieces:
        indices, back = one._entries()[0], np.empty(one.stored, np.uint32)
        octets = np.empty(kernels.gaps_bound(one.stored, np.uint32), np.uint8)
        for _ in range(4):  # the first compiles
            start = yield Clock()
            length = kernels.encode_gaps(indices, 0, octets)
            kernels.decode_gaps(octets[:length], 0, one.size, back)
            times.add("codec", start, (yield Clock()))
    for _ in range(3):
        start = yield Clock()
        reduction.pair(one, other)
        middle = yield Clock()
        times.add("gamma", start, middle)
        reduction.densify(none)
        times.add("gamma_dense", middle, (yield Clock()))
    for _ in range(3 if pieces else 0):
        start = yield Clock()
        filled = reduction.densify(_evenly(0, _FAR))
        memory.copy(filled._stored)
        times.add("gamma_far", start, (yield Clock()))
        del filled


def _time_dense(times: _Times, rank: int, ranks: int) -> Generator[Step, Any, None]:
    """Time dense allreduces of 4 MiB and of one value, and a dense allgather of 4 MiB."""
    for _ in range(3):
        array = _ones(_SIZE)  # a new array as in every operation: one that another core has just read takes twice as long
        start = yield Clock()
        yield DenseAllreduce(array, SUM)
        times.add("dense", start, (yield Clock()))
    blocks = tuple(pairwise(boundaries(_SIZE, ranks)))
    low, high = blocks[rank]
    for _ in range(3):
        block = SparseStream._dense_form(np.ones(high - low, np.float32), _SIZE, low, high, owned=True)
        start = yield Clock()
        yield DenseAllgather(block, blocks, SUM)
        times.add("gathered", start, (yield Clock()))
    for _ in range(6):
        array = _ones(1)
        start = yield Clock()
        yield DenseAllreduce(array, SUM)
        times.add("alpha_dense", start, (yield Clock()))


def _machine(times: _Times, ranks: int, sharing: float, faster_blocking: bool, pieces: bool, has_neighbours: bool) -> Machine:
    """Return this rank's constants, given its times."""
    volume = 2 * (ranks - 1) / ranks * _SIZE * 4
    small, large = 8 * _SMALL, 8 * _LARGE  # bytes
    beta, near = (max(times[long] - times[short], 0.0) / (large - small) for long, short in _PAIRS)
    if sharing > 1 or pieces:
        # With P = 3 on 2 cores the fastest megabyte took 0.01 to 0.1 ns a byte, by one rank while no other wanted its core, and with
        # P = 8 up to twice as long as the bytes of an allgather. Between hosts a wire may forgive the first bytes after a pause.
        gathered = times["gathered"] / (volume / 2) if ranks > 1 else 0.0
        # With several ranks per host, most data of an allgather comes from the same host, while messages to the rank half way round mostly
        # leave it, from all of its ranks at the same time.
        beta = max(beta, gathered) if pieces and has_neighbours else gathered
    beta_dense = times["dense"] / volume if ranks > 1 else 0.0
    alpha = sharing * max(times["small"] - beta * small, times["header"])
    return Machine(
        alpha=alpha,
        beta=beta,
        gamma=sharing * times["gamma"] / (2 * _LARGE),
        gamma_dense=sharing * times["gamma_dense"] / _SIZE,
        beta_dense=beta_dense,
        alpha_dense=times["alpha_dense"],
        # Of the polled sum's time at P = 2, Open MPI takes 0.2 to 0.4 from 1 MiB on, less for a byte than for one of a message, unless
        # that was in the cache (0.03 ns, where a sum of 4 MiB takes 0.2 and of 64 MiB 0.7), and MPICH all. Where ranks share cores, no
        # library is faster by much: 0.64 to 1.5 on 2 cores.
        beta_blocking=max(min(beta_dense, beta), _LEAST_BLOCKING * beta_dense) if faster_blocking and sharing <= 1 else beta_dense,
        trust=_TRUST_BETWEEN_HOSTS if pieces else _TRUST,
        codec=sharing * times["codec"] / _LARGE,
        overlap=OVERLAP if pieces else 0.0,
        alpha_local=sharing * max(times["near_small"] - near * small, 0.0) if has_neighbours else alpha,
        beta_local=near if has_neighbours else beta,
        gamma_far=sharing * (times["gamma_far"] / (2 * _FAR) if pieces else times["gamma_dense"] / _SIZE),
    )


def exchange_seconds(rank: int, ranks: int) -> Generator[Step, Any, float]:
    """Return the seconds, on the slowest rank, to exchange 131,072 entries at a density of 1 % and add them."""
    ahead, behind = (rank + ranks // 2) % ranks, (rank - ranks // 2) % ranks
    ours, reduction = _randomly(1 << 17, 100 << 17, rank), Reduction()
    seconds = math.inf
    for _ in range(4):  # the first compiles
        start = yield Clock()
        yield Shift(ahead, ours, behind, Merging(reduction, ours, first=rank < behind))
        seconds = min(seconds, (yield Clock()) - start)
    records: list[bytes] = yield Share(_SECONDS.pack(seconds))
    slowest: float = max(_SECONDS.unpack(record)[0] for record in records)
    return slowest


def pack_machine(machine: Machine) -> bytes:
    """Return a machine with all constants measured as bytes."""
    return _LAYOUT.pack(*machine)


def unpack_machine(packed: bytes) -> Machine:
    """Return the machine stored in these bytes."""
    return Machine(*_LAYOUT.unpack(packed))


def _ones(size: int) -> SparseStream:
    return SparseStream._dense_form(np.ones(size, np.float32), size, owned=True)


def _evenly(entries: int, size: int) -> SparseStream:
    indices = np.arange(entries, dtype=np.uint32) * np.uint32(size // max(entries, 1))
    return SparseStream._sparse_form(indices, np.ones(entries, np.float32), size)


def _randomly(entries: int, size: int, seed: int) -> SparseStream:
    gaps = np.random.default_rng(seed).integers(1, 2 * (size // entries) - 1, entries, dtype=np.uint32)
    indices = np.cumsum(gaps, dtype=np.uint32)
    return SparseStream._sparse_form(indices, np.ones(entries, np.float32), max(size, int(indices[-1]) + 1))
