"""Detection of files that are given as text but are not: archives, UTF-16, and others that their first bytes identify."""

from __future__ import annotations

import re
from pathlib import PurePath

from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.binary.format import MAGIC
from sparseallreduce.linear.data.files import PathLike
from sparseallreduce.linear.data.line_blocks import opened_text
from sparseallreduce.linear.data.reading import what_is_read

__all__ = ["check_text"]

_HEAD = 512  # number of bytes to examine: tar archives have their name at byte 257
_UNPACK = "unpack it, and give the files in it"
_DECOMPRESS = "decompress it, or compress it by gzip, bzip2, xz or zstd instead"
_TAR = "a tar archive"

# Formats by the first bytes of a file, and the remedy.
_BEGINNINGS: dict[bytes, tuple[str, str]] = {
    b"PK\x03\x04": ("a zip archive", _UNPACK),
    b"PK\x05\x06": ("a zip archive", _UNPACK),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    b"Rar!\x1a\x07": ("a RAR archive", _UNPACK),
    b"!<arch>\n": ("an ar archive", _UNPACK),
    b"\x1f\x9d": ("compressed by compress", _DECOMPRESS),
    b"\x04\x22\x4d\x18": ("compressed by lz4", _DECOMPRESS),
    b"LZIP": ("compressed by lzip", _DECOMPRESS),
    b"\x89LZO": ("compressed by lzop", _DECOMPRESS),
    b"\xff\x06\0\0sNaPpY": ("compressed by snappy", _DECOMPRESS),
    b"\x5d\0\0": ("compressed by lzma", _DECOMPRESS),
    b"PAR1": ("a Parquet file", "give it a name that ends in .parquet"),
    b"\x93NUMPY": ("an array of NumPy", "write compressed rows by scipy.sparse.save_npz"),
    b"\x89HDF\r\n\x1a\n": ("an HDF5 file", "write its samples as svmlight text, .npz or Parquet"),
    b"Obj\x01": ("an Avro file", "write its samples as svmlight text, .npz or Parquet"),
    b"ORC": ("an ORC file", "write its samples as svmlight text, .npz or Parquet"),
    MAGIC: ("our binary format, compressed", "decompress it"),
}
# Formats by the end of a file's name, and the remedy.
_ENDINGS: dict[str, tuple[str, str]] = {
    ".zip": ("a zip archive", _UNPACK),
    ".7z": ("a 7z archive", _UNPACK),
    ".rar": ("a RAR archive", _UNPACK),
    **dict.fromkeys((".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst"), (_TAR, _UNPACK)),
    **{
        ending: (f"compressed by {name}", _DECOMPRESS)
        for ending, name in ((".z", "compress"), (".lz4", "lz4"), (".lz", "lzip"), (".lzo", "lzop"), (".lzma", "lzma"))
    },
    **{ending: (f"compressed by {name}", _DECOMPRESS) for ending, name in ((".br", "brotli"), (".snappy", "snappy"), (".sz", "snappy"))},
}
# Unsupported formats of samples by the end of a file's name.
_UNREAD: dict[str, str] = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "JSON"),
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "a spreadsheet"),
    **dict.fromkeys((".h5", ".hdf5"), "HDF5"),
    **dict.fromkeys((".pkl", ".pickle"), "a pickle"),
    ".orc": "ORC",
    ".avro": "Avro",
    ".dta": "of Stata",
    ".sav": "of SPSS",
    ".sas7bdat": "of SAS",
    ".arff": "ARFF",
    ".mat": "of MATLAB",
}
_PRINTED = re.compile(rb"[\x09-\x0d\x20-\x7e]")  # if this follows an alphanumeric signature, the file is text that starts with that word
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_WIDE = (b"\xff\xfe\0\0", b"\0\0\xfe\xff", b"\xff\xfe", b"\xfe\xff")  # byte-order marks of UTF-32 and UTF-16


def check_text(path: PathLike, declared: bool) -> None:
    """Raise an error for a file to be read as text that is something else by its first bytes, compressed or not, or by its name.

    Parameters
    ----------
    path : path
    declared : bool
        Whether the user has declared it to be text, so that its name does not matter.

    Raises
    ------
    DatasetError
        With what the file is and the remedy, or if it cannot be read.
    """
    with opened_text(path) as text:
        head = text.read(_HEAD)
    found = _by_content(head) or (None if declared or not head else _by_name(str(path)))
    if found is not None:
        what, remedy = found
        raise DatasetError(f"cannot read {path}: it is {what}: {remedy}")


def _by_content(head: bytes) -> tuple[str, str] | None:
    if head.startswith(b"PK\x03\x04") and b".npy" in head[30:80]:
        return "a file of NumPy's arrays", "give it a name that ends in .npz"
    if head[257:262] == b"ustar":
        return _TAR, _UNPACK
    for beginning, found in _BEGINNINGS.items():
        if head.startswith(beginning) and not (beginning.isalnum() and _PRINTED.match(head, len(beginning))):
            return found
    encoding = _encoding(head)
    if encoding is not None:
        return f"text in {encoding}", f"write it in UTF-8, as by iconv -f {encoding} -t UTF-8"
    return None


def _encoding(head: bytes) -> str | None:
    """Return the encoding of text with characters of two or four bytes, or None for other text."""
    mark = next((mark for mark in _WIDE if head.startswith(mark)), None)
    if mark is not None:
        return "UTF-32" if len(mark) == 4 else "UTF-16"
    # Without a byte-order mark, every other byte is zero.
    shown = head[: min(len(head), 64) // 4 * 4]
    if len(shown) >= 8:
        for name, pattern in (("UTF-16LE", rb"([^\0]\0)+"), ("UTF-16BE", rb"(\0[^\0])+")):
            if re.fullmatch(pattern, shown, re.DOTALL):
                return name
        for name, pattern in (("UTF-32LE", rb"([^\0]\0\0\0)+"), ("UTF-32BE", rb"(\0\0\0[^\0])+")):
            if re.fullmatch(pattern, shown, re.DOTALL):
                return name
    return None


def _by_name(name: str) -> tuple[str, str] | None:
    lower = PurePath(name).name.lower()
    for suffix in _COMPRESSED:
        lower = lower.removesuffix(suffix)
    known = next((found for ending, found in _ENDINGS.items() if lower.endswith(ending)), None)
    unread = next((what for ending, what in _UNREAD.items() if lower.endswith(ending)), None)
    return known if unread is None else (f"{unread}, by its name", what_is_read())
