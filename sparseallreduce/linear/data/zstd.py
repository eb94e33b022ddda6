"""Zstandard files with one or several frames, read with the optional package zstandard."""

from __future__ import annotations

import io
import os
from typing import Any, BinaryIO

from sparseallreduce.errors import DatasetError

__all__ = ["ZSTD_MAGIC", "ZstdFile", "open_zstd"]

#: First bytes of a frame.
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PIECE = 1 << 12  # bytes decompressed in one call, which could give 128 MiB, but hardly ever do
_LARGEST_WINDOW = 1 << 31  # bytes, for files of `zstd --long=31`


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of a file, from start to end.

    Unlike the readers of zstandard itself it detects a truncated file.

    Parameters
    ----------
    file : binary file
        File open for reading. It is not closed with this object.

    Raises
    ------
    DatasetError
        If zstandard is not installed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._zstandard = _zstandard(getattr(file, "name", "a file"))
        self._file = file
        self._frame: Any = None  # the decompressor of the current frame; None between two frames
        self._left = b""  # compressed bytes after the end of the last frame
        self._ready = memoryview(b"")  # decompressed bytes that have not been read yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or a part of it; return the number of bytes read, 0 at the end.

        Raises
        ------
        OSError
            If the file is damaged.
        EOFError
            If it ends within a frame.
        """
        while not self._ready:
            compressed = self._left or self._file.read(_PIECE)
            self._left = b""
            if not compressed:
                if self._frame is not None:
                    raise EOFError("Compressed file ended before the end-of-stream marker was reached")
                return 0
            self._ready = memoryview(self._decompressed(compressed))
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompressed(self, compressed: bytes) -> bytes:
        try:
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()
            content: bytes = self._frame.decompress(compressed)
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
        except self._zstandard.ZstdError as error:
            raise OSError(str(error)) from None
        return content


def open_zstd(path: str | os.PathLike[str], mode: str) -> Any:
    """Open a file to read its decompressed content, or to write content that is compressed.

    Raises
    ------
    DatasetError
        If zstandard is not installed.
    """
    if mode == "rb":
        return _Owning(open(path, "rb"))
    return _zstandard(path).open(path, mode)


class _Owning(io.BufferedReader):
    """A reader that closes its underlying file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        super().__init__(ZstdFile(file))

    def close(self) -> None:
        super().close()
        self._file.close()


def _zstandard(path: object) -> Any:
    try:
        # An optional dependency.
        import zstandard
    except ImportError:
        raise DatasetError(f"cannot open {path}: .zst needs zstandard: install sparseallreduce[zstd]") from None
    return zstandard
