"""`sparseallreduce plot`: draw the reports that the other commands write with `--json`."""

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
from sparseallreduce.cli.terminal import wrapped
from sparseallreduce.runtime.launchers import launched_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST_REPORT = 1 << 28  # bytes: with --densities each step takes about fifty

Run = dict[str, Any]


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RESULT.json...")
@click.argument("out", type=OUTPUT_FILE, metavar="OUT.png")
def plot(results: tuple[Path, ...], out: Path) -> None:
    """Draw reports of `train`, `bench`, `simulate` and `figures` into OUT.png, or .pdf, .svg and other formats of matplotlib.

    Training runs: losses and accuracies of training and test samples over epochs, time and bytes, seconds per epoch by phase, density of
    the sums, and the results of a search. Benchmarks and simulations: time and bytes of every algorithm. Sweeps, and three or more
    simulations: time over density, ranks and dimension with the predictions of the cost model, bytes over density, the choices of auto, and
    the fill-in of sums. The runs are named after their files.
    """
    if launched_rank() > 0:
        return
    check_output(out)
    runs = _named(results, [_report(path) for path in results])
    commands = {run["command"] for run in runs.values()}
    if len(commands) > 1:
        raise click.ClickException(f"reports of {' and '.join(sorted(commands))} cannot be drawn in one picture: plot them separately")
    figure = _figure(_DRAWINGS[commands.pop()], dict(zip(runs, results)), runs)
    try:
        with atomic_file(out) as file:
            figure.savefig(file, dpi=150, format=out.suffix.removeprefix(".") or "png")
    except ValueError as error:  # an unknown suffix
        raise click.ClickException(f"cannot write {out}: {error}") from None
    click.echo(wrapped(f"{out}: {len(runs)} run{'s' if len(runs) > 1 else ''}"))


def _report(path: Path) -> Run:
    """Return the report in a file; raise ClickException if this command cannot draw it."""
    try:
        report = read_json(path, _LONGEST_REPORT)
    except OSError as error:
        raise click.ClickException(f"cannot read {path}: {error.strerror or error}") from None
    except Damaged as fault:
        raise click.ClickException(f"{path} is no report: {fault}; give a file written by train --json or bench --json") from None
    if not isinstance(report, dict) or not {"schema", "command"} <= report.keys():
        raise click.ClickException(f"{path} is not a report of sparseallreduce: give a file written by train --json or bench --json")
    if report["schema"] != SCHEMA:
        raise click.ClickException(f"{path} has schema {report['schema']}, but this version draws {SCHEMA}: write it again")
    if report["command"] not in _DRAWINGS:
        raise click.ClickException(f"{path} is a report of {report['command']}: only those of {_KINDS} can be drawn")
    swept = _found(report, "results.points") is not None
    missing = [name for name in _NEEDED["sweep" if swept else report["command"]] if not _found(report, name)]
    if missing:
        raise click.ClickException(f"{path} is damaged: {missing[0]!r} is missing or empty")
    return report


def _found(report: Run, name: str) -> Any:
    """Return the value at a dotted name, None if there is none."""
    value: Any = report
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _named(paths: Sequence[Path], runs: Sequence[Run]) -> dict[str, Run]:
    """Return the runs by the names of their files; files of the same name are named with their folders."""
    stems = Counter(path.stem for path in paths)
    names = [path.stem if stems[path.stem] == 1 else f"{path.parent.name}/{path.stem}" for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    return dict(zip(names, runs))


def _figure(make: Callable[[Mapping[str, Run]], Picture], paths: Mapping[str, Path], runs: Mapping[str, Run]) -> Figure:
    """Return the figure of runs by name; ``paths`` has their files."""
    try:
        return draw(make(runs))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if len(runs) > 1:  # find the damaged one: the first that cannot be drawn alone
            for name, run in runs.items():
                _figure(make, {name: paths[name]}, {name: run})
        files = ", ".join(map(str, paths.values()))
        raise click.ClickException(f"{files}: the report is damaged: {type(error).__name__} {error}") from None


def _benchmarks(runs: Mapping[str, Run]) -> Picture:
    """Return the picture of a sweep, or of simulations that form one; else that of separate benchmarks."""
    swept = any("points" in run["results"] for run in runs.values())
    simulated = len(runs) > 2 and all(run["command"] == "simulate" and "lossy" not in run["results"] for run in runs.values())
    if not swept and not (simulated and len({str(_setting(run)) for run in runs.values()}) > 2):
        return benchmark_picture(runs)
    if len({str(_setting(point)) for point in points_of(runs)}) > 1:
        return sweep_picture(runs)
    return benchmark_picture({name: run | {"results": run["results"]["points"][0]} for name, run in runs.items()})


def _figures_again(runs: Mapping[str, Run]) -> Picture:
    """Return one picture with all panels of the pictures written by `figures`."""
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
