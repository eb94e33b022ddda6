"""Faults at every point of an operation: how many leave every other rank with a right sum or a common error, and the next ones right.

    python bench/faults.py --faults 5000 [--seed S] [--scenario TEXT] [--errors KeyboardInterrupt,MemoryError]
    mpiexec -n P python bench/faults.py --mpi --faults 300 [--far]
    mpiexec -n P python bench/faults.py --rooms --faults 300 [--scenario fit] [--first N]
    python bench/faults.py --again '{"scenario": ..., "faults": [...], "order": ...}'

With --rooms what fails are calls in training and in what ranks tell each other, over a real MPI; a hang ends the run, which goes on behind
it with --first. Without --mpi and --rooms ranks are coroutines of this process, and a stand-in for MPI between them
(tests/world). Each fault that left something other than promised is printed with the line that repeats it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from world import interrupts
from world.faults import ERRORS, Fault, Scenario, Violation, faults_of, played, scenarios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=3000, help="how many in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scenario", default="", help="only those whose name has this in it")
    parser.add_argument("--errors", default=",".join(ERRORS), help="classes of errors")
    parser.add_argument("--without", default="", help="kinds of points to leave out, by what is in their names")
    parser.add_argument("--instructions", action="store_true", help="interrupts wherever Python takes one, and no other faults")
    parser.add_argument("--leave", action="store_true", help="a rank takes part in no more operations after one that has raised")
    parser.add_argument("--two", action="store_true", help="two faults at a time, on two ranks")
    parser.add_argument("--mpi", action="store_true", help="over a real MPI, under mpiexec")
    parser.add_argument("--far", action="store_true", help="with --mpi: ranks on hosts of their own, and skewed sets")
    parser.add_argument("--rooms", action="store_true", help="calls of the rooms above operations, over a real MPI, under mpiexec")
    parser.add_argument("--first", type=int, default=0, help="with --rooms: the number of the first fault")
    parser.add_argument("--again", help="one of those that did not hold")
    options = parser.parse_args()
    if options.again:
        sys.exit(again(json.loads(options.again), options.leave))
    if options.mpi:
        from world import mpi_faults

        sys.exit(mpi_faults.run(options.faults, options.seed, without(options), options.far) > 0)
    if options.rooms:
        from world import rooms

        sys.exit(rooms.run(options.faults, options.seed, options.scenario, options.first) > 0)
    chosen = [scenario for scenario in scenarios() if options.scenario in scenario.name]
    run(chosen, options)


def run(chosen: list[Scenario], options: argparse.Namespace) -> None:
    start, steps, kinds = time.perf_counter(), [], Counter[str]()
    seen: dict[str, Violation] = {}
    times = Counter[str]()
    failed: dict[str, Counter[str]] = defaultdict(Counter)
    print(f"{'scenario':60} {'points':>7} {'struck':>7} {'held':>7} {'not':>5} {'most points':>12}")
    for scenario in chosen:
        rng = random.Random(f"{options.seed} {scenario.name}")
        share = -(-options.faults // len(chosen))
        struck = held = most = 0
        with played(scenario, options.instructions, options.leave) as play:
            try:
                faults = [fault for fault in faults_of(play.points()) if fault.error in options.errors.split(",")]
                faults = [fault for fault in faults if not options.instructions or fault.kind == interrupts.KIND]
                faults = [fault for fault in faults if not any(part in fault.kind for part in without(options))]
            except AssertionError as error:
                print(f"{scenario.name}: {error}")
                continue
            for number, fault in enumerate(rng.sample(faults, min(share, len(faults)))):
                given = (fault, rng.choice([other for other in faults if other.rank != fault.rank])) if options.two else (fault,)
                violation = play.strike(*given, order="round robin" if number % 2 == 0 else f"{rng.randrange(10**6)} 0.2")
                if not play.struck:
                    continue
                struck += 1
                most = max(most, play.others)
                steps.append(play.others)
                kinds[fault.kind] += 1
                if violation is None:
                    held += 1
                    continue
                failed[fault.kind][fault.error] += 1
                sort = sort_of(violation)
                times[sort] += 1
                if sort not in seen:
                    seen[sort] = violation
                    print(f"  {violation}\n    --again '{json.dumps(violation._asdict() | {'what': ''})}'", flush=True)
        print(f"{scenario.name:60} {len(faults):7} {struck:7} {held:7} {struck - held:5} {most:12}", flush=True)
    print(f"\n{'kind of point':40} {'struck':>7} {'not held':>9}")
    for kind, count in sorted(kinds.items()):
        print(f"{kind:40} {count:7} {failed[kind].total():9}  {dict(failed[kind]) or ''}")
    print(f"\n{'times':>6} what was not as promised")
    for sort, violation in seen.items():
        print(f"{times[sort]:6} {str(violation)[:300]}")
    steps.sort()
    late = steps[min(len(steps) - 1, int(len(steps) * 0.999))] if steps else 0
    seconds = time.perf_counter() - start
    speed = len(steps) / seconds * 60
    print(f"\n{len(steps)} faults struck in {seconds:.0f} s ({speed:.0f} a minute); {times.total()} left what is not promised")
    print(f"the 99.9th percentile of the points that the other ranks passed until they had their outcome: {late}")
    sys.exit(times.total() > 0)


def without(options: argparse.Namespace) -> list[str]:
    return [part for part in options.without.split(",") if part]


def sort_of(violation: Violation) -> str:
    """The violation without what differs from one repetition to the next."""
    lines = violation.what.split("\n")
    places = sorted({" < ".join(line.partition(": ")[2].split(" < ")[:2]) for line in lines[1:]})
    return " | ".join([re.sub(r"\d+|\w*Error|KeyboardInterrupt", "#", lines[0]), *places])


def again(what: dict, leaves: bool) -> int:
    scenario = next(scenario for scenario in scenarios() if scenario.name == what["scenario"])
    with played(scenario, leaves=leaves) as play:
        play.points()
        violation = play.strike(*[Fault(*fault) for fault in what["faults"]], order=what["order"])
    print(violation or "held")
    return violation is not None


if __name__ == "__main__":
    main()
