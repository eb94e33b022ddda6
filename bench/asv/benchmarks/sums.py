"""Adding, encoding and selecting in one process, sums over MPI on two ranks, and sums of simulated ranks."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import sparseallreduce as sar
from sparseallreduce.streams.selection import ExactTopK, MSTopK

SIZE = 2**22


def stream_of(rank, density, size=SIZE):
    """Return a stream of random positions, the same in every run."""
    rng = np.random.default_rng(rank)
    entries = int(size * density)
    return sar.SparseStream(np.sort(rng.choice(size, entries, replace=False)), rng.random(entries, np.float32), size)


class Local:
    """Sums of two streams."""

    params = (0.001, 0.01, 0.0625)
    param_names = ("density",)

    def setup(self, density):
        self.first, self.second = stream_of(0, density), stream_of(1, density)
        self.first + self.second  # compiles

    def time_sum(self, density):
        self.first + self.second

    def time_to_dense(self, density):
        self.first.to_dense()


class Selecting:
    """Top-k of a dense gradient: 1 % of 2**22."""

    params = ("ExactTopK", "MSTopK")
    param_names = ("selector",)

    def setup(self, name):
        self.gradient = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32)
        self.selector = {"ExactTopK": ExactTopK, "MSTopK": MSTopK}[name](SIZE // 100)
        self.selector(self.gradient)

    def time_select(self, name):
        self.selector(self.gradient)


class OverMPI:
    """Sums by `algorithm="auto"` on two ranks, divided by MPI's Allreduce of the dense vector in the same run."""

    params = (0.0001, 0.001, 0.01, 0.0625)
    param_names = ("density",)
    unit = "of MPI's dense allreduce"
    timeout = 120

    def track_ratio(self, density):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "run.json")
            mpiexec = Path(sys.executable).parent / "mpiexec"
            command = [mpiexec, "-n", "2", sys.executable, "-m", "sparseallreduce", "bench", "--size", str(SIZE), "--density", str(density)]
            command += ["--algorithms", "auto", "--json", report]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=110)
            (automatic,) = json.loads(report.read_text())["results"]["algorithms"]
        return automatic["ratio"]


class Simulated:
    """Sums of 8 ranks on a network of 10 Gbit/s: virtual time and bytes, the same in every run."""

    params = ("auto", "ssar_recursive_doubling", "ssar_split_allgather", "dsar_split_allgather")
    param_names = ("algorithm",)

    network = sar.Network(latency=5e-6, bandwidth=1.25e9)

    def setup(self, algorithm):
        self.streams = [stream_of(rank, 0.01, 2**16) for rank in range(8)]
        sar.simulate(self.streams, algorithm, network=self.network)  # compiles

    def track_time(self, algorithm):
        return 1e6 * sar.simulate(self.streams, algorithm, network=self.network).time

    track_time.unit = "microseconds, virtual"

    def track_bytes(self, algorithm):
        return int(sar.simulate(self.streams, algorithm, network=self.network).bytes_sent.sum())

    track_bytes.unit = "bytes"

    def time_simulator(self, algorithm):
        sar.simulate(self.streams, algorithm, network=self.network)
