"""Streams that are sent with the records of a handshake, in one process."""

import numpy as np
import pytest
from oracle import bits

from sparseallreduce import SparseStream
from sparseallreduce.runtime.shortcuts.base import PACKED
from sparseallreduce.runtime.shortcuts.sent import Sent

LIMIT = 1000


def never(*_arguments):
    raise AssertionError("nothing is copied or joined")


@pytest.mark.parametrize("stream", [SparseStream(np.arange(300), np.ones(300), 2**40), SparseStream.from_dense(np.ones(300))])
def test_a_stream_that_is_too_long_is_not_copied(stream):
    assert Sent(True, never, never, LIMIT, 0).arm(1, stream) == 0


def test_a_message_that_is_too_long_for_its_header_and_indices_is_not_kept():
    stream = SparseStream(np.arange(100), np.ones(100), 2**40)  # 800 bytes of values, 800 of indices
    sent = Sent(True, lambda given: given, never, LIMIT, 0)
    assert sent.arm(1, stream) == 0 and sent.payload(stream) is None


def test_a_rank_that_sends_nothing_is_armed_whatever_stream_it_has():
    sent = Sent(False, never, never, LIMIT, 1)
    for stream in (None, SparseStream(np.arange(300), np.ones(300), 2**40)):
        assert sent.arm(1, stream) == PACKED and sent.payload(stream) is None


class Handshake:
    """The messages of a handshake, after an agreement."""

    def __init__(self, *messages):
        self._messages = messages

    def payloads(self):
        return [np.empty(0, np.uint8) if message is None else message for message in self._messages]


def test_what_is_sent_comes_back_on_arrays_of_its_own():
    stream = SparseStream([3, 2**33], [1.5, np.nan], 2**40)
    sent = Sent(True, lambda given: given, lambda streams: streams, LIMIT, 0)
    assert sent.arm(1, stream) == PACKED
    message = sent.payload(stream)
    (found,) = sent.commit(1, PACKED, Handshake(message, None))
    message[:] = 0  # as the next operation does with the slot
    assert bits(found) == bits(stream) and sent.moved() == (0, 0, 0)
