"""Codecs from outside the library: ``register_codec``."""

from __future__ import annotations

from typing import Any, cast

from sparseallreduce.errors import AlgorithmError
from sparseallreduce.streams.wire.codecs import INDEX_CODECS, INDEX_NAMES, VALUE_NAMES, IndexCodec
from sparseallreduce.streams.wire.values import BIASED, VALUE_CODECS, ValueCodec

__all__ = ["OWN_NUMBERS", "register_codec"]

OWN_NUMBERS = 128  # codecs of the library have numbers below this one
_LARGEST = 255  # a frame has one byte for it
_INDEX_METHODS = ("bytes_each", "bound", "write", "read")


def register_codec(codec: ValueCodec | IndexCodec, *, biased: bool = False) -> None:
    """Add a codec by its ``name``, which ``value_codec=`` or ``index_codec=`` of every operation then takes.

    All ranks have to register the codecs that they use, before the first operation that does. A package can register its codecs without a
    call, by entry points of the group ``sparseallreduce.codecs``.

    Parameters
    ----------
    codec : ValueCodec or IndexCodec
        An instance of a subclass of :class:`~sparseallreduce.streams.wire.values.ValueCodec`, or one with the methods of
        :class:`~sparseallreduce.streams.wire.codecs.IndexCodec`. Its ``name`` is a Python identifier, and its ``number``, from 128 to 255,
        stands for it in messages. A registered codec of the same name and number is replaced.
        :func:`sparseallreduce.testing.check_codec` tests a codec.
    biased : bool
        Whether the values that receivers decode are wrong on the mean. Such a codec of values is for reducers with error feedback alone.

    Raises
    ------
    AlgorithmError
        If it is no codec, or its name or number is taken or out of range.
    """
    kind, by_number = "values", cast("dict[int, Any]", VALUE_CODECS)
    if not isinstance(codec, ValueCodec):
        kind, by_number = "positions", cast("dict[int, Any]", INDEX_CODECS)
    if kind == "positions" and not all(callable(getattr(codec, method, None)) for method in _INDEX_METHODS):
        methods = ", ".join(_INDEX_METHODS)
        raise AlgorithmError(f"a codec is a ValueCodec, or an object with the methods {methods}, not {type(codec).__name__}")
    name, number = getattr(codec, "name", None), getattr(codec, "number", None)
    if not isinstance(name, str) or not name.isidentifier() or name in ("exact", "auto"):
        raise AlgorithmError(f"the name of a codec is a Python identifier, neither exact nor auto, not {name!r}")
    if not isinstance(number, int) or not OWN_NUMBERS <= number <= _LARGEST:
        raise AlgorithmError(f"the number of a registered codec is an integer from {OWN_NUMBERS} to {_LARGEST}, not {number!r}")
    for known in by_number.values():
        if (known.name == name) != (known.number == number):
            raise AlgorithmError(f"there is a codec of {kind} {known.name!r} with number {known.number}: choose another name and number")
    by_number[number] = codec
    if kind == "positions":
        names = INDEX_NAMES
    else:
        names = VALUE_NAMES
        for listed in (BIASED, VALUE_NAMES):
            if name in listed:
                listed.remove(name)
        if biased:
            BIASED.append(name)
            return
    if name not in names:
        names.append(name)
