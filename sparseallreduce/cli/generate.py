"""`sparseallreduce generate`: write a synthetic data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from sparseallreduce.cli.numbers import Whole
from sparseallreduce.cli.progress import progress_bar, progress_option
from sparseallreduce.cli.report import OUTPUT_FILE, check_output
from sparseallreduce.cli.signals import stop_as_interrupted
from sparseallreduce.linear.data.generate import BINARY_SUFFIX, KINDS
from sparseallreduce.linear.data.generate import generate as write_samples
from sparseallreduce.runtime.communicators import world
from sparseallreduce.runtime.objects import agreed


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("out", type=OUTPUT_FILE)
@click.option(
    "--samples",
    type=Whole(min=1),
    help="Number of samples: 100,000 (uniform), 2,396,130 (url-like), 350,000 (webspam-like) by default.",
)
@click.option("--features", type=Whole(min=2, max=2**32 - 1), help="Number of features: 100,000, 3,231,961 and 16,609,143 by default.")
@click.option("--density", type=click.FloatRange(0, 0.5, min_open=True), help="Non-zeros per sample as a fraction of the features.")
@click.option("--seed", type=Whole(min=0), default=0, show_default=True, help="Seed; the same arguments give the same bytes.")
@progress_option()
def generate(kind: str, out: Path, samples: int | None, features: int | None, density: float | None, seed: int) -> None:
    """Write synthetic samples to OUT.

    The file is binary if its name ends in .csr. Otherwise it is svmlight text, compressed if the name ends in .gz, .bz2 or .xz.

    uniform draws all features with the same probability. url-like and webspam-like resemble the two data sets of the sparse allreduce
    thesis in size, non-zeros per sample and power-law frequencies of the features. Labels come from a sparse linear model with noise.

    Under mpiexec the ranks share the work on a binary file. The bytes do not depend on the number of ranks.
    """
    stop_as_interrupted()
    comm = world()
    agreed(comm, lambda: check_output(out))
    total = samples or KINDS[kind].samples
    with progress_bar(comm, desc=out.name, unit="sample", total=total) as bar:
        # Rank 0's progress stands for that of all ranks that share the work.
        sharing = comm.size if out.suffix == BINARY_SUFFIX else 1
        arguments: dict[str, Any] = {"samples": samples, "features": features, "density": density, "seed": seed}
        write_samples(kind, out, **arguments, comm=comm, progress=lambda count: bar.update(count * sharing))
