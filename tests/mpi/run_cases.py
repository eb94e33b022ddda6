"""The program that mpiexec starts on every rank: run the named cases, in step, and write down how each went.

    PYTHONPATH=tests mpiexec -n 4 python tests/mpi/run_cases.py REPORTS NAMES.json

NAMES.json is the list of case names. REPORTS/done.jsonl gets one line a case from rank 0. REPORTS/rank<r>.log holds what rank r had to
say on the case in progress; when the launch ends early that tells why.

No case can hang the launch. A case over its time limit, which is longer on a busy machine, has its stack written down by faulthandler,
and the kernel's alarm then ends the process. When a case fails on some ranks while the others wait for them, the others get `GRACE`
seconds before the launch is aborted.
"""

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
import unittest
from pathlib import Path

from mpi4py import MPI
from mpi_cases import BEGAN, Case, collect, patience

GRACE = 3.0


def main(reports: Path, names: list[str]) -> None:
    world = MPI.COMM_WORLD
    own = world.Dup()
    processes = own.allgather(os.getpid())
    comm = world
    with (reports / f"rank{world.rank}.log").open("w") as log:
        faulthandler.enable(log)
        faulthandler.register(signal.SIGUSR1, log, all_threads=True)
        modules = {name: importlib.import_module(name) for name in dict.fromkeys(name.partition(".")[0] for name in names)}
        cases = {case.name: case for module in modules.values() for case in collect(module)}
        gc.collect()
        gc.freeze()  # collecting garbage then passes over what was imported, which takes it 0.6 s on each of two ranks
        for name in names:
            log.seek(0)
            log.truncate()
            log.write(f"{BEGAN} {name}\n")
            log.flush()
            start = time.monotonic()
            outcome, text = _run(cases[name], comm, log)
            if outcome == "failed":
                log.write(text)
                log.flush()
            _meet_or_abort(own, outcome, processes)
            faulthandler.cancel_dump_traceback_later()
            signal.alarm(0)
            everyone = own.gather((outcome, text))
            failed = own.bcast(_write(reports, name, everyone, time.monotonic() - start) if everyone else None)
            if failed:
                comm = world.Dup()  # a failed case may have left messages behind


def _run(case: Case, comm: MPI.Intracomm, log) -> tuple[str, str]:
    """Outcome on this rank and its explanation. The time limit stays armed, for the barrier after the case."""
    seconds = case.seconds * patience()
    faulthandler.dump_traceback_later(seconds, file=log)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(seconds) + 2)
    try:
        case.function(comm, **case.arguments)
    except BaseException as error:  # pytest.fail and pytest.raises raise outside Exception
        if isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped":
            return "skipped", str(error)
        lines = traceback.TracebackException(type(error), error, error.__traceback__.tb_next, capture_locals=True).format()
        return "failed", "".join(line[:4000] for line in lines)
    return "passed", ""


def _meet_or_abort(own: MPI.Intracomm, outcome: str, processes: list[int]) -> None:
    """Wait for all ranks to leave the case; a rank on which it failed waits for `GRACE` seconds only."""
    start = time.monotonic()
    barrier = own.Ibarrier()
    while not barrier.Test():
        if outcome == "failed" and time.monotonic() - start > GRACE:
            for pid in processes:
                if pid != os.getpid():
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
            own.Abort(1)
        time.sleep(0 if time.monotonic() - start < 0.01 else 0.001)


def _write(reports: Path, name: str, everyone: list[tuple[str, str]], seconds: float) -> bool:
    outcomes = {outcome for outcome, _ in everyone}
    outcome = outcomes.pop() if len(outcomes) == 1 else "failed"
    texts = [f"rank {rank}: {was}\n{text}" for rank, (was, text) in enumerate(everyone) if outcome == "failed" and (was, text)]
    reason = "\n".join(texts) if outcome == "failed" else everyone[0][1]
    with (reports / "done.jsonl").open("a") as done:
        done.write(json.dumps({"name": name, "outcome": outcome, "reason": reason, "seconds": seconds}) + "\n")
    return outcome == "failed"


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
