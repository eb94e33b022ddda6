"""The companion file of a binary file, for what the binary format cannot hold: the encoding of a table's columns, and class names.

``NAME.columns.json`` next to ``NAME`` holds ``encoding``, as :meth:`Encoding.to_json` writes it; ``classes``, the names of the labels 0, 1,
..., or null; and ``header``, the checksum of the binary file's first 192 bytes, so that it is ignored for another file of the same name.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any, NamedTuple

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.format import HEADER_BYTES
from sparseallreduce.linear.data.files import PathLike, Piped, first_bytes, readable
from sparseallreduce.linear.data.parts import COLUMNS_SUFFIX, Source
from sparseallreduce.linear.encoding import Encoding

__all__ = ["Companion", "companion_of", "write_columns"]

_MOST = 1 << 30  # largest size of a companion file, in bytes


class Companion(NamedTuple):
    """The encoding of the samples of a binary file."""

    encoding: Encoding
    classes: tuple[str, ...] | None


def write_columns(path: PathLike, encoding: Encoding, classes: list[str] | None) -> None:
    """Write the companion file of a complete binary file. Called by one rank."""
    content = {"encoding": json.loads(encoding.to_json()), "classes": classes, "header": _header(path)}
    with atomic_file(f"{os.fspath(path)}{COLUMNS_SUFFIX}", "w") as file:
        json.dump(content, file, ensure_ascii=False)


def companion_of(source: Source, comm: Any) -> Companion | None:
    """Return the encoding of binary files, or None if they have none in common. Collective over ``comm``.

    Raises
    ------
    DatasetError
        On every rank, if a companion file is damaged.
    """
    found = source.each(comm, _companion)
    return found[0] if all(each == found[0] for each in found) else None


def _companion(path: PathLike) -> Companion | None:
    name = f"{os.fspath(path)}{COLUMNS_SUFFIX}"
    if isinstance(path, Piped) or not os.path.exists(name):
        return None
    with readable(name), open(name, "rb") as file:
        content = file.read(_MOST)
    try:
        found = json.loads(content)
        if found["header"] != _header(path):
            return None
        classes = found["classes"]
        if classes is not None and not all(isinstance(name, str) for name in classes):
            raise ValueError("classes are not names")
        return Companion(Encoding.from_json(json.dumps(found["encoding"])), None if classes is None else tuple(classes))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(f"cannot read {name}: {error}; remove it, or convert the table again") from None


def _header(path: PathLike) -> int:
    return zlib.crc32(first_bytes(path, HEADER_BYTES))
