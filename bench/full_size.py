"""Generate, convert and load a data set of full size; print the seconds, and the largest memory of a rank.

    python bench/full_size.py url-like --folder /scratch
    python bench/full_size.py webspam-like --folder /scratch --no-text

The text reader is compared with scikit-learn's on the beginning of the same file. --keep leaves the files in the folder.
"""

from __future__ import annotations

import io
import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

GOAL = 1 << 30  # bytes that a rank may take beside its share of the data


@click.command()
@click.argument("kind", type=click.Choice(["url-like", "webspam-like", "uniform"]))
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=Path("data"), show_default=True)
@click.option("--samples", type=click.IntRange(min=1), help="By default those of the kind.")
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Of the parallel runs.")
@click.option("--text/--no-text", default=True, help="Whether to generate, convert and load svmlight text as well.")
@click.option("--keep", is_flag=True, help="Leave the binary file in the folder.")
def full_size(kind: str, folder: Path, samples: int | None, ranks: int, text: bool, keep: bool) -> None:
    """Measure all that is done to a data set of a KIND before it is trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    size = [] if samples is None else ["--samples", str(samples)]
    plain, binary, converted = (folder / f"{kind}{suffix}" for suffix in (".svm", ".csr", "-converted.csr"))
    print(f"| {kind} | ranks | seconds | MB/s of its file | most memory of a rank, MB |\n| --- | --- | --- | --- | --- |", flush=True)
    try:
        for count in (1, ranks):
            row("generate binary", count, binary, ["generate", kind, str(binary), *size])
        if text:
            row("generate text", 1, plain, ["generate", kind, str(plain), *size])
            for count in (1, ranks):
                row("convert text", count, plain, ["convert", str(plain), str(converted)])
            for count in (1, ranks):
                row("load text", count, plain, ["load", str(plain)])
            print(compared(plain))
        for count in (1, ranks):
            row("load binary", count, binary, ["load", str(binary)])
            print(f"(the goal: {(binary.stat().st_size / count + GOAL) / 1e6:,.0f} MB)", flush=True)
    finally:
        for path in (plain, converted, *(() if keep else (binary,))):
            path.unlink(missing_ok=True)


def row(title: str, ranks: int, file: Path, step: list[str]) -> None:
    """Carry out a step on some ranks, and print a row of the table."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [*([] if ranks == 1 else [str(mpiexec), "-n", str(ranks)]), sys.executable, __file__, "--step", *step]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True)
    reports = [json.loads(report) for report in re.findall(r"{[^}]*}", run.stdout)]  # ranks may speak in the same line
    seconds, peak = (max(report[name] for report in reports) for name in ("seconds", "peak"))
    print(f"| {title} | {ranks} | {seconds:.1f} | {file.stat().st_size / 1e6 / seconds:,.0f} | {peak / 1e6:,.0f} |", flush=True)


def carried_out(step: list[str]) -> dict[str, Any]:
    """One step on this rank: a command, or ``load FILE``."""
    from sparseallreduce.cli import main
    from sparseallreduce.linear import load
    from sparseallreduce.runtime.communicators import world

    comm = world()
    start = time.perf_counter()
    if step[0] == "load":
        load(step[1], comm=comm)
    else:
        try:
            main(step)
        except SystemExit as end:
            if end.code:
                raise
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def compared(path: Path, megabytes: int = 50) -> str:
    """Our parser and scikit-learn's on the same text in memory."""
    import numpy as np
    from sklearn.datasets import load_svmlight_file

    from sparseallreduce.linear.data.svmlight.reader import _Parser

    with path.open("rb") as file:
        lines = file.read(megabytes * 1_000_000).rpartition(b"\n")[0] + b"\n"
    parser = _Parser(None, False, np.dtype(np.float32))
    parser.parse(lines)
    start = time.perf_counter()
    parser.parse(lines)
    ours = time.perf_counter() - start
    start = time.perf_counter()
    load_svmlight_file(io.BytesIO(lines), dtype=np.float32, zero_based=False)
    theirs = time.perf_counter() - start
    rates = (len(lines) / 1e6 / seconds for seconds in (ours, theirs))
    return "(parsing alone: {:.0f} MB/s, scikit-learn {:.0f} MB/s; {:.0f} times as fast)".format(*rates, theirs / ours)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        print(json.dumps(carried_out(sys.argv[2:])), flush=True)
    else:
        full_size()
