"""Points in code that all ranks share: allocations, kernels, packing, messages' making, and every resumption of a schedule.

And the choice of the way that an operation takes, which is that of its vector's size here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

from sparseallreduce.algorithms import allreduce, choose, exchange, many, overlap
from sparseallreduce.algorithms.boundaries import Spread
from sparseallreduce.streams import kernels, memory, merging, packed, wire
from sparseallreduce.streams.merging import Merging
from sparseallreduce.streams.reduction import Reduction
from sparseallreduce.streams.wire import Encoding, frames

# Functions before which a rank may fail. A name that is not there any more is an error.
FAILING: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (memory, "memory", ("empty", "full", "copy")),
    (kernels, "kernels", ("merge", "scatter", "scatter_set", "gather_present", "cut_rows", "sum_cut_rows", "sum_rows", "estimate_union")),
    (packed, "packed", ("pack", "pack_into", "put")),
    (packed.Rows, "rows", ("reduced", "summed")),
    (wire, "wire", ("enclose", "read_headers", "join")),
    (frames, "wire", ("_frame",)),
    (frames.Assembly, "wire", ("take",)),
    (Encoding, "wire", ("quantised", "index_codec_for")),
    (Merging, "merging", ("advance", "finish")),
    (Reduction, "reduction", ("pair", "many", "enter", "leave", "densify")),
    (overlap, "overlap", ("_hashes", "_spread")),
    (Spread, "spread", ("parts",)),
)
UNEVEN = "spread.parts, uneven"  # a point behind each cut into parts of unequal widths
READY = "exchange, ready"  # a point before each message in which a rank of an allgather in step says that it is ready
# The size of a vector settles the way of an operation by "auto".
PACKED, DENSE, SPARSE_SHARED, MESSAGES, RECURSIVE = 48, 64, 96, 80, 72
SKEWED = 240  # of which half of the entries of a rank are at the first positions
_WAYS = {
    PACKED: "packed",
    DENSE: "dense",
    SPARSE_SHARED: "sparse_shared",
    MESSAGES: "ssar_split_allgather",
    SKEWED: "ssar_split_allgather",
    RECURSIVE: "ssar_recursive_doubling",
}
_BY_MESSAGES = {"packed": "allgather", "sparse_shared": "ssar_split_allgather"}


def begins(problem: Any, _machine: Any, fits: bool, writes: bool, _share: float) -> str:
    """In place of what :mod:`sparseallreduce.runtime.predictions` expects to be fastest."""
    way = _WAYS.get(problem.size, "allgather")
    return _BY_MESSAGES[way] if (way == "packed" and not fits) or (way == "sparse_shared" and not writes) else way


def _chosen(stream: Any, *_: Any) -> str:
    way = _WAYS.get(stream.size, "allgather")
    return _BY_MESSAGES.get(way, way)


def _is_worth_a_sample(stream: Any, entries: float, ranks: int, machine: Any, all_near: bool) -> bool:
    return choose.is_worth_a_sample(stream, entries, ranks, machine, all_near, 0.0 if stream.size == SKEWED else choose.LONG)


@contextmanager
def hooked(running: Callable[[], Any]) -> Iterator[None]:
    """Let these be points of the world that ``running`` returns, if any."""
    with ExitStack() as patches:
        for owner, place, names in FAILING:
            for name in names:
                patches.enter_context(mock.patch.object(owner, name, _failing(running, getattr(owner, name), f"{place}.{name}")))
        patches.enter_context(mock.patch.object(allreduce, "choose", _chosen))
        patches.enter_context(mock.patch.object(Spread, "parts", _telling(running, Spread.parts)))
        patches.enter_context(mock.patch.object(many, "is_worth_a_sample", _is_worth_a_sample))
        for name in ("Exchange", "Shift"):
            patches.enter_context(mock.patch.object(exchange, name, _telling_ready(running, getattr(exchange, name))))
        yield


@contextmanager
def in_step() -> Iterator[None]:
    """Let few ranks gather parts of unequal widths in step, as many do."""
    with mock.patch.object(exchange, "_FEW", 2):
        yield


@contextmanager
def in_pieces() -> Iterator[None]:
    """Let messages between hosts travel in pieces of a few entries, which are added up as they come."""
    with mock.patch.multiple(frames, _GRAIN=4, _SHORTEST=64, _LONGEST=200, QSGD_BLOCK=4), mock.patch.object(merging, "_LEAST", 1):
        yield


@contextmanager
def hosts_of_their_own(rank: int) -> Iterator[None]:
    """Let each rank take itself to be alone on a host, and tell the others with every operation where its entries lie, or that it knows."""
    from sparseallreduce.runtime import overlaps, setup, signature  # which import MPI
    from sparseallreduce.runtime.hosts import this_place

    alone = str(rank).encode().ljust(8)
    with (
        mock.patch.object(setup, "this_place", return_value=this_place()._replace(host=alone, memory=alone)),
        mock.patch.object(signature, "_LONG", 0.0),
        mock.patch.multiple(overlaps, _USES=2, _MOST_USES=2),
    ):
        yield


def _failing(running: Callable[[], Any], original: Any, kind: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        world = running()
        if world is not None:
            world.point(kind)
        return original(*args, **kwargs)

    return run


def _telling(running: Callable[[], Any], parts: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        cut, world = parts(*args), running()
        widths = [high - low for low, high in pairwise(cut.bounds)]
        if world is not None and max(widths) - min(widths) > 1:  # as equal ones differ by rounding
            world.point(UNEVEN)
        return cut

    return run


def _telling_ready(running: Callable[[], Any], step: Callable[..., Any]) -> Callable[..., Any]:
    def made(partner: int, payload: Any, *rest: Any) -> Any:
        world = running()
        if world is not None and isinstance(payload, tuple) and payload[0] is exchange._READY:
            world.point(READY)
        return step(partner, payload, *rest)

    return made


def resumable(running: Callable[[], Any], steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """A schedule that may fail wherever it is resumed: the error is raised where it stands."""
    value: Any = None
    try:
        while True:
            world, error = running(), None
            if world is not None:
                try:
                    world.point("resume")
                except Exception as raised:
                    error = raised
                except KeyboardInterrupt as raised:
                    error = raised
            step = steps.send(value) if error is None else steps.throw(error)
            value = yield step
    except StopIteration as stop:
        return stop.value
    finally:
        steps.close()
