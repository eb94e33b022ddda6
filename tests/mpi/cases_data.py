"""Data sets under MPI: every rank reads its own rows, all write one file, and errors are the same on every rank."""

import bz2
import gzip
import os
import shutil
import threading

import malformed
import numpy as np
import pytest
from mpi_cases import each, shared_folder, skip
from thoroughness import ALL

import sparseallreduce as sar
from sparseallreduce.data_cache import CachedFile, DataCache
from sparseallreduce.data_cache import files as cached_files
from sparseallreduce.linear import DatasetError, generate, load, numbered_classes
from sparseallreduce.linear.data.binary.writer import write_binary
from sparseallreduce.linear.data.convert import convert

RANKS = (1, 3)
COLUMNS = ("indptr", "indices", "values", "labels")


def made(comm, path, samples=500, **arguments):
    """Synthetic samples, from rank 0 alone."""
    if comm.rank == 0:
        generate("url-like", path, samples=samples, features=2000, **arguments)
    comm.Barrier()
    return path


def check_parts(comm, mine, whole):
    """The samples of this rank are those of the whole set from its first one on, and all ranks together have all."""
    last = mine.first_sample + mine.rows
    begin, end = whole.indptr[[mine.first_sample, last]]
    np.testing.assert_array_equal(mine.indptr, whole.indptr[mine.first_sample : last + 1] - begin)
    np.testing.assert_array_equal(mine.indices, whole.indices[begin:end])
    np.testing.assert_array_equal(mine.values, whole.values[begin:end])
    np.testing.assert_array_equal(mine.labels, whole.labels[mine.first_sample : last])
    assert (mine.total_samples, mine.features) == (whole.rows, whole.features)
    rows = comm.allgather(mine.rows)
    assert sum(rows) == whole.rows
    assert mine.first_sample == sum(rows[: comm.rank])


@each(suffix=[".svm", ".svm.gz", ".csr"])
def case_ranks_share_the_samples(comm, suffix):
    with shared_folder(comm) as folder:
        path = made(comm, folder / f"a{suffix}")
        mine, _ = load(path, comm=comm, n_features=2000)
        check_parts(comm, mine, load(path, comm=sar.SERIAL, n_features=2000)[0])
        assert max(comm.allgather(mine.nnz)) < 1.3 * comm.allreduce(mine.nnz) / comm.size + 200


@each(suffix=["", ".gz", ".csr"])
def case_ranks_share_the_parts_of_a_folder(comm, suffix):
    with shared_folder(comm) as folder:
        path = made(comm, folder / "a.svm", samples=200)
        if comm.rank == 0:
            lines = path.read_bytes().splitlines(keepends=True)
            (folder / "parts").mkdir()
            for number, (begin, end) in enumerate([(0, 7), (7, 7), (7, 150), (150, 200)]):
                part, content = folder / "parts" / f"part-{number:05}{suffix}", b"".join(lines[begin:end])
                if suffix != ".csr":
                    part.write_bytes(gzip.compress(content) if suffix else content)
                elif content:
                    (folder / "text.svm").write_bytes(content)
                    convert(folder / "text.svm", part, sar.SERIAL, n_features=2000)
            (folder / "parts" / "_SUCCESS").touch()
        comm.Barrier()
        whole = load(path, comm=sar.SERIAL, n_features=2000)[0]
        for data in (folder / "parts", f"{folder}/parts/part-*", sorted((folder / "parts").glob("part-*"))):
            mine, _ = load(data, comm=comm, n_features=2000)
            check_parts(comm, mine, whole)
            assert max(comm.allgather(mine.nnz)) < 1.3 * comm.allreduce(mine.nnz) / comm.size + 200


@each(packed=[False, True])
def case_a_pipe_of_rank_0_is_shared(comm, packed):
    with shared_folder(comm) as folder:
        path = made(comm, folder / "a.svm", samples=200)
        if comm.rank == 0:
            os.mkfifo(folder / "pipe")
            content = gzip.compress(path.read_bytes()) if packed else path.read_bytes()
            threading.Thread(target=(folder / "pipe").write_bytes, args=(content,), daemon=True).start()
        comm.Barrier()
        mine, _ = load(folder / "pipe", comm=comm, n_features=2000)
        check_parts(comm, mine, load(path, comm=sar.SERIAL, n_features=2000)[0])
        told = refusal(lambda: load([folder / "pipe", folder / "pipe"], comm=comm))
        assert "can be read once" in told
        check_same(comm, told)


def case_names_and_weights_are_those_of_all_ranks(comm):
    with shared_folder(comm) as folder:
        words = ["spam", "ham", "eggs", "caf\u00e9"]
        if comm.rank == 0:
            (folder / "a.svm").write_text("".join(f"{words[row * row % 4]}:{row % 3} {row + 1}:1\n" for row in range(50)))
        comm.Barrier()
        mine, _ = load(folder / "a.svm", comm=comm)
        whole = load(folder / "a.svm", comm=sar.SERIAL)[0]
        check_parts(comm, mine, whole)
        assert mine.names == whole.names == ("ham", "spam")
        assert np.concatenate(comm.allgather(mine.weights)).tolist() == [row % 3 for row in range(50)]
        (coded, classes), (expected, _) = numbered_classes(mine, comm), numbered_classes(whole, sar.SERIAL)
        assert classes == ("ham", "spam")
        assert np.concatenate(comm.allgather(coded.labels)).tolist() == expected.labels.tolist()


@each(suffix=[".svm", ".svm.gz", ".csr"])
def case_ranks_read_each_piece_of_a_cached_file_once(comm, suffix):
    fetched, kept = [], CachedFile._fetched
    with shared_folder(comm) as folder, pytest.MonkeyPatch.context() as patch:
        path = made(comm, folder / f"a{suffix}")
        patch.setattr(cached_files, "PIECE", 4096)
        patch.setattr(CachedFile, "_fetched", lambda file, number: (fetched.append(number), kept(file, number))[1])
        for _ in range(2):
            mine, _ = load(path, comm=comm, n_features=2000, cache=DataCache(folder / "cache"))
            check_parts(comm, mine, load(path, comm=sar.SERIAL, n_features=2000)[0])
            numbers = [number for each in comm.allgather(fetched) for number in each]
            assert len(numbers) == len(set(numbers)) >= -(-path.stat().st_size // 4096) - 1


@each(block=[64, 4096])
def case_reads_begin_and_end_inside_blocks(comm, block):
    from sparseallreduce.linear.data.binary import format as binary_format
    from sparseallreduce.linear.data.binary import reader as binary
    from sparseallreduce.linear.data.binary import writer as binary_writer

    kept = binary_format.BLOCK, binary._LONGEST_READ
    with shared_folder(comm) as folder:
        try:
            binary_format.BLOCK = binary_writer.BLOCK = block
            binary._LONGEST_READ = 1000  # as if messages of more bytes were too long
            path = made(comm, folder / "a.csr", samples=60)
            mine, _ = load(path, comm=comm)
        finally:
            (binary_format.BLOCK, binary._LONGEST_READ), binary_writer.BLOCK = kept, kept[0]
        check_parts(comm, mine, load(path, comm=sar.SERIAL)[0])


@each(suffix=["", ".bz2"])
def case_all_ranks_write_the_bytes_of_one(comm, suffix):
    with shared_folder(comm) as folder:
        made(comm, folder / f"a.svm{suffix}")
        convert(folder / f"a.svm{suffix}", folder / "all.csr", comm, n_features=2000)
        generate("url-like", folder / "made.csr", samples=500, features=2000, comm=comm)
        write_binary(folder / "copied.csr", load(folder / "all.csr", comm=comm)[0], comm)
        if comm.rank == 0:
            convert(folder / f"a.svm{suffix}", folder / "one.csr", sar.SERIAL, n_features=2000)
            one = (folder / "one.csr").read_bytes()
            assert all((folder / name).read_bytes() == one for name in ("all.csr", "made.csr", "copied.csr"))
            assert sorted(file.suffix for file in folder.iterdir()) == sorted([".csr"] * 4 + [suffix or ".svm"])
        comm.Barrier()


@each(kind=[case.kind for case in (malformed.CASES if ALL else malformed.BINARY + malformed.TEXT[::6])])  # tests/linear has all of TEXT
def case_a_malformed_file_is_the_same_error_on_every_rank(comm, kind):
    case = next(case for case in malformed.CASES if case.kind == kind)
    with shared_folder(comm) as folder:
        path = case.write(folder) if comm.rank == 0 else folder / case.name
        comm.Barrier()
        told = refusal(lambda: malformed.read(path, comm))
    assert case.says in told and str(path) in told
    check_same(comm, told)


@each(where=["first", "middle", "last"])
def case_one_altered_block_is_found_by_the_rank_that_reads_it(comm, where):
    with shared_folder(comm) as folder:
        path = made(comm, folder / "a.csr")
        if comm.rank == 0:
            content = bytearray(path.read_bytes())
            content[{"first": 195, "middle": len(content) // 2, "last": len(content) - 100}[where]] ^= 4
            path.write_bytes(content)
        comm.Barrier()
        check_same(comm, refusal(lambda: load(path, comm=comm)))


def case_a_file_that_some_ranks_do_not_see(comm):
    if comm.size == 1:
        skip("needs two ranks")
    with shared_folder(comm) as folder:
        path = made(comm, folder / "a.csr")
        told = refusal(lambda: load(path if comm.rank != comm.size - 1 else folder / "elsewhere.csr", comm=comm))
    assert "No such file" in told
    check_same(comm, told)


@each(what=["text", "compressed", "unwritable"])
def case_a_conversion_that_fails_leaves_nothing(comm, what):
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            text = b"1 3:1\n" * 5000 + b"1 3:x\n" + b"1 3:1\n" * 5000
            (folder / "a.svm").write_bytes(bz2.compress(text) if what == "compressed" else text)
        comm.Barrier()
        out = folder / "nowhere" / "out.csr" if what == "unwritable" else folder / "out.csr"
        told = refusal(lambda: convert(folder / "a.svm", out, comm))
        assert ("No such file" if what == "unwritable" else "line 5001") in told
        check_same(comm, told)
        comm.Barrier()
        assert [file.name for file in folder.iterdir()] == ["a.svm"]


def case_one_rank_that_cannot_write_stops_all(comm):
    from sparseallreduce.linear.data.binary import writer as binary_writer

    kept = binary_writer._write
    with shared_folder(comm) as folder:
        made(comm, folder / "a.svm")

        def full(file, items):
            raise OSError(28, "No space left on device")

        try:
            if comm.rank == comm.size - 1:
                binary_writer._write = full
            told = refusal(lambda: convert(folder / "a.svm", folder / "out.csr", comm))
        finally:
            binary_writer._write = kept
        assert told.endswith("out.csr: No space left on device")
        check_same(comm, told)
        comm.Barrier()
        assert [file.name for file in folder.iterdir()] == ["a.svm"]
        comm.Barrier()
        if comm.rank == 0:
            shutil.copy(folder / "a.svm", folder / "b.svm")
        comm.Barrier()
        assert convert(folder / "b.svm", folder / "b.csr", comm).samples == 500


def refusal(action):
    try:
        action()
    except DatasetError as error:
        return str(error)
    raise AssertionError("accepted")


def check_same(comm, told):
    assert len(set(comm.allgather(told))) == 1
    assert comm.allreduce(1) == comm.size
