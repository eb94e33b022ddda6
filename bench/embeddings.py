"""Steps of a recommendation model with large tables: this library's row-sparse sums beside DistributedDataParallel's over gloo.

python bench/embeddings.py [--rows 1000000] [--ranks 2] [--steps 12] [--ways rows,gloo-sparse,gloo-dense] [--rate 1gbit]

The model is that of examples/recommender.py: 4 tables of 16 columns, 4 lookups each by a power law, 256 samples a rank. Each way applies
the mean by row-wise Adagrad. Bytes of this library are counted by trace, those of gloo at the loopback interface, which nobody else should
use meanwhile. With ``--rate`` each rank has a host of its own, of `tools/hosts.sh`, and bytes are counted at its interface.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("rows", "gloo-sparse", "gloo-dense")


def sent_bytes(interface: str) -> int:
    """Return the bytes that a network interface has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith(f"{interface}:"))


def measure(way: str, rows: int, steps: int, warm_up: int = 3) -> dict[str, Any]:
    """Return what a way takes on these ranks: the median of its steps, of it what is not the model's, and the bytes a rank sends."""
    import recommender as example
    import torch
    from mpi4py import MPI
    from torch.nn.parallel import DistributedDataParallel
    from ways import on_own_hosts

    import sparseallreduce as sar
    from sparseallreduce.torch import DenseSGD, RowwiseAdagrad, distributed

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = example.Recommender(rows, sparse=way != "gloo-dense")
    tables, others = list(model.tables.parameters()), [*model.bottom.parameters(), *model.top.parameters()]
    run: Any = model
    if way == "rows":
        rowwise = distributed(RowwiseAdagrad)(tables, lr=0.05, comm=comm, check_every=0)
        optimizers: list[Any] = [rowwise, DenseSGD(others, lr=0.05, comm=comm)]
    else:
        run = DistributedDataParallel(model)
        optimizers = [RowwiseAdagrad(tables, lr=0.05), torch.optim.SGD(others, lr=0.05)]
    apart = on_own_hosts(comm)
    interface, shared_by = ("eth0", 1) if apart else ("lo", comm.size)
    times, forward, before = [], [], 0
    with sar.trace() as traffic:
        for step in range(warm_up + steps):
            numbers, words, clicks = example.batch(rows, 1 + step * comm.size + comm.rank)
            comm.Barrier()
            if step == warm_up:
                before, sent_before = sent_bytes(interface), traffic.bytes_sent
                comm.Barrier()
            start = perf_counter()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(run(numbers, words), clicks)
            forward.append(perf_counter() - start)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            times.append(perf_counter() - start)
    comm.Barrier()
    sent = (traffic.bytes_sent - sent_before) if way == "rows" and not apart else (sent_bytes(interface) - before) / shared_by
    of_ranks = comm.allgather((statistics.median(times[warm_up:]), statistics.median(forward[warm_up:]), sent, loss.item()))
    seconds, forwards, bytes_sent, losses = (sum(each) / comm.size for each in zip(*of_ranks))
    return {"way": way, "rows": rows, "seconds": seconds, "forward": forwards, "bytes": bytes_sent / steps, "loss": losses}


def of_ranks(way: str, rows: int, steps: int) -> None:
    """Measure on these ranks, and print the result on the first."""
    import torch

    from sparseallreduce.torch import init_process_group

    if way != "rows":
        init_process_group("gloo")
    found = measure(way, rows, steps)
    if way != "rows":
        torch.distributed.destroy_process_group()
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(found))


@contextlib.contextmanager
def on_hosts(hosts: int, rate: str) -> Iterator[list[str]]:
    """Make hosts, which needs root, and yield the command that launches ranks on them."""
    tool = str(ROOT / "tools" / "hosts.sh")
    subprocess.run([tool, "up", str(hosts), rate], check=True, stdin=subprocess.DEVNULL)
    try:
        yield [tool, "run"]
    finally:
        subprocess.run([tool, "down"], check=False, stdin=subprocess.DEVNULL)


def main() -> None:
    """Launch every way, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each table")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--rate", help="of the link of each rank's host, as tc writes it; all ranks on this host by default")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of ranks
    given = parser.parse_args()
    if given.way:
        of_ranks(given.way, given.rows, given.steps)
        return
    from demo import mpiexec

    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1", "MPIEXEC": mpiexec()}
    results = []
    with on_hosts(given.ranks, given.rate) if given.rate else contextlib.nullcontext([mpiexec()]) as launcher:
        for way in given.ways.split(","):
            command = [*launcher, "-n", str(given.ranks), sys.executable, __file__, "--way", way]
            command += ["--rows", str(given.rows), "--steps", str(given.steps)]
            done = subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    print(f"{given.rows:,} rows a table, {given.ranks} ranks")
    print("| way | ms a step | of it forward | beside the first | MB a rank and step | beside the first | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    first = results[0]
    for each in results:
        times = f"{1e3 * each['seconds']:.1f} | {1e3 * each['forward']:.1f} | {each['seconds'] / first['seconds']:.2f}"
        print(f"| {each['way']} | {times} | {each['bytes'] / 1e6:.3f} | {each['bytes'] / first['bytes']:.1f} | {each['loss']:.4f} |")


if __name__ == "__main__":
    main()
