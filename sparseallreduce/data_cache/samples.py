"""Samples as bytes, and back: numbers, strings, bytes and NumPy arrays, in tuples, lists and dictionaries.

An outline in JSON, which says what there is, and behind it the bytes of arrays; those that fill pages begin at one, so that they can be
mapped. Unlike a pickle it cannot run code when it is
read: other users may write to a folder on the disk. Whoever has other leaves (:mod:`sparseallreduce.torch`: tensors) says what arrays
they come to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.errors import DatasetError

__all__ = ["FromArray", "ToArray", "first_array", "pack", "unpack"]

#: Of a leaf that is none of those above, what it is called and the array that it is; None if it is not known.
ToArray = Callable[[Any], tuple[str, NDArray[Any]] | None]
FromArray = Callable[[str, NDArray[Any]], Any]

_ALIGNMENT, _PAGE = 64, 4096  # bytes
_HEAD = 8
_KINDS = "biufcSUmM"  # of dtypes that are their own bytes
_PLAIN = (type(None), bool, int, float, str)


def pack(sample: Any, to_array: ToArray = lambda _: None) -> list[Any]:
    """A sample as parts whose bytes follow each other.

    Raises
    ------
    DatasetError
        If there is something else in it.

    Examples
    --------
    >>> packed = b"".join(pack({"image": np.arange(3), "label": 7, "name": ("a", None)}))
    >>> unpack(np.frombuffer(packed, np.uint8))
    {'image': array([0, 1, 2]), 'label': 7, 'name': ('a', None)}
    """
    arrays: list[NDArray[Any]] = []
    outline = json.dumps(_outline(sample, arrays, to_array), separators=(",", ":")).encode()
    parts: list[Any] = [len(outline).to_bytes(_HEAD, "little"), outline]
    end = _HEAD + len(outline)
    for array in arrays:
        begin = _begin(end, array.nbytes)
        parts += [b"\0" * (begin - end), array.reshape(-1).view(np.uint8)]
        end = begin + array.nbytes
    return [part for part in parts if len(part)]


def unpack(content: NDArray[np.uint8], from_array: FromArray | None = None) -> Any:
    """The sample that some bytes are. Its arrays are views of them."""
    length = int.from_bytes(content[:_HEAD].tobytes(), "little")
    node = json.loads(content[_HEAD : _HEAD + length].tobytes())
    return _restored(node, content, [_HEAD + length], from_array)


def first_array(head: bytes, nbytes: int) -> int:
    """Where the first array begins in packed bytes that begin so, if it is of so many bytes."""
    return _begin(_HEAD + int.from_bytes(head[:_HEAD], "little"), nbytes)


def _outline(sample: Any, arrays: list[NDArray[Any]], to_array: ToArray) -> Any:
    """What JSON can say of a sample, whose arrays are added to the list. A list in it begins with what it stands for."""
    kind = type(sample)
    if kind in _PLAIN:
        return sample
    if kind in (list, tuple):
        return [kind.__name__, *(_outline(each, arrays, to_array) for each in sample)]
    if kind is dict:
        return ["dict", *(_outline(each, arrays, to_array) for pair in sample.items() for each in pair)]
    if kind in (bytes, bytearray):
        return _added("bytes", np.frombuffer(sample, np.uint8), arrays)
    if kind is np.ndarray or isinstance(sample, np.generic):
        array = np.asarray(sample)
        if array.dtype.kind in _KINDS and array.dtype.names is None:
            return _added("array" if kind is np.ndarray else "scalar", array, arrays)
    elif (known := to_array(sample)) is not None:
        return _added(*known, arrays)
    what = f"dtype {sample.dtype}" if kind is np.ndarray else f"a {kind.__module__}.{kind.__qualname__}"
    raise DatasetError(f"a sample with {what} in it cannot be cached: make numbers, strings, bytes, arrays or tensors of it before")


def _added(what: str, array: NDArray[Any], arrays: list[NDArray[Any]]) -> list[Any]:
    arrays.append(np.ascontiguousarray(array))
    return [what, array.dtype.str, *array.shape]


def _restored(node: Any, content: NDArray[np.uint8], end: list[int], from_array: FromArray | None) -> Any:
    """What an outline says; ``end`` is that of what has been read before, and moves on."""
    if not isinstance(node, list):
        return node
    what, *inside = node
    if what in ("list", "tuple", "dict"):
        parts = [_restored(each, content, end, from_array) for each in inside]
        return parts if what == "list" else tuple(parts) if what == "tuple" else dict(zip(parts[::2], parts[1::2]))
    dtype, shape = np.dtype(inside[0]), inside[1:]
    nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    begin = _begin(end[0], nbytes)
    end[0] = begin + nbytes
    array = content[begin : end[0]].view(dtype).reshape(shape)
    if what == "bytes":
        return array.tobytes()
    if what == "array":
        return array
    if what == "scalar":
        return array[()]
    if from_array is None:
        raise DatasetError(f"a cached sample has a {what} in it, which was cached by another kind of data set")
    return from_array(what, array)


def _begin(end: int, nbytes: int) -> int:
    """Where an array of so many bytes begins behind something."""
    alignment = _PAGE if nbytes and nbytes % _PAGE == 0 else _ALIGNMENT
    return -(-end // alignment) * alignment
