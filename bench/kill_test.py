"""Kill a rank of a training run at a random moment, resume, and compare the weights with those of an undisturbed run, to the bit.

    python bench/kill_test.py --kills 20

Every trial is a run of its own, with its own folder of checkpoints. The moment lies anywhere between the start of mpiexec and the end of
training. So it also hits ranks that are still reading, and checkpoints that are being written.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np

from sparseallreduce.linear import generate, load_model

TRAINING = ["--epochs", "15", "--batch-size", "50", "--l2", "1e-5", "--intercept", "--features", "300000", "--seed", "3"]
SECONDS = 300  # after which a run is taken to hang


@dataclass
class Trial:
    """One kill and what came of it."""

    moment: float  # seconds after the start
    rank: int
    resumed_after: int  # step
    same: bool


@dataclass
class Run:
    """A training run under mpiexec, with a model file and a report to write."""

    ranks: int
    data: Path
    folder: Path
    options: list[str] = field(default_factory=list)

    def start(self, *more: str) -> subprocess.Popen[str]:
        """Start mpiexec."""
        command = [mpiexec(), "-n", str(self.ranks), sys.executable, "-m", "sparseallreduce", "train", str(self.data), *TRAINING]
        command += [*self.options, *more, "--model-out", str(self.folder / "model.npz"), "--json", str(self.folder / "run.json")]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def finish(self, *more: str) -> str:
        """Run to the end, and return the output."""
        process = self.start(*more)
        output, _ = process.communicate(timeout=SECONDS)
        if process.returncode != 0:
            raise click.ClickException(f"the run failed with status {process.returncode}:\n{output}")
        return output

    def weights(self) -> bytes:
        """The bits of what it has learned."""
        model = load_model(self.folder / "model.npz")
        return model.weights.tobytes() + np.asarray(model.intercept).tobytes()


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--ranks", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--samples", type=click.IntRange(min=100), default=40_000, show_default=True)
@click.option("--every-steps", type=click.IntRange(min=1), default=25, show_default=True, help="Between two checkpoints.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the moments.")
@click.argument("options", nargs=-1)
def kill_test(kills: int, ranks: int, samples: int, every_steps: int, seed: int, options: tuple[str, ...]) -> None:
    """Kill, resume, compare, as often as asked. OPTIONS, after --, go to `sparseallreduce train`."""
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "train.svm"
        generate("url-like", data, samples=samples, features=300_000)
        undisturbed = Run(ranks, data, folder, list(options))
        start = time.monotonic()
        undisturbed.finish()
        duration = time.monotonic() - start
        steps = sum(epoch["steps"] for epoch in json.loads((folder / "run.json").read_text())["epochs"])
        expected = undisturbed.weights()
        click.echo(f"undisturbed: {steps} steps on {ranks} ranks in {duration:.1f} s")
        trials: list[Trial] = []
        while len(trials) < kills:
            own = folder / f"kill-{len(trials)}"
            own.mkdir()
            run = Run(ranks, data, own, [*options, "--checkpoint", str(own / "checkpoints"), "--checkpoint-every-steps", str(every_steps)])
            trial = one_trial(run, expected, chance.uniform(0, duration), chance.randrange(ranks))
            if trial is not None:
                trials.append(trial)
                same = "same weights" if trial.same else "OTHER WEIGHTS"
                killed = f"kill {len(trials):3}: rank {trial.rank} after {trial.moment:5.2f} s"
                click.echo(f"{killed}, resumed after step {trial.resumed_after:5}: {same}")
            shutil.rmtree(own)
    wrong = sum(not trial.same for trial in trials)
    within = sum(trial.resumed_after > 0 for trial in trials)
    click.echo(f"{kills} kills, {within} of them after the first checkpoint; {kills - wrong} ended with the bits of the undisturbed run")
    if wrong:
        raise SystemExit(1)


def one_trial(run: Run, expected: bytes, moment: float, rank: int) -> Trial | None:
    """Kill a rank after so many seconds, resume and compare; None if the run had ended before."""
    process = run.start()
    time.sleep(moment)
    ranks = rank_processes(process.pid)
    while process.poll() is None and len(ranks) < run.ranks:  # mpiexec has not yet started them all
        time.sleep(0.01)
        ranks = rank_processes(process.pid)
    if process.poll() is None:
        os.kill(ranks[rank], signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    if process.returncode == 0:
        return None
    output = run.finish("--resume")
    resumed = [line for line in output.splitlines() if line.startswith("resumed after step")]
    step = int(resumed[0].split()[3].rstrip(",").replace(",", "")) if resumed else 0
    return Trial(moment, rank, step, run.weights() == expected)


def rank_processes(root: int) -> list[int]:
    """The processes below mpiexec that train, in the order they were started; from /proc, so on Linux only."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(entry.read_text().rpartition(")")[2].split()[1]), []).append(int(entry.parent.name))
        except OSError:  # ended meanwhile
            continue
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += [pid for pid in below if is_training(pid)]
    return sorted(found)


def is_training(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return os.path.basename(command[0]).startswith(b"python") and b"sparseallreduce" in command


def mpiexec() -> str:
    """The launcher that is installed beside this interpreter, or that of the system."""
    found = shutil.which("mpiexec", path=Path(sys.executable).parent) or shutil.which("mpiexec")
    if found is None:
        raise click.ClickException("there is no mpiexec: `make setup` installs one")
    return found


if __name__ == "__main__":
    kill_test()
