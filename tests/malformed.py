"""Malformed data files of every kind, each with what the error has to say: the cases of a test, and a table.

python tests/malformed.py
"""

import bz2
import gzip
import lzma
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import sparseallreduce as sar
from sparseallreduce.linear import DatasetError, load, two_classes
from sparseallreduce.linear.data.binary.format import HEADER_BYTES, Header, Section

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
    _line("blank behind the colon, and no value", "1 2: 3:1", "the value '3:1' of index 2 is not a number"),
    _line("value on the next line", "1 2:\n1", "the value '' of index 2 is not a number"),
    _line("blank before the colon", "1 2 :1", "'2' is not of the form index:value"),
    _line("two colons", "1 2:1:3", "the value '1:3' of index 2 is not a number"),
    _line("index is a word", "1 x:1", "the index 'x' is not a whole number"),
    _line("index is missing", "1 :1", "the index '' is not a whole number"),
    _line("index with a point", "1 1.5:1", "the index '1.5' is not a whole number"),
    _line("index below zero", "1 -4:1", "the index '-4' is not a whole number"),
    _line("qid behind a feature", "1 1:1 qid:2 3:1", "the index 'qid' is not a whole number"),
    _line("index zero", "1 0:1", "index 0, but indices count from 1"),
    _line("index decreasing", "1 3:1 2:1", "index 2 comes after a higher one"),
    _line("index twice", "1 3:1 3:1", "index 3 occurs twice"),
    _line("index beyond N", "1 11:1", "index 11 is above the highest of 10 features"),
    _line("index beyond 64 bits", "1 99999999999999999999:1", "index 99999999999999999999 is above the highest of 10 features"),
    _line("index that 64 bits would wrap", "1 18446744073709551621:1", "index 18446744073709551621 is above the highest of 10 features"),
    _line("index that 64 bits would wrap twice", "1 1844674407370955161624:1", "index 1844674407370955161624 is above the highest of 10"),
    _line("value is a word", "1 2:x", "the value 'x' of index 2 is not a number"),
    _line("value is missing", "1 2:", "the value '' of index 2 is not a number"),
    _line("value with an empty exponent", "1 2:1e", "the value '1e' of index 2 is not a number"),
    _line("value with a comma", "1 2:0,5", "the value '0,5' of index 2 is not a number"),
    _line("value is NaN", "1 2:nan", "the value 'nan' of index 2 is not finite"),
    _line("value is infinite", "1 2:-Infinity", "the value '-Infinity' of index 2 is not finite"),
    _line("value beyond float32", "1 2:1e39", "the value 1e39 is too large for float32"),
    _line("NUL bytes", b"1 2:\0\0\0", "NUL bytes; the file is damaged, or not text"),
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


def binary(**changes: Any) -> bytes:
    """A good binary file of four samples and seven non-zeros, in the smallest blocks, whose checksums hold whatever is changed.

    Parameters
    ----------
    **changes
        Other contents of a section (``indptr``, ``indices``, ``values``, ``labels``), or another value of a field of the header.
    """
    columns = {
        "indptr": np.array([0, 2, 2, 5, 7]),
        "indices": np.array([0, 4, 1, 2, 9, 3, 5]),
        "values": np.array([1, 0.25, -1, 2, 3, 0.5, 1]),
        "labels": np.array([1, -1, 1, -1]),
    }
    widths = {"index_width": 4, "value_width": 4, "label_width": 1}
    widths |= {name: changes.pop(name) for name in widths if name in changes}
    header = Header.planned(4, FEATURES, 7, tuple(widths.values()))
    given = {name: changes.pop(name) for name in columns if name in changes}
    content = bytearray(header.file_bytes)
    crcs = []
    for name, items in (columns | given).items():
        section = header.sections[name]
        raw = np.array(items).astype(header.dtype(name)).tobytes()[: section.length]
        content[section.offset : section.offset + len(raw)] = raw
        crcs += [zlib.crc32(raw)] * bool(raw)
    table = np.array(crcs, "<u4").tobytes()
    content[header.checksums.offset :] = table
    content[:HEADER_BYTES] = replace(header, checksums_crc=zlib.crc32(table), **changes).to_bytes()
    return bytes(content)


def _with(offset: int, *numbers: int, seal: bool = False) -> bytes:
    """The good file with other bytes somewhere, and, sealed, a header that matches its checksum again."""
    content = bytearray(binary())
    content[offset : offset + len(numbers)] = bytes(numbers)
    if seal:
        content[188:192] = zlib.crc32(content[:188]).to_bytes(4, "little")
    return bytes(content)


def _moved(name: str, offset: int, length: int) -> dict[str, Any]:
    """The header's sections with one of them at another place."""
    sections = Header.planned(4, FEATURES, 7, (4, 4, 1)).sections
    return {"sections": sections | {name: Section(offset, length)}}


def _file(kind: str, content: bytes, says: str) -> Malformed:
    return Malformed(f"binary: {kind}", content, says, "bad.csr")


BINARY = [
    _file("other magic number", b"\x89PNG\r\n\x1a\n" + binary()[8:], ", line 1: the label"),
    _file("transferred as text", binary().replace(b"\r\n", b"\n"), ", offset 4: the line ends"),
    _file("newer version", _with(8, 2), ", offset 8: the file has version 2"),
    _file("big-endian", _with(12, 1, 2, 3, 4), ", offset 12: the file is in big-endian byte order"),
    _file("byte order mark altered", _with(12, 7), ", offset 12: the byte order mark is altered"),
    _file("header altered", _with(16, 5), ", offset 188: the header does not match its checksum"),
    _file("cut in the magic number", binary()[:6], ", offset 6: the file ends within its header"),
    _file("cut in the header", binary()[:100], ", offset 100: the file ends within its header"),
    _file("cut in a section", binary()[:260], ", offset 40: the file should have 464 bytes, but has 260"),
    _file("too long", binary() + b"\0", ", offset 40: the file should have 464 bytes, but has 465"),
    _file("no samples", _with(16, 0, seal=True), ", offset 16: no samples in it"),
    _file("no features", binary(features=0), ", offset 24: 0 features do not match indices of 4 bytes"),
    _file("too many features", binary(features=2**33), ", offset 24: 8589934592 features do not match"),
    _file("samples of another number", binary(samples=5), ", offset 64: the section indptr has 40 bytes"),
    _file("non-zeros of another number", binary(nonzeros=8), ", offset 80: the section indices has 28 bytes"),
    _file("unknown index width", _with(48, 3, seal=True), ", offset 48: the index width is 3"),
    _file("unknown value width", _with(49, 2, seal=True), ", offset 49: the value width is 2"),
    _file("unknown label width", _with(50, 4, seal=True), ", offset 50: the label width is 4"),
    _file("blocks of no bytes", binary(block=0), ", offset 52: blocks of 0 bytes"),
    _file("section not aligned", binary(**_moved("indices", 257, 28)), ", offset 72: the section indices cannot"),
    _file("sections overlap", binary(**_moved("values", 256, 28)), ", offset 88: the section values cannot"),
    _file("section beyond the end", binary(**_moved("labels", 640, 4)), ", offset 104: the section labels cannot"),
    _file("checksums altered", _with(460, 9), ", offset 448: the checksums do not match their own"),
    _file("indptr altered", _with(200, 3), ", offset 192: the 40 bytes of indptr from here do not match"),
    _file("indices altered", _with(260, 3), ", offset 256: the 28 bytes of indices from here do not match"),
    _file("values altered", _with(322, 1), ", offset 320: the 28 bytes of values from here do not match"),
    _file("labels altered", _with(384, 2), ", offset 384: the 4 bytes of labels from here do not match"),
    _file("indptr begins late", binary(indptr=[1, 2, 2, 5, 7]), ", offset 192: the first sample starts at non-zero 1"),
    _file("indptr decreases", binary(indptr=[0, 5, 2, 5, 7]), ", offset 208: sample 1 ends before it starts"),
    _file("indptr ends early", binary(indptr=[0, 2, 2, 5, 6]), ", offset 224: the samples end at non-zero 6 of 7"),
    _file("indptr ends late", binary(indptr=[0, 2, 2, 5, 8]), ", offset 224: the samples end at non-zero 8 of 7"),
    _file("index beyond N", binary(indices=[0, 4, 1, 2, 10, 3, 5]), ", offset 272: index 10 of sample 2"),
    _file("row unsorted", binary(indices=[0, 4, 1, 9, 2, 3, 5]), ", offset 272: index 2 of sample 2"),
    _file("index twice", binary(indices=[0, 4, 1, 2, 2, 3, 5]), ", offset 272: index 2 of sample 2"),
    _file("value is NaN", binary(values=[1, 1, 1, np.nan, 1, 1, 1]), ", offset 332: the value of index 2 of sample 2"),
    _file("float64 value is infinite", binary(value_width=8, values=[1, 1, 1, np.inf, 1, 1, 1]), ", offset 344: the value of index 2"),
    _file("label is NaN", binary(label_width=8, labels=[1, -1, np.nan, 1]), ", offset 400: the label is not finite"),
    _file("more features than asked for", binary(features=11), ": it has 11 features, more than the requested 10"),
    _file("three classes", binary(labels=[0, 1, 2, 1]), ": a classifier needs two classes"),
]

CASES = TEXT + BINARY


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
