"""What streams of one kind remember of how their operations begin."""

from types import SimpleNamespace

import numpy as np
import pytest

from sparseallreduce import SparseStream
from sparseallreduce.algorithms.allreduce import make_call
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.runtime.work import BLOCKING
from sparseallreduce.streams.packed import packed_bytes
from sparseallreduce.streams.stream import index_dtype

SIZE = 1 << 18
SLOW_MESSAGES = Machine(alpha=3e-7, alpha_dense=1e-6, beta=1e-9, gamma=1e-9, beta_dense=1e-8, trust=0.9)


def signature_of(stream, op="sum", ranks=2, shares=True, capacity=1 << 20, machine=None):
    """For ranks of one host that have met."""
    signature = pytest.importorskip("sparseallreduce.runtime.signature", exc_type=ImportError)
    memory = SimpleNamespace(ranks=ranks, capacity=capacity, spins=1) if shares and capacity else None
    constants = {"rank": 0, "ranks": ranks, "machine": machine, "hosts": None, "oversubscribed": False, "areas": []}
    return signature.Signature(*make_call(stream, op, "auto", {}), SimpleNamespace(**constants, sparse_memory=memory, shares_memory=shares))


def streams(dtype, width):
    """Of counts around all limits, and of some in between."""
    shape = (SIZE,) if width is None else (SIZE, width)
    indices, values = np.arange(SIZE, dtype=index_dtype(SIZE)), np.ones(shape, dtype)
    return lambda count: SparseStream._sparse_form(indices[:count], values[:count], SIZE)


@pytest.mark.parametrize("dtype,width", [(np.float32, None), (np.float64, None), (np.float16, None), (np.float32, 3)])
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("shares,capacity", [(True, 1 << 19), (True, 0), (False, 0), (True, 3001)])
@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_what_is_remembered_is_what_would_be_chosen(dtype, width, op, shares, capacity, ranks):
    stream_of = streams(dtype, width)
    signature = signature_of(stream_of(1), op, ranks, shares, capacity, Machine(alpha=3e-7, beta=2e-10, trust=0.9))
    each = packed_bytes(stream_of(1000)) / 1000
    limits = [int(limit / each) for limit in (*signature._limits, 4000, 8192, 1 << 16, 1 << 19, 1 << 20)]
    counts = {max(0, min(SIZE, limit + offset)) for limit in limits for offset in (-3, -2, -1, 0, 1, 2, 3)}
    counts |= {int(count) for count in np.geomspace(1, SIZE / 2, 60)}
    for _ in range(2):
        for count in np.random.default_rng(0).permutation(sorted(counts)).tolist():
            stream = stream_of(count)
            _, chosen = signature._chosen(stream)
            assert signature.choose(stream, BLOCKING) == chosen, count
    assert len(signature._choices) < len(counts)


@pytest.mark.parametrize("ranks", [2, 5])
def test_no_stream_is_packed_or_written_where_it_has_no_room(ranks):
    """Whichever count of about as many has come first."""
    stream_of = streams(np.float32, None)
    for first in (-1, 1):
        signature = signature_of(stream_of(1), ranks=ranks, capacity=200_000)
        always, room, capacity = signature._limits
        for limit in (always, room, capacity):
            for offset in (first, 0, -first):
                stream = stream_of(limit // 8 + offset)
                for shortcut in signature.choose(stream, BLOCKING):
                    fits = {"Packed": room, "SparseShared": capacity}.get(type(shortcut).__name__, np.inf)
                    assert packed_bytes(stream) <= fits


def test_steps_of_a_training_choose_once():
    stream_of = streams(np.float32, None)
    signature = signature_of(stream_of(1))
    chosen = []
    signature._chosen = lambda stream, choose=signature._chosen: chosen.append(stream) or choose(stream)
    for count in np.random.default_rng(0).integers(7900, 8100, 500).tolist():
        signature.choose(stream_of(count), BLOCKING)
    assert len(chosen) <= 4


def test_lopsided_streams_begin_alike_on_all_ranks_from_the_second_sum_on():
    stream_of = streams(np.float32, None)
    longest, shortest = stream_of(SIZE // 2), stream_of(0)
    ranks = [signature_of(stream_of(1), capacity=1 << 22, machine=SLOW_MESSAGES) for _ in range(2)]

    def names():
        given = zip(ranks, (longest, shortest))
        return [[type(shortcut).__name__ for shortcut in signature.choose(stream, BLOCKING)] for signature, stream in given]

    assert names() == [["SparseShared"], ["Packed"]]
    for signature in ranks:
        signature.record_entries(shortest, [longest.nnz, 0])
    assert names() == [["SparseShared"], ["SparseShared"]]
    for signature in ranks:
        signature.record_entries(shortest, [1000, 1010])
    assert names() == [["SparseShared"], ["Packed"]]


def test_a_stream_for_which_the_common_way_has_no_room_begins_as_it_would_alone():
    stream_of = streams(np.float32, None)
    signature = signature_of(stream_of(1), capacity=200_000, machine=SLOW_MESSAGES)
    signature.record_entries(stream_of(0), [20_000, 0])
    assert [type(shortcut).__name__ for shortcut in signature.choose(stream_of(0), BLOCKING)] == ["SparseShared"]
    assert "SparseShared" not in [type(shortcut).__name__ for shortcut in signature.choose(stream_of(100_000), BLOCKING)]
