"""Memory that ranks share, where only processes that may die can try it: who writes into a result, and limits of memory."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import sparseallreduce as sar

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_who_writes_into_a_result_through_a_pointer_changes_no_other_rank(mpi_run, form):
    """It is killed for it: a child of rank 0, since with a rank its MPI library ends all."""
    run = mpi_run(2, write_into_the_result, form, timeout=SECONDS)
    for what in ("values", "indices", "buffer") if form == "sparse" else ("values", "buffer"):
        assert f"{what}: killed by signal 11" in run.stdout
    assert run.stdout.count("holds the sum") == 2


def write_into_the_result(form):
    import ctypes

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    size, entries = 400_000, 40_000 if form == "sparse" else 390_000
    stream, total = random_stream(comm, size, entries)
    with all_in_shared_memory():
        result = sar.allreduce(stream, comm)
    assert result.is_dense == (form == "dense")
    buffer = result._stored
    while isinstance(buffer.base, np.ndarray):
        buffer = buffer.base
    arrays = {"values": result._stored, "indices": result.indices, "buffer": buffer}
    for what, array in arrays.items():
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                ctypes.memset(array.ctypes.data, 0, 64)
                os._exit(0)
            print(f"{what}: killed by signal", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
    comm.Barrier()
    if np.array_equal(result.to_dense(), total):
        print(f"rank {comm.rank} holds the sum", flush=True)


def random_stream(comm, size, entries):
    """A stream of ones, and what all of them come to."""
    indices = np.sort(np.random.default_rng(comm.rank).permutation(size)[:entries])
    stream = sar.SparseStream(indices, np.ones(entries, np.float32), size)
    return stream, comm.allreduce(stream.to_dense())


def all_in_shared_memory():
    """Whatever can be is added up there."""
    from sparseallreduce.runtime import predictions

    def chosen(_problem, _machine, _fits, writes, _share):
        return "sparse_shared" if writes else "ssar_recursive_doubling"

    return mock.patch.object(predictions, "_fastest", chosen)


@pytest.fixture
def control_group():
    """A control group with a limit of so many bytes, which processes can join; skips where none can be made."""
    made = []

    def make(limit):
        version_1 = Path("/sys/fs/cgroup/memory")
        root, name = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
        group = root / f"sparseallreduce-test-{os.getpid()}"
        try:
            group.mkdir()
            made.append(group)
            (group / name).write_text(str(limit))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        return group / "cgroup.procs"

    yield make
    for group in made:
        group.rmdir()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="control groups are of Linux")
def test_a_limit_of_memory_ends_no_process(control_group):
    """Memory for streams of 32 MiB does not fit into what is left of it, which turns out before any of it is touched."""
    command = [sys.executable, __file__, str(control_group(LIMIT))]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    assert run.returncode == 0, run
    assert run.stdout.split() == ["8:True", "32:False", "8:True"]


LIMIT = 448 << 20


def sum_in_a_group(processes):
    """Join it, and say which streams of two ranks can be summed in shared memory, while the results of four sums are kept."""
    from sparseallreduce.runtime.memory.mapping import SharedFile
    from sparseallreduce.runtime.memory.sparse import SparseMemory
    from sparseallreduce.runtime.shortcuts.sparse_shared import SparseShared
    from sparseallreduce.streams import packed
    from sparseallreduce.streams.reduction import Reduction

    Path(processes).write_text(str(os.getpid()))
    file = os.memfd_create("sparse")
    os.ftruncate(file, SparseMemory.nbytes(2))
    files = [SharedFile(os.dup(file), SparseMemory.nbytes(2)) for _ in range(2)]
    memories = [SparseMemory(each, rank, 2, oversubscribed=False, cores=2) for rank, each in enumerate(files)]
    sequence, kept = 1, []
    for mebibytes in (8, 32, 8):
        entries = mebibytes << 17
        ones, size = np.ones(entries, np.float32), 4 * entries
        streams = [sar.SparseStream(np.arange(rank, size, 4, np.uint32), ones, size) for rank in range(2)]
        reduction = Reduction()
        kind, done = packed.Layout.of(streams[0], reduction), True
        shortcuts = [SparseShared(kind, reduction, memory) for memory in memories]
        for _ in range(4):
            flags = [shortcut.arm(sequence, stream) for shortcut, stream in zip(shortcuts, streams)]
            done = done and all(flags)
            if all(flags):
                for shortcut in shortcuts:
                    shortcut.commit(sequence, flags[0] & flags[1], SimpleNamespace(entries=lambda: [entries] * 2))  # noqa: B023
                kept += [shortcut.poll(sequence, 1) or shortcuts[0].poll(sequence, 1) for shortcut in shortcuts]
            for shortcut in shortcuts:
                shortcut.cancel(sequence)
            sequence += 1
        kept.clear()
        print(f"{mebibytes}:{done}", flush=True)


if __name__ == "__main__":
    sum_in_a_group(sys.argv[1])
