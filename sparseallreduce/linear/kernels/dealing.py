"""Assignment of samples to batches by a computed permutation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.streams.kernels.compilation import inlined, kernel

__all__ = ["deal"]

Array = NDArray[Any]

_ONE, _TWO, _THIRTY_TWO = np.uint64(1), np.uint64(2), np.uint64(32)
_TOGETHER = 256  # numbers per block of the vectorised loop
_MIX = np.uint64(0x9E3779B97F4A7C15)


@kernel
def deal(first: int, total: int, size: int, keys: Array, starts: Array, order: Array) -> None:
    """Assign the numbers below ``total`` to batches of ``size``, and list the numbers from ``first`` on that each batch gets.

    A number goes to batch p // size, where p is its position in a permutation of all numbers: a Feistel network on pairs of numbers, which
    is applied again as long as the result is not below ``total`` (Black and Rogaway, 2002). So a rank computes only the positions of its
    own samples.

    Parameters
    ----------
    first, total, size : int
    keys : ndarray
        uint64: an even number of random numbers, one per round.
    starts : ndarray
        int64 zeros, one more than there are batches. On return, batch i gets ``order[starts[i] : starts[i + 1]]``.
    order : ndarray
        int64 output, one entry per number to assign: the numbers minus ``first``, ascending within a batch.
    """
    width = np.uint64(max(1, math.ceil(math.sqrt(total))))
    height = (np.uint64(total) + width - _ONE) // width
    batches = np.empty(order.size, np.uint64)
    lefts, rights = np.empty(_TOGETHER, np.uint64), np.empty(_TOGETHER, np.uint64)
    for begin in range(0, order.size, _TOGETHER):
        count = min(_TOGETHER, order.size - begin)
        for number in range(count):
            place = np.uint64(first + begin + number)
            lefts[number], rights[number] = place // height, place % height
        for round_ in range(np.uint64(0), np.uint64(keys.size), _TWO):
            for number in range(count):  # this loop is vectorised
                lefts[number] = _moved(lefts[number], rights[number] ^ keys[round_], width)
                rights[number] = _moved(rights[number], lefts[number] ^ keys[round_ + _ONE], height)
        for number in range(count):
            place = _below(total, lefts[number], rights[number], keys, width, height)
            batch = place // np.uint64(size)
            batches[begin + number] = batch
            if batch + _TWO < np.uint64(starts.size):
                starts[batch + _TWO] += 1
    for batch in range(2, starts.size):
        starts[batch] += starts[batch - 1]
    # The start of each batch is stored one position late and advances to the batch's end, which is the start of the next.
    for number in range(order.size):
        batch = batches[number] + _ONE
        order[starts[batch]] = number
        starts[batch] += 1


@inlined
def _below(total: int, left: Any, right: Any, keys: Array, width: Any, height: Any) -> Any:
    """Return the first position below ``total`` that repeated application of the network to a pair gives."""
    place = left * height + right
    while place >= np.uint64(total):
        left, right = place // height, place % height
        for round_ in range(np.uint64(0), np.uint64(keys.size), _TWO):
            left = _moved(left, right ^ keys[round_], width)
            right = _moved(right, left ^ keys[round_ + _ONE], height)
        place = left * height + right
    return place


@inlined
def _moved(place: Any, key: Any, size: Any) -> Any:
    """Return a position of ``size``, at most 2**32, shifted cyclically by a distance that depends on the key."""
    key *= _MIX
    key = (key ^ (key >> _THIRTY_TWO)) * np.uint64(0xD6E8FEB86659FD93)
    place += ((key >> _THIRTY_TWO) * size) >> _THIRTY_TWO
    return place - size * np.uint64(place >= size)
