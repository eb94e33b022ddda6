"""Draw docs/overview.svg, the picture of the README: what a sparse allreduce does, and how long it takes compared with a dense one.

The times are simulated: 16 hosts at 10 Gbit/s, float32 vectors with uniformly random positions. Needs matplotlib.
Run: .venv/bin/python tools/draw_overview.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import sparseallreduce as sar

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "overview.svg"
RANKS, SIZE = 16, 2**20
NETWORK = sar.Network(latency=5e-6, bandwidth=1.25e9)
DENSITIES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3)
# Okabe and Ito's colours, which colour-blind readers can tell apart.
ALGORITHMS = {
    "dense": ("MPI_Allreduce of the dense vector", "#d55e00"),
    "allgather": ("allgather of all pairs, as in PyTorch", "#0072b2"),
    "auto": ("sparseallreduce", "#009e73"),
}
VECTORS = ({2: 3, 7: 1}, {4: 5, 7: 2}, {9: 7}, {})
CELLS = 12


def times(density: float) -> dict[str, float]:
    """Return the simulated time of a sum by each algorithm, in milliseconds."""
    entries = int(SIZE * density)
    streams = []
    for rank in range(RANKS):
        rng = np.random.default_rng(rank)
        positions = np.sort(rng.choice(SIZE, entries, replace=False))
        streams.append(sar.SparseStream(positions, rng.random(entries, np.float32), SIZE))
    return {name: 1e3 * sar.simulate(streams, name, network=NETWORK).time for name in ALGORITHMS}


def written(density: float, milliseconds: dict[str, float]) -> str:
    """Return the times at one density as the picture's description has them."""
    return f"{density:g}: " + ", ".join(f"{name} {time:.4g} ms" for name, time in milliseconds.items())


def main() -> None:
    """Simulate, draw, and write the picture."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "overview", "svg.fonttype": "none", "font.size": 9}
    matplotlib.rcParams |= {"axes.spines.top": False, "axes.spines.right": False}
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), width_ratios=(1.15, 1), layout="constrained", facecolor="white")
    draw_operation(left)
    taken = {density: times(density) for density in DENSITIES}
    draw_times(right, taken)
    description = "; ".join(written(density, milliseconds) for density, milliseconds in taken.items())
    figure.savefig(PICTURE, metadata={"Date": None, "Description": description})
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB\n" + description.replace("; ", "\n"))


def draw_operation(axes) -> None:
    """Draw four ranks' vectors, and their sum."""
    colours = ("#56b4e9", "#e69f00", "#cc79a7", "#cccccc")
    for rank, vector in enumerate(VECTORS):
        draw_vector(axes, -rank, f"rank {rank}", vector, colours[rank])
    total = {cell: sum(vector.get(cell, 0) for vector in VECTORS) for cell in {cell for vector in VECTORS for cell in vector}}
    axes.annotate("", (CELLS / 2, -4.75), (CELLS / 2, -3.65), arrowprops={"arrowstyle": "-|>", "color": "#444444", "lw": 1.5})
    axes.text(CELLS / 2 + 0.4, -4.2, "sar.allreduce(stream)", va="center", family="monospace", color="#222222")
    draw_vector(axes, -5.3, "every rank", total, "#009e73")
    axes.set(xlim=(-2.6, CELLS + 0.1), ylim=(-6, 0.6))
    axes.set_title("Each rank has a few non-zeros; every rank gets the sum")
    axes.set_aspect("equal")
    axes.axis("off")


def draw_vector(axes, row: float, label: str, vector: dict[int, int], colour: str) -> None:
    """Draw the cells of one vector, and its non-zeros."""
    axes.text(-0.3, row, label, ha="right", va="center", color="#222222")
    for cell in range(CELLS):
        value = vector.get(cell)
        filled = "white" if value is None else colour
        axes.add_patch(_rectangle(cell, row, filled))
        if value is not None:
            axes.text(cell + 0.5, row, str(value), ha="center", va="center", weight="bold", color="black")


def _rectangle(cell: int, row: float, colour: str):
    from matplotlib.patches import Rectangle

    return Rectangle((cell, row - 0.4), 1, 0.8, facecolor=colour, edgecolor="#999999", linewidth=0.8)


def draw_times(axes, taken: dict[float, dict[str, float]]) -> None:
    """Draw the time of each algorithm against the density."""
    percent = [100 * density for density in taken]
    for name, (label, colour) in ALGORITHMS.items():
        axes.loglog(percent, [each[name] for each in taken.values()], color=colour, label=label, marker="o", markersize=3, linewidth=2)
    axes.set_xticks((0.01, 0.1, 1, 10), ("0.01 %", "0.1 %", "1 %", "10 %"))
    axes.set_yticks((0.1, 1, 10), ("0.1 ms", "1 ms", "10 ms"))
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_title("Time of a sum: 16 hosts, 10 Gbit/s, N = 2²⁰")
    axes.set_xlabel("non-zeros of each rank (simulated, random positions)")
    axes.legend(frameon=False, fontsize=8, loc="lower right")


if __name__ == "__main__":
    main()
