"""Zstandard: files of one frame or several, by the package zstandard, which not everyone has."""

from __future__ import annotations

import io
import os
from typing import Any, BinaryIO

from sparseallreduce.errors import DatasetError

__all__ = ["ZSTD_MAGIC", "ZstdFile", "open_zstd"]

#: How a frame begins.
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_PIECE = 1 << 12  # bytes that are decompressed at once: they may become 128 MiB, but hardly ever do
_LARGEST_WINDOW = 1 << 31  # bytes: files of `zstd --long=31` have it


class ZstdFile(io.RawIOBase):
    """The decompressed bytes of a file, from its beginning to its end.

    Unlike the readers of zstandard itself it notices that a file is cut off.

    Parameters
    ----------
    file : binary file
        Open for reading. It is not closed with this one.

    Raises
    ------
    DatasetError
        If zstandard is not installed.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._zstandard = _zstandard(getattr(file, "name", "a file"))
        self._file = file
        self._frame: Any = None  # the decompressor of the frame that is read; None between two frames
        self._left = b""  # compressed bytes behind the end of the last frame
        self._ready = memoryview(b"")  # decompressed bytes that nobody has asked for yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, or a part of it; return how many bytes were read, 0 at the end.

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
    """Open a file to read what it holds decompressed, or to write into it what is then compressed.

    Raises
    ------
    DatasetError
        If zstandard is not installed.
    """
    if mode == "rb":
        return _Owning(open(path, "rb"))
    return _zstandard(path).open(path, mode)


class _Owning(io.BufferedReader):
    """A reader that closes the file that it was made of."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        super().__init__(ZstdFile(file))

    def close(self) -> None:
        super().close()
        self._file.close()


def _zstandard(path: object) -> Any:
    try:
        # Not everyone has it.
        import zstandard
    except ImportError:
        raise DatasetError(f"cannot open {path}: .zst takes zstandard: install sparseallreduce[zstd]") from None
    return zstandard
