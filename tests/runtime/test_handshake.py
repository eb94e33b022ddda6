"""Handshakes in shared memory, seen by all ranks of one process: nobody reads what is not there, or is overwritten before it was read."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparseallreduce import SparseStream
from sparseallreduce.runtime.handshake.base import DISAGREED, PENDING, RECORD, UNUSABLE, payload_capacity
from sparseallreduce.runtime.handshake.shared import SLOTS, nbytes, slots_in
from sparseallreduce.streams import packed
from sparseallreduce.streams.reduction import Reduction

FIRST = 7
DIGEST = 5


def ranks_of(ranks, capacity=4096, cores=16):
    """The slots as each rank sees them."""
    memory = np.zeros(nbytes(ranks, capacity), np.uint8)
    return [slots_in(memory, rank, ranks, capacity, cores, FIRST) for rank in range(ranks)]


def slot(slots, sequence):
    return slots[sequence % SLOTS]


def publish(slots, sequence, entries=3, usable=True, flags=1, digest=DIGEST, valid=True):
    slot(slots, sequence).publish(sequence, usable, flags, digest, entries, None, valid)


def agree(slots, sequence, spins=1, flags=1, digest=DIGEST):
    return slot(slots, sequence).agree(sequence, spins, flags, digest, 4)


def test_what_all_have_published_is_read_by_all():
    ours, theirs = ranks_of(2)
    for sequence in range(FIRST, FIRST + 3 * SLOTS):
        assert slot(ours, sequence).is_free(sequence)
        assert not slot(ours, sequence).has_published(sequence)
        publish(ours, sequence, sequence)
        assert slot(ours, sequence).has_published(sequence)
        assert agree(ours, sequence) == PENDING
        assert agree(theirs, sequence, slot(theirs, sequence).spins) == PENDING
        publish(theirs, sequence, 2 * sequence)
        for slots in (ours, theirs):
            assert agree(slots, sequence) == 1
            assert slot(slots, sequence).entries() == [sequence, 2 * sequence]
            slot(slots, sequence).release(sequence)


def test_a_slot_is_free_when_all_have_released_it():
    ours, theirs = ranks_of(2)
    for sequence in range(FIRST, FIRST + SLOTS):
        assert slot(ours, sequence).is_free(sequence)
        publish(ours, sequence)
        publish(theirs, sequence)
    later = FIRST + SLOTS
    slot(ours, FIRST).release(FIRST)
    assert not slot(ours, later).is_free(later)
    slot(theirs, FIRST).release(FIRST)
    assert slot(ours, later).is_free(later)
    assert slot(theirs, later).is_free(later)
    assert not slot(ours, later + 1).is_free(later + 1)


def test_a_rank_that_gave_up_without_a_word_holds_up_nobody_later():
    """It leaves the handshake while the others have not published yet."""
    ours, theirs = ranks_of(2)
    assert slot(theirs, FIRST).abandon(FIRST)
    publish(ours, FIRST)
    assert agree(ours, FIRST) == PENDING
    assert slot(ours, FIRST).abandon(FIRST)
    for sequence in range(FIRST + 1, FIRST + SLOTS):
        for slots in (theirs, ours):
            assert slot(slots, sequence).abandon(sequence)
    for slots in (ours, theirs):
        assert slot(slots, FIRST + SLOTS).is_free(FIRST + SLOTS)


def test_who_leaves_without_a_word_keeps_what_it_has_still_to_read():
    ours, theirs = ranks_of(2)
    publish(ours, FIRST, 11)
    publish(theirs, FIRST, 22)
    later = FIRST + SLOTS
    assert not slot(theirs, later).abandon(later)  # it has not read the records of the operation before in this slot
    assert agree(theirs, FIRST) == 1 and slot(theirs, FIRST).entries() == [11, 22]
    for slots in (ours, theirs):
        slot(slots, FIRST).release(FIRST)
    assert slot(theirs, later).abandon(later)


@given(
    st.lists(
        st.one_of(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**60)), st.integers(0, 2**29).map(lambda n: (4 * n, n))),
        min_size=2,
        max_size=5,
    ),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 255), min_size=5, max_size=5),
    st.lists(st.booleans(), min_size=5, max_size=5),
)
def test_what_is_written_is_the_record_that_travels_in_messages(said, digest, flags, usable):
    ranks = [slot(slots, FIRST) for slots in ranks_of(len(said))]
    for ours, (length, entries), flag, valid in zip(ranks, said, flags, usable):
        ours._publish(ours._words, ours._ours, FIRST, valid, length, True, flag, digest, entries)
    expected = 255 if all(usable[: len(said)]) else 255 | UNUSABLE
    for flag in flags[: len(said)]:
        expected &= flag | UNUSABLE
    for ours in ranks:
        assert ours.agree(FIRST, 1, 255, digest, 4) == expected
        assert list(zip(ours.lengths(), ours.entries())) == said
        counts = [-1 if entries and length == 4 * entries else entries for length, entries in said]
        assert ours._counts.tolist() == counts
        assert ours._sums.tolist() == [sum(count for count in counts if count > 0), counts.count(-1)]
        assert ours.agree(FIRST, 1, 255, digest ^ 1, 4) == DISAGREED
    for row, (length, entries), flag, valid in zip(ranks[0]._rows.bytes, said, flags, usable):
        assert RECORD.unpack_from(row, ranks[0]._rows.start - RECORD.size) == (valid, length, True, flag, digest, entries)


@pytest.mark.parametrize("wrong", [{"digest": DIGEST + 1}, {"valid": False}])
def test_one_rank_that_means_something_else_or_is_wrong_is_no_agreement(wrong):
    ours, theirs = ranks_of(2)
    publish(ours, FIRST)
    publish(theirs, FIRST, **wrong)
    assert agree(ours, FIRST) == DISAGREED


def test_a_stream_travels_behind_the_record():
    ranks = [slot(slots, FIRST) for slots in ranks_of(3)]
    streams = [SparseStream([rank, 70], np.float32([1, 10 * rank]), 100) for rank in range(3)]
    kind = packed.Layout.of(streams[0], Reduction())
    for ours, stream in zip(ranks, streams):
        assert ours.publish(FIRST, True, 1, DIGEST, stream.stored, stream) == 16
    for ours in ranks:
        assert ours.agree(FIRST, 1, 1, DIGEST, 4) == 1
        assert np.array_equal(ours.reduced(kind, Reduction()).to_dense(), sum(stream.to_dense() for stream in streams))


def test_of_those_who_commit_and_withdraw_the_first_decides():
    ours, theirs = (slot(slots, FIRST) for slots in ranks_of(2))
    assert ours.commit(FIRST) and theirs.commit(FIRST)
    assert not theirs.withdraw(FIRST)
    later = FIRST + SLOTS
    assert theirs.withdraw(later)
    assert not ours.commit(later)


def test_streams_of_a_few_ranks_alone_travel_with_records():
    assert payload_capacity(2) == 1 << 17
    assert payload_capacity(16) == 1 << 14
    assert payload_capacity(17) == 0


def test_ranks_in_threads_read_each_others_records():
    """With pauses of the length that the interpreter likes."""
    ranks, operations, read = 3, 300, []

    def run(slots, rank):
        for sequence in range(FIRST, FIRST + operations):
            ours = slot(slots, sequence)
            while not ours.is_free(sequence):
                pass
            publish(slots, sequence, 1000 * sequence + rank)
            while agree(slots, sequence, 50) == PENDING:
                pass
            read.append((sequence, ours.entries()))
            ours.release(sequence)

    threads = [threading.Thread(target=run, args=(slots, rank)) for rank, slots in enumerate(ranks_of(ranks, cores=1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == ranks * operations
    assert all(entries == [1000 * sequence + rank for rank in range(ranks)] for sequence, entries in read)
