"""The commands: see the package. What they need is imported by the one that runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from . import RESULTS, __doc__

FILE = click.Path(dir_okay=False, path_type=Path)
RECORDS = RESULTS / "neural-trainings.jsonl"


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option("--models", default="vgg,lstm,transformer", show_default=True)
@click.option("--optimisers", help="Such as oktopk,topk, beside dense SGD; all by default.")
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--density", type=click.FloatRange(0, 1, min_open=True), default=0.01, show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--epochs", type=click.IntRange(min=1), help="Instead of the model's own number.")
@click.option("--samples", type=click.IntRange(min=1), help="At most so many of the training set.")
@click.option("--seconds", type=float, default=float("inf"), help="After which no training begins; the same command goes on.")
@click.option("--records", type=FILE, default=RECORDS, help="JSON lines, one a training.")
def table(
    models: str,
    optimisers: str | None,
    seeds: int,
    density: float,
    ranks: int,
    epochs: int | None,
    samples: int | None,
    seconds: float,
    records: Path,
) -> None:
    """Train every model by every optimiser, and print a table."""
    from .table import make_table, settings

    given = {"density": density, "ranks": ranks, "epochs": epochs or 0, "most_samples": samples or 0}
    chosen = None if optimisers is None else ["dense", *optimisers.split(",")]
    make_table(settings(models.split(","), seeds, chosen, **given), records, seconds)


@main.command()
@click.option("--figure", "names", multiple=True, help="Such as oktopk-8; several, or all by default.")
@click.option("--list", "listed", is_flag=True, help="Print the names.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=RESULTS, help="Folder.")
@click.option("--records", type=FILE, default=RECORDS, help="JSON lines, one a training.")
@click.option("--seconds", type=float, default=float("inf"), help="After which no training begins; the same command goes on.")
@click.option("--samples", type=click.IntRange(min=1), help="Of a training set, to try it.")
@click.option("--epochs", type=click.IntRange(min=1), help="Of a training, to try it.")
@click.option("--most-ranks", type=click.IntRange(min=1), default=256, show_default=True, help="Simulated.")
@click.option("--steps", type=click.IntRange(min=1), default=120, show_default=True, help="Of trainings in one process.")
@click.option("--longest", type=click.IntRange(min=1), default=2**24, show_default=True, help="Values of a vector of commlib-6.")
def figures(
    names: tuple[str, ...],
    listed: bool,
    out: Path,
    records: Path,
    seconds: float,
    samples: int | None,
    epochs: int | None,
    most_ranks: int,
    steps: int,
    longest: int,
) -> None:
    """Measure and draw figures of the papers."""
    from .figures import FIGURES, Sizes, draw

    if listed:
        for name, figure in FIGURES.items():
            click.echo(f"{name:20} {figure.title}")
        return
    if unknown := set(names) - set(FIGURES):
        raise click.UsageError(f"there is no figure {', '.join(sorted(unknown))}: --list names them")
    sizes = Sizes(records, seconds, samples or 0, epochs or 0, most_ranks, steps, longest)
    for name in names or FIGURES:
        picture, report = draw(name, sizes, out)
        click.echo(f"{picture}, {report}")


@main.command()
@click.option("--model", default="vgg", show_default=True)
@click.option("--width", type=click.IntRange(min=1), default=108, show_default=True, help="108: 4.8 million parameters.")
@click.option("--density", type=click.FloatRange(0, 1, min_open=True), default=0.01, show_default=True)
@click.option("--samples", type=click.IntRange(min=1), default=16, show_default=True, help="Of a rank and step.")
@click.option("--steps", type=click.IntRange(min=1), default=15, show_default=True, help="Of each way, after three that do not count.")
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, as tc writes it.")
@click.option("--way", "wanted", multiple=True, help='Such as "Ok-Topk, hooked"; several, or all by default.')
@click.option("--json", "json_path", type=FILE, help="Where to write the results.")
def overlap(
    model: str, width: int, density: float, samples: int, steps: int, rate: str, wanted: tuple[str, ...], json_path: Path | None
) -> None:
    """Time steps between two hosts: hooked, packed, by layer, dense, and DistributedDataParallel over gloo."""
    from .overlap import print_table
    from .throughput import hosts, on_hosts

    with hosts(rate):
        found = on_hosts(2, "overlap-ranks", model, width, density, samples, steps, ";".join(wanted))
    rows = print_table(found)
    if json_path is not None:
        given = {"model": model, "width": width, "density": density, "samples": samples, "rate": rate}
        json_path.write_text(json.dumps({**given, **found, "table": rows}, indent=1) + "\n")


@main.command()
@click.option("--ways", help="Such as dense:1,sparseloco:30; a way and its steps between two sums; all by default.")
@click.option("--densities", default="0.02", show_default=True, help="Of SparseLoCo, such as 0.02,0.1.")
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=960, show_default=True)
@click.option("--pieces", type=click.IntRange(min=1), default=2, show_default=True, help="Of 32 characters, a rank and step.")
@click.option("--width", type=click.IntRange(min=4), default=56, show_default=True, help="56: 1.1 million parameters.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), default=2e-3, show_default=True, help="The highest learning rate.")
@click.option("--outer-lr", type=click.FloatRange(0), default=0, help="Of SparseLoCo and DiLoCo instead of their own.")
@click.option("--beta", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="Of SparseLoCo.")
@click.option("--delay", type=click.IntRange(min=0), default=0, help="Steps during which a sum of SparseLoCo is in flight.")
@click.option("--fragments", type=click.IntRange(min=1), default=1, help="Parts of the model that SparseLoCo sums in turn.")
@click.option("--warmup", type=click.IntRange(min=0), default=0, help="Steps with dense sums before the local ones.")
@click.option("--text", type=click.Choice(["documentation", "sources"]), default="documentation", show_default=True, help="Of Python's.")
@click.option("--seconds", type=float, default=float("inf"), help="After which no training begins; the same command goes on.")
@click.option("--records", type=FILE, default=RESULTS / "local-trainings.jsonl", help="JSON lines, one a training.")
def local(ways: str | None, densities: str, seeds: str, seconds: float, records: Path, **given: Any) -> None:
    """Train a transformer by local steps and by sums in each step, and print loss, bytes and seconds a token."""
    from .local import WAYS, LocalSetting, make_local_table

    chosen = [(name, int(H or 1)) for name, _, H in (way.partition(":") for way in ways.split(","))] if ways else list(WAYS)
    if unknown := {name for name, _ in chosen} - {name for name, _ in WAYS}:
        raise click.UsageError(f"there is no way {', '.join(sorted(unknown))}: take some of {', '.join(dict(WAYS))}")
    common = {name: given.pop(name) for name in ("ranks", "steps", "pieces", "width", "rate", "text")}
    warmup = given.pop("warmup")

    def own(name: str, density: str) -> dict[str, Any]:
        if name == "sparseloco":
            return {**given, "density": float(density)}
        return {"outer_lr": given["outer_lr"]} if name == "diloco" else {}

    wanted = [
        LocalSetting(name, H, seed=int(seed), warmup=warmup if H > 1 else 0, **common, **own(name, density))
        for seed in seeds.split(",")
        for name, H in chosen
        for density in densities.split(",")
    ]
    make_local_table(list(dict.fromkeys(wanted)), records, seconds)


@main.command()
@click.option("--width", type=click.IntRange(min=4), default=56, show_default=True, help="56: 1.1 million parameters.")
@click.option("--pieces", type=click.IntRange(min=1), default=1, show_default=True, help="Of 32 characters, a rank and step.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Of 30 steps of each way.")
@click.option("--rate", default="1gbit", show_default=True, help="Of each host's link, as tc writes it.")
def local_hosts(width: int, pieces: int, rounds: int, rate: str) -> None:
    """Time local steps between two hosts beside DistributedDataParallel over gloo."""
    from .local_hosts import print_local_table
    from .throughput import hosts, on_hosts

    with hosts(rate):
        found = on_hosts(2, "local-hosts-ranks", width, pieces, rounds)
    print_local_table(found)


@main.command(hidden=True)
@click.argument("width", type=int)
@click.argument("pieces", type=int)
@click.argument("rounds", type=int)
@click.argument("out", type=FILE)
def local_hosts_ranks(width: int, pieces: int, rounds: int, out: Path) -> None:
    """What `local-hosts` starts on the hosts."""
    from .local_hosts import measure_local

    measure_local(width, pieces, rounds, out)


@main.command(hidden=True)
@click.argument("model")
@click.argument("width", type=int)
@click.argument("density", type=float)
@click.argument("samples", type=int)
@click.argument("steps", type=int)
@click.argument("wanted")
@click.argument("out", type=FILE)
def overlap_ranks(model: str, width: int, density: float, samples: int, steps: int, wanted: str, out: Path) -> None:
    """What `overlap` starts on the hosts."""
    from .overlap import measure

    measure(model, width, density, samples, steps, [way for way in wanted.split(";") if way], out)


@main.command(hidden=True)
@click.argument("out", type=FILE)
def messages(out: Path) -> None:
    """What the figure gtopk-8 starts on the hosts."""
    from .throughput import ping_pong

    ping_pong(out)


@main.command(hidden=True)
@click.argument("order", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def ranks(order: Path) -> None:
    """What `table` and `figures` start under mpiexec."""
    from .training import of_ranks

    of_ranks(order)


if __name__ == "__main__":
    main(prog_name="python -m bench.neural")
