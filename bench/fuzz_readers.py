"""Read damaged files, and compare the results with those of slow readers that share no code with ours.

    python bench/fuzz_readers.py --inputs 100000 --seed 0

Each input is a good file of one of the formats that are read, in which some bytes were changed. In half of the binary ones the
checksums are made to match again, so that the damage gets past them. A reader must refuse an input with a DatasetError if and only if
the slow reader refuses it. Otherwise it must return the same data, to the bit. Compressed text and npz have checksums, and so has our
Parquet: there it must refuse, or return what was written. A crash or a hang ends the run with the number of the input. `--only` repeats
that input. Parquet is left out where there is no pyarrow.

`--tables` tries tables instead, of CSV, Parquet and Arrow, which one rank and three, in blocks of a few bytes, must read alike, or refuse
alike in one line that names the file, and of CSV the line.
"""

from __future__ import annotations

import argparse
import bz2
import faulthandler
import gzip
import io
import itertools
import lzma
import re
import struct
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.utils.murmurhash import murmurhash3_bytes_u32
from tqdm import tqdm

import sparseallreduce as sar
from sparseallreduce.linear import Dataset, DatasetError, load
from sparseallreduce.linear.data import line_blocks

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "linear"))
from thread_ranks import joined, on_ranks

FEATURES = 60
SECONDS = 20.0  # for one input
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0")  # how files begin that are decompressed
NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
BLANKS = re.compile(rb"[ \t\r\v\f]+")
HEADER = struct.Struct("<8sIIQQQQBBBBI10QI")

# What breaks a parser: numbers at the limits of their types, and characters with a meaning.
WORDS = (
    *(b"0 1 -1 +1 00 1e 1e5 1e39 -1e400 nan inf -Infinity .5 5. . - + e 1_0 0x1f 1e-400 16777217 1.7976931348623157e308".split()),
    *(str(number).encode() for power in (31, 32, 53, 63, 64) for number in (2**power - 1, 2**power, 2**power + 1)),
    *(b"123456789012345678901234567890", b"0.1234567890123456789", b"1:1", b"61:1", b"60:1", b"0:1", b":", b"::", b"qid:7", b"qid:", b"#"),
    *(b" ", b"  ", b"\t", b"\n", b"\r", b"\r\n", b"\v", b"\f", b"\0", b"\xff", b"\x1c", b",", b"1:1 1:1", b"2:1 1:1", b" 3:4\n1"),
    *(b"3: 1", b": ", b"spam", b"\nspam 1:1", b"-1:0.5"),
)
VW_WORDS = (*WORDS, *(b"| || |a |7:2 |a:0 |: :3 :x x: x:y:z x:0 'tag 1| 99999999999999999999 \xc3\xa9 \xc3".split()))
VW_WORDS += (b"x:nan", b"x:-INF", b"x:Infinity", b"x:info")
HASHED = 64  # features of formats that hash them
INTEGERS = (0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 192, 255, 256, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


class Refused(Exception):
    """A slow reader refuses its input."""


#: How often each kind is tried.
KINDS = {"text": 0.37, "compressed": 0.06, "binary": 0.15, "binary, resealed": 0.17, "Vowpal Wabbit": 0.15, "plain text": 0.02}
KINDS |= {"compressed, npz": 0.04, "compressed, Parquet": 0.04} if find_spec("pyarrow") else {"compressed, npz": 0.08}


class Input(NamedTuple):
    kind: str
    content: bytes
    expected: Callable[[], list[Any]]  # what it holds; raises Refused
    format: str | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one input to repeat")
    parser.add_argument("--tables", action="store_true", help="try tables")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long one input may take; more on a busy machine")
    arguments = parser.parse_args()
    numbers = range(arguments.inputs) if arguments.only is None else [arguments.only]
    start = time.perf_counter()
    trial = (make_table, judge_table) if arguments.tables else (make, judge)
    counts, failures = run(arguments.seed, tqdm(numbers, unit="input", disable=None), *trial, seconds=arguments.seconds)
    print(f"{len(numbers)} inputs in {time.perf_counter() - start:.0f} s, seed {arguments.seed}")
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:18} {outcome:9} {count:7}")
    for number, failure in failures.items():
        print(f"input {number}: {failure}")
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


def run(
    seed: int,
    numbers: Any,
    make: Callable[[np.random.Generator], Any] | None = None,
    judge: Callable[[Any, Path], str] | None = None,
    seconds: float = SECONDS,
) -> tuple[Counter[tuple[str, str]], dict[int, str]]:
    """How often which kind of input was accepted or refused, and what went wrong with which input."""
    make, judge = make or globals()["make"], judge or globals()["judge"]
    counts: Counter[tuple[str, str]] = Counter()
    failures: dict[int, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            made = make(np.random.default_rng((seed, number)))
            faulthandler.dump_traceback_later(seconds, exit=True)
            try:
                outcome = judge(made, Path(folder) / "input")
            except Exception as error:
                failures[number] = f"{made.kind}: {type(error).__name__}: {error}"
            else:
                counts[made.kind, outcome] += 1
            finally:
                faulthandler.cancel_dump_traceback_later()
    return counts, failures


def judge(made: Input, path: Path) -> str:
    """Whether the reader accepts or refuses the input; raises if it should not have."""
    path.write_bytes(made.content)
    try:
        expected = made.expected()
    except Refused:
        expected = None
    features = HASHED if made.format in ("vw", "text") else FEATURES
    try:
        found = contents(load(path, comm=sar.SERIAL, n_features=features, format=made.format)[0])
    except DatasetError as error:
        if "\n" in str(error) or str(path) not in str(error):
            raise AssertionError(f"the error does not name the file in one line: {error!r}") from None
        if expected is not None and not made.kind.startswith("compressed"):
            raise AssertionError(f"refused though good: {error}") from None
        return "refused"
    if expected is None:
        raise AssertionError("accepted though bad")
    if found != expected:
        raise AssertionError(f"wrong data: {found} instead of {expected}")
    return "accepted"


class Table(NamedTuple):
    """A table that may be damaged."""

    kind: str
    content: bytes
    suffix: str
    block: int  # bytes that a reader of text takes at once


CSV_WORDS = (
    *(b'" "" """ , ,, ; \t | a NA nan inf -inf 1e400 1e39 0x1F 0X 1_0 +5 true False TRUE yes'.split(b" ")),
    *(b"\n", b"\r\n", b"\r", b"\n\n", b'"\n"', b'",\n', b',"\n', b"\xff", b"\xef\xbb\xbf", b"\0", b" "),
    *(b"2020-01-01", b"12:30", b"2020-01-01 12:00"),
    *(b"99999999999999999999", b"-0", b".5", b"5.", b"\xc3\xa9", b"y", b"n,t"),
)
TABLE_KINDS = {"CSV": 0.5, "Parquet": 0.25, "Parquet, plain": 0.1, "Arrow": 0.1, "Arrow, a stream": 0.05}
WHERE = re.compile(r", (line|row) \d+")


def make_table(rng: np.random.Generator) -> Table:
    """A table by the state of the generator."""
    import pandas
    import pyarrow
    from pyarrow import parquet

    rows = int(rng.integers(0, 8))
    words = np.array(["a", "b, c", 'say "x"', "two\nlines", "caf\u00e9", "NA", "7", ""], object)
    frame = pandas.DataFrame(
        {
            "n": np.where(rng.random(rows) < 0.2, np.nan, np.round(rng.standard_normal(rows), 2)),
            "i": rng.integers(-5, 5, rows),
            "t": words[rng.integers(0, len(words) - 2 * (rng.random() < 0.7), rows)],
            "b": rng.random(rows) < 0.5,
            "y": rng.choice(["yes", "no"], rows) if rng.random() < 0.5 else rng.integers(0, 2, rows),
        }
    )
    kind, block = str(rng.choice(list(TABLE_KINDS), p=list(TABLE_KINDS.values()))), int(rng.choice([5, 30, 1 << 20]))
    if kind == "CSV":
        text = frame.to_csv(index=False, header=bool(rng.random() < 0.9)).encode()
        return Table(kind, mutated(text, rng, CSV_WORDS), ".csv", block)
    table, file = pyarrow.Table.from_pandas(frame, preserve_index=False), io.BytesIO()
    if kind.startswith("Parquet"):
        plain = kind != "Parquet"
        parquet.write_table(table, file, row_group_size=3, compression="none" if plain else "snappy", use_dictionary=not plain)
    else:
        with (pyarrow.ipc.new_file if kind == "Arrow" else pyarrow.ipc.new_stream)(file, table.schema) as out:
            out.write_table(table, max_chunksize=3)
    return Table(kind, mutated(file.getvalue(), rng, ()), ".parquet" if kind.startswith("Parquet") else ".arrow", block)


def judge_table(made: Table, path: Path) -> str:
    """Whether one rank and three accept or refuse a table; raises if they do not do so alike."""
    path = path.with_suffix(made.suffix)
    path.write_bytes(made.content)
    line_blocks._BLOCK, line_blocks._RECORDS = made.block, made.block
    found = []
    for ranks in (1, 3):
        parts = on_ranks(ranks, lambda comm: load(path, comm=comm, target="y")[0])
        errors = [part for part in parts if isinstance(part, Exception)]
        if errors and (len(errors) < ranks or len({(type(error), str(error)) for error in errors}) > 1):
            raise AssertionError(f"of {ranks} ranks some accept it, or errors differ: {errors!r}")
        if errors:
            check_error(made, errors[0], path)
            found.append(str(errors[0]))
        else:
            samples, labels = joined(parts)
            columns = (samples.indptr, samples.indices.astype(np.int64), samples.data, labels)
            found.append([parts[0].encoding, parts[0].names, *(np.ascontiguousarray(column).tobytes() for column in columns)])
    refused = [isinstance(each, str) for each in found]
    if refused[0] != refused[1] or (found[0] != found[1] and not refused[0]):
        raise AssertionError(f"one rank and three differ: {found}")
    return "refused" if refused[0] else "accepted"


def check_error(made: Table, error: Exception, path: Path) -> None:
    if not isinstance(error, DatasetError) or "\n" in str(error) or str(path) not in str(error):
        raise AssertionError(f"the error does not name the file in one line: {error!r}")
    whole = re.search("column|quote that opens|no samples", str(error))
    if made.kind == "CSV" and not whole and not WHERE.search(str(error)):
        raise AssertionError(f"the error names neither line nor column: {error!r}")


def contents(dataset: Dataset) -> list[Any]:
    """A data set as plain objects, with the bytes of all numbers."""
    columns = (dataset.indptr, dataset.indices.astype(np.int64), dataset.values, dataset.labels)
    return [dataset.features, *(np.ascontiguousarray(column).tobytes() for column in columns)]


def make(rng: np.random.Generator) -> Input:
    """An input by the state of the generator."""
    kind = rng.choice(list(KINDS), p=list(KINDS.values()))
    if kind == "Vowpal Wabbit":
        text = mutated(good_lines(rng), rng, VW_WORDS)
        return Input(kind, text, lambda: read_lines(text), "vw")
    if kind == "plain text":
        text = mutated(good_plain(rng), rng, VW_WORDS)
        return Input(kind, text, lambda: read_plain(text), "text")
    if kind in ("compressed, npz", "compressed, Parquet"):
        given, write, format = good_text(rng), *((good_npz, "npz") if kind.endswith("npz") else (good_parquet, "parquet"))
        return Input(kind, mutated(write(given), rng, ()), lambda: read_text(given), format)
    if kind == "text":
        text = mutated(good_text(rng), rng, WORDS)
        return Input(kind, text, lambda: read_text(text))
    if kind == "compressed":
        text = good_text(rng)
        compress = [gzip.compress, bz2.compress, lzma.compress][rng.integers(3)]
        damaged = mutated(compress(text), rng, ())
        if not damaged.startswith(COMPRESSED):  # what is left of it is text like any other
            return Input("text", damaged, lambda: read_text(damaged))
        return Input(kind, damaged, lambda: read_text(text))
    words = [number.to_bytes(size, "little") for number in INTEGERS for size in (1, 4, 8) if number < 256**size]
    binary = mutated(good_binary(rng), rng, words, keeps_length=rng.random() < 0.8)
    if kind == "binary, resealed":
        binary = resealed(binary)
    return Input(kind, binary, lambda: read_binary(binary))


def good_text(rng: np.random.Generator) -> bytes:
    lines = []
    for _ in range(rng.integers(1, 6)):
        indices = np.flatnonzero(rng.random(FEATURES) < rng.choice([0.02, 0.1])) + 1
        numbers = rng.standard_normal(len(indices) + 1) * 10.0 ** rng.integers(-3, 4)
        style = rng.choice(["{:.6g}", "{!r}", "{:.0f}", "{:.3e}"])
        label, *values = (style.format(float(number)) for number in numbers)
        query = rng.choice(["", " qid:3"], p=[0.9, 0.1])
        comment = rng.choice(["", " # 1:x", "#"], p=[0.8, 0.1, 0.1])
        lines.append(label + query + "".join(f" {index}:{value}" for index, value in zip(indices, values)) + comment)
    return ("\n".join(lines) + rng.choice(["\n", "", "\n\n", "\r\n"])).encode()


def good_binary(rng: np.random.Generator) -> bytes:
    samples = int(rng.integers(1, 6))
    lengths = rng.integers(0, 6, samples)
    index, value, label = (int(rng.choice(widths)) for widths in ((4, 8), (0, 4, 8), (1, 8)))
    nonzeros = int(lengths.sum())
    indices = [np.sort(rng.choice(FEATURES, length, replace=False)) for length in lengths]
    values = rng.standard_normal(nonzeros)
    sections = [
        np.concatenate([[0], np.cumsum(lengths)]).astype("<i8").tobytes(),
        np.concatenate([*indices, []]).astype(f"<u{index}").tobytes(),
        values.astype(f"<f{value}").tobytes() if value else b"",
        rng.integers(-1, 2, samples).astype("<i1" if label == 1 else "<f8").tobytes(),
    ]
    block = int(rng.choice([64, 128, 1 << 20]))
    sections.append(b"\0" * 4 * sum(-(-len(section) // block) for section in sections))
    content, places = bytearray(192), []
    for section in sections:
        content += bytes(-len(content) % 64)
        places += [len(content), len(section)]
        content += section
    head = HEADER.pack(
        *(b"\x89SAR\r\n\x1a\n", 1, 0x01020304, samples, FEATURES, nonzeros, len(content), index, value, label, 0, block, *places, 0)
    )
    content[: len(head)] = head
    return resealed(bytes(content))


def good_lines(rng: np.random.Generator) -> bytes:
    """Vowpal Wabbit's text."""
    lines = []
    for _ in range(rng.integers(1, 6)):
        line = str(rng.choice(["1 ", "-1 0.5 ", "1 2 'tag ", "0.25 1 0 x"]))
        for _ in range(rng.integers(1, 3)):
            line += rng.choice(["|", "|ns", "|12", "|ns:0.5"]) + " "
            names, values = rng.choice(["a", "b", "7", ""], 5), rng.choice(["", ":2", ":0.1", ":red"], 5)
            line += " ".join(f"{name}{value}" for name, value in zip(names[: rng.integers(0, 6)], values))
            line += " "
        lines.append(line)
    return ("\n".join(lines) + rng.choice(["\n", "", "\n\n", "\r\n"])).encode()


def good_plain(rng: np.random.Generator) -> bytes:
    words = ["good", "bad", "a", "FILM", "caf\u00e9", "it's", "\t"]
    texts = (" ".join(rng.choice(words, rng.integers(0, 6))) for _ in range(rng.integers(1, 6)))
    return "\n".join(f"{rng.integers(-1, 2)}\t{text}" for text in texts).encode()


def columns_of(text: bytes) -> tuple[Any, ...]:
    """Where rows begin, indices, values and labels of good svmlight text."""
    _, indptr, indices, values, labels = read_text(text)
    return tuple(np.frombuffer(raw, kind) for raw, kind in ((indptr, "i8"), (indices, "i8"), (values, "f4"), (labels, "f8")))


def good_npz(text: bytes) -> bytes:
    indptr, indices, values, labels = columns_of(text)
    file = io.BytesIO()
    arrays = {"indptr": indptr, "indices": indices.astype(np.int32), "data": values, "labels": labels}
    np.savez_compressed(file, format=b"csr", shape=(len(labels), FEATURES), **arrays)
    return file.getvalue()


def good_parquet(text: bytes) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    indptr, indices, values, labels = columns_of(text)
    lists = {name: pa.ListArray.from_arrays(indptr.astype(np.int32), flat) for name, flat in (("indices", indices), ("values", values))}
    file = io.BytesIO()
    parquet.write_table(pa.table({"label": labels} | lists), file, write_page_checksum=True, use_dictionary=False)
    return file.getvalue()


def mutated(content: bytes, rng: np.random.Generator, words: Any, keeps_length: bool = False) -> bytes:
    """The content with some bytes flipped, put in, overwritten, removed, repeated, or cut off."""
    out = bytearray(content)
    for _ in range(rng.choice([0, 1, 2, 3, 6], p=[0.05, 0.5, 0.25, 0.1, 0.1])):
        at = int(rng.integers(len(out) + 1))
        upto = min(at + int(rng.geometric(0.2)), len(out))
        word = words[rng.integers(len(words))] if len(words) and rng.random() < 0.7 else rng.bytes(int(rng.integers(1, 4)))
        what = rng.choice(["flip", "overwrite"] if keeps_length else ["flip", "overwrite", "insert", "replace", "remove", "repeat", "cut"])
        if what == "flip" and at < len(out):
            out[at] ^= 1 << int(rng.integers(8))
        elif what == "overwrite":
            if keeps_length:
                at = at // len(word) * len(word)  # where a field or an item of this size may begin
            out[at : at + len(word)] = word[: max(len(out) - at, 0)]
        elif what == "insert":
            out[at:at] = word
        elif what == "replace":
            out[at:upto] = word
        elif what == "remove":
            del out[at:upto]
        elif what == "repeat":
            out[at:at] = out[at:upto]
        elif what == "cut" and rng.random() < 0.5:
            del out[at:]
    return bytes(out)


def resealed(binary: bytes) -> bytes:
    """A binary file with checksums that match its contents, as far as its header makes sense."""
    if len(binary) < 192:
        return binary
    out = bytearray(binary)
    *_, block = HEADER.unpack_from(out)[:12]
    places = HEADER.unpack_from(out)[12:22]
    if block > 0 and places[9] < len(out) and all(length <= len(out) for length in places[1::2]):
        crcs = []
        for offset, length in zip(places[:8:2], places[1:8:2]):
            crcs += [zlib.crc32(out[offset + at : offset + min(at + block, length)]) for at in range(0, length, block)]
        table = b"".join(crc.to_bytes(4, "little") for crc in crcs)
        if len(table) == places[9]:
            out[places[8] : places[8] + len(table)] = table
        out[136:140] = zlib.crc32(out[places[8] : places[8] + places[9]]).to_bytes(4, "little")
    out[188:192] = zlib.crc32(out[:188]).to_bytes(4, "little")
    return bytes(out)


def read_text(text: bytes) -> list[Any]:
    """svmlight text, word by word."""
    indptr, indices, values, heads = [0], [], [], []
    for line in text.removeprefix(b"\xef\xbb\xbf").split(b"\n"):
        words = [word for word in BLANKS.split(line.partition(b"#")[0]) if word]
        if not words:
            continue
        after = 2 if words[1:] and words[1].startswith(b"qid:") else 1
        # There may be blanks behind a colon.
        features = re.sub(rb": +", b":", b" ".join(words[after:])).split()
        heads.append((words[0], after == 2, features[0] if features else b""))
        previous = 0
        for word in features:
            index, colon, value = word.partition(b":")
            if not colon or not re.fullmatch(rb"[0-9]+", index) or not previous < int(index) <= FEATURES:
                raise Refused
            previous = int(index)
            indices.append(previous - 1)
            values.append(number(value, np.float32))
        indptr.append(len(indices))
    return packed(indptr, indices, values, labels_of(heads))


def labels_of(heads: list[tuple[bytes, bool, bytes]]) -> list[float]:
    """Numbers, or the places of names, of labels with weights or without: each with whether a query follows, and the first feature."""
    demand(bool(heads))
    words = [word for word, _, _ in heads]
    if b":" in words[0]:
        demand(all(b":" in word for word in words))
        pairs = [word.rpartition(b":")[::2] for word in words]
        words = [label for label, _ in pairs]
        demand(words[0] != b"qid" and all(number(weight, np.float64) >= 0 for _, weight in pairs))
        firsts = [b"qid:" if query else feature for _, query, feature in heads]
        demand(any(not follows(label, first) for label, first in zip(words, firsts)))
    if not is_name(words[0]):
        return [number(word, np.float64) for word in words]
    demand(all(is_name(word) and b":" not in word for word in words))
    names = sorted({word.decode() for word in words})
    return [float(names.index(word.decode())) for word in words]


def follows(label: bytes, first: bytes) -> bool:
    """Whether a label could be the index of a feature before the first one."""
    index = first.partition(b":")[0]
    whole = re.compile(rb"[0-9]{1,20}").fullmatch
    return bool(whole(label)) and not (index == b"qid" or (whole(index) and int(index) <= int(label)))


def is_name(word: bytes) -> bool:
    try:
        text = word.decode()
    except UnicodeDecodeError:
        return False
    letter = text[:1] == "_" or text[:1] > "\x7f" or (text[:1].isascii() and text[:1].isalpha())
    return letter and text.isprintable() and "," not in text and text.lower() not in ("nan", "inf", "infinity")


def read_lines(text: bytes) -> list[Any]:
    """Vowpal Wabbit's text, word by word."""
    indptr, indices, values, labels = [0], [], [], []
    for line in text.split(b"\n"):
        if not re.fullmatch(rb"[ \t\r]*", line):
            head, bar, rest = line.lstrip(b" \t\r").partition(b"|")
            demand(bool(bar))
            words = [word for word in re.split(rb"[ \t\r]+", head) if word]
            if words and (words[-1][:1] == b"'" or head[-1:] not in b" \t\r"):
                words.pop()
            demand(1 <= len(words) <= 3)
            numbers = [number(word, np.float64) for word in words]
            demand(numbers[1:2] >= [0.0] or len(numbers) < 2)
            labels.append(numbers[0])
            sums: dict[int, Any] = {}
            for index, value in hashed(b"|" + rest):
                sums[index % HASHED] = np.float32(sums.get(index % HASHED, np.float32(0)) + value)
            for index in sorted(sums):
                indices.append(index)
                values.append(sums[index])
            indptr.append(len(indices))
    return packed(indptr, indices, values, labels, HASHED)


def hashed(features: bytes) -> Iterator[tuple[int, Any]]:
    """The features of a line, before those that meet are added up."""
    seed, weight, unnamed = 0, 1.0, 0
    for word in re.findall(rb"\|?[^ \t\r|]*", features):
        if not word:
            continue
        name, colon, text = word.removeprefix(b"|").partition(b":")
        if word.startswith(b"|"):
            seed, unnamed = hash_of(name, 0) if name else 0, 0
            weight = number(text, np.float64) if colon else 1.0
        elif colon and not NUMBER.fullmatch(text):
            demand(bool(name) and bool(text) and text.lower().lstrip(b"+-") not in (b"nan", b"inf", b"infinity"))
            yield hash_of(text, hash_of(name, seed)), np.float32(1)
        else:
            value = finite((float(text) if colon else 1.0) * weight)
            if (float(text) if colon else 1.0) * weight != 0:
                yield (hash_of(name, seed) if name else seed + unnamed), value
                unnamed += not name
            elif not name:
                unnamed += 1


def finite(value: float) -> Any:
    with np.errstate(over="ignore"):
        demand(bool(np.isfinite(np.float32(value))))
        return np.float32(value)


def hash_of(name: bytes, seed: int) -> int:
    if re.fullmatch(rb"[0-9]*", name):
        return (int(name or b"0") + seed) % 2**64
    return int(murmurhash3_bytes_u32(name, seed % 2**32))


def read_plain(text: bytes) -> list[Any]:
    words, texts = [], []
    for line in text.split(b"\n"):
        if line.strip():
            word, tab, rest = line.partition(b"\t")
            demand(bool(tab))
            words.append(word.strip())
            try:
                texts.append(rest.decode())
            except UnicodeDecodeError:
                raise Refused from None
    demand(bool(texts))
    if is_name(words[0]):
        demand(all(map(is_name, words)))
        names = sorted({word.decode() for word in words})
        labels = [float(names.index(word.decode())) for word in words]
    else:
        labels = [number(word, np.float64) for word in words]
    rows = [HashingVectorizer(n_features=HASHED, dtype=np.float32).transform([text]) for text in texts]
    for row in rows:
        row.sort_indices()
    indptr = np.cumsum([0, *(row.nnz for row in rows)])
    return packed(indptr, np.concatenate([row.indices for row in rows]), np.concatenate([row.data for row in rows]), labels, HASHED)


def number(word: bytes, dtype: Any) -> Any:
    if not NUMBER.fullmatch(word):
        raise Refused
    with np.errstate(over="ignore", invalid="ignore"):
        value = dtype(float(word))
    if not np.isfinite(value):
        raise Refused
    return value


def read_binary(content: bytes) -> list[Any]:
    """A binary file, item by item, as data/FORMAT.md says."""
    if content[:4] != b"\x89SAR":
        return read_text(content)
    demand(len(content) >= 192)
    magic, version, order, samples, features, nonzeros, length, index, value, label, _, block, *places = HEADER.unpack_from(content)
    demand(magic == b"\x89SAR\r\n\x1a\n" and version == 1 and order == 0x01020304 and length == len(content))
    demand(int.from_bytes(content[188:192], "little") == zlib.crc32(content[:188]))
    demand(index in (4, 8) and value in (0, 4, 8) and label in (1, 8))
    demand(samples >= 1 and 1 <= features <= (2**32 if index == 4 else 2**63) and features <= FEATURES)
    demand(64 <= block <= 2**30 and block % 64 == 0)
    sizes = [8 * (samples + 1), index * nonzeros, value * nonzeros, label * samples]
    sizes.append(4 * sum(-(-size // block) for size in sizes))
    sections, end = [], 192
    for offset, size, needed in zip(places[:10:2], places[1:10:2], sizes):
        demand(size == needed and offset % 64 == 0 and end <= offset and offset + size <= length)
        sections.append(content[offset : offset + size])
        end = offset + size
    demand(zlib.crc32(sections[4]) == places[10])
    crcs = [zlib.crc32(section[at : at + block]) for section in sections[:4] for at in range(0, len(section), block)]
    demand(b"".join(crc.to_bytes(4, "little") for crc in crcs) == sections[4])
    return checked_rows(
        features, unpack("q", sections[0]), unpack("I" if index == 4 else "Q", sections[1]), sections[2], value, sections[3]
    )


def checked_rows(features: int, indptr: list[int], indices: list[int], raw_values: bytes, value: int, raw_labels: bytes) -> list[Any]:
    demand(indptr[0] == 0 and indptr[-1] == len(indices) and indptr == sorted(indptr))
    for begin, end in itertools.pairwise(indptr):
        row = indices[begin:end]
        demand(all(one < other for one, other in itertools.pairwise(row)) and all(one < features for one in row))
    values = unpack("f" if value == 4 else "d", raw_values) if value else [1.0] * len(indices)
    numbers = np.array(values, np.float64 if value == 8 else np.float32)
    labels = unpack("b" if len(raw_labels) == len(indptr) - 1 else "d", raw_labels)
    demand(bool(np.isfinite(numbers).all()) and bool(np.isfinite(labels).all()))
    return packed(indptr, indices, numbers, labels)


def unpack(kind: str, raw: bytes) -> list[Any]:
    return [item for (item,) in struct.iter_unpack(f"<{kind}", raw)]


def demand(condition: bool) -> None:
    if not condition:
        raise Refused


def packed(indptr: Any, indices: Any, values: Any, labels: Any, features: int = FEATURES) -> list[Any]:
    demand(len(labels) > 0)
    kind = values.dtype if isinstance(values, np.ndarray) else np.float32
    columns = ((indptr, np.int64), (indices, np.int64), (values, kind), (labels, np.float64))
    return [features, *(np.array(column, dtype).tobytes() for column, dtype in columns)]


if __name__ == "__main__":
    main()
