"""The tables and JSON records of epochs that `sparseallreduce train` writes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sparseallreduce.cli.terminal import Column, columns_of_terminal, fitting, row_of, titles_of
from sparseallreduce.linear.solvers import Figures
from sparseallreduce.linear.training.trainer import Epoch

__all__ = ["compared", "comparison", "header", "line", "record", "rounds_header", "rounds_line"]


# The columns of held-out samples are between those of the test set and the progressive ones.
_HELD_OUT = (
    Column("validation_loss", "val loss", 10, 3),
    Column("validation_accuracy", "val acc", 8, 2),
    Column("validation_auc", "auc", 7, 8),
)
_SCORES = (
    Column("train_accuracy", "train acc", 9, 1), Column("train_auc", "auc", 7, 9),
    Column("test_accuracy", "test acc", 9, 1), Column("test_auc", "auc", 7, 7),
)  # fmt: skip
_EPOCHS = (
    (Column("epoch", "epoch", 5, 0), Column("loss", "loss", 10, 0), *_SCORES),
    (
        Column("progressive_loss", "prog loss", 10, 6), Column("progressive_accuracy", "prog acc", 8, 10),
        Column("compute", "compute", 8, 4, spaced=True), Column("select", "select", 8, 11),
        Column("communicate", "communicate", 11, 4), Column("wait", "wait", 8, 12), Column("update", "update", 8, 13),
        Column("evaluate", "evaluate", 8, 12), Column("total", "total s", 8, 1), Column("sent", "sent MB", 9, 5, spaced=True),
        Column("gradient", "gradient", 9, 14), Column("sum", "sum", 9, 14),
    ),
)  # fmt: skip
_ROUNDS = (
    (Column("epoch", "round", 5, 0), Column("loss", "loss", 10, 0), Column("gap", "gap", 10, 1), *_SCORES),
    (
        Column("active", "active", 9, 6), Column("compute", "compute", 8, 4, spaced=True), Column("communicate", "communicate", 11, 4),
        Column("evaluate", "evaluate", 8, 12), Column("total", "total s", 8, 1), Column("sent", "sent MB", 9, 5, spaced=True),
    ),
)  # fmt: skip


def _columns(table: tuple[tuple[Column, ...], tuple[Column, ...]], held_out: bool) -> list[Column]:
    """Return the columns that fit the terminal."""
    first, rest = table
    return fitting([*first, *(_HELD_OUT if held_out else ()), *rest], columns_of_terminal())


def header(held_out: bool) -> str:
    """Return the header of the lines of epochs."""
    return titles_of(_columns(_EPOCHS, held_out))


def line(epoch: Epoch, held_out: bool) -> str:
    """Return the line of an epoch, with as many metrics as fit the terminal, those of held-out samples included if there are any."""
    cells = _cells(epoch) | {
        "loss": _shown(epoch.loss if epoch.evaluated else None, ".6g"),
        "progressive_loss": _shown(epoch.progressive_loss, ".6g"),
        "progressive_accuracy": _shown(epoch.progressive_accuracy),
        "gradient": f"{epoch.gradient_density:.3%}",
        "sum": f"{epoch.total_density:.3%}",
    }
    return row_of(_columns(_EPOCHS, held_out), cells)


def rounds_header(held_out: bool) -> str:
    """Return the header of the lines of rounds."""
    return titles_of(_columns(_ROUNDS, held_out))


def rounds_line(figures: Figures, held_out: bool) -> str:
    """Return the line of a round, with metrics of held-out samples if there are any."""
    cells = {"loss": _shown(figures.loss, ".6g"), "gap": _shown(figures.gap, ".3g"), "active": f"{figures.active:,}"}
    return row_of(_columns(_ROUNDS, held_out), _cells(figures) | cells)


def _cells(of: Epoch | Figures) -> dict[str, str]:
    """Return the cells that epochs and rounds have in common."""
    names = [f"{samples}_{figure}" for samples in ("train", "test", "validation") for figure in ("accuracy", "auc")]
    return {
        "epoch": str(of.epoch),
        **{name: _shown(getattr(of, name)) for name in names},
        "validation_loss": _shown(of.validation_loss, ".6g"),
        **{phase: f"{seconds:.3f}" for phase, seconds in of.seconds.items()},
        "sent": f"{of.bytes_sent / 1e6:.2f}",
    }


def comparison(name: str) -> str:
    """Return the header of the lines of models that differ in the option of this name."""
    return f"{name:>10} {'epoch':>5} {'loss':>10} {'val loss':>10} {'val acc':>8} {'auc':>8}"


def compared(strength: float, history: list[Epoch] | list[Figures], best_epoch: int | None, chosen: bool) -> str:
    """Return the line of a model in a comparison."""
    best = next((epoch for epoch in history if epoch.epoch == best_epoch), None)
    figures = [None] * 4 if best is None else [best.loss, best.validation_loss, best.validation_accuracy, best.validation_auc]
    loss, held_loss, accuracy, auc = map(_shown, figures)
    mark = "  best" if chosen else ""
    return f"{strength:10.4g} {best_epoch or '-':>5} {loss:>10} {held_loss:>10} {accuracy:>8} {auc:>8}{mark}"


def record(epoch: Epoch | Figures, tested: bool, held_out: bool, densities: bool) -> dict[str, Any]:
    """Return an epoch or a round for --json, without metrics of test or held-out samples if there are none."""
    known = asdict(epoch)
    for of, there in (("test", tested), ("validation", held_out)):
        if not there:
            del known[f"{of}_loss"], known[f"{of}_accuracy"], known[f"{of}_auc"]
    if isinstance(epoch, Figures):
        return known
    if not densities:
        del known["gradient_densities"], known["total_densities"]
    measures: dict[str, Any] = known.pop("measures")
    return known | measures


def _shown(figure: float | None, form: str = ".4f") -> str:
    return "-" if figure is None else format(figure, form)
