"""An allgather in step: its parts, its messages, and what it is for."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import sparseallreduce as sar
from sparseallreduce.algorithms.exchange import gather_parts, rounds_in_step
from sparseallreduce.runtime.simulator.engine import run

NETWORK = sar.Network(latency=2e-6, bandwidth=1.25e9)


def gathered(sizes, in_step, delivery=None):
    """An allgather of streams of so many entries, side by side."""
    ends = np.cumsum([0, *sizes])
    streams = [
        sar.SparseStream(np.arange(low, high), np.full(high - low, rank, np.float32), int(ends[-1]))
        for rank, (low, high) in enumerate(pairwise(ends))
    ]
    schedules = [gather_parts(stream, rank, len(sizes), in_step=in_step) for rank, stream in enumerate(streams)]
    return run(schedules, NETWORK, delivery=delivery)


@pytest.mark.parametrize("ranks", [5, 16, 32, 33, 48, 64])
@pytest.mark.parametrize("delivery", [None, 1, 2])
def test_ranks_in_step_gather_all_parts_in_order_by_a_message_more_in_each_long_round(ranks, delivery):
    sizes = [rank % 7 for rank in range(ranks)]

    out = gathered(sizes, True, delivery)

    for parts in out.outputs:
        assert [part.nnz for part in parts] == sizes
        assert all((part.values == rank).all() for rank, part in enumerate(parts))
    assert set(out.messages) == {(ranks - 1).bit_length() + rounds_in_step(ranks)}
    assert rounds_in_step(ranks) == (4 if ranks >= 32 else 0)


def test_delays_do_not_double_from_round_to_round_where_ranks_are_in_step():
    sizes = np.random.default_rng(3).integers(0, 3_000, 64).tolist()
    on_the_wire = 8 * sum(sizes) / NETWORK.bandwidth

    apart, in_step = gathered(sizes, False).time, gathered(sizes, True).time

    assert apart > 1.4 * on_the_wire  # or there is nothing to mend
    assert in_step < 1.2 * on_the_wire
