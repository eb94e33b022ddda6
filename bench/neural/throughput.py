"""Messages between two hosts (gTop-k figure 8), and training from end to end on hosts of several ranks (CommLib table 3)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from demo import mpiexec
from matplotlib.figure import Figure as Picture

from sparseallreduce.cli.paper_figures.hosts import CLOUD, LARGEST, scaled_vectors, seconds_of_sums

from . import ROOT
from .scaling import accumulators, compute_seconds

if TYPE_CHECKING:
    from .figures import Sizes

HOSTS, LANES = 16, 8

__all__ = ["end_to_end", "hosts", "messages", "on_hosts", "plot_end_to_end", "plot_messages"]

TOOL = ROOT / "tools" / "hosts.sh"
WORDS = (256, 1024, 4096, 16384, 65536, 262144, 1048576)  # of 4 bytes
WAYS = {"Dense-SGD": "TreeAR", "2DTAR-SGD": "2DTAR", "MSTopK-SGD": "HiTopKComm"}
#: Of CommLib section 5.5.2: millions of parameters, samples of a rank, and samples a second of one GPU; efficiencies in its table 3.
CASES = {
    "ResNet-50 (224*224)": (25, 256, 1150, (43.5, 91.4, 90.6)),
    "ResNet-50 (96*96)": (25, 256, 4400, (20.1, 56.7, 70.5)),
    "VGG-19": (143, 256, 560, (25.0, 66.4, 80.4)),
    "Transformer": (110, 8, 32, (16.5, 61.6, 87.8)),
}


@contextmanager
def hosts(rate: str, ranks: int = 1) -> Iterator[None]:
    """Two hosts of `tools/hosts.sh`, with so many ranks each; as root."""
    if subprocess.run([TOOL, "up", "2", rate, str(ranks)], check=False, stdin=subprocess.DEVNULL).returncode != 0:
        raise click.ClickException(f"{TOOL.relative_to(ROOT)} made no hosts: it needs root")
    try:
        yield
    finally:
        subprocess.run([TOOL, "down"], check=False, stdin=subprocess.DEVNULL)


def on_hosts(ranks: int, command: str, *arguments: object) -> Any:
    """What a command of this package writes as JSON to the file that is its last argument, started on these hosts."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = [TOOL, "run", "-n", ranks, sys.executable, "-m", "bench.neural", command, *arguments, out]
        environment = os.environ | {"MPIEXEC": mpiexec(), "PYTHONPATH": str(ROOT)}
        if subprocess.run(list(map(str, words)), cwd=ROOT, check=False, stdin=subprocess.DEVNULL, env=environment).returncode != 0:
            raise click.ClickException("a run on the hosts failed")
        return json.loads(out.read_text())


def messages(sizes: Sizes) -> dict[str, Any]:
    """gTop-k figure 8, between hosts at 1 Gbit/s."""
    with hosts("1gbit"):
        times = {int(words): seconds for words, seconds in on_hosts(2, "messages").items()}
    words = np.array(list(times))
    beta, alpha = np.polyfit(words, list(times.values()), 1, w=1 / np.array(list(times.values())))
    print(f"alpha = {1e3 * alpha:.4f} ms, beta = {1e3 * beta:.3g} ms a value of 4 bytes")
    return {"seconds": times, "alpha": float(alpha), "beta": float(beta)}


def ping_pong(out: Path) -> None:
    """Seconds of a message of so many words each way: the median of half the time of there and back."""
    from mpi4py import MPI

    comm, found = MPI.COMM_WORLD, {}
    for words in WORDS:
        message, times = np.zeros(words, np.float32), []
        for _ in range(12):
            comm.Barrier()
            start = perf_counter()
            for turn in range(8):
                if comm.rank == turn % 2:
                    comm.Send(message, 1 - comm.rank)
                else:
                    comm.Recv(message, 1 - comm.rank)
            times.append((perf_counter() - start) / 8)
        found[words] = float(np.median(times))
    if comm.rank == 0:
        out.write_text(json.dumps(found))


def plot_messages(results: dict[str, Any], picture: Picture) -> None:
    axes = picture.subplots()
    words = np.array([int(each) for each in results["seconds"]])
    axes.plot(words, 1e3 * np.array(list(results["seconds"].values())), "o", label="measured, two hosts at 1 Gbit/s")
    axes.plot(words, 1e3 * (results["alpha"] + results["beta"] * words), label="alpha + beta m")
    axes.plot(words, 0.436 + 3.6e-5 * words, ":", label="the paper's alpha and beta")
    axes.set(xscale="log", yscale="log", xlabel="values of 4 bytes", ylabel="ms a message")
    axes.legend()


def end_to_end(sizes: Sizes) -> dict[str, Any]:
    """CommLib table 3: our models with their time of computing here, and the paper's with the paper's, on the paper's network."""
    ranks, results = HOSTS * LANES, {}
    for model in ("resnet", "vgg", "transformer"):
        arrays = accumulators(model, 16, ranks, 0.01)
        report(results, f"{model}, ours", compute_seconds(model, 16), 16 * ranks, seconds_of_sums(arrays, CLOUD, LANES), None)
    for name, (million, samples, speed, paper) in CASES.items():
        if million * 1e6 <= sizes.longest * 16:
            arrays, network = scaled_vectors(million * 1_000_000, LARGEST, (HOSTS, LANES))
            report(results, name, samples / speed, samples * ranks, seconds_of_sums(arrays, network, LANES), paper)
    return results


def report(results: dict[str, Any], name: str, computing: float, samples: int, times: dict[str, float], paper: Any) -> None:
    """Samples a second and efficiencies, with nothing of communication hidden."""
    steps = {way: computing + times[sums] for way, sums in WAYS.items()}
    row = {way: {"throughput": samples / step, "efficiency": computing / step} for way, step in steps.items()}
    results[name] = {"computing": computing, "ways": row, "paper": paper}
    said = ", ".join(f"{way} {each['throughput']:,.0f} samples/s ({each['efficiency']:.1%})" for way, each in row.items())
    print(f"{name}: {said}" + (f"; paper {paper}" if paper else ""), flush=True)


def plot_end_to_end(results: dict[str, Any], picture: Picture) -> None:
    axes, width = picture.subplots(), 0.8 / len(WAYS)
    places = np.arange(len(results))
    for number, way in enumerate(WAYS):
        heights = [100 * row["ways"][way]["efficiency"] for row in results.values()]
        axes.bar(places + number * width, heights, width, label=way)
        papers = [np.nan if row["paper"] is None else row["paper"][number] for row in results.values()]
        axes.plot(places + number * width, papers, "k_", markersize=14, label="paper" if number == 0 else None)
    axes.set_xticks(places + width, list(results), fontsize="small")
    axes.set_ylabel("scaling efficiency, %")
    axes.legend()
