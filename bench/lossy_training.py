"""Measure training by lossy sums: convergence, the xi of Ok-Topk's assumption 1, and how many values the selectors choose.

    python bench/lossy_training.py convergence                     final loss and accuracy of every optimiser beside dense SGD
    python bench/lossy_training.py assumption                      xi over the training (Ok-Topk section 5.1, figure 5)
    python bench/lossy_training.py selection                       values chosen against k (Ok-Topk section 5.2, figures 4 and 6)
    python bench/lossy_training.py record --out gradients.npz      accumulators of a training, for other measurements

All take --task perceptron, or --task logistic --data FOLDER: the data set `phishing_url` in that folder, or with --set reviews_trigram
the other. All take --learning-rate and --momentum. The first three take --json FILE and --plot FILE. P replicas run in one process, on
the simulator. See `lossy_tasks.py` for the tasks.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from lossy_tasks import OPTIMISERS, Array, Digits, Logistic, Measure, Step, Task, replicas, training
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import sparseallreduce as sar
from sparseallreduce import optim
from sparseallreduce.cli.report import environment
from sparseallreduce.streams import selection as selectors

FEATURES = {"phishing_url": 3_231_961, "reviews_trigram": 16_777_216}
#: What is done against the loss of accuracy: gTop-k's warm-up of the density in four epochs, and DGC's momentum correction and masking.
WARM_UP, CORRECTION, MASKING = AIDS = ("warm-up", "correction", "masking")
#: What becomes of the local choices, of which those of Ok-Topk are by threshold reuse.
OK_GLOBAL = "Ok-Topk, global"
LOSSY: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    name: (kind, {}) for name, kind in OPTIMISERS.items() if kind is not optim.DenseSGD
} | {"approximate TopK SGD, at most": (optim.ApproximateTopKSGD, {"form": "at most"})}
SELECTORS: dict[str, Callable[[int], selectors.Selector]] = {
    "exact": selectors.NonZeroTopK,
    "threshold reuse": partial(selectors.ThresholdReuse, period=32),
    "Gaussian": selectors.Gaussian,
    "MSTopK": selectors.MSTopK,
    "double sampling": selectors.DoubleSampling,
    "approximate": selectors.ApproximateTopK,
    "random": partial(selectors.RandomK, seed=0),
}

Results = dict[str, Any]


@click.group(help=__doc__)
def main() -> None:
    pass


def task_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--momentum", type=click.FloatRange(0, 1, max_open=True), help="By default 0.9 and 0."),
        click.option("--learning-rate", type=click.FloatRange(0, min_open=True), help="By default 0.05 and 1."),
        click.option("--epochs", type=click.IntRange(min=1), help="By default 40 of the perceptron, 1 of logistic regression."),
        click.option("--batch", type=click.IntRange(min=1), help="Samples a step, of all ranks; by default 100 and 500."),
        click.option("--data", "folder", type=click.Path(exists=True, path_type=Path), help="Folder of the data set."),
        click.option("--set", "data_set", type=click.Choice(list(FEATURES)), default="phishing_url", show_default=True),
        click.option("--task", "name", type=click.Choice(["perceptron", "logistic"]), default="perceptron", show_default=True),
    ):
        command = option(command)
    return command


def output_options(command: Callable[..., None]) -> Callable[..., None]:
    for name in ("plot", "json"):
        command = click.option(f"--{name}", f"{name}_path", type=click.Path(dir_okay=False, path_type=Path))(command)
    return command


def task_of(name: str, folder: Path | None, data_set: str, **options: Any) -> Task:
    given = {option: options[option] for option in ("epochs", "batch", "learning_rate", "momentum") if options[option] is not None}
    if name == "perceptron":
        return Digits(**given)
    if folder is None:
        raise click.UsageError(f"--task logistic needs --data, the folder of {data_set}.svm.bz2")
    return Logistic(folder, FEATURES[data_set], data_set, **given)


def numbers(text: str, kind: Callable[[str], Any]) -> list[Any]:
    return [kind(number) for number in text.split(",")]


@main.command()
@task_options
@output_options
@click.option("--ranks", default="4,8", show_default=True)
@click.option("--densities", default="0.01,0.001", show_default=True)
@click.option("--ways", default="plain", show_default=True, help=f"Such as plain,{WARM_UP},{WARM_UP}+{CORRECTION}+{MASKING}.")
@click.option("--optimisers", type=re.compile, default="", help="Those whose names a regular expression finds; all by default.")
def convergence(ranks: str, densities: str, ways: str, optimisers: re.Pattern[str], **shared: Any) -> None:
    """Final loss and accuracy of every optimiser after as many steps as dense SGD."""
    task = task_of(**shared)
    results: Results = {}
    for size in numbers(ranks, int):
        dense = results[f"P = {size}: dense SGD"] = list(epochs_of(task, optim.DenseSGD, {}, size, 1.0, ""))
        report(f"P = {size}: dense SGD", dense, dense)
        for density in numbers(densities, float):
            for optimiser in filter(optimisers.search, LOSSY):
                for way in ways.split(","):
                    key = f"P = {size}, density {density:g}: {optimiser}, {way}"
                    results[key] = list(epochs_of(task, *LOSSY[optimiser], size, density, way))
                    report(key, results[key], dense)
    write(shared, "convergence", task, results, draw_convergence)


def epochs_of(
    task: Task, kind: type[optim.Optimizer], options: dict[str, Any], ranks: int, density: float, way: str
) -> Iterable[Measure]:
    settings, schedule, aids = task.settings | options, density, way.split("+")
    if unknown := set(aids) - {*AIDS, "plain", ""}:
        raise click.UsageError(f"a way is plain, or some of {', '.join(AIDS)} with a plus sign between them, not {'+'.join(unknown)}")
    if CORRECTION in aids:
        settings |= {"momentum_correction": True, "momentum_masking": MASKING in aids}
    if WARM_UP in aids:
        schedule = optim.DensityWarmup(density, task.epoch_steps, tuple(max(density, share) for share in (0.25, 0.0725, 0.015, 0.004)))
    return training(task, replicas(task, kind, ranks, schedule, settings))


def report(key: str, measures: Sequence[Measure], dense: Sequence[Measure]) -> None:
    loss, accuracy = measures[-1]
    beside = f"{loss / dense[-1].loss:6.2f} times the loss of dense SGD, accuracy {accuracy - dense[-1].accuracy:+.4f}"
    print(f"{key:80} loss {loss:.5f}, test accuracy {accuracy:.4f}: {beside}", flush=True)


def draw_convergence(results: Results, figure: Figure) -> None:
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, measures in results.items():
        group, _, optimiser = key.partition(": ")
        groups[group][optimiser] = measures
    baselines = {group: groups.pop(group) for group in list(groups) if "density" not in group}
    figure.set_size_inches(6 * len(groups), 4.5)
    for axes, (group, curves) in zip(np.ravel(figure.subplots(1, len(groups), sharey=True)), groups.items()):
        for optimiser, measures in (baselines[group.partition(",")[0]] | curves).items():
            axes.plot(range(1, len(measures) + 1), [measure[0] for measure in measures], label=optimiser)
        axes.set(title=group, xlabel="epochs", ylabel="training loss", yscale="log")
    axes.legend(fontsize="small")


@main.command()
@task_options
@output_options
@click.option("--ranks", default="4,8", show_default=True)
@click.option("--densities", default="0.02,0.01,0.001", show_default=True)
def assumption(ranks: str, densities: str, **shared: Any) -> None:
    """The empirical xi of Ok-Topk's assumption 1 at every step of training with Ok-Topk SGD."""
    task = task_of(**shared)
    results: Results = {}
    for size in numbers(ranks, int):
        for density in numbers(densities, float):
            found = empirical_xi(task, size, density)
            tenths = ", ".join(f"{np.mean(part):.2f}" for part in np.array_split(found, min(10, len(found))))
            print(f"P = {size}, density {density:g}: xi by tenths of the training {tenths}; at most {max(found):.2f}", flush=True)
            results[f"P = {size}, density {density:g}"] = found
    write(shared, "assumption", task, results, draw_xi)


def empirical_xi(task: Task, ranks: int, density: float) -> list[float]:
    """Equation 5: the distance of the update from the top k of the mean accumulator, by the norm of the mean gradient."""
    found: list[float] = []
    wanted: list[Array] = []

    def before(step: Step) -> None:
        mean = np.mean(step.accumulators(), axis=0, dtype=np.float64)
        wanted[:] = [selectors.ExactTopK(round(density * len(mean)))(mean).to_dense()]

    def after(step: Step) -> None:
        update = step.out[0].outputs[0].to_dense()
        found.append(float(np.linalg.norm(update - wanted[0]) / np.linalg.norm(step.rate * step.mean_gradient())))

    list(training(task, replicas(task, optim.OkTopkSGD, ranks, density, task.settings), before, after))
    return found


def draw_xi(results: Results, figure: Figure) -> None:
    axes = figure.subplots()
    for key, found in results.items():
        window = max(1, len(found) // 50)
        axes.plot(np.convolve(found, np.ones(window) / window, "valid"), label=key)
    axes.set(xlabel="steps", ylabel="xi of assumption 1, running mean")
    axes.legend()


@main.command()
@task_options
@output_options
@click.option("--ranks", default=4, show_default=True)
@click.option("--densities", default="0.01,0.001", show_default=True)
def selection(ranks: int, densities: str, **shared: Any) -> None:
    """How many values every selector chooses from the accumulators of training with Ok-Topk SGD, against k.

    Or against the number of values that are not zero, where that is lower; zeros that fill up a choice do not count.
    """
    task = task_of(**shared)
    results: Results = {}
    for density in numbers(densities, float):
        key = f"P = {ranks}, density {density:g}"
        found = results[key] = chosen_values(task, ranks, density)
        print(f"{key:26}{'values / k: mean':>18}{'least':>8}{'most':>8}{'mean deviation':>16}{'of the exact choice':>21}")
        for selector, row in found["selectors"].items():
            counts = np.array(row["chosen"])
            row |= {"mean_deviation": float(np.abs(counts - 1).mean()), "mean_overlap": float(np.mean(row["overlaps"]))}
            spread = f"{counts.mean():18.3f}{counts.min():8.3f}{counts.max():8.3f}{row['mean_deviation']:16.2%}"
            print(f"{selector:26}{spread}{row['mean_overlap']:21.2%}", flush=True)
    write(shared, "selection", task, results, draw_selection)


def chosen_values(task: Task, ranks: int, density: float) -> Results:
    """For every selector, the values that it chooses at each step and rank, and the share of the exact choice among them."""
    optimizers = replicas(task, optim.OkTopkSGD, ranks, density, task.settings)
    size = sum(parameter.size for parameter in optimizers[0].parameters)
    k = round(density * size)
    ours = {name: [make(k) for _ in range(ranks)] for name, make in SELECTORS.items()}
    rows: Results = {name: {"chosen": [], "overlaps": []} for name in [*SELECTORS, OK_GLOBAL]}

    def note(name: str, found: sar.SparseStream, exact: Array) -> None:
        indices = found.indices[found.values != 0]
        rows[name]["chosen"].append(len(indices) / len(exact))
        rows[name]["overlaps"].append(len(np.intersect1d(indices, exact, assume_unique=True)) / len(exact))

    def before(step: Step) -> None:
        accumulators = step.accumulators()
        for rank, accumulator in enumerate(accumulators):
            exact = ours["exact"][rank](accumulator).indices
            for name, each in ours.items():
                note(name, each[rank](accumulator), exact)
        wanted[:] = [selectors.NonZeroTopK(k)(np.mean(accumulators, axis=0)).indices]

    wanted: list[Array] = []
    list(training(task, optimizers, before, lambda step: note(OK_GLOBAL, step.out[0].outputs[0], wanted[0])))
    return {"k": k, "ranks": ranks, "size": size, "selectors": rows}


def draw_selection(results: Results, figure: Figure) -> None:
    figure.set_size_inches(6 * len(results), 4.5)
    for axes, (key, found) in zip(np.ravel(figure.subplots(1, len(results), sharey=True)), results.items()):
        for name, row in found["selectors"].items():
            of_ranks = 1 if name == OK_GLOBAL else found["ranks"]
            axes.plot(np.array(row["chosen"]).reshape(-1, of_ranks).mean(1), label=name)
        axes.axhline(1, color="black", linestyle=":", label="k")
        axes.set(title=key, xlabel="steps", ylabel="values chosen / k", yscale="log")
    axes.legend(fontsize="small")


@main.command()
@task_options
@click.option("--ranks", default=16, show_default=True)
@click.option("--density", default=0.01, show_default=True)
@click.option("--every", type=click.IntRange(min=1), default=20, show_default=True, help="Steps between two that are kept.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True)
def record(ranks: int, density: float, every: int, out: Path, **shared: Any) -> None:
    """Keep what the ranks select from in training with TopK SGD: `accumulators`, of shape (steps, ranks, N), and `steps`."""
    task = task_of(**shared)
    kept: dict[int, list[Array]] = {}

    def before(step: Step) -> None:
        if step.number % every == 0:
            kept[step.number] = step.accumulators()

    list(training(task, replicas(task, optim.TopKSGD, ranks, density, task.settings), before))
    np.savez(out, accumulators=np.array(list(kept.values())), steps=list(kept), density=density)
    print(f"{out}: {len(kept)} steps of {ranks} ranks")


def write(shared: dict[str, Any], command: str, task: Task, results: Results, draw: Callable[[Results, Figure], None]) -> None:
    """Results as JSON, and as a picture, where they are wanted."""
    json_path, plot_path = shared["json_path"], shared["plot_path"]
    about = {"command": command, "task": task.name, "epochs": task.epochs, "batch": task.batch}
    about |= {"learning_rate": task.learning_rate, **task.settings}
    if json_path is not None:
        json_path.write_text(json.dumps({**about, "environment": environment(sar.SERIAL), "results": results}, indent=1) + "\n")
    if plot_path is not None:
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        draw(results, figure)
        figure.suptitle(f"{task.name}, {task.epochs} epochs")
        figure.savefig(plot_path, dpi=150)


if __name__ == "__main__":
    main()
