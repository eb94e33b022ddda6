"""All algorithms with 1,024 ranks, flat and between 64 hosts of 16 ranks, in the simulator.

python bench/many_hosts.py [--json FILE]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

import sparseallreduce as sar
from sparseallreduce.cli.report import environment, write_report

MANY = sar.Network(30e-6, 25e9 / 8, hosts=16, local_latency=1e-6, local_bandwidth=10e9)
MANY_RANKS, MANY_SIZE, MANY_SHARES = 1024, 2**20, (1e-4, 1e-3)


@click.command()
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Where to write the results.")
@click.pass_context
def main(context: click.Context, json_path: Path | None) -> None:
    """Simulate, and print a table."""
    rows = of_many_ranks()
    if json_path is not None:
        write_report(json_path, "many_hosts", context.params, environment(sar.SERIAL), {"rows": rows})


def of_many_ranks() -> list[dict[str, Any]]:
    """Every algorithm on all ranks, and between hosts."""
    rows = []
    hosts = MANY_RANKS // int(MANY.hosts or 1)
    print(f"{hosts} hosts x {MANY.hosts} ranks, N = {MANY_SIZE:,}, float32, uniform; milliseconds, and bytes that the busiest rank sends")
    for share in MANY_SHARES:
        rng, k = np.random.default_rng(0), round(share * MANY_SIZE)
        streams = [uniform(rng, k) for _ in range(MANY_RANKS)]
        print(f"k = {k:,} ({share:.2%})")
        for name in sar.algorithms():
            both: dict[str, Any] = {"algorithm": name, "density": share}
            ways: dict[str, tuple[str, dict[str, str]]] = {"flat": (name, {})}
            if name not in ("hierarchical", "dense_torus", "auto"):
                ways["hierarchical"] = "hierarchical", {"outer": name}
            for way, (algorithm, options) in ways.items():
                out = sar.simulate(streams, algorithm, MANY, **options)
                both[way] = {"time": out.time, "bytes": int(out.bytes_sent.max())}
            rows.append(both)
            shown = "   ".join(f"{way} {1e3 * both[way]['time']:9.2f} ms {both[way]['bytes'] / 1e3:9.0f} kB" for way in ways)
            print(f"  {name:24} {shown}", flush=True)
    return rows


def uniform(rng: np.random.Generator, count: int) -> sar.SparseStream:
    indices = np.sort(rng.choice(MANY_SIZE, count, replace=False)).astype(np.uint32)
    return sar.SparseStream(indices, np.ones(count, np.float32), MANY_SIZE)


if __name__ == "__main__":
    main()
