"""What no case can try, because it ends the launch: ranks that die, leave or raise; and eight ranks that compile at once."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from mpi_launch import FOREIGN, ROOT, SETTINGS, launcher

import sparseallreduce as sar
from sparseallreduce.linear import generate

SECONDS = 60  # within which mpiexec has to end; MPICH takes two of them, start included, and Open MPI six


@pytest.mark.parametrize(
    "mpi,algorithm", [("mpich", "ssar_ring"), ("openmpi", "ssar_ring"), pytest.param("mpich", "dense", marks=pytest.mark.release)]
)
def test_killed_rank_ends_the_run(mpi_run, mpi, algorithm):
    if launcher(mpi) is None:
        missing = f"no {mpi} here: `make test` installs it"
        pytest.fail(missing) if os.environ.get("REQUIRE_MPI") else pytest.skip(missing)
    run = mpi_run(4, reduce_until_the_end_of_rank_1, "kill", algorithm, mpi=mpi, timeout=SECONDS, check=False)
    assert run.returncode != 0
    assert "rank 1 goes" in run.stdout


def test_rank_that_leaves_ends_the_run(mpi_run):
    run = mpi_run(3, reduce_until_the_end_of_rank_1, "leave", "ssar_split_allgather", timeout=SECONDS, check=False)
    assert run.returncode != 0
    assert "rank 1 goes" in run.stdout


def test_killed_rank_ends_ranks_that_wait_with_a_thread(mpi_run):
    run = mpi_run(3, reduce_until_the_end_of_rank_1, "kill", "ssar_ring", "thread", timeout=SECONDS, check=False)
    assert run.returncode != 0


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ["auto", pytest.param("ssar_ring", marks=pytest.mark.release)])
def test_a_rank_that_has_ended_is_not_waited_for(algorithm, tmp_path):
    """Where the launcher leaves the others alone: a shell that outlives the rank hides its end from it."""
    own = launcher("mpich")
    if own is None:
        pytest.skip("no mpich here: `make test` installs it")
    (tmp_path / "said").mkdir()
    call = f"import runpy; runpy.run_path({__file__!r})['outlive_rank_1']({algorithm!r}, {str(tmp_path)!r})"
    shell = '"$0" -c "$1"; for _ in $(seq 300); do [ -e "$2/over" ] || sleep .1; done'
    command = [own.mpiexec, "-n", "3", "sh", "-c", shell, own.python, call, tmp_path]
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests"))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)} | SETTINGS | {"PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False, stdin=subprocess.DEVNULL)
    said = [file.read_text().splitlines() for file in sorted((tmp_path / "said").iterdir())]
    assert len(said) == 2 and said[0] == said[1], (said, run.stdout, run.stderr)
    assert [line.startswith("rank 1 has ended: its process") for line in said[0]] == [True, True]


def outlive_rank_1(algorithm, folder):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    stream = sar.SparseStream([comm.rank], [1.0], 1000)
    for _ in range(20):
        sar.allreduce(stream, comm, algorithm=algorithm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with open(os.path.join(folder, "said", str(comm.rank)), "w") as file:
        for _ in range(2):
            try:
                sar.allreduce(stream, comm, algorithm=algorithm)
            except sar.SparseAllreduceError as error:
                file.write(f"{error}\n")
    limit = time.monotonic() + 30
    while time.monotonic() < limit and sum(len(_lines(folder, rank)) == 2 for rank in ("0", "2")) < 2:
        time.sleep(0.01)  # so that neither is gone before the other has looked
    Path(folder, "over").touch()
    os._exit(0)  # MPI waits for all ranks at its end


def _lines(folder, rank):
    file = Path(folder, "said", rank)
    return file.read_text().splitlines() if file.exists() else []


def reduce_until_the_end_of_rank_1(how, algorithm, progress="manual"):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    stream = sar.SparseStream([comm.rank], [1.0], 1000)
    for number in range(10**6):
        requests = [sar.iallreduce(stream, comm, algorithm=algorithm, progress=progress) for _ in range(4)]
        if comm.rank == 1 and number == 20:
            print("rank 1 goes", flush=True)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(3)
        sar.Request.waitall(requests)


def test_a_rank_killed_while_it_caches_leaves_nothing_that_is_read(mpi_run, tmp_path):
    generate("url-like", tmp_path / "samples.csr", samples=500, features=2000)
    run = mpi_run(3, load_until_a_rank_is_killed, "kill", tmp_path, timeout=SECONDS, check=False)
    assert run.returncode != 0 and "samples" not in run.stdout
    kept = len([path for path in (tmp_path / "cache").rglob("*") if len(path.name) == 30])
    run = mpi_run(3, load_until_a_rank_is_killed, "go on", tmp_path, timeout=SECONDS)
    said = [[int(each) for each in pair] for pair in re.findall("samples ([0-9]+), fetched ([0-9]+)", run.stdout)]
    assert len(said) == 3, run.stdout
    samples, fetched = zip(*said)
    pieces = -(-(tmp_path / "samples.csr").stat().st_size // 4096)
    assert set(samples) == {500} and pieces - kept - 1 <= sum(fetched) <= pieces - kept < pieces
    assert not list((tmp_path / "cache/writing").iterdir())


def load_until_a_rank_is_killed(how, folder):
    """Read a file by way of a cache, in which a rank is killed half way through its third piece; one may fetch all for the others."""
    from mpi4py import MPI

    from sparseallreduce.data_cache import CachedFile, DataCache, files
    from sparseallreduce.linear import load

    comm, folder, fetched = MPI.COMM_WORLD, Path(folder), []
    files.PIECE, write, fetch = 4096, os.pwritev, CachedFile._fetched

    def killing(file, views, offset):
        if how == "kill" and len(fetched) == 3:
            os.pwrite(file, bytes(views[0])[:5], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, views, offset)

    CachedFile._fetched = lambda file, number: (fetched.append(number), fetch(file, number))[1]
    with mock.patch.object(os, "pwritev", killing):
        mine, _ = load(folder / "samples.csr", comm=comm, cache=DataCache(folder / "cache"))
    whole, _ = load(folder / "samples.csr", comm=sar.SERIAL)
    begin, end = whole.indptr[[mine.first_sample, mine.first_sample + mine.rows]]
    assert (mine.indices == whole.indices[begin:end]).all() and (mine.values == whole.values[begin:end]).all()
    print(f"samples {comm.allreduce(mine.rows)}, fetched {len(fetched)}", flush=True)


def test_exception_on_one_rank_of_a_command_ends_all(mpi_run):
    run = mpi_run(3, bench_with_a_failing_rank, timeout=SECONDS, check=False)
    assert run.returncode != 0
    assert "no luck on rank 1" in run.stderr


def bench_with_a_failing_rank():
    from mpi4py import MPI

    from sparseallreduce.cli import main

    sys.argv = ["sparseallreduce", "bench", "--size", "10000", "--density", "0.01", "--algorithms", "ssar_ring", "--repeats", "2"]
    if MPI.COMM_WORLD.rank != 1:
        main()
    with mock.patch.object(sar, "allreduce", side_effect=RuntimeError("no luck on rank 1")):
        main()


@pytest.mark.release  # that one of several processes compiles is shown without MPI (tests/streams/test_kernels.py)
def test_eight_ranks_compile_together_on_a_cold_cache(mpi_run, tmp_path):
    run = mpi_run(8, first_operations, timeout=300, env={"NUMBA_CACHE_DIR": str(tmp_path)})
    print(run.stdout)
    assert run.stdout.count("right") == 8
    compiled = {path.name.partition("-")[0] for path in tmp_path.rglob("*.nbi")}
    assert {"selection.select", "selection.kth", "selection.top"} <= compiled


def first_operations():
    import time

    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    start = time.perf_counter()
    for algorithm in sar.algorithms():
        result = sar.allreduce(sar.SparseStream([comm.rank, 10], np.float32([1, 2]), 100), comm, algorithm=algorithm)
        assert result.indices.tolist() == [*range(comm.size), 10]
        assert result.values.tolist() == [1.0] * comm.size + [2.0 * comm.size]
        if algorithm == sar.algorithms()[0]:
            first = time.perf_counter() - start
    accumulator = np.zeros(2**17, np.float32)
    accumulator[: 2 * comm.size] = np.arange(2 * comm.size)
    update, contributed = sar.OkTopk(2**17, comm.size).allreduce(accumulator, comm)
    assert update.indices.tolist() == contributed.tolist() == list(range(comm.size, 2 * comm.size))
    assert update.values.tolist() == [comm.size * index for index in range(comm.size, 2 * comm.size)]
    print(f"right after {first:.1f} s, all algorithms and a selection after {time.perf_counter() - start:.1f} s", flush=True)
