"""Malformed data files of every kind, each with what the error has to say: the cases of a test, and a table.

python tests/malformed.py
"""

import bz2
import gzip
import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import sparseallreduce as sar
from sparseallreduce.linear import DatasetError, load, two_classes

FEATURES = 10
GOOD = b"1 1:1 5:0.25\n-1 2:1\n" * 20


class Malformed(NamedTuple):
    kind: str
    content: bytes | None  # of the file; None: there is none
    says: str  # what the error has to say besides the name of the file
    name: str = "bad.svm"

    def write(self, folder: Path) -> Path:
        path = folder / self.name
        if self.content is not None:
            path.write_bytes(self.content)
        return path


def _line(kind: str, line: str | bytes, says: str) -> Malformed:
    """A bad line in the middle of good ones."""
    return Malformed(kind, GOOD + (line if isinstance(line, bytes) else line.encode()) + b"\n" + GOOD, f", line 41: {says}")


def _cut(compress: Callable[[bytes], bytes]) -> bytes:
    whole = compress(GOOD * 50)
    return whole[: len(whole) // 2]


def _flipped(compress: Callable[[bytes], bytes]) -> bytes:
    whole = bytearray(compress(GOOD * 50))
    whole[len(whole) // 2] ^= 0xFF
    return bytes(whole)


TEXT = [
    _line("label is a word", "abc 2:1", "the label 'abc' is not a number"),
    _line("label is missing", "2:1 3:1", "the label '2:1' is not a number"),
    _line("several labels", "1,2 2:1", "the label '1,2' is not a number"),
    _line("label with an underscore", "1_0 2:1", "the label '1_0' is not a number"),
    _line("label in hexadecimal", "0x1 2:1", "the label '0x1' is not a number"),
    _line("label without digits", "- 2:1", "the label '-' is not a number"),
    _line("label is NaN", "nan 2:1", "the label 'nan' is not finite"),
    _line("label is infinite", "-inf 2:1", "the label '-inf' is not finite"),
    _line("label beyond float64", "1e400 2:1", "the label 1e400 is too large for float64"),
    _line("feature without a colon", "1 2", "'2' is not of the form index:value"),
    _line("blank behind the colon", "1 2: 1", "the value '' of index 2 is not a number"),
    _line("blank before the colon", "1 2 :1", "'2' is not of the form index:value"),
    _line("two colons", "1 2:1:3", "the value '1:3' of index 2 is not a number"),
    _line("index is a word", "1 x:1", "the index 'x' is not a whole number"),
    _line("index is missing", "1 :1", "the index '' is not a whole number"),
    _line("index with a point", "1 1.5:1", "the index '1.5' is not a whole number"),
    _line("index below zero", "1 -4:1", "the index '-4' is not a whole number"),
    _line("qid behind a feature", "1 1:1 qid:2 3:1", "the index 'qid' is not a whole number"),
    _line("index zero", "1 0:1", "index 0, but indices count from 1"),
    _line("index decreasing", "1 3:1 2:1", "index 2 comes after a higher one"),
    _line("index twice", "1 3:1 3:1", "index 3 comes twice"),
    _line("index beyond N", "1 11:1", "index 11 is above the highest of 10 features"),
    _line("index beyond 64 bits", "1 99999999999999999999:1", "index 99999999999999999999 is above the highest of 10 features"),
    _line("value is a word", "1 2:x", "the value 'x' of index 2 is not a number"),
    _line("value is missing", "1 2:", "the value '' of index 2 is not a number"),
    _line("value with an empty exponent", "1 2:1e", "the value '1e' of index 2 is not a number"),
    _line("value with a comma", "1 2:0,5", "the value '0,5' of index 2 is not a number"),
    _line("value is NaN", "1 2:nan", "the value 'nan' of index 2 is not finite"),
    _line("value is infinite", "1 2:-Infinity", "the value '-Infinity' of index 2 is not finite"),
    _line("value beyond float32", "1 2:1e39", "the value 1e39 is too large for float32"),
    _line("NUL bytes", b"1 2:\0\0\0", "NUL bytes; the file is damaged, or no text"),
    _line("bytes beyond ASCII", b"\xff\xfe 2:1", "the label '\\xff\\xfe' is not a number"),
    Malformed("text of a spreadsheet", b"label,f1,f2\n1,2,3\n", ", line 1: the label 'label,f1,f2' is not a number"),
    Malformed("binary garbage", bytes(range(1, 256)) * 20, ", line 1: the label '\\x01\\x02"),
    Malformed("empty file", b"", ": no samples in it"),
    Malformed("comments only", b"# nothing\n\n", ": no samples in it"),
    Malformed("missing file", None, "No such file or directory"),
    Malformed("truncated gzip", _cut(gzip.compress), "ended before the end-of-stream marker", "bad.svm.gz"),
    Malformed("truncated bzip2", _cut(bz2.compress), "ended before the end-of-stream marker", "bad.svm.bz2"),
    Malformed("truncated xz", _cut(lzma.compress), "ended before the end-of-stream marker", "bad.svm.xz"),
    Malformed("altered gzip", _flipped(gzip.compress), "cannot read ", "bad.svm.gz"),
    Malformed("altered bzip2", _flipped(bz2.compress), "cannot read ", "bad.svm.bz2"),
    Malformed("altered xz", _flipped(lzma.compress), "cannot read ", "bad.svm.xz"),
    Malformed("empty gzip", gzip.compress(b""), ": no samples in it", "bad.svm.gz"),
    Malformed("one class", b"1 1:1\n1 2:1\n", ": a classifier needs two classes, but the labels are 1"),
    Malformed("three classes", b"0 1:1\n1 1:1\n2 1:1\n", ": a classifier needs two classes, but the labels are 0, 1, 2"),
]

CASES = TEXT


def read(path: Path, comm=sar.SERIAL) -> None:
    """What the trainer does with a file before it trains a classifier."""
    two_classes(load(path, comm=comm, n_features=FEATURES)[0], comm)


def main() -> None:
    print("| kind | message |\n| --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            path = case.write(Path(folder))
            try:
                read(path)
                message = "ACCEPTED"
            except DatasetError as error:
                message = str(error).replace(f"{folder}/", "")
            path.unlink(missing_ok=True)
            print(f"| {case.kind} | `{message}` |".replace("||", "|"))


if __name__ == "__main__":
    main()
