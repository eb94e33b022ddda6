"""What is selected and how long it takes: figures of Ok-Topk (4 to 6) and CommLib (6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.cli.paper_figures.learning import Step, Training, method_of
from sparseallreduce.cli.paper_figures.settings import PIZ_DAINT, Figure, Settings, on_first
from sparseallreduce.cli.paper_figures.tasks import make_task
from sparseallreduce.cli.pictures.panels import SECONDS, AnyPanel, Line, Panel, Picture, Quantity
from sparseallreduce.streams.selection import DoubleSampling, ExactTopK, Gaussian, MSTopK, ThresholdReuse

__all__ = ["FIGURES"]

Array = NDArray[Any]

# The papers' VGG-16, LSTM and BERT: model, density and samples of a step over all ranks.
_CASES = (("perceptron", 0.01, 320), ("recurrent", 0.02, 80), ("softmax", 0.01, 320))
_RANKS = 16
_PERIOD = 32  # steps between two exact thresholds, tau'
_STEP = Quantity("step", "whole", False)


def _trained(settings: Settings) -> str:
    ranks = 4 if settings.small else _RANKS
    return f"Small models instead of the paper's networks, trained with Ok-Topk and error feedback on {ranks} simulated ranks"


def _train(
    settings: Settings, case: tuple[str, float, int], watch: Callable[[Step], None], density: float = 0.0, steps: int | None = None
) -> str:
    """Train a model with Ok-Topk, for ``steps`` if given, and call ``watch`` in each step; return its name and size."""
    name, usual, batch = case
    task = make_task(name, settings.small, settings.seed)
    ranks, epochs = (4, 2) if settings.small else (_RANKS, 20)
    epochs = epochs if steps is None else -(-steps // (task.count // batch))
    list(Training(task, method_of("oktopk", density or usual), ranks, batch, epochs, PIZ_DAINT, settings.seed).run(watch))
    return f"{task.title}, N = {task.size:,}"


def _distribution(settings: Settings) -> Picture:
    """Draw Ok-Topk's figure 4: the distribution of the values of a step, and three thresholds."""
    chosen = 5 if settings.small else 60  # 28 steps after an exact threshold, of 80 steps or more
    panels: list[AnyPanel] = [_thresholds(settings, case, chosen) for case in _CASES]
    caption = (
        f"{_trained(settings)}; the first rank's gradients and residuals in step {chosen}. Measured: the magnitude of the k-th largest "
        f"value (exact); the threshold that Ok-Topk keeps from earlier steps, of which one in {_PERIOD} has an exact one; and that of a "
        "normal distribution (Gaussiank)."
    )
    return Picture("Ok-Topk 4: values and thresholds", panels, caption, columns=3)


def _thresholds(settings: Settings, case: tuple[str, float, int], chosen: int) -> Panel:
    reuse: list[ThresholdReuse] = []
    found: dict[str, Any] = {}

    def watch(step: Step) -> None:
        if step.number > chosen:
            return
        values = step.accumulators[0]
        k = max(1, round(case[1] * len(values)))
        reuse[:] = reuse or [ThresholdReuse(k, period=_PERIOD)]
        if step.number == chosen:
            exact, normal = (float(np.abs(select(values).values).min()) for select in (ExactTopK(k), Gaussian(k, least=0)))
            found.update(values=values, thresholds={"exact": exact, "Ok-Topk": reuse[0].threshold, "Gaussiank": normal})
        reuse[0](values.copy())

    title = _train(settings, case, watch, steps=chosen + 1)
    values, thresholds = found["values"], found["thresholds"]
    reach = 1.3 * max(thresholds.values())
    counts, edges = np.histogram(values, bins=61, range=(-reach, reach))
    lines = [Line("values", ((edges[1:] + edges[:-1]) / 2).tolist(), [float(count) or None for count in counts], what="distribution")]
    lines += [Line(name, [at, at], [1.0, float(counts.max())], what="threshold") for name, at in thresholds.items()]
    return Panel(f"{title}, k = {100 * case[1]:g} % of N", Quantity("value", "", False), Quantity("number of values", "count"), lines)


def _assumption(settings: Settings) -> Picture:
    """Draw Ok-Topk's figure 5: the empirical xi of assumption 1, by density."""
    panels: list[AnyPanel] = []
    for case in _CASES:
        lines, title = [], ""
        for density in (0.01, 0.02):
            found: list[float] = []
            title = _train(settings, case, partial(_note_xi, found, density), density)
            lines.append(_smooth(f"k = {100 * density:g} % of N", found))
        panels.append(Panel(f"{title}: lower is better", _STEP, Quantity("ξ", "", False), lines))
    caption = (
        f"{_trained(settings)}; running means. ξ: the distance of the update from the k largest values of the mean of all ranks' values, "
        "divided by the norm of the mean gradient (assumption 1)."
    )
    return Picture("Ok-Topk 5: the empirical value of ξ", panels, caption, columns=3)


def _note_xi(found: list[float], density: float, step: Step) -> None:
    mean = np.add.reduce(step.accumulators, dtype=np.float64) / len(step.accumulators)
    wanted = ExactTopK(max(1, round(density * len(mean))))(mean).to_dense()
    found.append(float(np.linalg.norm(step.update - wanted) / max(float(np.linalg.norm(step.gradient)), 1e-30)))


def _smooth(label: str, values: Sequence[float]) -> Line:
    """Return the running mean over a thirtieth of the steps."""
    window = max(1, len(values) // 30)
    means = np.convolve(values, np.ones(window) / window, "valid")
    return Line(label, list(range(window, len(values) + 1)), means.tolist())


def _counts(settings: Settings) -> Picture:
    """Draw Ok-Topk's figure 6: the number of values that are selected, relative to k."""
    panels: list[AnyPanel] = []
    for case in _CASES:
        counts: dict[str, list[float]] = {"Ok-Topk, local": [], "Ok-Topk, global": [], "Gaussiank": []}
        locals_: list[ThresholdReuse] = []

        def watch(step: Step, case: Any = case, counts: Any = counts, locals_: Any = locals_) -> None:
            k = max(1, round(case[1] * len(step.update)))
            locals_[:] = locals_ or [ThresholdReuse(k, period=_PERIOD) for _ in step.accumulators]
            normal = Gaussian(k, least=0)
            counts["Gaussiank"].append(float(np.mean([normal(values.copy()).nnz for values in step.accumulators])) / k)
            chosen = [each(values.copy()).nnz for each, values in zip(locals_, step.accumulators)]
            counts["Ok-Topk, local"].append(float(np.mean(chosen)) / k)
            counts["Ok-Topk, global"].append(int(np.count_nonzero(step.update)) / k)

        title = _train(settings, case, watch)
        lines = [_smooth(name, each) for name, each in counts.items()]
        y = Quantity("values selected, relative to k", "")
        panels.append(Panel(f"{title}, k = {100 * case[1]:g} % of N: 1 is exact", _STEP, y, lines, level=1.0))
    caption = (
        f"{_trained(settings)}; means over ranks, running means over steps. Gaussiank: the selection from the same values by the threshold "
        "of a normal distribution, before it is scaled down."
    )
    return Picture("Ok-Topk 6: number of selected values", panels, caption, columns=3)


def _selectors(settings: Settings) -> Picture:
    """Draw CommLib's figure 6: time of the selectors over the size."""
    sizes = settings.sizes((2**12, 2**14), [2**power for power in range(18, 26)])
    kinds = {"exact top-k": ExactTopK, "DGC (double sampling)": DoubleSampling, "MSTopK": MSTopK}
    rng, lines = np.random.default_rng(settings.seed), []
    for name, kind in kinds.items():
        times = []
        for size in sizes:
            values, select, found = rng.laplace(size=size).astype(np.float32), kind(max(1, size // 1000)), []
            for _ in range(4):
                start = perf_counter()
                select(values)
                found.append(perf_counter() - start)
            times.append(float(np.median(found[1:])))
        lines.append(Line(name, sizes, times))
    panel = Panel("k = 0.1 % of N: less is better", Quantity("values, N", "count"), SECONDS, lines)
    return Picture("CommLib 6: time of a selection", [panel], "Measured here on one core; the paper has a GPU. Laplace-distributed values.")


def _figure(name: str, summary: str, make: Callable[[Settings], Picture]) -> Figure:
    return Figure(name, summary, lambda settings: on_first(settings, lambda: make(settings)))


FIGURES = (
    _figure("oktopk-4", "distribution of values and the thresholds of three selectors", _distribution),
    _figure("oktopk-5", "empirical value of ξ of assumption 1", _assumption),
    _figure("oktopk-6", "number of selected values, relative to k", _counts),
    _figure("commlib-6", "time of the selectors over the size, on this machine", _selectors),
)
