"""`sparseallreduce plot`: pictures of what `train --json` and `bench --json` have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.checked_file import Damaged, read_json
from sparseallreduce.cli.report import OUTPUT_FILE, SCHEMA, check_output
from sparseallreduce.runtime.launchers import launched_rank

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {  # phases from the bottom to the top of a bar
    "read": "tab:brown",
    "compute": "tab:gray",
    "select": "tab:purple",
    "communicate": "tab:red",
    "wait": "tab:orange",
    "update": "tab:blue",
    "checkpoint": "tab:pink",
    "evaluate": "tab:green",
}
_OTHERS = ("tab:olive", "tab:cyan", "black")  # of phases that are not named here
_MOST_POINTS = 2000  # of a curve
_LONGEST_REPORT = 1 << 28  # bytes: with --densities a step takes some fifty

Run = dict[str, Any]


@click.command()
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RESULT.json...")
@click.argument("out", type=OUTPUT_FILE, metavar="OUT.png")
def plot(results: tuple[Path, ...], out: Path) -> None:
    """Draw the reports of `train --json` or `bench --json` into OUT.png, or .pdf, .svg, and what else matplotlib writes.

    Training runs: the loss against epochs and against time, seconds an epoch by phase, and the density of the sums. Benchmarks: time
    and bytes of every algorithm. The names of the files are those of the runs.
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
        raise click.ClickException(f"{path} is a report of {report['command']}: only those of {' and '.join(_DRAWINGS)} can be drawn")
    missing = [name for name in _NEEDED[report["command"]] if not _found(report, name)]
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


def _figure(draw: Callable[[Figure, Mapping[str, Run]], None], paths: Mapping[str, Path], runs: Mapping[str, Run]) -> Figure:
    """The picture of runs by name, whose reports are in the files of these names."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise click.ClickException("plot needs matplotlib: pip install 'sparseallreduce[plot]'") from None
    figure = Figure(figsize=(11, 8), layout="constrained")
    FigureCanvasAgg(figure)  # no display, and no state that other figures share
    try:
        draw(figure, runs)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        if len(runs) > 1:  # the first that cannot be drawn by itself is the damaged one, or else what they have in common is
            for name, run in runs.items():
                _figure(draw, {name: paths[name]}, {name: run})
        files = ", ".join(map(str, paths.values()))
        raise click.ClickException(f"{files}: the report is damaged: {type(error).__name__} {error}") from None
    return figure


def _draw_training(figure: Figure, runs: Mapping[str, Run]) -> None:
    (by_pass, by_time), (phases, densities) = figure.subplots(2, 2)
    for name, run in runs.items():
        epochs = run["epochs"]
        losses = np.array([epoch["loss"] for epoch in epochs], np.float64)  # None, where it is not known, is no number
        by_pass.plot([epoch["epoch"] for epoch in epochs], losses, marker=".", label=name)
        by_time.plot(np.cumsum([_training_seconds(epoch) for epoch in epochs]), losses, marker=".", label=name)
    by_pass.set(xlabel="epoch", ylabel="loss", title="loss of the training set")
    by_time.set(xlabel="seconds of training", ylabel="loss", xlim=(0, None), title="loss against time, without evaluation")
    _draw_phases(phases, runs)
    _draw_densities(densities, runs)
    for axes in (by_pass, by_time):
        axes.grid(alpha=0.3)
        axes.legend()


def _training_seconds(epoch: Run) -> float:
    return float(sum(seconds for phase, seconds in epoch["seconds"].items() if phase not in ("total", "evaluate")))


def _draw_phases(axes: Axes, runs: Mapping[str, Run]) -> None:
    """Seconds of an epoch by phase, mean over the epochs, stacked; a bar a run."""
    phases = dict.fromkeys(phase for run in runs.values() for epoch in run["epochs"] for phase in epoch["seconds"] if phase != "total")
    others = iter(_OTHERS * len(phases))
    bottom = np.zeros(len(runs))
    for phase in sorted(phases, key=lambda phase: list(_COLOURS).index(phase) if phase in _COLOURS else len(_COLOURS)):
        heights = np.array([np.mean([epoch["seconds"].get(phase, 0.0) for epoch in run["epochs"]]) for run in runs.values()])
        axes.bar(list(runs), heights, bottom=bottom, label=phase, color=_COLOURS.get(phase) or next(others), width=0.6)
        bottom += heights
    for place, height in enumerate(bottom):
        axes.annotate(f"{height:.3g} s", (place, height), (0, 2), textcoords="offset points", ha="center")
    axes.set(ylabel="seconds an epoch", title="time by phase, mean over the epochs")
    axes.margins(y=0.1)
    _slant(axes, runs)
    axes.legend()


def _draw_densities(axes: Axes, runs: Mapping[str, Run]) -> None:
    """The density of gradient and sum at every iteration where it has been recorded, else of every epoch; runs in rounds have none."""
    for name, run in runs.items():
        if not all("steps" in epoch for epoch in run["epochs"]):
            continue
        colour = None
        steps, given, summed = _densities(run["epochs"])
        for values, what, style in ((given, "a gradient", "-"), (summed, "the sum", "--")):
            colour = axes.plot(steps, values, style, color=colour, label=f"{name}: {what}")[0].get_color()
    axes.set(xlabel="iteration", ylabel="share of non-zero entries", yscale="log", title="density")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()


def _densities(epochs: Sequence[Run]) -> tuple[Any, Any, Any]:
    """Iterations, and at each the density of a rank's gradient and of the sum."""
    if all(epoch.get("gradient_densities") for epoch in epochs):
        given, summed = (np.concatenate([epoch[f"{of}_densities"] for epoch in epochs]) for of in ("gradient", "total"))
        every = -(-len(given) // _MOST_POINTS)
        return np.arange(1, len(given) + 1)[::every], given[::every], summed[::every]
    ends = np.cumsum([epoch["steps"] for epoch in epochs])
    return ends, [epoch["gradient_density"] for epoch in epochs], [epoch["total_density"] for epoch in epochs]


def _draw_benchmarks(figure: Figure, runs: Mapping[str, Run]) -> None:
    """Bars of every algorithm, a colour a run: median and quartiles of the time, and the bytes of the rank that sends most."""
    times, sent = figure.subplots(2, 1, sharex=True)
    rows = {name: _bench_rows(run["results"]) for name, run in runs.items()}
    algorithms = list(dict.fromkeys(algorithm for by_name in rows.values() for algorithm in by_name))
    width = 0.8 / len(runs)
    for number, (name, by_name) in enumerate(rows.items()):
        places = [place + (number - (len(runs) - 1) / 2) * width for place, algorithm in enumerate(algorithms) if algorithm in by_name]
        found = [by_name[algorithm] for algorithm in algorithms if algorithm in by_name]
        medians = np.array([1e3 * row["median"] for row in found])
        below = medians - [1e3 * row["lower_quartile"] for row in found]
        above = [1e3 * row["upper_quartile"] for row in found] - medians
        times.bar(places, medians, width, yerr=np.array([below, above]), label=_setting(name, runs[name]["results"]), capsize=2)
        selects = [1e3 * row["select"]["median"] if "select" in row else np.nan for row in found]
        if not np.isnan(selects).all():
            times.plot(places, selects, "k_", label=f"{name}: selection")
        sent.bar(places, [max(row.get("bytes_sent") or [np.nan]) / 1e6 for row in found], width)
    times.set(ylabel="milliseconds", title="time of the slowest rank, median and quartiles")
    sent.set(ylabel="MB sent by a rank", title="bytes of the rank that sends most (of MPI's own Allreduce nobody knows)")
    sent.set_xticks(range(len(algorithms)), algorithms, rotation=20, ha="right")
    for axes in (times, sent):
        axes.grid(axis="y", alpha=0.3)
        if any(bar.get_height() > 0 for bar in axes.patches):  # one process sends nothing
            axes.set_yscale("log")
    times.legend()


def _bench_rows(results: Run) -> dict[str, Run]:
    rows = [results[name] for name in ("dense", "dense_with_densifying") if name in results]  # with --lossy only the former
    return {row["algorithm"]: row for row in (*rows, *results["algorithms"])}


def _setting(name: str, results: Run) -> str:
    return f"{name}: {results['ranks']} ranks, N = {results['size']:,}, density {results['density']:.3g}"


def _slant(axes: Axes, runs: Mapping[str, Run]) -> None:
    if len(runs) > 3 or max(map(len, runs)) > 15:
        axes.tick_params(axis="x", rotation=20)


_DRAWINGS = {"train": _draw_training, "bench": _draw_benchmarks}
_NEEDED = {"train": ("epochs",), "bench": ("results.algorithms", "results.dense")}
