"""The cost of algorithms: the alpha-beta model of thesis section 3.1.1 with a gamma for additions, and table 3.1.

All predictions use only sums, products and quotients, which IEEE 754 rounds identically on every machine, so that ranks with the same
inputs choose the same algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from sparseallreduce.algorithms.boundaries import Figures
from sparseallreduce.algorithms.dsar_early_switch import core_of
from sparseallreduce.algorithms.exchange import halvings, lower_power_of_two, rounds_in_step
from sparseallreduce.streams.reduction import CACHE_LINE
from sparseallreduce.streams.wire import BITMAP, GAPS, Encoding, piece_bytes

__all__ = [
    "OVERLAP",
    "Machine",
    "Problem",
    "Transfer",
    "concatenation_time",
    "copy_time",
    "expected_size",
    "gather_time",
    "outer_problem",
    "pair_time",
    "predicted_time",
    "rabenseifner_of_messages",
    "rounds",
    "sent_bytes",
    "set_model",
    "shared_split_time",
    "split_time",
    "step_time",
    "transfer",
    "tree_time",
    "without_copies",
]

_CACHED = 1 << 22  # size in bytes of the array with which gamma_dense is measured
OVERLAP = 0.9  # measured fraction of the work on a message of many pieces that overlaps with its transfer
# Constants of a GPU before it is measured: bytes take the time given in specification sheets, a lower bound. A link of PCI Express with 16
# lanes of 16 GT/s each way, 128 of 130 bits data ("PCI Express Base Specification", revision 4.0), and the
# memory of an A100 with 80 GB of HBM2e, 2,039 GB/s ("NVIDIA A100 Tensor Core GPU" data sheet). Latencies are guesses.
PCIE4_X16 = 16e9 * 16 * 128 / 130 / 8  # bytes a second each way
HBM2E = 2.039e12  # bytes a second
_COPY_LATENCY, _LAUNCH_LATENCY = 1e-5, 2e-5  # seconds
_MERGED = 4 + 8 + 8  # bytes moved by a merge for each entry: the index is counted, then the entry read and written

_LEAST_GAIN = 0.9  # as in the choice of codecs for messages


class Machine(NamedTuple):
    """The constants of a network and of its processors."""

    alpha: float = 2e-6  # seconds per message
    beta: float = 1e-10  # seconds per byte
    gamma: float = 2e-9  # seconds per entry read by a sparse reduction
    gamma_dense: float = 3e-10  # seconds per value written by a dense one
    beta_dense: float = 2e-10  # seconds per byte and hop of the dense allreduce, including additions
    alpha_dense: float | None = None  # seconds of the dense allreduce of a few bytes; by default 2 log2(P) alpha
    beta_blocking: float | None = None  # beta_dense of a blocking MPI call; by default the same
    trust: float = 1.0  # another algorithm must be predicted to take less than this fraction of the dense allreduce's time
    codec: float = 0.0  # seconds to encode and decode an index as a gap; 0 if messages are not encoded
    overlap: float = 0.0  # fraction of the work on a message of many pieces that overlaps with its transfer
    alpha_local: float | None = None  # alpha and beta between ranks of one host; by default the same
    beta_local: float | None = None
    gamma_far: float | None = None  # gamma_dense for arrays that do not fit into the caches; by default the same
    # For streams on a GPU:
    gamma_device: float = _MERGED / HBM2E  # gamma and gamma_dense
    gamma_dense_device: float = 4 / HBM2E
    alpha_device: float = _LAUNCH_LATENCY  # fixed seconds of a reduction: kernels start, and the host waits for a length
    alpha_to_host: float = _COPY_LATENCY  # seconds per copy to the host, and per byte
    beta_to_host: float = 1 / PCIE4_X16
    alpha_to_device: float = _COPY_LATENCY  # the same for copies to the device
    beta_to_device: float = 1 / PCIE4_X16

    def dense_pass(self, values: float, nbytes: float, on_device: bool = False) -> float:
        """Return the seconds of a pass that writes ``values`` values of an array of ``nbytes`` bytes; beyond the caches it takes gamma_far.

        On a GPU, whose caches are small compared with the data, every value takes the same time.
        """
        if on_device:
            return self.alpha_device + self.gamma_dense_device * values
        far = self.gamma_dense if self.gamma_far is None else self.gamma_far
        near = min(_CACHED / nbytes, 1.0) if nbytes > 0 else 1.0
        return values * (far + near * (self.gamma_dense - far))


class Problem(NamedTuple):
    """A reduction to be predicted: k entries on each of P ranks, in dimension N (thesis section 3.1.2)."""

    entries: float  # k
    size: int  # N
    ranks: int  # P
    value_bytes: int = 4  # size of a value, or of a row: isize
    index_bytes: int = 4  # c
    switch_density: float | None = None  # as in SparseStream
    sent_bytes: float | None = None  # encoded size of a value, if a value codec changes it
    index_codec: str = "auto"  # as in allreduce
    union: tuple[tuple[int, float], ...] = ()  # (m, entries of the sum of m ranks' streams per input entry); by default uniform
    imbalance: float = 1.0  # entries of the rank with most, relative to the mean
    occupancy: tuple[float, float] = (1.0, 1.0)  # as in Spread: of a rank's entries, and of the sum
    parts: Figures = Figures()  # loads of the cut for all ranks
    blocks: Figures = Figures()  # loads of the cut into dense blocks
    early_blocks: Figures = Figures()  # loads if groups of ranks split, and halve each part among the groups
    host_parts: Figures = Figures()  # loads of the cut for the ranks of a host
    local: int = 1  # consecutive ranks on one host
    hosts: int = 1
    lanes: int = 1  # ranks of the smallest host
    share_memory: bool = False  # whether the ranks of every host exchange parts in shared memory
    on_device: bool = False  # whether streams are on a GPU, with messages copied to the host and back

    def bytes(self, entries: float, extent: float) -> float:
        """Return the size of an unencoded stream with ``entries`` on ``extent`` positions, in the smaller form."""
        if entries > self.limit(extent):
            return extent * self.value_bytes
        return entries * (self.value_bytes + self.index_bytes)

    def limit(self, extent: float) -> float:
        """Return phi: the number of entries above which a stream on ``extent`` positions is dense (thesis section 4.1.2)."""
        limit = extent * self.value_bytes / (self.value_bytes + self.index_bytes)
        return limit if self.switch_density is None else min(limit, extent * self.switch_density)

    def occupied(self, density: float) -> float:
        """Return the fraction of a range that the entries of a stream of this density occupy, as in :attr:`occupancy`."""
        of_rank, of_sum = self.occupancy
        if of_rank == of_sum == 1.0:
            return 1.0
        low, high = self.entries, self.held(self.ranks)
        place = (density * self.size - low) / (high - low) if high > low else 0.0
        return of_rank + min(max(place, 0.0), 1.0) * (of_sum - of_rank)

    def fullest(self, ranks: int) -> float:
        """Return the entries of the group of `ranks` that contains the fullest rank, relative to the mean of all groups."""
        if self.imbalance == 1.0:
            return 1.0
        return (self.imbalance + (ranks - 1) * (self.ranks - self.imbalance) / (self.ranks - 1)) / ranks

    def held(self, ranks: int) -> float:
        """Return the expected number of entries of the sum of ``ranks`` ranks' streams."""
        if not self.union:
            return expected_size(self.entries, self.size, ranks)
        before, low = self.union[0]
        for number, share in self.union:
            if number >= ranks:
                share = share if number == ranks else low + (share - low) * (ranks - before) / (number - before)
                return min(share * ranks * self.entries, float(self.size))
            before, low = number, share
        return min(low * ranks * self.entries, float(self.size))


class Transfer(NamedTuple):
    """A message, or everything that is sent in one step."""

    nbytes: float
    coding: float  # seconds to encode and decode it

    def time(self, alpha: float, beta: float, machine: Machine, work: float = 0.0) -> float:
        """Return the seconds until it has arrived and ``work`` seconds of work on it are done."""
        wire, busy = self.nbytes * beta, self.coding + work
        pieces = max(self.nbytes / piece_bytes(self.nbytes), 1.0)
        return alpha + wire + busy - machine.overlap * (1.0 - 1.0 / pieces) * min(wire, busy)


def transfer(problem: Problem, machine: Machine, entries: float, extent: float, local: bool = False, dense: bool = False) -> Transfer:
    """Return the message for a stream with ``entries`` on ``extent`` positions, with the codec that the runtime would choose.

    ``local`` is True inside a host. ``dense`` forces the dense form.
    """
    dense = dense or entries > problem.limit(extent)
    if local or not machine.codec or problem.index_codec == "plain":
        sent = problem.value_bytes if problem.sent_bytes is None or local else problem.sent_bytes
        if dense:
            return Transfer(extent * sent, 0.0)
        return Transfer(entries * (sent + problem.index_bytes), 0.0)
    sent = problem.value_bytes if problem.sent_bytes is None else problem.sent_bytes
    if dense:
        nbytes = entries * sent + extent / 8
        if nbytes < _LEAST_GAIN * extent * sent and problem.sent_bytes is None and BITMAP.seconds < problem.value_bytes * machine.beta:
            return Transfer(nbytes, 2 * machine.dense_pass(extent, extent * problem.value_bytes))
        return Transfer(extent * sent, 0.0)
    if entries <= 0 or extent <= 0:
        return Transfer(0.0, 0.0)
    density = min(entries / extent, 1.0)
    local_density = min(density / problem.occupied(density), 1.0)
    # A message of the whole range is taken for one of entries as far apart as on average, until its gaps are written.
    assumed = local_density if extent < problem.size else density
    codec = Encoding(problem.index_codec).index_codec_at(assumed, problem.index_bytes, machine.beta)
    density = local_density if extent < problem.size or codec is GAPS else density
    seconds = machine.codec * codec.seconds / GAPS.seconds
    return Transfer(entries * (sent + codec.bytes_each(density, problem.index_bytes)), entries * seconds)


def expected_size(entries: float, size: float, ranks: int) -> float:
    """Return E[K] = f(k, N, P): the expected entries of the sum of P streams of k entries at uniformly random positions (thesis 3.2.1).

    The paper's alternating sum in closed form is N (1 - (1 - k/N)**P).

    Examples
    --------
    >>> round(expected_size(16, 512, 2), 6)
    31.5
    """
    if size == 0:
        return 0.0
    absent, power, base = 1.0, ranks, 1.0 - entries / size
    while power:  # by repeated squaring, since pow() may differ in the last bit between C libraries
        if power & 1:
            absent *= base
        base *= base
        power >>= 1
    return size * (1.0 - absent)


def predicted_time(name: str, problem: Problem, machine: Machine) -> float:
    """Return the predicted seconds of algorithm ``name``.

    Parameters
    ----------
    name : str
        One of :func:`~sparseallreduce.algorithms.algorithms`, except "auto". NaN is returned for a registered algorithm without a cost.
    problem : Problem
    machine : Machine

    Notes
    -----
    With gamma = 0 and sparse streams at uniformly random positions these are the expected bandwidths of thesis table 3.1; ranks in excess
    of a power of two add one message at each end, for the algorithms that need it.
    """
    model = _MODELS.get(name)
    return math.nan if model is None else model(problem, machine)


def set_model(name: str, model: Callable[[Problem, Machine], float] | None) -> None:
    """Set the function that returns the time of a registered algorithm, or remove it."""
    _MODELS.pop(name, None)
    if model is not None:
        _MODELS[name] = model


def shared_split_time(problem: Problem, machine: Machine) -> float:
    """Return the seconds of a split in shared memory: a rank copies its stream, adds its part, copies that, and waits twice.

    Copying an entry takes half the time that a merge takes to read one, and each wait takes as long as a dense sum of a few bytes. With 30
    microseconds in addition, this fits measurements of short streams with 2, 4 and 8 ranks on 2 cores in which parts were copied; with two
    parts they no longer are.
    """
    copied = problem.entries + problem.held(problem.ranks) / problem.ranks
    wait = machine.alpha if machine.alpha_dense is None else machine.alpha_dense
    return 3e-5 + 2 * wait + machine.gamma / 2 * copied + tree_time(problem, machine, problem.ranks)


def sent_bytes(name: str, problem: Problem, machine: Machine) -> float:
    """Return the bytes received by the busiest rank: the predicted time on a network where only bytes take time."""
    bytes_alone = Machine(0.0, machine.beta, 0.0, 0.0, machine.beta, 0.0, 0.0, codec=machine.codec, overlap=0.0)
    free = _MODELS[name](problem._replace(local=1, on_device=False), bytes_alone)
    return free / machine.beta if machine.beta else 0.0


def copy_time(name: str, problem: Problem, machine: Machine) -> float:
    """Return the part of the predicted seconds spent on copies between GPU and host, without overlap; 0 for streams on the host."""
    if not problem.on_device or name not in _MODELS:
        return 0.0
    return max(_MODELS[name](problem, machine) - _MODELS[name](problem, without_copies(machine)), 0.0)


def without_copies(machine: Machine) -> Machine:
    """Return the machine with copies between GPUs and hosts that take no time."""
    return machine._replace(alpha_to_host=0.0, beta_to_host=0.0, alpha_to_device=0.0, beta_to_device=0.0)


def rounds(ranks: int) -> int:
    return (ranks - 1).bit_length()


def rabenseifner_of_messages(machine: Machine, ranks: int, local: int) -> Machine:
    """Return a machine whose dense allreduce is Rabenseifner's algorithm of plain messages, as the simulator runs it.

    ``local`` is the number of consecutive ranks on each host. Ranks in excess of a power of two send the whole vector and get it back.
    """
    core = lower_power_of_two(ranks)
    alpha_near = machine.alpha if machine.alpha_local is None else machine.alpha_local
    beta_near = machine.beta if machine.beta_local is None else machine.beta_local
    latency, share = 0.0, 0.0
    if core < ranks:
        latency += 2 * (alpha_near if core < local else machine.alpha)
        share += 2 * (beta_near if core < local else machine.beta)
    for distance in halvings(core):
        latency += 2 * (alpha_near if distance < local else machine.alpha)
        share += (distance / core + 0.5 / distance) * (beta_near if distance < local else machine.beta)
    return machine._replace(alpha_dense=latency, beta_dense=share / (2 * (ranks - 1) / ranks))


def _copied(problem: Problem, machine: Machine, to_host: float, to_device: float, copies: float = 1) -> float:
    """Return the seconds of copies to the host and back, given the total bytes in each direction; 0 for streams on the host."""
    if not problem.on_device or problem.ranks == 1:
        return 0.0
    latency = machine.alpha_to_host + machine.alpha_to_device
    return copies * latency + to_host * machine.beta_to_host + to_device * machine.beta_to_device


def _merge_time(problem: Problem, machine: Machine, entries: float) -> float:
    """Return the seconds of a sparse reduction that reads ``entries`` entries."""
    return machine.alpha_device + machine.gamma_device * entries if problem.on_device else machine.gamma * entries


def _pass_time(problem: Problem, machine: Machine, values: float) -> float:
    """Return the seconds of writing ``values`` values of a dense array in the caches, or on a GPU."""
    return machine.alpha_device + machine.gamma_dense_device * values if problem.on_device else machine.gamma_dense * values


def step_time(
    problem: Problem,
    machine: Machine,
    distance: int,
    entries: float,
    extent: float,
    work: float = 0.0,
    streams: float = 1,
    dense: bool = False,
) -> float:
    """Return the seconds of a message to the rank at ``distance``, and of ``work`` on it.

    The message holds ``streams`` streams with ``entries`` entries on ``extent`` positions each.
    """
    local = distance < problem.local
    each = transfer(problem, machine, entries, extent, local, dense)
    whole = Transfer(streams * each.nbytes, streams * each.coding)
    copied = 0.0
    if problem.on_device:
        machine = machine._replace(overlap=0.0)  # what is copied to the device is whole before any work on it
        nbytes = streams * (extent * problem.value_bytes if dense else problem.bytes(entries, extent))
        copied = _copied(problem, machine, nbytes, nbytes, streams)
    if not local:
        return copied + whole.time(machine.alpha, machine.beta, machine, work)
    alpha = machine.alpha if machine.alpha_local is None else machine.alpha_local
    beta = machine.beta if machine.beta_local is None else machine.beta_local
    return copied + whole.time(alpha, beta, machine._replace(overlap=0.0), work)


def pair_time(problem: Problem, machine: Machine, entries: float, extent: float) -> float:
    """Return the seconds of reducing two streams of ``entries`` each on ``extent`` positions."""
    if entries > problem.limit(extent):
        return _pass_time(problem, machine, extent)
    if 2 * entries > problem.limit(extent):
        return _pass_time(problem, machine, extent) + _merge_time(problem, machine, 2 * entries)
    return _merge_time(problem, machine, 2 * entries)


def tree_time(problem: Problem, machine: Machine, parts: int) -> float:
    """Return the seconds of reducing all ranks' streams, as a balanced tree, on one of ``parts`` parts of the index space."""
    time, nodes, size = 0.0, problem.ranks, 1
    while nodes > 1:
        time += nodes // 2 * pair_time(problem, machine, problem.held(size) / parts, problem.size / parts)
        nodes, size = (nodes + 1) // 2, 2 * size
    return time


def concatenation_time(problem: Problem, machine: Machine, entries: float, extent: float) -> float:
    """Return the seconds of joining all ranks' parts; an entry takes half as long (0.43 to 0.51) as in a merge."""
    if entries > problem.limit(extent):
        return _pass_time(problem, machine, extent * problem.ranks)
    return _merge_time(problem, machine, entries * problem.ranks / 2)


def gather_time(
    problem: Problem,
    machine: Machine,
    entries: float,
    extent: float,
    dense: bool = False,
    fullest: Callable[[int], float] = lambda _: 1.0,
    in_step: bool = False,
) -> float:
    """Return the predicted seconds of an allgather of one stream a rank, by recursive doubling or by dissemination.

    ``fullest`` maps a number of ranks to the entries of the fullest group of that many, relative to the mean of such groups. With
    ``in_step``, partners first exchange a message in some rounds that they are ready.
    """
    time, held, core = machine.alpha * rounds_in_step(problem.ranks) if in_step else 0.0, 1, lower_power_of_two(problem.ranks)
    while held < problem.ranks:
        distance = problem.ranks // (2 * held) if core == problem.ranks else held
        streams = min(held, problem.ranks - held)
        time += step_time(problem, machine, distance, entries, extent, streams=fullest(streams) * streams, dense=dense)
        held *= 2
    return time


def _dense(problem: Problem, machine: Machine) -> float:
    hops = 2 * (problem.ranks - 1) / problem.ranks
    already = problem.entries > problem.limit(problem.size)
    fill = 0.0 if already else _pass_time(problem, machine, problem.size) + _merge_time(problem, machine, problem.entries)
    latency = 2 * rounds(problem.ranks) * machine.alpha if machine.alpha_dense is None else machine.alpha_dense
    nbytes = problem.size * problem.value_bytes
    return fill + _copied(problem, machine, nbytes, nbytes) + latency + hops * nbytes * machine.beta_dense


def _allgather(problem: Problem, machine: Machine) -> float:
    return gather_time(problem, machine, problem.entries, problem.size, fullest=problem.fullest) + tree_time(problem, machine, 1)


def _ssar_recursive_doubling(problem: Problem, machine: Machine) -> float:
    k, size = problem.entries, problem.size
    core = lower_power_of_two(problem.ranks)
    time = 0.0
    if core < problem.ranks:
        time += step_time(problem, machine, core, k, size, pair_time(problem, machine, k, size))
        time += step_time(problem, machine, core, problem.held(problem.ranks), size)
    for distance in halvings(core):
        held = problem.fullest(core // (2 * distance)) * problem.held(core // (2 * distance))
        time += step_time(problem, machine, distance, held, size, pair_time(problem, machine, held, size))
    return time


def split_time(problem: Problem, machine: Machine, work: float, fullest: float = 1.0) -> float:
    """Return the seconds of the split phase and of ``work``; ``fullest`` is the entries of the fullest part relative to the mean."""
    ranks = problem.ranks
    if ranks == 1:
        return work
    entries, extent = problem.entries / ranks, problem.size / ranks
    if problem.entries > problem.limit(problem.size):
        entries, fullest = extent, 1.0
    near = problem.local - 1
    time = near * step_time(problem, machine, 1, fullest * entries, fullest * extent) if near else 0.0
    far = ranks - 1 - near
    if far:
        each = transfer(problem, machine, entries, extent)
        all_of_them = Transfer(far * fullest * each.nbytes, far * fullest * each.coding)
        overlapping = machine._replace(overlap=0.0) if problem.on_device else machine
        nbytes = far * fullest * problem.bytes(entries, extent)
        time += _copied(problem, machine, nbytes, nbytes, far)
        time += all_of_them.time(far * machine.alpha, machine.beta, overlapping, work)
    else:
        time += work
    return time


def _ssar_split_allgather(problem: Problem, machine: Machine) -> float:
    parts, extent = problem.parts, problem.size / problem.ranks
    work = parts.entries * tree_time(problem, machine, problem.ranks)
    time = split_time(problem, machine, work, max(parts.entries, problem.imbalance))
    total = problem.held(problem.ranks) / problem.ranks
    time += gather_time(problem, machine, parts.gathered * total, parts.gathered * extent, in_step=parts.in_step)
    return time + concatenation_time(problem, machine, total, extent)


def _ssar_ring(problem: Problem, machine: Machine) -> float:
    ranks = problem.ranks
    entries, extent = problem.entries / ranks, problem.size / ranks
    time, parts = 0.0, problem.parts
    machine, next_one = machine._replace(beta=_beta_of_one(problem, machine)), 1 if problem.local == ranks else ranks
    problem = problem._replace(occupancy=(1.0, 1.0))  # at each hop the part that takes most bytes is waited for, which is a wide one
    for hop in range(1, ranks):
        partial = problem.held(hop) / ranks
        fullest = parts.entries + (hop - 1) / (ranks - 1) * (parts.summed - parts.entries)
        work = fullest * pair_time(problem, machine, (partial + entries) / 2, extent)
        fullest *= problem.fullest(hop)
        time += step_time(problem, machine, next_one, fullest * partial, fullest * extent, work)
    total = problem.held(ranks) / ranks
    time += (ranks - 1) * step_time(problem, machine, next_one, parts.summed * total, parts.summed * extent)
    return time + concatenation_time(problem, machine, total, extent)


def _beta_of_one(problem: Problem, machine: Machine) -> float:
    """Return the seconds per byte of a message to another host if one rank of each host sends at a time, which leaves it the whole link."""
    near = machine.beta if machine.beta_local is None else machine.beta_local
    return min(max(machine.beta / problem.local, near), machine.beta)


def _dense_gather(problem: Problem, machine: Machine, parts: Figures) -> float:
    """Return the seconds of an allgather of dense blocks on the host, cut as ``parts`` tells."""
    extent = parts.gathered * problem.size / problem.ranks
    entries = min(parts.gathered * problem.held(problem.ranks) / problem.ranks, extent)
    time = gather_time(problem._replace(on_device=False), machine, entries, extent, dense=True, in_step=parts.in_step)
    nbytes = problem.size * problem.value_bytes
    return time + _copied(problem, machine, nbytes / problem.ranks, nbytes) + machine.dense_pass(problem.size, nbytes)


def _block_time(problem: Problem, machine: Machine, parts: int) -> float:
    """Return the seconds of filling a dense block, one of ``parts`` parts, and of adding streams to it.

    An entry takes a cache line, unless all lines are written.
    """
    extent = problem.size / parts
    lines = min(problem.entries / parts * max(CACHE_LINE / problem.value_bytes, 1.0), extent)
    written = machine.dense_pass(extent + parts * lines, extent * problem.value_bytes, problem.on_device)
    return _merge_time(problem, machine, problem.entries) + written


def _dsar_split_allgather(problem: Problem, machine: Machine) -> float:
    parts = problem.blocks
    work = parts.entries * _block_time(problem, machine, problem.ranks)
    return split_time(problem, machine, work, max(parts.entries, problem.imbalance)) + _dense_gather(problem, machine, parts)


def _dsar_early_switch(problem: Problem, machine: Machine) -> float:
    group, groups = core_of(problem.ranks)
    k, size = problem.entries, problem.size
    time = 0.0
    if group * groups < problem.ranks:
        time += step_time(problem, machine, problem.ranks, k, size, pair_time(problem, machine, k, size))
    parts = problem.early_blocks
    work = parts.entries * _block_time(problem, machine, group)
    fullest = max(parts.entries, parts.grouped, problem.imbalance)
    time += split_time(problem._replace(ranks=group, local=min(problem.local, group)), machine, work, fullest)
    share, added = parts.gathered / group, group
    for distance in halvings(groups):
        share /= 2
        fullest = max(1.0, parts.grouped * group / added)  # as groups add up, their sections become alike
        entries, extent = min(fullest * share * problem.held(added), share * size), share * size
        work = machine.dense_pass(extent, extent * problem.value_bytes, problem.on_device)
        time += step_time(problem, machine, distance * group, entries, extent, work, dense=True)
        added *= 2
    return time + _dense_gather(problem, machine, parts)


def outer_problem(problem: Problem) -> Problem:
    """Return the reduction between hosts once each host has added its streams: a part for the ranks at one place of all hosts."""
    each = problem.ranks / problem.hosts
    held = problem.held(max(1, round(each)))
    union: tuple[tuple[int, float], ...] = ()
    if problem.union and held > 0:
        counts = sorted({min(problem.hosts, 1 << bit) for bit in range(problem.hosts.bit_length() + 1)})
        union = tuple((count, problem.held(max(1, round(count * each))) / (count * held)) for count in counts)
    return problem._replace(
        entries=held / problem.lanes,
        size=max(1, problem.size // problem.lanes),
        ranks=problem.hosts,
        union=union,
        local=1,
        hosts=1,
        lanes=1,
        parts=Figures(),
        blocks=Figures(),
        early_blocks=Figures(),
        host_parts=Figures(),
    )


def _hierarchical(problem: Problem, machine: Machine) -> float:
    outer = outer_problem(problem)
    each = max(1, round(problem.ranks / problem.hosts))
    time, parts = 0.0, problem.host_parts
    if outer.ranks > 1:
        between = rabenseifner_of_messages(machine, outer.ranks, 1)  # MPI's own is measured for all ranks
        time = min(_MODELS[name](outer, between) for name in _FLAT)
    if each == 1:
        return time
    extent, total = problem.size / problem.lanes, problem.held(problem.ranks) / problem.lanes
    here = problem._replace(ranks=each, local=each, on_device=False)  # parts are handed over, and added up, on the host
    part = problem.bytes(total, extent)
    time += _copied(problem, machine, problem.bytes(problem.entries, problem.size) + part, part + problem.lanes * part, 2)
    if problem.share_memory:  # as for the split in memory: written once, added up where it lies, and the result lies there for all
        wait = machine.alpha if machine.alpha_local is None else machine.alpha_local
        copied = problem.entries + parts.summed * total
        return time + 4 * wait + machine.gamma / 2 * copied + parts.entries * tree_time(here, machine, problem.lanes)
    time += (each - 1) * step_time(here, machine, 1, parts.entries * problem.entries / problem.lanes, extent)
    time += parts.entries * tree_time(here, machine, problem.lanes)
    time += (each - 1) * step_time(here, machine, 1, parts.summed * total, extent)
    return time + concatenation_time(here._replace(ranks=problem.lanes), machine, total, extent)


def _dense_torus(problem: Problem, machine: Machine) -> float:
    each, part = max(1, round(problem.ranks / problem.hosts)), problem.size / problem.lanes
    here = problem._replace(ranks=each, local=each)
    time = _pass_time(problem, machine, problem.size) + _merge_time(problem, machine, problem.entries)
    time += 2 * (each - 1) * step_time(here, machine, 1, part, part, dense=True)
    time += (each - 1) * machine.dense_pass(part, part * problem.value_bytes, problem.on_device)
    far, block = problem._replace(local=1), part / problem.hosts
    for hop in range(1, problem.hosts):  # blocks are dense, but zeros need not be sent
        work = _pass_time(problem, machine, block)
        added, total = (problem.held(ranks) * block / problem.size if problem.size else 0.0 for ranks in (hop * each, problem.ranks))
        time += step_time(far, machine, problem.ranks, added, block, work, dense=True)
        time += step_time(far, machine, problem.ranks, total, block, dense=True)
    return time


_MODELS: dict[str, Callable[[Problem, Machine], float]] = {
    "dense": _dense,
    "allgather": _allgather,
    "ssar_recursive_doubling": _ssar_recursive_doubling,
    "ssar_split_allgather": _ssar_split_allgather,
    "ssar_ring": _ssar_ring,
    "dsar_split_allgather": _dsar_split_allgather,
    "dsar_early_switch": _dsar_early_switch,
    "hierarchical": _hierarchical,
    "dense_torus": _dense_torus,
}
_FLAT = tuple(name for name in _MODELS if name not in ("hierarchical", "dense_torus"))
