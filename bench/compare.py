"""Compare results of `sparseallreduce bench` with the goals of this project: compare.py RESULT.json...

A goal is the time of the best algorithm, as a share of the time of the MPI library's dense allreduce: N = 2**24, float32, uniform
positions, shared memory. The reference is the C++ implementation of the thesis's authors, measured the same way under Open MPI.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Aim(NamedTuple):
    """Times as shares of the dense allreduce's."""

    goal: float
    reference: float


# By density and number of ranks.
AIMS = {
    (0.001, 2): Aim(0.003, 0.009),
    (0.001, 4): Aim(0.0035, 0.010),
    (0.001, 8): Aim(0.0035, 0.010),
    (0.01, 2): Aim(0.026, 0.076),
    (0.01, 4): Aim(0.021, 0.061),
    (0.01, 8): Aim(0.062, 0.185),
    (0.0625, 2): Aim(0.18, 0.54),
    (0.0625, 4): Aim(0.175, 0.52),
    (0.0625, 8): Aim(0.19, 0.56),
}


def main(paths: list[str]) -> None:
    """Print one row a result, in the order of density and ranks."""
    reports = [json.loads(Path(path).read_text()) for path in paths]
    if not reports or any(report.get("command") != "bench" for report in reports):
        sys.exit("usage: compare.py RESULT.json..., each written by sparseallreduce bench --json")
    print(f"{'density':>8} {'P':>3} {'dense ms':>9} {'best':>8} {'auto':>8} {'goal':>8} {'C++':>8}  best algorithm / auto took")
    for report in sorted(reports, key=lambda report: (report["results"]["density"], report["results"]["ranks"])):
        print(line(report["results"]))


def line(results: dict[str, Any]) -> str:
    """The fastest algorithm of a result, and what "auto" came to, beside the aims where there are some."""
    rows = {row["algorithm"]: row for row in results["algorithms"]}
    auto = rows.pop("auto", None)
    best = min(rows.values(), key=lambda row: row["median"], default=auto)
    matches = (results["size"], results["dtype"], results["op"]) == (2**24, "float32", "sum")
    aim = AIMS.get((results["density"], results["ranks"])) if matches else None
    shares = [best["ratio"], auto and auto["ratio"], aim and aim.goal, aim and aim.reference]
    columns = " ".join(f"{'-' if share is None else format(share, '.4f'):>8}" for share in shares)
    took = auto["chosen"] + " in shared memory" * auto["in_shared_memory"] if auto and auto["chosen"] else "-"
    return f"{results['density']:8.4g} {results['ranks']:3} {1e3 * results['dense']['median']:9.2f} {columns}  {best['algorithm']} / {took}"


if __name__ == "__main__":
    main(sys.argv[1:])
