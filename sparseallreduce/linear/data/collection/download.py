"""A downloader for pooch that resumes an interrupted transfer, in the same run or in a later one.

Received data are stored in a file with the suffix ``.part``, with the server's version of the file (ETag or Last-Modified) in
``.part.version``. The rest is requested on condition that the version is the same: otherwise, and from a server that does not support
ranges, the whole file is transferred again.

If a server does not send the length of a file, a connection may have ended too early. The data must then be complete
compressed streams, or text whose last line has a newline.
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

_ATTEMPTS = 5  # number of consecutive attempts without progress after which to fail
_PAUSE = 1.0  # seconds before the next attempt, doubled after each without progress
_TIMEOUT = (10.0, 60.0)  # seconds to connect, and between two bytes
_PIECE = 1 << 16  # bytes per write; an interrupted connection loses the last piece
_UNPACKED = 1 << 20  # bytes decompressed in one call
_VERSION = re.compile(r"[ -~]{1,1000}")  # allowed version strings of servers


class AbsentError(DatasetError):
    """Raised if the server does not have the file."""


class _BrokenError(Exception):
    """Raised if the transfer ended too early, for a reason that may be temporary."""


class Secure(requests.Session):
    """A session that refuses redirects from an encrypted to an unencrypted connection."""

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Return the target of a redirect.

        Raises
        ------
        DatasetError
            If a server contacted by HTTPS redirects to another protocol.
        """
        target = super().get_redirect_target(resp)
        if target is not None and urlsplit(resp.url).scheme == "https":
            absolute = urljoin(resp.url, target)
            if urlsplit(absolute).scheme != "https":
                what = "which is not encrypted, so that anyone on the way could alter it"
                raise DatasetError(f"cannot fetch {resp.url}: the server redirects to {absolute}, {what}: choose another --mirror")
        return target


class Downloader:
    """A ``downloader`` for ``pooch`` that resumes interrupted transfers.

    Parameters
    ----------
    part : Path
        File for the data received so far.
    on_received : callable, optional
        Function called with the number of bytes received, and the total if known.
    """

    def __init__(self, part: Path, on_received: Callable[[int, int | None], object] | None = None) -> None:
        self._part, self._version = part, part.with_name(f"{part.name}.version")
        self._on_received = on_received

    def __call__(self, url: str, output_file: str, pooch: Any = None, check_only: bool = False) -> None:
        """Fetch a file; the arguments are those that pooch passes.

        Raises
        ------
        DatasetError
            If it cannot be fetched; received data are kept for the next call.
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
                    kept = f"; the {self._received()} bytes received are kept for the next time" if self._received() else ""
                    raise DatasetError(f"cannot fetch {url}: {_reason(error)}{kept}") from None
                time.sleep(_PAUSE * 2**failures)
        publish(self._part, Path(output_file))
        self._version.unlink(missing_ok=True)

    def _received(self) -> int:
        return self._part.stat().st_size if self._part.exists() else 0

    def _transfer(self, url: str) -> None:
        """Receive the rest of the file, or as much as the connection allows."""
        have, version = self._received(), self._known_version()
        headers = {"Accept-Encoding": "identity"}  # byte ranges have to refer to the file itself
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
            raise _BrokenError(f"the connection ended after {have} bytes, in the middle of the file, whose length the server did not send")

    def _known_version(self) -> str | None:
        """Return the server's version of the received data, or None if it is unknown."""
        try:
            version = read_bytes(self._version, 1000).decode()
        except (OSError, Damaged, UnicodeDecodeError):
            return None
        return version if _VERSION.fullmatch(version) else None

    def _begin(self, url: str, have: int, response: requests.Response) -> tuple[int, int | None]:
        """Return the position from which the file is sent, and its total length."""
        if response.status_code in (404, 410):
            raise AbsentError(f"cannot fetch {url}: {response.status_code} {response.reason}")
        sent = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+)", response.headers.get("Content-Range", ""))
        if response.status_code == 416 and sent and int(sent[2]) == have:
            return have, have
        if response.status_code in (206, 416):
            if response.status_code == 206 and sent and int(sent[1] or -1) == have:
                return have, int(sent[2])
            self._version.unlink(missing_ok=True)  # the next attempt starts from the beginning
            raise _BrokenError(f"the server does not continue from byte {have}")
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
    """Return True if a file of this suffix is complete: it ends with a compressed stream, or a newline."""
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
    """Return the innermost cause of an error, without the wrappers of libraries."""
    while error.__context__ is not None and isinstance(error.__context__, Exception):
        error = error.__context__
    return str(error).rstrip(".") or type(error).__name__
