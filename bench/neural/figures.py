"""The figures: what each one is made of, what its paper says, and how it is drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Picture

import sparseallreduce as sar
from sparseallreduce.cli.report import environment

from . import reading, throughput
from .papers import PAPERS
from .scaling import ARIES, ETHERNET, SELECTORS, Step, communication_seconds, compute_seconds, select_seconds, step_of
from .training import Setting, recommended, recorded

__all__ = ["FIGURES", "Sizes", "draw"]

Results = Any


@dataclass(frozen=True)
class Sizes:
    """What a figure may be reduced by: to try a command, and in tests."""

    records: Path  # of the trainings
    seconds: float = float("inf")  # for trainings that are missing
    most_samples: int = 0  # of a training set
    epochs: int = 0
    most_ranks: int = 256  # simulated
    steps: int = 120  # of trainings in one process
    longest: int = 2**24  # values of a vector

    def of(self, setting: Setting) -> Setting:
        """The setting, reduced."""
        if not self.most_samples and not self.epochs:
            return setting
        return replace(setting, most_samples=self.most_samples, epochs=self.epochs, batch=min(setting.step_samples, 32))


@dataclass(frozen=True)
class Figure:
    """A figure: how its numbers come about, and how they are drawn."""

    title: str
    measure: Callable[[Sizes], Results]
    plot: Callable[[Results, Picture], None]


def draw(name: str, sizes: Sizes, out: Path) -> tuple[Path, Path]:
    """Measure and draw a figure; the paper's numbers stand beneath it."""
    figure = FIGURES[name]
    results = figure.measure(sizes)
    picture = Picture(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(picture)
    picture.suptitle(f"{name}, at laptop size: {figure.title}", fontsize="medium")
    picture.supxlabel(fill(f"Paper: {PAPERS[name]}", 150), fontsize="small", x=0.01, ha="left")
    figure.plot(results, picture)
    out.mkdir(parents=True, exist_ok=True)
    files = out / f"figure-{name}.png", out / f"figure-{name}.json"
    picture.savefig(files[0], dpi=80)
    report = {"figure": name, "title": figure.title, "paper": PAPERS[name], "environment": environment(sar.SERIAL), "results": results}
    files[1].write_text(json.dumps(report, indent=1, default=float) + "\n")
    return files


# Loss and accuracy of trainings by 4 and 8 ranks.


def curves(settings: dict[str, Setting], network: sar.Network | None = None) -> Callable[[Sizes], Results]:
    """The curves of trainings by name; with a network, also the seconds of a step of as many ranks there."""

    def measure(sizes: Sizes) -> Results:
        found = recorded(map(sizes.of, settings.values()), sizes.records, sizes.seconds)
        results = {}
        for (name, setting), record in zip(settings.items(), found, strict=True):
            last = record["curve"][-1]
            row = {"record": record, "loss": last["loss"], "accuracy": last["accuracy"], "bytes_sent": record["bytes_sent"]}
            if network is not None:
                row["step"] = seconds_of(sizes.of(setting), network)
            results[name] = row
            print(f"{name}: " + ", ".join(f"{what} {row[what]:.5g}" for what in ("loss", "accuracy", "bytes_sent", "step") if what in row))
        return results

    return measure


#: The method of METHODS that makes the sums of an optimiser; approximate top k and HiTopK cost about what these do.
METHOD = {"dense": "Dense", "topk": "TopkDSA", "approximate-topk": "TopkDSA", "gtopk": "gTopk", "oktopk": "Ok-Topk", "mstopk": "MSTopK"}


def seconds_of(setting: Setting, network: sar.Network) -> float:
    """Of a step on a network whose ranks have a core each."""
    samples = max(1, setting.step_samples // setting.ranks)
    return step_of(METHOD[setting.optimiser], setting.model, samples, setting.ranks, setting.density, network, width=setting.width).total


def plot_curves(results: Results, picture: Picture) -> None:
    """Training loss and test accuracy by step, and accuracy by time where that is known."""
    timed = all("step" in row for row in results.values())
    panels = picture.subplots(1, 3 if timed else 2)
    for name, row in results.items():
        points = row["record"]["curve"]
        steps = np.array([point["step"] for point in points])
        accuracy = [point["accuracy"] for point in points]
        panels[0].plot(steps, [point["train_loss"] for point in points], label=name)
        panels[1].plot(steps, accuracy, label=name)
        if timed:
            panels[2].plot(steps * row["step"], accuracy, label=name)
    panels[0].set(xlabel="steps", ylabel="training loss", yscale="log")
    panels[1].set(xlabel="steps", ylabel="test accuracy")
    if timed:
        panels[2].set(xlabel="seconds, simulated", ylabel="test accuracy")
    panels[0].legend(fontsize="small")


# Seconds of a step by part, and how they grow with the number of ranks.

OK_METHODS = ("Dense", "TopkA", "TopkDSA", "gTopk", "Gaussiank", "Ok-Topk")


def parts(model: str, ranks: Sequence[int], density: float, longer: float, samples: int = 16) -> Callable[[Sizes], Results]:
    """A step by part for all methods of Ok-Topk section 5 on two networks, and for a vector that is so many times as long on one."""

    def measure(sizes: Sizes) -> Results:
        results: Results = {}
        for number in sorted({min(number, sizes.most_ranks) for number in ranks}):
            for where, network, times in (("Aries", ARIES, 1.0), ("1 Gbit/s", ETHERNET, 1.0), ("Aries, paper's size", ARIES, longer)):
                rows = {name: step_of(name, model, samples, number, density, network, times) for name in OK_METHODS}
                table = {"Dense": rows.pop("Dense")}
                table = {**table, "DenseOvlp": table["Dense"].overlapped(), **rows}
                results[f"P = {number}, {where}"] = {name: step._asdict() for name, step in table.items()}
                times_of = ", ".join(f"{name} {1e3 * step.communication:.3g} of {1e3 * step.total:.3g}" for name, step in table.items())
                print(f"P = {number}, {where}: communication of step, ms: {times_of}", flush=True)
        return results

    return measure


COLOURS = {"sparsification": "tab:orange", "communication": "tab:red", "computation": "tab:gray"}


def plot_parts(results: Results, picture: Picture) -> None:
    """Stacked bars; of the vector of the paper's size, communication alone, since computing is not that of the paper's model."""
    rows = max(1, len(results) // 3)
    for axes, (title, table) in zip(np.ravel(picture.subplots(rows, -(-len(results) // rows))), results.items()):
        shown = ("communication",) if "paper's" in title else tuple(COLOURS)
        stacked(axes, table, shown)
        axes.set_title(title, fontsize="small")
        axes.set_yscale("log" if "paper's" in title else "linear")
    np.ravel(picture.axes)[0].legend(fontsize="x-small")
    picture.set_size_inches(11, 2 + 3 * rows)


def stacked(axes: Any, table: dict[str, dict[str, float]], shown: Sequence[str]) -> None:
    bottom = np.zeros(len(table))
    for part in shown:
        heights = 1e3 * np.array([row[part] for row in table.values()])
        axes.bar(range(len(table)), heights, bottom=bottom, color=COLOURS[part], label=part)
        bottom += heights
    axes.set_xticks(range(len(table)), list(table), rotation=30, ha="right", fontsize="x-small")
    axes.set_ylabel("ms a step", fontsize="small")


G_MODELS = ("vgg", "resnet", "lstm", "transformer")


def efficiency(sizes: Sizes) -> Results:
    """gTop-k figure 10: the share of a step that is computing."""
    results: Results = {}
    for model in G_MODELS:
        for number in sorted({min(number, sizes.most_ranks) for number in (4, 8, 16, 32)}):
            row = {name: step_of(name, model, 16, number, 0.001, ETHERNET) for name in ("Dense", "TopkA", "gTopk")}
            results.setdefault(model, {})[number] = {name: step.computation / step.total for name, step in row.items()}
            faster = row["Dense"].total / row["gTopk"].total, row["TopkA"].total / row["gTopk"].total
            shares = ", ".join(f"{name} {share:.1%}" for name, share in results[model][number].items())
            print(f"{model}, P = {number}: {shares}; gTopk {faster[0]:.1f} times as fast as Dense, {faster[1]:.2f} as TopkA", flush=True)
    return results


def plot_efficiency(results: Results, picture: Picture) -> None:
    for axes, (model, by_ranks) in zip(np.ravel(picture.subplots(1, len(results), sharey=True)), results.items()):
        for method in next(iter(by_ranks.values())):
            axes.plot(list(map(str, by_ranks)), [row[method] for row in by_ranks.values()], "o-", label=method)
        axes.set(title=model, xlabel="ranks", ylabel="scaling efficiency", ylim=(0, 1))
    axes.legend()


def breakdown(sizes: Sizes) -> Results:
    """gTop-k figure 11."""
    ranks = min(32, sizes.most_ranks)
    table = {model: step_of("gTopk", model, 16, ranks, 0.001, ETHERNET)._asdict() for model in G_MODELS}
    for model, row in table.items():
        print(f"{model}, P = {ranks}: " + ", ".join(f"{part} {1e3 * seconds:.2f} ms" for part, seconds in row.items()))
    return table


def plot_breakdown(results: Results, picture: Picture) -> None:
    axes = picture.subplots()
    stacked(axes, results, tuple(COLOURS))
    axes.legend()


def long_vectors(sizes: Sizes) -> Results:
    """gTop-k figure 9: sums of 25 million values by P, and of others by 32 ranks; vectors are shortened, and the network made slower."""
    small = 2**16
    rng, results = np.random.default_rng(0), {}
    arrays = [rng.standard_normal(small).astype(np.float32) for _ in range(min(128, sizes.most_ranks))]
    points = [(ranks, 25e6) for ranks in (4, 8, 16, 32, 64, 128)] + [(32, size) for size in (1e6, 4e6, 50e6, 100e6)]
    for ranks, size in points:
        if ranks <= sizes.most_ranks:
            network = ETHERNET._replace(bandwidth=ETHERNET.bandwidth * small / size)
            row = {name: communication_seconds(name, arrays[:ranks], 0.001, network) for name in ("TopkA", "gTopk")}
            row["TopkA, formula"], row["gTopk, formula"] = formulas(ranks, 0.001 * size)
            results[f"{ranks} ranks, {size / 1e6:g} million"] = row
            print(f"P = {ranks}, N = {size / 1e6:g} million: " + ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in row.items()))
    return results


def formulas(ranks: int, k: float) -> tuple[float, float]:
    """gTop-k table I: log P alpha + 2 (P - 1) k beta, and 2 alpha log P + 4 k beta log P (equation 7)."""
    alpha, beta, rounds = ETHERNET.latency, 4 / ETHERNET.bandwidth, np.log2(ranks)
    return float(rounds * alpha + 2 * (ranks - 1) * k * beta), float(2 * alpha * rounds + 4 * k * beta * rounds)


def plot_long_vectors(results: Results, picture: Picture) -> None:
    for axes, mark in zip(picture.subplots(1, 2), (" 25 million", "32 ranks")):
        keys = sorted((key for key in results if mark in key), key=lambda key: results[key]["gTopk, formula"])
        chosen = {key: results[key] for key in keys}
        for name in next(iter(results.values())):
            axes.plot(list(chosen), [1e3 * row[name] for row in chosen.values()], "--" if "formula" in name else "o-", label=name)
        axes.set(ylabel="ms a sum", yscale="log")
        axes.tick_params(axis="x", rotation=30, labelsize="x-small")
    axes.legend()


def speedup(sizes: Sizes) -> Results:
    """Thesis figure 5.15: a network so slow that dense sums take as long as computing, as there; and the largest of every 512 values."""
    computing = compute_seconds("vgg", 16)
    ranks, results = min(8, sizes.most_ranks), {}
    dense = step_of("Dense", "vgg", 16, ranks, 1.0, ARIES).communication
    longer = computing / dense
    for name, density in {"SGD": 1.0, **BUCKETS}.items():
        step = step_of("Dense" if name == "SGD" else "TopkDSA", "vgg", 16, ranks, density, ARIES, longer)
        results[name] = Step(0.0, step.communication, step.computation)._asdict() | {"selection": step.sparsification}
    whole = {name: row["communication"] + row["computation"] for name, row in results.items()}
    for name, seconds in whole.items():
        print(f"{name}: {1e3 * seconds:.2f} ms, {whole['SGD'] / seconds:.2f} times as fast as SGD", flush=True)
    return results


# What is selected.


def assumption(sizes: Sizes) -> Results:
    """Ok-Topk figure 5: xi of assumption 1."""
    from lossy_training import empirical_xi

    from .tasks import Network

    results = {}
    for model, ranks in (("vgg", 8), ("lstm", 8), ("transformer", 8)):
        for density in (0.01, 0.02):
            found = empirical_xi(Network(model, 32, sizes.steps), min(ranks, sizes.most_ranks), density)  # type: ignore[arg-type]
            results[f"{model}, density {density:g}"] = found
            thirds = ", ".join(f"{np.mean(part):.2f}" for part in np.array_split(found, min(3, len(found))))
            print(f"{model}, density {density:g}: xi by thirds of the training {thirds}; at most {max(found):.2f}", flush=True)
    return results


def plot_assumption(results: Results, picture: Picture) -> None:
    models = list(dict.fromkeys(key.partition(",")[0] for key in results))
    for axes, model in zip(np.ravel(picture.subplots(1, len(models))), models):
        for key, found in results.items():
            if key.startswith(model):
                window = max(1, len(found) // 20)
                axes.plot(np.convolve(found, np.ones(window) / window, "valid"), label=key.partition(", ")[2])
        axes.set(title=model, xlabel="steps", ylabel="xi, running mean")
        axes.legend()


def selection(sizes: Sizes) -> Results:
    """Ok-Topk figure 6: values chosen, beside k."""
    from lossy_training import OK_GLOBAL, chosen_values

    from .tasks import Network

    results = {}
    for model in ("vgg", "lstm", "transformer"):
        found = chosen_values(Network(model, 32, sizes.steps), min(8, sizes.most_ranks), 0.01)  # type: ignore[arg-type]
        kept = {name: found["selectors"][name] for name in ("Gaussian", "threshold reuse", OK_GLOBAL)}
        results[model] = {**found, "selectors": kept}
        for name, row in kept.items():
            counts = np.array(row["chosen"])
            print(f"{model}, {name}: {counts.mean():.3f} k, mean deviation {np.abs(counts - 1).mean():.1%}", flush=True)
    return results


def plot_selection(results: Results, picture: Picture) -> None:
    from lossy_training import draw_selection

    draw_selection(results, picture)
    picture.set_size_inches(13, 5.5)


def selectors(sizes: Sizes) -> Results:
    """CommLib figure 6: seconds of a selection of k = 0.001 d, on one core."""
    rng, results = np.random.default_rng(0), {}
    for power in range(18, 28, 2):
        if 2**power <= sizes.longest:
            arrays = [rng.standard_normal(2**power).astype(np.float32) for _ in range(2)]
            row = {name: select_seconds(make, arrays, max(1, 2**power // 1000), 5) for name, make in SELECTORS.items()}
            results[str(2**power)] = row
            print(f"d = {2**power:,}: " + ", ".join(f"{name} {1e3 * each:.2f} ms" for name, each in row.items()), flush=True)
    return results


def plot_selectors(results: Results, picture: Picture) -> None:
    axes = picture.subplots()
    for name in next(iter(results.values())):
        axes.plot([int(size) for size in results], [1e3 * row[name] for row in results.values()], "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel="d", ylabel="ms a selection")
    axes.legend()


# The figures by name. Trainings with a density of 1 % by 4 ranks are those of `table`.


def compared(model: str, optimisers: Sequence[str], **given: Any) -> dict[str, Setting]:
    """Trainings by these optimisers, with the settings of docs/lossy.md."""
    chosen = {name: given | recommended(name, given.get("adam", False)) for name in optimisers}
    if "dense" in chosen:  # which has none
        chosen["dense"].pop("density", None)
    return {f"{model}, {name}": Setting(model, name, **own) for name, own in chosen.items()}


def beside_dense(model: str, settings: dict[str, Setting], **given: Any) -> dict[str, Setting]:
    return {f"{model}, dense": Setting(model, "dense", **given), **settings}


ALL_TOP_K = ("dense", "topk", "gtopk", "oktopk")
BUCKETS = {"Top32": 32 / 512, "Top8": 8 / 512, "Top2": 2 / 512}


def of_buckets(model: str, names: Sequence[str], **given: Any) -> dict[str, Setting]:
    """The thesis's runs: dense, and so many of every 512 values."""
    ways = {f"P = {given['ranks']}, SGD": Setting(model, "dense", **given)}
    return ways | {f"P = {given['ranks']}, {name}": Setting(model, "topk", density=BUCKETS[name], **given) for name in names}


GTOPK = {"optimiser": "gtopk", "warm_up": True}
DENSITIES = {
    **beside_dense("vgg", {f"vgg, density {d:g}": Setting("vgg", density=d, **GTOPK) for d in (0.005, 0.001, 0.0005)}),
    **beside_dense("resnet", {f"resnet, density {d:g}": Setting("resnet", density=d, **GTOPK) for d in (0.005, 0.001, 0.0005)}),
}
WIDE = {"width": 64}


def against_top_k(batches: dict[str, int]) -> dict[str, Setting]:
    """gTop-k and top k at the density of 0.001 by 8 ranks, the batch of each model as given."""
    return {
        f"{model}, batch {batch}, {name}": Setting(model, name, 0.001, 8, batch, warm_up=True, epochs=30 if batch > 64 else 0)
        for model, batch in batches.items()
        for name in ("topk", "gtopk")
    }


FIGURES: dict[str, Figure] = {
    "oktopk-5": Figure("xi of assumption 1, P = 8", assumption, plot_assumption),
    "oktopk-6": Figure("values chosen against k, P = 8, density 1 %", selection, plot_selection),
    "oktopk-8": Figure("a step of the VGG-like net, density 2 %", parts("vgg", (16, 32), 0.02, 14.7 / 0.42), plot_parts),
    "oktopk-9": Figure(
        "accuracy of the VGG-like net, density 2 %, P = 4; time as on 1 Gbit/s",
        curves(compared("vgg", ALL_TOP_K, density=0.02), ETHERNET),
        plot_curves,
    ),
    "oktopk-10": Figure("a step of the LSTM, density 2 %", parts("lstm", (32, 64), 0.02, 27.6 / 0.36), plot_parts),
    "oktopk-11": Figure(
        "accuracy of the LSTM, density 2 %, P = 4; time as on 1 Gbit/s",
        curves(compared("lstm", ALL_TOP_K, density=0.02), ETHERNET),
        plot_curves,
    ),
    "oktopk-12": Figure("a step of the transformer, density 1 %", parts("transformer", (32, 64, 256), 0.01, 133.5 / 0.38, 8), plot_parts),
    "oktopk-13": Figure(
        "training loss of the transformer with Adam, density 1 %, P = 4; time as on 1 Gbit/s",
        curves(compared("transformer", ("dense", "oktopk"), adam=True), ETHERNET),
        plot_curves,
    ),
    "gtopk-5": Figure(
        "convergence, P = 4, density 0.1 % behind a warm-up",
        curves({key: setting for key, setting in DENSITIES.items() if "0.005" not in key and "0.0005" not in key}),
        plot_curves,
    ),
    "gtopk-6": Figure(
        "convergence of nets twice as wide, P = 4, density 0.1 % behind a warm-up",
        curves(
            {
                **beside_dense("vgg", {"vgg, gtopk": Setting("vgg", density=0.001, **GTOPK, **WIDE)}, **WIDE),
                **beside_dense("resnet", {"resnet, gtopk": Setting("resnet", density=0.001, **GTOPK, **WIDE)}, **WIDE),
            }
        ),
        plot_curves,
    ),
    "gtopk-7": Figure(
        "convergence of the LSTM, P = 4, density 0.5 % behind a warm-up",
        curves(beside_dense("lstm", {"lstm, gtopk": Setting("lstm", density=0.005, **GTOPK)})),
        plot_curves,
    ),
    "gtopk-8": Figure("a message between two hosts, by its size", throughput.messages, throughput.plot_messages),
    "gtopk-9": Figure("sums of the 0.1 % largest, 1 Gbit/s as measured in the paper", long_vectors, plot_long_vectors),
    "gtopk-10": Figure("scaling efficiency, density 0.1 %, 1 Gbit/s", efficiency, plot_efficiency),
    "gtopk-11": Figure("a step by part, P = 32, density 0.1 %, 1 Gbit/s", breakdown, plot_breakdown),
    "gtopk-12": Figure("convergence by density, P = 4, behind a warm-up", curves(DENSITIES), plot_curves),
    "gtopk-13": Figure("gTop-k beside top k, large batches, P = 8", curves(against_top_k({"vgg": 256, "resnet": 256})), plot_curves),
    "gtopk-14": Figure("the same with other batches", curves(against_top_k({"vgg": 512, "resnet": 64})), plot_curves),
    "thesis-5.13": Figure(
        "SGD and top 32 of 512 by 4 and 8 ranks, 16 samples each",
        curves({**of_buckets("resnet", ["Top32"], ranks=4, batch=64), **of_buckets("resnet", ["Top32"], ranks=8, batch=128)}),
        plot_curves,
    ),
    "thesis-5.14": Figure(
        "SGD and the top of 512 by 8 ranks", curves(of_buckets("resnet", ["Top32", "Top8", "Top2"], ranks=8, batch=128)), plot_curves
    ),
    "thesis-5.15": Figure("a step of the VGG-like net where dense communication takes half of it", speedup, plot_breakdown),
    "thesis-5.16": Figure(
        "dense layers by 8 ranks; time as on 1 Gbit/s", curves(of_buckets("perceptron", ["Top8"], ranks=8, batch=64), ETHERNET), plot_curves
    ),
    "thesis-5.17": Figure("LSTM by 8 ranks; time as on 1 Gbit/s", curves(of_buckets("lstm", ["Top8"], ranks=8), ETHERNET), plot_curves),
    "commlib-6": Figure("seconds of a selection, k = 0.001 d", selectors, plot_selectors),
    "commlib-9": Figure("a step of the residual net, samples from a store of 10 MB/s", reading.reading, reading.plot_reading),
    "commlib-10": Figure(
        "convergence, density 1 %, P = 4",
        curves(dict(pair for model in ("resnet", "vgg", "transformer") for pair in compared(model, ("dense", "topk", "mstopk")).items())),
        plot_curves,
    ),
    "commlib-throughput": Figure("samples a second of 16 hosts of 8 ranks", throughput.end_to_end, throughput.plot_end_to_end),
}
