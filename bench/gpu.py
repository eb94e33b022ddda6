"""Kernels on a GPU beside a device-to-device copy of the same vector; and steps of two ranks that share it, by parts.

    python bench/gpu.py [--power 24 --power 28] [--density 0.001 --density 0.01] [--repeats 9] [--json FILE]

Times are medians, by CUDA events, of float32 values on the current device; the first run of each, which compiles, is left out. "Copies" is
in multiples of a copy of N values. GB/s counts the bytes that have to be read and written once: a copy's, the entries that a merge reads
and writes, the sectors of 32 bytes in which a scatter's places lie, read and written, and what a codec reads and writes. The two ranks are
started with mpiexec. Between the parts of their steps the device is waited for, which keeps these from overlapping.
--simulated runs all of it in numba's simulator at N = 2**8: what it then prints says nothing of any GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

MANY = 8  # streams of a sum of many
SECTOR = 32  # bytes that the memory of a GPU reads and writes at once
RANKS = 2


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--power", type=int, action="append", help="N = 2**POWER; 24 and 28 by default")
    parser.add_argument("--density", type=float, action="append", help="k / N; 0.001 and 0.01 by default")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--simulated", action="store_true", help="run in numba's simulator, to try the program")
    parser.add_argument("--part", choices=["kernels", "ranks"], help="one of the two parts; ranks under mpiexec")
    options = parser.parse_args(arguments)
    options.power = options.power or ([8] if options.simulated else [24, 28])
    options.density = options.density or [0.001, 0.01]
    xp = array_module(options.simulated)
    if xp is None:
        return 2
    rows = []
    for power in options.power:
        for density in options.density:
            size = 2**power
            k = max(2, round(size * density))
            if options.part != "ranks":
                rows += shown(kernel_rows(xp, size, k, options.repeats), size, k)
            if options.part == "ranks":
                rows += rank_rows(xp, size, k, options.repeats)
            elif options.part is None:
                rows += shown(started_ranks(power, density, options), size, k)
    if options.json:
        options.json.write_text(json.dumps({"device": name_of(xp), "simulated": options.simulated, "rows": rows}, indent=1))
    return 0


def array_module(simulated: bool) -> Any:
    """CuPy; None after a line that says why there is none."""
    if simulated:
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")
        sys.path.append(str(Path(__file__).resolve().parent.parent / "tests/cuda"))
        import device_arrays

        from sparseallreduce.streams.kernels.cuda import ranking

        ranking.DIGIT, ranking.DIGITS = 5, 2**5  # each takes as many turns of a loop of Python
        print("numba's simulator: times say nothing of any GPU", file=sys.stderr)
        return device_arrays
    from sparseallreduce import StreamError
    from sparseallreduce.streams.kernels.backend import device_module

    try:
        return device_module()
    except StreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return None


def name_of(xp: Any) -> str:
    if not hasattr(xp.cuda, "get_elapsed_time"):  # what stands for CuPy
        return "numba's simulator"
    return xp.cuda.runtime.getDeviceProperties(xp.cuda.Device().id)["name"].decode()


def seconds(xp: Any, repeats: int, call: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """The median of a call, by events of the device; ``before`` each the data are made as they were."""
    times = []
    for _ in range(repeats + 1):
        before()
        xp.cuda.Device().synchronize()
        if hasattr(xp.cuda, "get_elapsed_time"):
            start, end = xp.cuda.Event(), xp.cuda.Event()
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(xp.cuda.get_elapsed_time(start, end) / 1e3)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def normal(xp: Any, rng: np.random.Generator, size: int) -> Any:
    if hasattr(xp.cuda, "get_elapsed_time"):
        return xp.random.standard_normal(size, dtype=np.float32)
    return xp.asarray(rng.standard_normal(size).astype(np.float32))


def positions(rng: np.random.Generator, size: int, k: int) -> np.ndarray:
    """So many of the positions, at random, in increasing order."""
    found = np.unique(rng.integers(0, size, k + k // 4 + 16, dtype=np.uint32))
    while len(found) < k:
        found = np.unique(np.concatenate([found, rng.integers(0, size, k, dtype=np.uint32)]))
    return np.sort(rng.permutation(found)[:k])


Rows = list[dict[str, Any]]


def kernel_rows(xp: Any, size: int, k: int, repeats: int) -> Rows:
    rng = np.random.default_rng(0)
    vector, gradient = normal(xp, rng, size), normal(xp, rng, size)
    residual = vector.copy()
    copied = seconds(xp, repeats, lambda: xp.copyto(residual, vector))
    rows: Rows = [{"what": "copy", "seconds": copied, "bytes": 8 * size}]
    rows += selection_rows(xp, vector, gradient, residual, k, repeats)
    rows += merging_rows(xp, rng, size, k, repeats) + codec_rows(xp, rng, vector, k, repeats)
    return [row | {"copies": row["seconds"] / copied if copied else None} for row in rows]


def selection_rows(xp: Any, vector: Any, gradient: Any, residual: Any, k: int, repeats: int) -> Rows:
    from sparseallreduce.streams.kernels import magnitude
    from sparseallreduce.streams.kernels.cuda import mstopk, ranking, selection

    def restore() -> None:
        xp.copyto(residual, vector)

    summed = vector + gradient
    threshold = magnitude.from_key(ranking.kth(summed, k, xp)[0], np.dtype(np.float32))
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "threshold selection, residual updated and cleared": (
            2.2, lambda: selection.select_at_least(residual, threshold, gradient, np.uint32, xp, clear=True),
        ),
        "exact k-th magnitude": (4, lambda: ranking.kth(summed, k, xp)),
        "MSTopK, residual updated and cleared": (6, lambda: mstopk.mstopk(residual, gradient, k, np.uint32, xp, clear=True)),
    }  # fmt: skip
    rows = [
        {"what": what, "seconds": seconds(xp, repeats, call, restore), "goal in copies": goal} for what, (goal, call) in calls.items()
    ]
    rows.append({"what": "places of the k largest", "seconds": seconds(xp, repeats, lambda: ranking.largest(summed, k, np.uint32, xp))})
    return rows + torch_rows(xp, summed, k, repeats)


def torch_rows(xp: Any, summed: Any, k: int, repeats: int) -> Rows:
    """That of torch.topk on the same memory, where PyTorch with CUDA is installed."""
    if not hasattr(xp.cuda, "get_elapsed_time"):
        return []
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    tensor = torch.from_dlpack(summed).abs()
    with torch.cuda.stream(torch.cuda.ExternalStream(xp.cuda.get_current_stream().ptr)):
        return [{"what": "torch.topk", "seconds": seconds(xp, repeats, lambda: torch.topk(tensor, k, sorted=False))}]


def merging_rows(xp: Any, rng: np.random.Generator, size: int, k: int, repeats: int) -> Rows:
    from sparseallreduce.streams.kernels.cuda import dense, merging
    from sparseallreduce.streams.operator import SUM

    sets = [positions(rng, size, k) for _ in range(MANY)]
    streams = [(xp.asarray(indices), xp.asarray(rng.standard_normal(k).astype(np.float32))) for indices in sets]
    union = len(np.union1d(sets[0], sets[1]))
    read = written = 0  # entries, level by level
    level = [np.array(indices) for indices in sets]
    while len(level) > 1:
        read += sum(map(len, level))
        level = [np.union1d(*pair) for pair in zip(level[::2], level[1::2], strict=True)]
        written += sum(map(len, level))
    target = xp.zeros(size, np.float32)
    sectors = len(np.unique(sets[0] // (SECTOR // 4)))
    return [
        {
            "what": "merge of 2 streams",
            "seconds": seconds(xp, repeats, lambda: merging.merge(*streams[0], *streams[1], SUM, xp)),
            "bytes": 8 * (2 * k + union),
        },
        {
            "what": f"sum of {MANY} streams",
            "seconds": seconds(xp, repeats, lambda: merging.merge_many(streams, SUM, xp)),
            "bytes": 8 * (read + written),
        },
        {
            "what": "scatter, by sectors touched",
            "seconds": seconds(xp, repeats, lambda: dense.scatter(*streams[0], 0, SUM, target, xp)),
            "bytes": 8 * k + 2 * SECTOR * sectors,
        },
        *cupyx_rows(xp, streams, size, 8 * (2 * k + union), repeats),
    ]


def cupyx_rows(xp: Any, streams: list[tuple[Any, Any]], size: int, nbytes: int, repeats: int) -> Rows:
    """That of CuPy's own addition of the same, as matrices of a row."""
    if not hasattr(xp.cuda, "get_elapsed_time"):
        return []
    from cupyx.scipy.sparse import csr_matrix

    rows = [
        csr_matrix((values, indices.astype(np.int32), xp.asarray(np.array([0, len(indices)], np.int32))), (1, size))
        for indices, values in streams[:2]
    ]
    return [{"what": "cupyx, sum of 2 sparse rows", "seconds": seconds(xp, repeats, lambda: rows[0] + rows[1]), "bytes": nbytes}]


def codec_rows(xp: Any, rng: np.random.Generator, vector: Any, k: int, repeats: int) -> Rows:
    from sparseallreduce.streams.kernels.cuda import bitmap, dense, gaps

    size, dtype = len(vector), np.dtype(np.uint32)
    indices = xp.asarray(positions(rng, size, k))
    sparse = xp.zeros(size, np.float32)
    dense.scatter_set(indices, vector[:k].copy(), 0, sparse, xp)
    octets, bits = gaps.encode_gaps(indices, 0, xp), bitmap.encode_bitmap(indices, 0, size, xp)
    marks, values = bitmap.encode_nonzero(sparse, xp)
    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "gaps, written": (4 * k + len(octets), lambda: gaps.encode_gaps(indices, 0, xp)),
        "gaps, read": (4 * k + len(octets), lambda: gaps.decode_gaps(octets, 0, size, k, dtype, xp)),
        "bitmap, written": (4 * k + len(bits), lambda: bitmap.encode_bitmap(indices, 0, size, xp)),
        "bitmap, read": (4 * k + len(bits), lambda: bitmap.decode_bitmap(bits, 0, size, k, dtype, xp)),
        "dense as bits and values, written": (4 * size + len(marks) + 4 * k, lambda: bitmap.encode_nonzero(sparse, xp)),
        "dense as bits and values, read": (4 * size + len(marks) + 4 * k, lambda: bitmap.decode_nonzero(marks, values, size, xp)),
    }
    return [{"what": what, "seconds": seconds(xp, repeats, call), "bytes": nbytes} for what, (nbytes, call) in calls.items()]


def started_ranks(power: int, density: float, options: argparse.Namespace) -> Rows:
    """What two ranks that share the device find; nothing without an mpiexec."""
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        print("there is no mpiexec: sums of two ranks are left out")
        return []
    command = [mpiexec, "-n", str(RANKS), sys.executable, __file__, "--part", "ranks", "--power", str(power), "--density", str(density)]
    command += ["--repeats", str(options.repeats), *(["--simulated"] if options.simulated else [])]
    compiled = os.environ | {"NUMBA_DISABLE_JIT": "0"}  # what ranks share in memory is compiled code's
    ran = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=compiled)
    if ran.returncode:
        print(f"two ranks failed:\n{ran.stderr}")
        return []
    rows: Rows = json.loads(ran.stdout.splitlines()[-1])
    return rows


def rank_rows(xp: Any, size: int, k: int, repeats: int) -> Rows:
    """The parts of an OkTopk step, and of exact sums, on the slowest rank; rank 0 prints them."""
    from mpi4py import MPI

    import sparseallreduce as sar

    comm = MPI.COMM_WORLD
    rng = np.random.default_rng(comm.rank)
    rows = oktopk_rows(xp, comm, normal(xp, rng, size), k, repeats)
    stream = sar.SparseStream(positions(rng, size, k), rng.standard_normal(k).astype(np.float32), size).to_device(xp)
    dense, total = stream.to_dense(), np.empty(size, np.float32)

    def staged() -> Any:
        comm.Allreduce(dense.get(), total)
        return xp.asarray(total)

    for what, call in {"exact sum, auto": lambda: sar.allreduce(stream, comm), "dense Allreduce by the host": staged}.items():
        rows.append({"what": f"{RANKS} ranks: {what}", "seconds": slowest(xp, comm, repeats, call)})
    if comm.rank == 0:
        print(json.dumps(rows))
    return rows


def slowest(xp: Any, comm: Any, repeats: int, call: Callable[[], object]) -> float:
    """The median of the slowest rank's seconds, from a barrier until the device has nothing more to do."""
    times = []
    for _ in range(repeats + 1):
        comm.Barrier()
        begin = time.perf_counter()
        call()
        xp.cuda.Device().synchronize()
        times.append(max(comm.allgather(time.perf_counter() - begin)))
    return statistics.median(times[1:])


def oktopk_rows(xp: Any, comm: Any, gradient: Any, k: int, repeats: int) -> Rows:
    """Steps of error feedback as they are, and again with the device waited for between kernels, copies and messages."""
    import sparseallreduce as sar
    from sparseallreduce.reducers import base
    from sparseallreduce.reducers.oktopk import thresholds
    from sparseallreduce.streams.selection import reuse

    feedback = sar.ErrorFeedback(sar.OkTopk(len(gradient), k))
    whole = slowest(xp, comm, repeats, lambda: feedback.step(gradient, comm))
    rows = [{"what": f"{RANKS} ranks: OkTopk step", "seconds": whole}]
    right, spent = base.staged, {"kernels": 0.0, "copies": 0.0}

    def timed(name: str, schedule: Generator[Any, Any, Any], inner: str | None = None) -> Generator[Any, Any, Any]:
        """A schedule whose own time is added up, that of the one inside it left out."""
        value = None
        while True:
            before, begin = spent[inner] if inner else 0.0, time.perf_counter()
            try:
                step = schedule.send(value)
            except StopIteration as stop:
                return stop.value
            finally:
                xp.cuda.Device().synchronize()
                spent[name] += time.perf_counter() - begin - ((spent[inner] - before) if inner else 0.0)
            value = yield step

    def copying(function: Callable[..., Any]) -> Callable[..., Any]:
        """A copy that is made among kernels."""

        def call(*arrays: Any) -> Any:
            xp.cuda.Device().synchronize()
            begin = time.perf_counter()
            try:
                return function(*arrays)
            finally:
                spent["copies"] += time.perf_counter() - begin
                spent["kernels"] -= time.perf_counter() - begin

        return call

    def parted(schedule: Generator[Any, Any, Any], *rest: Any, **more: Any) -> Generator[Any, Any, Any]:
        return timed("copies", right(timed("kernels", schedule), *rest, **more), "kernels")

    found: dict[str, list[float]] = {"kernels": [], "copies": [], "messages": []}
    of_chosen, of_sums = (reuse, "as_host_together"), (thresholds, "as_host")
    copies = [mock.patch.object(*where, copying(getattr(*where))) for where in (of_chosen, of_sums)]
    with mock.patch.object(base, "staged", parted), copies[0], copies[1]:
        for _ in range(repeats):
            spent.update(kernels=0.0, copies=0.0)
            comm.Barrier()
            begin = time.perf_counter()
            feedback.step(gradient, comm)
            xp.cuda.Device().synchronize()
            all_of_it = time.perf_counter() - begin
            parts = {**spent, "messages": all_of_it - sum(spent.values())}
            for name, each in parts.items():
                found[name].append(max(comm.allgather(each)))
    return rows + [
        {"what": f"{RANKS} ranks: OkTopk step, {name}", "seconds": statistics.median(times)} for name, times in found.items()
    ]


def shown(rows: Rows, size: int, k: int) -> Rows:
    print(f"N = {size:,}, k = {k:,}\n{'':52}{'ms':>12}{'copies':>9}{'goal':>6}{'GB/s':>10}")
    for row in rows:
        copies = f"{row['copies']:9.2f}" if row.get("copies") is not None else " " * 9
        goal = f"{row['goal in copies']:6}" if "goal in copies" in row else " " * 6
        rate = f"{row['bytes'] / row['seconds'] / 1e9:10.1f}" if row.get("bytes") and row["seconds"] else ""
        print(f"{row['what']:52}{1e3 * row['seconds']:12.3f}{copies}{goal}{rate}")
    return [{"size": size, "k": k, **row} for row in rows]


if __name__ == "__main__":
    sys.exit(main())
