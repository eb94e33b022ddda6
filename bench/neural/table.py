"""Every optimiser beside dense SGD: loss, accuracy, bytes and seconds of trainings by 4 ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from .training import OPTIMISERS, Setting, recommended, recorded, records

__all__ = ["MODELS", "make_table", "settings"]

MODELS = ("vgg", "lstm", "transformer")


def settings(models: Sequence[str], seeds: int, optimisers: Sequence[str] | None = None, **given: Any) -> list[Setting]:
    """All cells, so that one seed of all comes before the next; with the settings of docs/lossy.md."""
    names = optimisers or OPTIMISERS
    cells = [(seed, model, name) for seed in range(seeds) for model in models for name in names]
    return [Setting(model, name, seed=seed, **(given | recommended(name))) for seed, model, name in cells]


def make_table(wanted: Sequence[Setting], path: Path, seconds: float) -> None:
    """Train what is missing, for so many seconds, and print what there is."""
    try:
        recorded(wanted, path, seconds)
    except click.ClickException as error:
        click.echo(error.format_message())
    found = records(path)
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for setting in wanted:
        if setting.key in found:
            cells.setdefault((setting.model, setting.optimiser), []).append(found[setting.key])
    click.echo("| model | optimiser | seeds | loss | accuracy | beside dense | MB sent | computing, s | step beside, s |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for (model, name), rows in cells.items():
        accuracies = [row["curve"][-1]["accuracy"] for row in rows]
        dense = {row["seed"]: row["curve"][-1]["accuracy"] for row in cells.get((model, "dense"), [])}
        gaps = [accuracy - dense[row["seed"]] for accuracy, row in zip(accuracies, rows) if row["seed"] in dense]
        loss = np.mean([row["curve"][-1]["loss"] for row in rows])
        spread = f"{np.mean(accuracies):.4f} ({min(accuracies):.4f} to {max(accuracies):.4f})"
        gap = f"{100 * np.mean(gaps):+.2f} %" if gaps and name != "dense" else ""
        sent, computing, beside = (np.mean([row[what] for row in rows]) for what in ("bytes_sent", "compute", "communicate"))
        which = f"{model} | `{OPTIMISERS[name]}` | {len(rows)}"
        click.echo(f"| {which} | {loss:.4f} | {spread} | {gap} | {sent / 1e6:.1f} | {computing:.1f} | {beside:.1f} |")
