"""A downloader for pooch that takes up a broken transfer where it broke, in this run or in a later one.

What has come so far lies in a file with the suffix ``.part``, and beside it, in ``.part.version``, what the server calls this version of
the file (ETag or Last-Modified). The rest is asked for on condition that the version is still the same: otherwise, and from a server that
cannot send a part of a file, the whole file comes anew.

Where a server does not say how long the file is, a connection that ends may have ended too early. What has come must then be a whole
compressed stream, or text whose last line has an end.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import requests

from sparseallreduce.atomic_file import atomic_file, clear_special, publish
from sparseallreduce.checked_file import Damaged, read_bytes
from sparseallreduce.errors import DatasetError

__all__ = ["AbsentError", "Downloader", "Secure"]

_ATTEMPTS = 5  # in a row that bring nothing
_PAUSE = 1.0  # seconds before the next attempt, and twice as long after each that brought nothing
_TIMEOUT = (10.0, 60.0)  # seconds to connect, and without a byte
_PIECE = 1 << 16  # bytes written at once, of which a broken connection loses the last
_UNPACKED = 1 << 20  # bytes that are decompressed at once
_VERSION = re.compile(r"[ -~]{1,1000}")  # what a server may call a version of a file


class AbsentError(DatasetError):
    """The server has no such file."""


class _BrokenError(Exception):
    """The transfer ended too early, for a reason that may pass."""


class Secure(requests.Session):
    """A session that no server leads from an encrypted connection to one that is not."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Where a response sends the client.

        Raises
        ------
        DatasetError
            If that is another protocol than HTTPS, from a server that was asked by it.
        """
        target = super().get_redirect_target(resp)
        if target is not None and urlsplit(resp.url).scheme == "https":
            absolute = urljoin(resp.url, target)
            if urlsplit(absolute).scheme != "https":
                what = "which is not encrypted, so that anyone on the way could alter it"
                raise DatasetError(f"cannot fetch {resp.url}: the server sends us to {absolute}, {what}: choose another --mirror")
        return target


class Downloader:
    """What ``pooch`` takes as a ``downloader``.

    Parameters
    ----------
    part : Path
        Where to keep what has come so far.
    on_received : callable, optional
        Called with how many bytes there are, and how many there will be, if known.
    """

    def __init__(self, part: Path, on_received: Callable[[int, int | None], object] | None = None) -> None:
        self._part, self._version = part, part.with_name(f"{part.name}.version")
        self._on_received = on_received

    def __call__(self, url: str, output_file: str, pooch: Any = None, check_only: bool = False) -> None:
        """Fetch a file; the arguments are those with which pooch calls.

        Raises
        ------
        DatasetError
            If it cannot be had; what has come stays for the next time.
        """
        clear_special(self._part)
        most, failures = self._received(), 0
        while True:
            try:
                self._transfer(url)
                break
            except (_BrokenError, requests.RequestException) as error:
                failures = 0 if self._received() > most else failures + 1
                most = max(most, self._received())
                if failures == _ATTEMPTS:
                    kept = f"; the {self._received()} bytes that have come are kept for the next time" if self._received() else ""
                    raise DatasetError(f"cannot fetch {url}: {_reason(error)}{kept}") from None
                time.sleep(_PAUSE * 2**failures)
        publish(self._part, Path(output_file))
        self._version.unlink(missing_ok=True)

    def _received(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _transfer(self, url: str) -> None:
        """Bring the part up to the whole file, or as far as the connection lasts."""
        have, version = self._received(), self._known_version()
        headers = {"Accept-Encoding": "identity"}  # so that bytes are those of the file
        if have and version is not None:
            headers |= {"Range": f"bytes={have}-", "If-Range": version}
        with Secure() as session, session.get(url, headers=headers, stream=True, timeout=_TIMEOUT) as response:
            have, total = self._begin(url, have, response)
            if have == total and have:
                return
            with self._part.open("r+b" if have else "wb") as file:
                file.seek(have)
                for piece in response.iter_content(_PIECE):
                    file.write(piece)
                    have += len(piece)
                    if self._on_received is not None:
                        self._on_received(have, total)
        if total is not None and have != total:
            raise _BrokenError(f"the connection ended after {have} of {total} bytes")
        if total is None and not _ends(self._part, Path(urlsplit(url).path).suffix):
            raise _BrokenError(f"the connection ended after {have} bytes, in the middle of the file, whose length the server does not say")

    def _known_version(self) -> str | None:
        """What the server has called the version of what has come so far, None if that is not known."""
        try:
            version = read_bytes(self._version, 1000).decode()
        except (OSError, Damaged, UnicodeDecodeError):
            return None
        return version if _VERSION.fullmatch(version) else None

    def _begin(self, url: str, have: int, response: requests.Response) -> tuple[int, int | None]:
        """From where on the file comes, and how long it is in all."""
        if response.status_code in (404, 410):
            raise AbsentError(f"cannot fetch {url}: {response.status_code} {response.reason}")
        sent = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", response.headers.get("Content-Range", ""))
        if response.status_code == 416 and sent and int(sent[2]) == have:
            return have, have
        if response.status_code in (206, 416):
            if response.status_code == 206 and sent and int(sent[1] or -1) == have:
                return have, int(sent[2])
            self._version.unlink(missing_ok=True)  # from the beginning, then
            raise _BrokenError(f"the server does not go on from byte {have}")
        if 400 <= response.status_code < 500:
            raise DatasetError(f"cannot fetch {url}: {response.status_code} {response.reason}")
        response.raise_for_status()
        tag = response.headers.get("ETag", "")
        version = tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified")
        if version and _VERSION.fullmatch(version):
            with atomic_file(self._version, "w", own=True) as file:
                file.write(version)
        else:
            self._version.unlink(missing_ok=True)
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if re.fullmatch(r"[0-9]{1,18}", length) else None


def _ends(path: Path, suffix: str) -> bool:
    """Whether a file ends where one of this suffix may end: behind compressed streams, or a line."""
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    opener = openers.get(suffix)
    if opener is None:
        with path.open("rb") as text:
            text.seek(max(0, text.seek(0, os.SEEK_END) - 1))
            return text.read() == b"\n"
    try:
        with opener(path) as file:
            while file.read(_UNPACKED):
                pass
    except (EOFError, OSError, lzma.LZMAError, zlib.error):
        return False
    return path.stat().st_size > 0


def _reason(error: Exception) -> str:
    """The innermost cause, without the wrappers that libraries put around it."""
    while error.__context__ is not None and isinstance(error.__context__, Exception):
        error = error.__context__
    return str(error).rstrip(".") or type(error).__name__
