"""A trace counts what the operations inside it did, and those alone."""

import numpy as np
import pytest

import sparseallreduce as sar


def stream(entries):
    return sar.SparseStream(np.arange(entries), np.ones(entries), 100)


@pytest.mark.parametrize("algorithm", sar.algorithms())
def test_operations_and_entries_are_counted(algorithm):
    with sar.trace() as counts:
        sar.allreduce(stream(3), comm=sar.SERIAL, algorithm=algorithm)
        sar.iallreduce(stream(4), comm=sar.SERIAL, algorithm=algorithm).wait()
    assert (counts.operations, counts.entries_in) == (2, 7)
    dense = algorithm.startswith("d")
    assert counts.entries_out == (200 if dense else 7)
    assert counts.fill_in == counts.entries_out / 7


def test_a_rank_alone_moves_nothing():
    with sar.trace() as counts:
        sar.allreduce(stream(3), comm=sar.SERIAL, algorithm="dense")
    assert (counts.bytes_sent, counts.bytes_received, counts.header_bytes, counts.agreement_bytes) == (0, 0, 0, 0)
    assert (counts.messages, counts.rounds) == (0, 0)


def test_traces_nest_and_end():
    with sar.trace() as outer:
        sar.allreduce(stream(1), comm=sar.SERIAL)
        with sar.trace() as inner:
            sar.allreduce(stream(2), comm=sar.SERIAL)
        sar.allreduce(stream(4), comm=sar.SERIAL)
    sar.allreduce(stream(8), comm=sar.SERIAL)
    assert (inner.operations, inner.entries_in) == (1, 2)
    assert (outer.operations, outer.entries_in) == (3, 7)
    assert 0 < inner.seconds <= outer.seconds


def test_an_error_ends_the_trace():
    with pytest.raises(sar.AlgorithmError), sar.trace() as counts:
        sar.allreduce(stream(1), comm=sar.SERIAL, algorithm="none")
    sar.allreduce(stream(1), comm=sar.SERIAL)
    assert counts.operations == 0
    assert counts.seconds > 0


def test_no_operation_has_no_fill_in():
    with sar.trace() as counts:
        pass
    assert counts.fill_in == 0.0
