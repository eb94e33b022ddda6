"""All orders in which ranks may run, up to some preemptions: of three operations in a row, and with a fault at each of their points.

    python bench/interleavings.py --preemptions 2 [--program TEXT] [--most 100000] [--random 5000]
    python bench/interleavings.py --faults 2000 [--program TEXT]

Ranks are coroutines of this process (tests/world). A preemption is a point at which another rank goes on than the one that runs, or, at
a wait, than the next. Each order has to leave right sums, with the same bits on all ranks and in all orders.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from world.faults import ERRORS, faults_of, played, scenarios
from world.orders import Explorer, Program, programs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preemptions", type=int, default=1)
    parser.add_argument("--program", default="", help="only those whose name has this in it")
    parser.add_argument("--most", type=int, help="orders of each program")
    parser.add_argument("--random", type=int, default=500, help="orders at random besides")
    parser.add_argument("--faults", type=int, default=0, help="instead: faults with one preemption each, in the scenarios of faults.py")
    parser.add_argument("--errors", default=",".join(ERRORS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sys.exit(faulty(options) if options.faults else faultless(options))


def faultless(options: argparse.Namespace) -> int:
    wrong = 0
    print(f"{'program':50} {'points':>7} {'orders':>8} {'random':>7} {'wrong':>6} {'seconds':>8}")
    for program in programs():
        if options.program in program.name:
            wrong += explored(program, options)
    return wrong


def explored(program: Program, options: argparse.Namespace) -> bool:
    start, kinds = time.perf_counter(), Counter[str]()

    def found(what: str, order: Any) -> None:
        kinds[what[:60]] += 1
        if kinds[what[:60]] == 1:
            print(f"  {program.name}, {order}: {what}", flush=True)

    with Explorer(program) as explorer:
        found_first = explorer.try_order(None)
        if found_first:
            found(found_first, "no preemption")
        points = explorer.world.steps
        orders = explorer.explore(options.preemptions, found, options.most)
        explorer.wander(range(options.seed, options.seed + options.random), found)
    seconds = time.perf_counter() - start
    print(f"{program.name:50} {points:7} {orders:8} {options.random:7} {kinds.total():6} {seconds:8.1f}", flush=True)
    return bool(kinds)


def faulty(options: argparse.Namespace) -> int:
    chosen = [scenario for scenario in scenarios() if options.program in scenario.name]
    wrong = 0
    for scenario in chosen:
        rng, failed = random.Random(f"{options.seed} {scenario.name}"), 0
        with played(scenario) as play:
            faults = [fault for fault in faults_of(play.points()) if fault.error in options.errors.split(",")]
            first, last = play.window
            for _ in range(-(-options.faults // len(chosen))):
                at = f"preempt {rng.randint(first, last)}:{rng.randrange(1, scenario.ranks)}"
                violation = play.strike(rng.choice(faults), order=at)
                if violation is not None:
                    failed += 1
                    print(f"  {violation}", flush=True)
        print(f"{scenario.name:60} {failed:5} did not hold", flush=True)
        wrong += failed
    return wrong > 0


if __name__ == "__main__":
    main()
