"""Hashes of strings in Arrow's memory: MurmurHash3 of their UTF-8, as in scikit-learn and Vowpal Wabbit."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.linear.data.vowpal_wabbit.kernels import murmur3
from sparseallreduce.streams.kernels.compilation import kernel

__all__ = ["hashes_of"]

Array = NDArray[Any]


def hashes_of(words: Any) -> Array:
    """Return the 32-bit hash of each string of an Arrow array of type string without nulls, as uint32."""
    hashes = np.empty(len(words), np.uint32)
    if len(words):
        _, offsets, content = words.buffers()
        bounds = np.frombuffer(offsets, np.int32)[words.offset : words.offset + len(words) + 1]
        text = np.frombuffer(content if content is not None and content.size else b"\0", np.uint8)
        _hash(text, bounds, hashes)
    return hashes


@kernel
def _hash(text: Array, bounds: Array, hashes: Array) -> None:
    for word in range(hashes.size):
        hashes[word] = murmur3(text, bounds[word], bounds[word + 1], np.uint64(0))
