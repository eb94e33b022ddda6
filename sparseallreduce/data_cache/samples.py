"""Encode samples to bytes and back: numbers, strings, bytes and NumPy arrays, in tuples, lists and dictionaries.

The format is an outline in JSON, followed by the bytes of arrays; arrays that fill whole pages are page-aligned, so that they can be
mapped. Unlike a pickle it cannot execute code when read, which matters because other users may write to a folder on the disk. Callers with
other leaves (:mod:`sparseallreduce.torch`: tensors) pass functions that convert them to arrays.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.checked_file import Damaged, parse_json
from sparseallreduce.checked_npz import has_characters
from sparseallreduce.errors import DatasetError

__all__ = ["FromArray", "ToArray", "first_array", "pack", "unpack"]

#: Returns a name and an array for a leaf of another type; None if the type is unknown.
ToArray = Callable[[Any], tuple[str, NDArray[Any]] | None]
FromArray = Callable[[str, NDArray[Any]], Any]

_ALIGNMENT, _PAGE = 64, 4096  # bytes
_HEAD = 8
_KINDS = "biufcSUmM"  # kinds of dtypes whose items are plain bytes
_PLAIN = (type(None), bool, int, float, str)
_DTYPE = re.compile(rf"[<>|][{_KINDS}][0-9]{{1,9}}(\[[0-9]*[a-zA-Zμ]*\])?")  # description of such a dtype


def pack(sample: Any, to_array: ToArray = lambda _: None) -> list[Any]:
    """Encode a sample as parts to be concatenated.

    Raises
    ------
    DatasetError
        If the sample contains an unsupported type.

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
    """Decode a sample. Its arrays are views of the bytes.

    Raises
    ------
    Damaged
        If the bytes are not a complete sample.
    DatasetError
        If it contains leaves that need ``from_array``.
    """
    length = int.from_bytes(content[:_HEAD].tobytes(), "little")
    if _HEAD + length > len(content):
        raise Damaged(f"an outline of {length:,} bytes is more than it has")
    node, end = parse_json(content[_HEAD : _HEAD + length].tobytes()), [_HEAD + length]
    try:
        sample = _restored(node, content, end, from_array)
    except RecursionError as error:
        raise Damaged(str(error)) from None
    if end[0] != len(content):
        raise Damaged(f"it has {len(content):,} bytes, and its outline tells of {end[0]:,}")
    return sample


def first_array(head: bytes, nbytes: int) -> int:
    """Return the offset of the first array, of ``nbytes`` bytes, in packed bytes that start with ``head``."""
    return _begin(_HEAD + int.from_bytes(head[:_HEAD], "little"), nbytes)


def _outline(sample: Any, arrays: list[NDArray[Any]], to_array: ToArray) -> Any:
    """Return the JSON form of a sample, and append its arrays to the list. A list in it starts with the name of its type."""
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
    """Return the sample of an outline; ``end`` is the end of what has been read, and is advanced."""
    if type(node) in _PLAIN:
        return node
    if not isinstance(node, list) or not node or not isinstance(node[0], str):
        raise Damaged("its outline is none of a sample")
    what, *inside = node
    if what in ("list", "tuple", "dict"):
        parts = [_restored(each, content, end, from_array) for each in inside]
        return parts if what == "list" else tuple(parts) if what == "tuple" else _dictionary(parts)
    array = _array(inside, content, end)
    if what == "bytes":
        return array.tobytes()
    if what == "array":
        return array
    if what == "scalar":
        if array.ndim:
            raise Damaged(f"its outline has a scalar of {array.ndim} dimensions")
        return array[()]
    if from_array is None and " " not in what:  # the name of a leaf type
        raise Damaged(f"its outline has a {what!r:.40}")
    if from_array is None:
        raise DatasetError(f"a cached sample has a {what} in it, which was cached by another kind of data set")
    return from_array(what, array)


def _dictionary(parts: list[Any]) -> dict[Any, Any]:
    try:
        return dict(zip(parts[::2], parts[1::2], strict=True))
    except (TypeError, ValueError) as error:  # an unhashable key, or a key without a value
        raise Damaged(f"its outline has a dictionary with a fault: {error}") from None


def _array(described: list[Any], content: NDArray[np.uint8], end: list[int]) -> NDArray[Any]:
    """Return the array that an outline describes by dtype and shape, and that follows what has been read."""
    name, shape = described[:1], described[1:]
    if not (name and isinstance(name[0], str) and _DTYPE.fullmatch(name[0]) and all(type(each) is int and each >= 0 for each in shape)):
        raise Damaged(f"its outline has an array of {described!r:.60}")
    try:
        dtype = np.dtype(name[0])
        begin = _begin(end[0], nbytes := dtype.itemsize * math.prod(shape))
        if begin + nbytes > len(content):
            raise Damaged(f"its outline has an array of {nbytes:,} bytes at {begin:,}, of {len(content):,} in all")
        end[0] = begin + nbytes
        items = content[begin : end[0]].view(dtype)
        if not has_characters(items):
            raise Damaged("it has strings of what are no characters")
        return items.reshape(shape)
    except (TypeError, ValueError) as error:
        raise Damaged(f"its outline has an array that cannot be: {error}") from None


def _begin(end: int, nbytes: int) -> int:
    """Return the offset of an array of ``nbytes`` bytes after ``end``."""
    alignment = _PAGE if nbytes and nbytes % _PAGE == 0 else _ALIGNMENT
    return -(-end // alignment) * alignment
