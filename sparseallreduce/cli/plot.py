"""`sparseallreduce plot`: pictures of what the other commands have written with `--json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.checked_file import Damaged, read_json
from sparseallreduce.cli.pictures.benchmarks import benchmark_picture
from sparseallreduce.cli.pictures.drawing import draw
from sparseallreduce.cli.pictures.panels import Picture, panel_of
from sparseallreduce.cli.pictures.sweeps import points_of, sweep_picture
from sparseallreduce.cli.pictures.training import training_picture
from sparseallreduce.cli.report import OUTPUT_FILE, SCHEMA, check_output
from sparseallreduce.runtime.launchers import launched_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_REPORT = 1 << 28  # bytes: with --densities a step takes some fifty

Run = dict[str, Any]


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RESULT.json...")
@click.argument("out", type=OUTPUT_FILE, metavar="OUT.png")
def plot(results: tuple[Path, ...], out: Path) -> None:
    """Draw the reports of `train --json`, `bench --json` or `simulate --json` into OUT.png, or .pdf, .svg, and what else matplotlib writes.

    Training runs: losses and accuracies of training and test samples against epochs, time and bytes, seconds an epoch by phase, the density
    of the sums, and what a search has found. Benchmarks and simulations: time and bytes of every algorithm. Sweeps, and three simulations
    or more: time against density, ranks and dimension, with what the cost model expects, bytes against density, what auto takes, and how
    sums fill in. The names of the files are those of the runs.
    """
    if launched_rank() > 0:
        return
    check_output(out)
    runs = _named(results, [_report(path) for path in results])
    commands = {run["command"] for run in runs.values()}
    if len(commands) > 1:
        raise click.ClickException(f"reports of {' and '.join(sorted(commands))} have no picture in common: plot them apart")
    figure = _figure(_DRAWINGS[commands.pop()], dict(zip(runs, results)), runs)
    try:
        with atomic_file(out) as file:
            figure.savefig(file, dpi=150, format=out.suffix.removeprefix(".") or "png")
    except ValueError as error:  # an unknown suffix
        raise click.ClickException(f"cannot write {out}: {error}") from None
    click.echo(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}")


def _report(path: Path) -> Run:
    """The report in a file, if this command can draw it."""
    try:
        report = read_json(path, _LONGEST_REPORT)
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror or error}") from None
    except Damaged as fault:
        raise click.ClickException(f"{path} is no report: {fault}; give what train --json or bench --json has written") from None
    if not isinstance(report, dict) or not {"schema", "command"} <= report.keys():
        raise click.ClickException(f"{path} is not a report of sparseallreduce: give what train --json or bench --json has written")
    if report["schema"] != SCHEMA:
        raise click.ClickException(f"{path} has schema {report['schema']}, this version draws {SCHEMA}: write it again")
    if report["command"] not in _DRAWINGS:
        raise click.ClickException(f"{path} is a report of {report['command']}: only those of {_KINDS} can be drawn")
    swept = _found(report, "results.points") is not None
    missing = [name for name in _NEEDED["sweep" if swept else report["command"]] if not _found(report, name)]
    if missing:
        raise click.ClickException(f"{path} is damaged: there is nothing in its {missing[0]!r}")
    return report


def _found(report: Run, name: str) -> Any:
    """What stands at a dotted name, None if nothing does."""
    value: Any = report
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _named(paths: Sequence[Path], runs: Sequence[Run]) -> dict[str, Run]:
    """The runs by the names of their files, with those of their folders where these are the same."""
    stems = Counter(path.stem for path in paths)
    names = [path.stem if stems[path.stem] == 1 else f"{path.parent.name}/{path.stem}" for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, runs))


def _figure(make: Callable[[Mapping[str, Run]], Picture], paths: Mapping[str, Path], runs: Mapping[str, Run]) -> Figure:
    """The picture of runs by name, whose reports are in the files of these names."""
    try:
        return draw(make(runs))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if len(runs) > 1:  # the first that cannot be drawn by itself is the damaged one, or else what they have in common is
            for name, run in runs.items():
                _figure(make, {name: paths[name]}, {name: run})
        files = ", ".join(map(str, paths.values()))
        raise click.ClickException(f"{files}: the report is damaged: {type(error).__name__} {error}") from None


def _benchmarks(runs: Mapping[str, Run]) -> Picture:
    """The picture of a sweep, or of simulations that form one; else that of benchmarks one by one."""
    swept = any("points" in run["results"] for run in runs.values())
    simulated = len(runs) > 2 and all(run["command"] == "simulate" and "lossy" not in run["results"] for run in runs.values())
    if not swept and not (simulated and len({str(_setting(run)) for run in runs.values()}) > 2):
        return benchmark_picture(runs)
    if len({str(_setting(point)) for point in points_of(runs)}) > 1:
        return sweep_picture(runs)
    return benchmark_picture({name: run | {"results": run["results"]["points"][0]} for name, run in runs.items()})


def _figures_again(runs: Mapping[str, Run]) -> Picture:
    """The pictures of `figures`, all panels of them in one."""
    pictures = [run["results"]["picture"] for run in runs.values()]
    panels = [panel_of(panel) for picture in pictures for panel in picture["panels"]]
    title, caption = (" / ".join(dict.fromkeys(picture[of] for picture in pictures)) for of in ("title", "caption"))
    return Picture(title, panels, caption, pictures[0]["columns"])


def _setting(run: Run) -> list[Any]:
    return [(run.get("arguments") or run).get(name) for name in ("ranks", "size", "density")]


_DRAWINGS: dict[str, Callable[[Mapping[str, Run]], Picture]] = {
    "train": training_picture,
    "bench": _benchmarks,
    "simulate": _benchmarks,
    "figures": _figures_again,
}
*_FIRST, _LAST = _DRAWINGS
_KINDS = f"{', '.join(_FIRST)} and {_LAST}"
_NEEDED = {
    "train": ("epochs",),
    "bench": ("results.algorithms", "results.dense"),
    "sweep": ("results.points",),
    "simulate": ("results.algorithms",),
    "figures": ("results.picture.panels",),
}
