"""Dictionaries of hashed features, from words of a text to features, as written by Vowpal Wabbit's ``--invert_hash``.

A dictionary is a text file with a line ``index<TAB>name`` for each name, in the order of indices from 0; names with the same hash have
separate lines. The file that ``vw --invert_hash`` writes can be read too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

import numpy as np

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear.data.formats import format_of
from sparseallreduce.linear.data.line_blocks import NUMBER, shared_line_blocks
from sparseallreduce.linear.data.parts import Data, source_of
from sparseallreduce.linear.data.reading import Reading, naming_option
from sparseallreduce.linear.data.vowpal_wabbit.reader import parsed
from sparseallreduce.runtime.objects import agreed, collective, gather

__all__ = ["feature_names", "read_names", "write_names"]

_HASHED = ("vw", "text")
_BY_NAME = Reading()
_AT_ONCE = 1 << 16  # number of names hashed in one call
_BLANKS = re.compile(rb"[ \t\r]+")
_INVERTED = re.compile(r"(.*):([0-9]+):[^:]+")  # a line of vw --invert_hash: name, feature, weight


@collective
def feature_names(data: Data, comm: Any, features: int, reading: Reading = _BY_NAME) -> dict[str, int]:
    """Return the feature of each name in files of hashed features, on rank 0, and nothing on other ranks. Collective.

    Names are the words of plain text, ``namespace^feature`` of Vowpal Wabbit's text, and ``namespace^feature^word`` of its categories. The
    files are read again for that.

    Parameters
    ----------
    data : path or sequence of paths
        As for :func:`~sparseallreduce.linear.load`, except pipes.
    comm : communicator
    features : int
        Number of features, a power of two.
    reading : Reading, optional
        Options with which the files were read, if they were not read by their names.

    Raises
    ------
    DatasetError
        On every rank, if the files have another format, are pipes, or cannot be read.
    """
    with source_of(data, comm) as source:
        if source.piped:
            raise naming_option(f"{source} can be read only once, but {{option}} reads it again: give a file", "names", "--names")
        chosen = format_of(source, reading, comm)
        if chosen not in _HASHED:
            reason = f"{source} has the format {chosen}, but {{option}} is for formats with hashed features, {' and '.join(_HASHED)}"
            raise naming_option(reason, "names", "--names")
        words, numbered = _words_of(chosen, features)

        def own() -> dict[str, int]:
            found: set[Any] = set()
            with closing(shared_line_blocks(source, comm)) as blocks:
                for block in blocks:
                    found.update(words(block.text))
            return numbered(found)

        ranks = gather(comm, agreed(comm, own))
    names: dict[str, int] = {}
    for each in ranks if comm.rank == 0 else []:
        names |= each
    return names


def _words_of(chosen: str, features: int) -> tuple[Callable[[bytes], Iterable[Any]], Callable[[set[Any]], dict[str, int]]]:
    """Return a function that finds the words of a text, and one that numbers them."""
    if chosen == "vw":
        return _namespace_words, lambda found: _numbered_vw(sorted(found), features.bit_length() - 1)
    from sklearn.feature_extraction.text import HashingVectorizer  # imported on demand, because it takes two seconds to load

    vectorizer = HashingVectorizer(n_features=features, norm=None, alternate_sign=False)
    analyze = vectorizer.build_analyzer()

    def words(text: bytes) -> Iterable[str]:
        found: list[str] = analyze("\n".join(line.partition(b"\t")[2].decode() for line in text.split(b"\n")))
        return found

    def numbered(found: set[str]) -> dict[str, int]:
        listed = sorted(found)
        return dict(zip(listed, vectorizer.transform(listed).indices.tolist(), strict=True)) if listed else {}

    return words, numbered


def _namespace_words(text: bytes) -> set[tuple[bytes, bytes]]:
    """Return namespaces and features of lines, without numeric values; unnamed features are their number after a colon."""
    found: set[tuple[bytes, bytes]] = set()
    for line in text.split(b"\n"):
        for part in line.split(b"|")[1:]:
            words = _BLANKS.split(part)
            namespace = words[0].partition(b":")[0]
            unnamed = 0
            for word in words[1:]:
                name, colon, value = word.partition(b":")
                number = not colon or NUMBER.fullmatch(value) is not None
                if colon and not name:
                    found.add((namespace, b":%d" % unnamed))
                    unnamed += 1
                elif word:
                    found.add((namespace, name if number else word))
    return found


def _numbered_vw(found: list[tuple[bytes, bytes]], bits: int) -> dict[str, int]:
    """Return the features of words, by parsing a text with one line per word."""
    names: dict[str, int] = {}
    for first in range(0, len(found), _AT_ONCE):
        some = found[first : first + _AT_ONCE]
        text = b"".join(b"1 |%s %s\n" % (namespace, b":1" if word.startswith(b":") else word) for namespace, word in some)
        rows = parsed(text, bits, False, np.dtype(np.float32))
        for (namespace, word), index in zip(some, rows.indices.tolist(), strict=True):
            unnamed = word.startswith(b":")  # unnamed features are numbered from the first one on
            parts = [namespace, b"[%s]" % word[1:]] if unnamed else [namespace, *word.split(b":", 1)]
            name = "^".join(part.decode(errors="backslashreplace") for part in parts if part)
            names[name] = (index + int(word[1:])) % (1 << bits) if unnamed else index
    return names


def write_names(path: str | os.PathLike[str], names: dict[str, int]) -> None:
    """Write a dictionary, which appears under its name when it is complete. Raise OSError on failure."""
    with atomic_file(path, "w") as file:
        file.writelines(f"{index}\t{name}\n" for name, index in sorted(names.items(), key=lambda each: (each[1], each[0])))


def read_names(path: str | os.PathLike[str]) -> dict[int, str]:
    """Return the name of each feature, counted from 0, in a dictionary; names with the same hash are joined by "or".

    Raises
    ------
    DatasetError
        If the file does not exist, or has a line that is not one of a dictionary.
    """
    found: dict[int, list[str]] = {}
    inverted = False
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            for number, line in enumerate(file, 1):
                line = line.rstrip("\n")
                index, tab, name = line.partition("\t")
                match = None if tab else _INVERTED.fullmatch(line)
                if tab and index.isdecimal():
                    found.setdefault(int(index), []).append(name)
                elif match is not None:
                    inverted = True
                    found.setdefault(int(match[2]), []).append(match[1])
                elif line and found and not inverted:
                    raise DatasetError(f"{path}, line {number}, is not a line of a dictionary, index<TAB>name: {line[:60]!r}")
    except OSError as error:
        raise DatasetError(f"cannot read the names in {path}: {error.strerror}") from None
    if not found:
        raise DatasetError(f"{path} is not a dictionary of names, with lines index<TAB>name or those of vw --invert_hash")
    return {index: " or ".join(names) for index, names in found.items()}
