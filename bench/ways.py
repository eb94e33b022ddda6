"""Ways to sum the sparse streams of all ranks, checked once and timed in turn: what the benchmarks on emulated hosts share."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import socket
import struct
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

import sparseallreduce as sar
from sparseallreduce.algorithms import AUTO
from sparseallreduce.cli.report import environment, on_rank_0, write_report
from sparseallreduce.cli.synthetic import draw_positions, draw_values, largest_deviation
from sparseallreduce.cli.timing import slowest
from sparseallreduce.streams.operator import SUM

Array = NDArray[Any]

DENSE = "MPI Allreduce"
TRIES = 3  # of a first time, unless one takes long
RECEIVED = Path("/sys/class/net/eth0/statistics/rx_bytes")  # counted by a host's kernel, frames and acknowledgements included


class Way(NamedTuple):
    """One way to sum."""

    name: str
    call: Callable[[sar.SparseStream], Any]
    algorithm: str | None = None  # of this library
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


class Timing(NamedTuple):
    """What a way came to; the same on all ranks."""

    seconds: list[float]  # of one sum on the slowest rank, by sample
    sums: int  # of a sample
    wire: float | None  # bytes that came into the busiest host with each sum; None where ranks share a network

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))

    @property
    def quartile(self) -> float:
        """The lower one."""
        return float(np.quantile(self.seconds, 0.25))


class Variant(NamedTuple):
    """Options of `--with` and the algorithm that they are for, or "all"."""

    algorithm: str
    options: dict[str, Any]


def variants_option(default: Sequence[str] = ()) -> Callable[[Any], Any]:
    """The option ``--with [ALGORITHM:]NAME=VALUE,...``, passed on as the list ``variants``."""
    return click.option(
        "--with",
        "variants",
        multiple=True,
        default=default,
        show_default=True,
        metavar="[ALGORITHM:]NAME=VALUE,...",
        callback=lambda context, option, texts: [variant_of(text) for text in texts],
        help='Options that allreduce takes as another way, for "auto" unless an algorithm, or all, is named.',
    )


def variant_of(text: str) -> Variant:
    """What a text of `--with` says.

    >>> variant_of("ssar_ring:index_codec=plain,switch_density=0.1")
    Variant(algorithm='ssar_ring', options={'index_codec': 'plain', 'switch_density': 0.1})
    """
    algorithm, colon, pairs = text.rpartition(":")
    algorithm = algorithm if colon else AUTO
    if algorithm not in (*sar.algorithms(), "all"):
        raise click.BadParameter(f"unknown algorithm {algorithm!r}: give all, or one of {','.join(sar.algorithms())}")
    options = {}
    for pair in pairs.split(","):
        name, equals, value = pair.partition("=")
        if not (name.isidentifier() and equals and value):
            raise click.BadParameter(f"{pair!r} is not of the form NAME=VALUE")
        try:
            options[name] = literal_eval(value)
        except (ValueError, SyntaxError):
            options[name] = value
    return Variant(algorithm, options)


def library_ways(comm: MPI.Intracomm, names: Sequence[str], variants: Sequence[Variant]) -> list[Way]:
    """Each algorithm, and after it what `--with` asks of it."""
    ways = []
    for name in names:
        asked = [variant.options for variant in variants if variant.algorithm in (name, "all")]
        ways += [library_way(comm, name, options) for options in ({}, *asked)]
    return ways


def library_way(comm: MPI.Intracomm, algorithm: str, options: dict[str, Any]) -> Way:
    name = " ".join([algorithm, *(f"{name}={value}" for name, value in options.items())])
    return Way(name, lambda stream: sar.allreduce(stream, comm, algorithm=algorithm, **options), algorithm, options)


def dense_way(comm: MPI.Intracomm, stream: sar.SparseStream) -> Way:
    """MPI's own sum, of an array that is dense already and stays in memory."""
    ours, total = stream.to_dense(), np.empty(stream.size, stream.dtype)

    def call(stream: sar.SparseStream) -> Array:
        comm.Allreduce(ours, total)
        return total

    return Way(DENSE, call)


def densifying_way(comm: MPI.Intracomm, size: int, name: str = DENSE) -> Way:
    """MPI's own sum, of an array that is made of the stream each time."""
    total = np.empty(size, np.float32)

    def call(stream: sar.SparseStream) -> Array:
        comm.Allreduce(stream.to_dense(), total)
        return total

    return Way(name, call)


def numpy_ways(comm: MPI.Intracomm) -> list[Way]:
    """What is written without this library: index-value pairs are gathered everywhere, and NumPy adds them up in one of two ways."""

    def gathered(stream: sar.SparseStream) -> tuple[Array, Array]:
        counts = comm.allgather(stream.nnz)
        indices, values = np.empty(sum(counts), stream.indices.dtype), np.empty(sum(counts), stream.dtype)
        comm.Allgatherv(stream.indices, (indices, counts))
        comm.Allgatherv(stream.values, (values, counts))
        return indices, values

    def add_at(stream: sar.SparseStream) -> Array:
        indices, values = gathered(stream)
        total = np.zeros(stream.size, stream.dtype)
        np.add.at(total, indices, values)
        return total

    def sort(stream: sar.SparseStream) -> tuple[Array, Array]:
        indices, values = gathered(stream)
        order = np.argsort(indices, kind="stable")
        indices = indices[order]
        firsts = np.flatnonzero(np.diff(indices, prepend=indices[:1] + 1))
        return indices[firsts], np.add.reduceat(values[order], firsts) if len(firsts) else values

    return [Way("allgather + np.add.at", add_at), Way("allgather + sort", sort)]


@contextmanager
def gloo_ways(comm: MPI.Intracomm, wanted: bool = True) -> Iterator[list[Way]]:
    """PyTorch's sum of sparse tensors over gloo, where all ranks have PyTorch; ends its connections."""
    present = wanted and importlib.util.find_spec("torch") is not None
    if not comm.allreduce(present, MPI.MIN):
        yield []
        return
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    device = "eth0" if on_own_hosts(comm) else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = device
    address = comm.bcast(f"tcp://{address_of(device)}:{free_port()}")
    torch.distributed.init_process_group("gloo", init_method=address, rank=comm.rank, world_size=comm.size)
    tensors: dict[int, tuple[sar.SparseStream, Any, Any]] = {}  # with the stream, so that no other is at its address

    def call(stream: sar.SparseStream) -> Any:
        if id(stream) not in tensors:  # the forms that PyTorch takes are there before the sum, as a user of PyTorch would have them
            indices = torch.from_numpy(stream.indices.astype(np.int64)[np.newaxis])
            tensors[id(stream)] = stream, indices, torch.from_numpy(stream.values.copy())
        _, indices, values = tensors[id(stream)]
        tensor = torch.sparse_coo_tensor(indices, values, (stream.size,), check_invariants=False, is_coalesced=True)
        torch.distributed.all_reduce(tensor)
        return tensor

    try:
        yield [Way("gloo, sparse", call)]
    finally:
        torch.distributed.destroy_process_group()


def on_own_hosts(comm: MPI.Intracomm) -> bool:
    """Whether every rank is alone on a host whose device is eth0, as `tools/hosts.sh` makes them."""
    names = comm.allgather(socket.gethostname())
    return bool(comm.allreduce(len(set(names)) == comm.size and comm.size > 1 and RECEIVED.exists(), MPI.MIN))


def address_of(device: str) -> str:
    """The IPv4 address of a network device."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = fcntl.ioctl(probe, 0x8915, struct.pack("256s", device.encode()))  # SIOCGIFADDR
    return socket.inet_ntoa(found[20:24])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def uniform_streams(comm: MPI.Intracomm, rank: int, size: int, count: int, streams: int, seed: int = 0) -> list[sar.SparseStream]:
    """So many different streams of a rank, float32, uniformly random positions."""
    found = []
    for number in range(streams):
        rng = np.random.default_rng((seed, number, rank, comm.size))
        found.append(sar.SparseStream(draw_positions(rng, size, count), draw_values(rng, count, "float32"), size))
    return found


def bytes_per_second(rate: str) -> float:
    """Of a rate as tc writes it.

    >>> bytes_per_second("200mbit")
    25000000.0
    """
    for suffix, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        number = rate.lower().removesuffix(suffix)
        if number != rate.lower():
            try:
                return float(number) * factor / 8
            except ValueError:
                break
    raise click.BadParameter(f"{rate!r} is not a rate like 1gbit or 200mbit")


class Checked(NamedTuple):
    """The ways that gave right results, and what was counted with it."""

    ways: list[Way]
    received: dict[str, int]  # bytes into the busiest rank, of this library's ways
    first_seconds: dict[str, float]  # of a single sum
    left_out: dict[str, str]  # why, by name


def checked(ways: Sequence[Way], stream: sar.SparseStream, comm: MPI.Intracomm) -> Checked:
    """Run every way once for its result and its bytes, and once for a first idea of its time.

    Ways whose options this version does not take are left out.

    Raises
    ------
    click.ClickException
        A result is wrong.
    """
    expected, magnitude = np.empty((2, stream.size), stream.dtype)
    comm.Allreduce(stream.to_dense(), expected)
    comm.Allreduce(np.abs(stream.to_dense()), magnitude)
    kept = Checked([], {}, {}, {})
    for way in ways:
        try:
            with sar.trace() as traffic:
                result = way.call(stream)
        except sar.AlgorithmError as error:  # on all ranks alike
            kept.left_out[way.name] = str(error)
            continue
        deviation = largest_deviation(stream_of(result, stream.size), expected, magnitude, comm.size, SUM)
        del result
        if comm.allreduce(deviation, MPI.MAX) > 1:
            raise click.ClickException(f"{way.name} gave a wrong sum, off by {deviation:.3g} times what rounding explains")
        if way.algorithm is not None:
            kept.received[way.name] = comm.allreduce(traffic.bytes_received, MPI.MAX)
        kept.first_seconds[way.name] = first_time(way, stream, comm)
        kept.ways.append(way)
    return kept


def first_time(way: Way, stream: sar.SparseStream, comm: MPI.Intracomm) -> float:
    """Seconds of a single sum: the least of a few, as a first one may meet what happens once."""
    least = sample(way, [stream], comm, 1)
    for _ in range(TRIES - 1):
        if least < 0.02:
            least = min(least, sample(way, [stream], comm, 1))
    return least


def stream_of(result: Any, size: int) -> sar.SparseStream:
    """The result of a way as a stream."""
    if isinstance(result, sar.SparseStream):
        return result
    if isinstance(result, tuple):
        return sar.SparseStream(*result, size)
    array = result if isinstance(result, np.ndarray) else result.to_dense().numpy()
    return sar.SparseStream.from_dense(array)


def in_turn(
    found: Checked,
    streams: Sequence[sar.SparseStream],
    comm: MPI.Intracomm,
    *,
    samples: int,
    sums: int,
    longest: float,
    seconds: float,
    least: int = 3,
    hopeless: float = np.inf,
) -> dict[str, Timing]:
    """Time the ways in rounds, each of which takes a sample of every way, in another order than the one before.

    Parameters
    ----------
    found : Checked
    streams : sequence of SparseStream
        Which the sums of a sample take in turn.
    comm : Intracomm
    samples, sums : int
        Rounds, and sums back to back in a sample: what a link lets through at once after a pause counts little then.
    longest : float
        Seconds of a sample: ways of which so many sums would take longer do fewer.
    seconds : float
        Of all rounds, about; there are fewer then, though not below ``least``.
    hopeless : float
        Ways that took more than so many times as long as the fastest fixed algorithm at first are not timed again; "auto" always is.
    """
    first = found.first_seconds
    fixed = [first[way.name] for way in found.ways if way.algorithm not in (None, AUTO)]
    fastest = min(fixed or first.values())
    timed = [way for way in found.ways if first[way.name] <= hopeless * fastest or way.algorithm == AUTO]
    counts = {name: int(np.clip(longest / max(time, 1e-9), 1, sums)) for name, time in first.items()}
    round_seconds = sum(counts[way.name] * first[way.name] for way in timed)
    rounds = int(np.clip(seconds / round_seconds, min(least, samples), samples))
    own = on_own_hosts(comm)
    times, wires = np.empty((rounds, len(timed))), np.zeros(len(timed))
    for number in range(rounds):
        for place in np.random.default_rng(number).permutation(len(timed)):
            way = timed[place]
            before = received(own)
            times[number, place] = sample(way, streams, comm, counts[way.name], local=True)
            wires[place] += received(own) - before
    times, wires = slowest(times, comm), slowest(wires, comm)
    timings = {}
    for way in found.ways:
        if way not in timed:
            timings[way.name] = Timing([first[way.name]], 1, None)
            continue
        place = timed.index(way)
        wire = float(wires[place]) / (rounds * counts[way.name]) if own else None
        timings[way.name] = Timing(times[:, place].tolist(), counts[way.name], wire)
    return timings


def sample(way: Way, streams: Sequence[sar.SparseStream], comm: MPI.Intracomm, sums: int, local: bool = False) -> float:
    """Seconds a sum, of so many back to back: on this rank if ``local``, else on the slowest."""
    comm.Barrier()
    start = perf_counter()
    for number in range(sums):
        way.call(streams[number % len(streams)])
    seconds = (perf_counter() - start) / sums
    return seconds if local else float(comm.allreduce(seconds, MPI.MAX))


def received(own: bool) -> int:
    """Bytes that have come into this host so far."""
    return int(RECEIVED.read_text()) if own else 0


def faster(found: Checked, names: Sequence[str]) -> Checked:
    """The same without those of the named ways that took longer than another of them."""
    rivals = [name for name in names if name in found.first_seconds]
    worse = set(rivals) - {min(rivals, key=found.first_seconds.__getitem__, default=None)}
    seconds = {name: time for name, time in found.first_seconds.items() if name not in worse}
    return found._replace(ways=[way for way in found.ways if way.name not in worse], first_seconds=seconds)


def write_json(path: Path | None, comm: MPI.Intracomm, command: str, arguments: Mapping[str, Any], results: Any) -> None:
    """Write the results from rank 0, if a file is named."""
    surroundings = environment(comm)
    if path is not None:
        on_rank_0(comm, lambda: write_report(path, command, arguments, surroundings, results))
