"""What `sparseallreduce train` shows and writes of an epoch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sparseallreduce.linear.solvers import Figures
from sparseallreduce.linear.training.trainer import Epoch

__all__ = ["COMPARISON", "compared", "header", "line", "record", "rounds_header", "rounds_line"]

COMPARISON = f"{'l2':>10} {'epoch':>5} {'loss':>10} {'val loss':>10} {'val acc':>8} {'auc':>8}"


def header(held_out: bool) -> str:
    """What stands above the lines of epochs."""
    validation = f"{'val loss':>10} {'val acc':>8} {'auc':>7} " if held_out else ""
    return (
        f"{'epoch':>5} {'loss':>10} {'train acc':>9} {'auc':>7} {'test acc':>9} {'auc':>7} {validation}{'prog loss':>10} {'prog acc':>8}   "
        f"{'compute':>8} {'select':>8} {'communicate':>11} {'wait':>8} {'update':>8} {'evaluate':>8} {'total s':>8}   "
        f"{'sent MB':>9} {'gradient':>9} {'sum':>9}"
    )


def line(epoch: Epoch, held_out: bool) -> str:
    """An epoch, with the figures of samples held out if there are any."""
    loss = _shown(epoch.loss if epoch.evaluated else None, ".6g")
    figures = epoch.train_accuracy, epoch.train_auc, epoch.test_accuracy, epoch.test_auc, epoch.progressive_accuracy
    train_accuracy, train_auc, test_accuracy, test_auc, accuracy = map(_shown, figures)
    validation = _held_out(epoch)
    seconds = epoch.seconds
    return (
        f"{epoch.epoch:5} {loss:>10} {train_accuracy:>9} {train_auc:>7} {test_accuracy:>9} {test_auc:>7} "
        f"{validation if held_out else ''}{_shown(epoch.progressive_loss, '.6g'):>10} {accuracy:>8}   "
        f"{seconds['compute']:8.3f} {seconds['select']:8.3f} {seconds['communicate']:11.3f} {seconds['wait']:8.3f} "
        f"{seconds['update']:8.3f} {seconds['evaluate']:8.3f} {seconds['total']:8.3f}   "
        f"{epoch.bytes_sent / 1e6:9.2f} {epoch.gradient_density:9.3%} {epoch.total_density:9.3%}"
    )


def rounds_header(held_out: bool) -> str:
    """What stands above the lines of rounds."""
    validation = f"{'val loss':>10} {'val acc':>8} {'auc':>7} " if held_out else ""
    return (
        f"{'round':>5} {'loss':>10} {'gap':>10} {'train acc':>9} {'auc':>7} {'test acc':>9} {'auc':>7} {validation}{'active':>9}   "
        f"{'compute':>8} {'communicate':>11} {'evaluate':>8} {'total s':>8}   {'sent MB':>9}"
    )


def rounds_line(figures: Figures, held_out: bool) -> str:
    """A round, with the figures of samples held out if there are any."""
    shares = figures.train_accuracy, figures.train_auc, figures.test_accuracy, figures.test_auc
    train_accuracy, train_auc, test_accuracy, test_auc = map(_shown, shares)
    validation = (
        f"{_shown(figures.validation_loss, '.6g'):>10} {_shown(figures.validation_accuracy):>8} {_shown(figures.validation_auc):>7} "
    )
    seconds = figures.seconds
    return (
        f"{figures.epoch:5} {_shown(figures.loss, '.6g'):>10} {_shown(figures.gap, '.3g'):>10} {train_accuracy:>9} {train_auc:>7} "
        f"{test_accuracy:>9} {test_auc:>7} {validation if held_out else ''}{figures.active:9,}   "
        f"{seconds['compute']:8.3f} {seconds['communicate']:11.3f} {seconds['evaluate']:8.3f} {seconds['total']:8.3f}   "
        f"{figures.bytes_sent / 1e6:9.2f}"
    )


def compared(l2: float, history: list[Epoch] | list[Figures], best_epoch: int | None, chosen: bool) -> str:
    """A model beside others."""
    best = next((epoch for epoch in history if epoch.epoch == best_epoch), None)
    figures = [None] * 4 if best is None else [best.loss, best.validation_loss, best.validation_accuracy, best.validation_auc]
    loss, held_loss, accuracy, auc = map(_shown, figures)
    mark = "  best" if chosen else ""
    return f"{l2:10.4g} {best_epoch or '-':>5} {loss:>10} {held_loss:>10} {accuracy:>8} {auc:>8}{mark}"


def record(epoch: Epoch | Figures, tested: bool, held_out: bool, densities: bool) -> dict[str, Any]:
    """An epoch, or a round, for --json, without the figures of samples that there are none of."""
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


def _held_out(of: Epoch | Figures) -> str:
    return f"{_shown(of.validation_loss, '.6g'):>10} {_shown(of.validation_accuracy):>8} {_shown(of.validation_auc):>7} "


def _shown(figure: float | None, form: str = ".4f") -> str:
    return "-" if figure is None else format(figure, form)
