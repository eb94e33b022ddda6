"""Tables under MPI: every rank reads its own rows, all agree on columns, categories and classes, and errors are the same on every rank."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from cases_data import check_parts, check_same, refusal
from mpi_cases import each, shared_folder

import sparseallreduce as sar
from sparseallreduce.linear import LogisticRegression, load, numbered_classes
from sparseallreduce.linear.data import line_blocks
from sparseallreduce.linear.data.convert import convert

RANKS = (2, 3)
ROWS = 60
TOWNS = ("Ulm", "Rust, am See", 'the "Hague"', "two\nlines", "caf\u00e9")


def columns(rows=ROWS):
    """Numbers with gaps, strings of which some are in late rows alone, a boolean, and names of classes."""
    return {
        "age": [None if row % 7 == 3 else row / 4 for row in range(rows)],
        "town": [None if row % 11 == 5 else TOWNS[row * 5 // rows] for row in range(rows)],
        "paid": [row % 3 == 0 for row in range(rows)],
        "y": ["no" if row % 2 else "yes" for row in range(rows)],
    }


def write(path):
    table = pa.table(columns())
    if path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=9)
    else:
        text = table.to_pandas().to_csv(index=False).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@each(name=["a.csv", "a.csv.gz", "a.parquet", "a.arrow"], block=[40, 1 << 20])
def case_ranks_share_rows_and_agree_on_columns(comm, name, block):
    with shared_folder(comm) as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_blocks, "_RECORDS", block)
        patch.setattr(line_blocks, "_BLOCK", block)
        if comm.rank == 0:
            write(folder / name)
        comm.Barrier()
        mine, whole = load(folder / name, comm=comm, target="y")[0], load(folder / name, comm=sar.SERIAL, target="y")[0]
    check_parts(comm, mine, whole)
    assert mine.encoding == whole.encoding and mine.names == whole.names == ("no", "yes")
    assert set(TOWNS) == set(mine.encoding.columns[1].categories)
    (coded, _), (expected, _) = numbered_classes(mine, comm), numbered_classes(whole, sar.SERIAL)
    assert np.concatenate(comm.allgather(coded.labels)).tolist() == expected.labels.tolist()


@each(name=["a.csv", "a.parquet"])
def case_too_many_categories_are_hashed_on_all_ranks_alike(comm, name):
    """Though no rank has met too many alone."""
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            write(folder / name)
        comm.Barrier()
        given = {"target": "y", "max_categories": 4, "hash_bits": 5}
        mine, whole = load(folder / name, comm=comm, **given)[0], load(folder / name, comm=sar.SERIAL, **given)[0]
    check_parts(comm, mine, whole)
    assert mine.encoding == whole.encoding and mine.encoding.columns[1].bits == 5


def case_a_column_that_is_of_strings_on_the_last_rank_is_so_on_all(comm):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            (folder / "a.csv").write_text("zip,y\n" + "07,1\n" * ROWS + "x,0\n")
        comm.Barrier()
        mine = load(folder / "a.csv", comm=comm, target="y")[0]
    assert mine.encoding.columns[0].categories == ("07", "x")


FAULTS = {
    "ragged": ("1,2,3\n", ", line 62: 3 fields, but 2 columns"),
    "quote": ('"1,2\n', "a quote that opens a field is not closed"),
    "target": ("1,\n", ", line 62: the target 'y' is missing"),
    "names": ("1,yes\n", ", line 62: the target 'y' is 'yes', but others are numbers"),
    "characters": ("\udcff,1\n", ", line 62: invalid start byte of UTF-8"),
    "infinite": ("inf,1\n", ", line 62: the column 'a' is inf"),
}


@each(fault=FAULTS)
def case_one_wrong_line_is_the_same_error_on_every_rank(comm, fault):
    line, says = FAULTS[fault]
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            (folder / "a.csv").write_text("a,y\n" + "1,2\n" * ROWS + line + "1,2\n" * 3, errors="surrogateescape")
        comm.Barrier()
        told = refusal(lambda: load(folder / "a.csv", comm=comm, target="y"))
    assert says in told and str(folder / "a.csv") in told, told
    check_same(comm, told)


@each(suffix=[".parquet", ".arrow"])
def case_a_file_that_was_cut_is_the_same_error_on_every_rank(comm, suffix):
    with shared_folder(comm) as folder:
        path = folder / f"a{suffix}"
        if comm.rank == 0:
            write(path)
            path.write_bytes(path.read_bytes()[:-20])
        comm.Barrier()
        told = refusal(lambda: load(path, comm=comm, target="y"))
    assert str(path) in told
    check_same(comm, told)


def case_a_converted_table_is_that_of_one_rank(comm):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            write(folder / "a.csv")
        comm.Barrier()
        convert(folder / "a.csv", folder / "all.csr", comm, target="y")
        convert(folder / "a.csv", folder / f"one{comm.rank}.csr", sar.SERIAL, target="y")
        assert (folder / "all.csr").read_bytes() == (folder / f"one{comm.rank}.csr").read_bytes()
        assert json.loads((folder / "all.csr.columns.json").read_text()) == json.loads(
            (folder / f"one{comm.rank}.csr.columns.json").read_text()
        )


def case_frames_of_all_ranks_are_one_table(comm):
    """Each rank has its own rows, and the last one alone a category."""
    import pandas as pd

    whole = pd.DataFrame(columns()).astype({"age": float})
    lines = np.array_split(np.arange(ROWS), comm.size)[comm.rank]
    mine = whole.iloc[lines]
    model = LogisticRegression(comm=comm).fit(mine.drop(columns="y"), mine["y"])
    alone = LogisticRegression(comm=sar.SERIAL).fit(whole.drop(columns="y"), whole["y"])
    assert model.encoding_ == alone.encoding_ and model.classes_.tolist() == ["no", "yes"]
    assert list(model.feature_names_in_) == ["age", "town", "paid"]
    np.testing.assert_allclose(model.coef_, alone.coef_, rtol=1e-2, atol=1e-3)
