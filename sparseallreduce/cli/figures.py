"""`sparseallreduce figures`: reproduce the figures of the papers, each with one command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.cli.bench import Setting as Benchmark
from sparseallreduce.cli.bench import measured_results
from sparseallreduce.cli.bench_sweep import swept
from sparseallreduce.cli.numbers import Whole
from sparseallreduce.cli.paper_figures import FIGURES, Settings
from sparseallreduce.cli.pictures.drawing import draw
from sparseallreduce.cli.pictures.panels import Picture
from sparseallreduce.cli.report import check_output, environment, on_rank_0, write_report
from sparseallreduce.cli.sweep import Setting
from sparseallreduce.cli.terminal import wrapped
from sparseallreduce.runtime.communicators import world

_EXPERIMENTS, _REPEATS = 5, 10  # as in the thesis


@click.command()
@click.argument("names", nargs=-1, metavar="NAME...")
@click.option("--list", "listed", is_flag=True, help="List all figures and exit.")
@click.option("--small", is_flag=True, help="Use small sizes that take seconds, for a preview.")
@click.option("--format", "ending", type=click.Choice(["png", "svg", "pdf"]), default="png", show_default=True, help="Image format.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(), show_default="here", help="Folder for the files.")
@click.option("--seed", type=Whole(min=0), default=0, show_default=True, help="Seed of the data.")
@click.pass_context
def figures(context: click.Context, names: tuple[str, ...], listed: bool, small: bool, ending: str, out: Path, seed: int) -> None:
    """Reproduce figures of the papers: write NAME.png and NAME.json to the folder --out.

    A name consists of a paper and the number of its figure, as thesis-5.1; `thesis` stands for all figures of that paper, `all` for all
    figures. Under mpiexec, numbers of ranks up to those started are measured; larger ones are simulated, drawn dashed and mentioned in the
    caption. `plot` draws the JSON again. Small models stand in for the papers' neural networks, and docs/figures.md says which figures
    cannot be reproduced.
    """
    comm = world()
    if listed:
        if comm.rank == 0:
            click.echo("\n".join(wrapped(f"{name:<14} {figure.summary}", 15) for name, figure in FIGURES.items()))
        return
    chosen = _chosen(context, names)
    on_rank_0(comm, lambda: _prepare(out, chosen, ending))
    surroundings = environment(comm)
    for name in chosen:
        picture = FIGURES[name].make(Settings(comm, _measuring(comm, small, seed), small, seed))
        on_rank_0(comm, lambda: _write(picture, out / f"{name}.{ending}", context, surroundings, name))  # noqa: B023
        if comm.rank == 0:
            click.echo(wrapped(f"{out / name}.{ending}, {name}.json: {FIGURES[name].summary}"))


def _chosen(context: click.Context, names: Sequence[str]) -> list[str]:
    """Return the names of the chosen figures; the name of a paper selects all its figures."""
    found: list[str] = []
    for name in names:
        some = [each for each in FIGURES if name in ("all", each, each.rpartition("-")[0])]
        if not some:
            raise click.UsageError(f"there is no figure {name!r}: figures --list shows all", context)
        found += some
    if not found:
        raise click.UsageError("no figure given: name one or more, such as thesis-5.1; figures --list shows all", context)
    return list(dict.fromkeys(found))


def _prepare(out: Path, names: Sequence[str], ending: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    check_output(*(out / f"{name}.{end}" for name in names for end in (ending, "json")))


def _measuring(comm: Any, small: bool, seed: int) -> Any:
    """Return the function with which figures measure or simulate their points; calling it is collective."""
    experiments, repeats = (1, 2) if small else (_EXPERIMENTS, _REPEATS)

    def measure(points: Sequence[Setting], names: Sequence[str], network: Any, simulate: bool = False) -> dict[str, Any]:
        def measured(point: Setting, part: Any) -> dict[str, Any]:
            setting = Benchmark(point.size, point.density, "float32", "sum", experiments, repeats, seed, False, False)
            return measured_results(setting, list(names), part)

        options: dict[str, Any] = {"dtype": "float32", "op": "sum", "seed": seed, "network": network, "on_point": lambda point: None}
        return swept(points, comm, measured, names, simulate=simulate, **options)

    return measure


def _write(picture: Picture, path: Path, context: click.Context, surroundings: dict[str, Any], name: str) -> None:
    report = {"figure": name, "picture": asdict(picture)}
    write_report(path.parent / f"{name}.json", "figures", context.params, surroundings, report)
    with atomic_file(path) as file:
        draw(picture).savefig(file, dpi=150, format=path.suffix.removeprefix("."))
