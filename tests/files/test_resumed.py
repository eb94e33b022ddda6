"""Checkpoints whose checksums are right and whose contents are of no run: refused, or gone on from, but never something else."""

import copy

import numpy as np
import pytest
import scipy.sparse
from strange import put

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError, DivergenceError, MismatchError
from sparseallreduce.linear import (
    MODELS,
    Checkpoints,
    Dataset,
    Descent,
    EarlyStopping,
    Options,
    OverlappedStrategy,
    SparseStrategy,
    Trainer,
)
from sparseallreduce.linear.strategies import STRATEGIES
from sparseallreduce.linear.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from sparseallreduce.linear.training.schedules import BoldDriver

LAZY = Descent(1e-3, True, 1e-4, 0.5, False, 20)
FTRL = Descent(1e-3, True, 1e-4, update="ftrl")
RUNS = {"sparse": (SparseStrategy, LAZY), "overlapped": (OverlappedStrategy, Descent(1e-3)), "adaptive": (SparseStrategy, FTRL)}
RUNS |= {"oktopk": (STRATEGIES["oktopk"], Descent(1e-3, True))}
NONSENSE = [None, -1, 2**70, 1e308, float("nan"), "word", True, [], [1, "a"], {}, {"a": 1}]
ARRAYS = [
    np.zeros(0),
    np.zeros((2, 3)),
    np.array(["a"]),
    np.full(40, -1),
    np.full(40, 65535, np.uint16),
    np.full(20, 2**63, np.uint64),
    np.arange(3)[::-1],
    np.full(41, np.nan),
]


def problem():
    rng = np.random.default_rng(1)
    matrix = np.where(rng.random((60, 40)) < 0.1, rng.standard_normal((60, 40)), 0).astype(np.float32)
    return Dataset.from_scipy(scipy.sparse.csr_array(matrix), np.where(matrix @ rng.standard_normal(40) > 0, 1.0, -1.0))


def trainer(folder, run, dataset):
    strategy, descent = RUNS[run]
    options = {"validation": 0.2} if run == "sparse" else {}
    made = strategy(dataset, sar.SERIAL, descent)
    given = {"stopping": EarlyStopping("loss", 50), "checkpoints": Checkpoints(folder, 5)}
    return Trainer(MODELS["logistic"](), made, BoldDriver(0.2), Options(3, 5, **options), **given)


def places(value, path=()):
    """Where something stands in a checkpoint, and what."""
    yield path, value
    if isinstance(value, dict | list | tuple) and len(path) < 4:
        inside = value.items() if isinstance(value, dict) else list(enumerate(value))[:2]
        for name, each in inside:
            yield from places(each, (*path, name))


def changed(value, path, other):
    """The same with something else at a place, or with nothing there."""
    if not path:
        return other
    copied = list(value) if isinstance(value, tuple) else copy.copy(value)
    if other is KeyError and len(path) == 1:
        del copied[path[0]]
    else:
        copied[path[0]] = changed(copied[path[0]], path[1:], other)
    return copied


@pytest.mark.parametrize("run", RUNS)
def test_nonsense_with_right_checksums_is_a_checkpoint_error_or_a_run_like_any_other(tmp_path, run):
    dataset = problem()
    list(trainer(tmp_path, run, dataset).run())
    *_, last = sorted(tmp_path.iterdir())
    good = read_checkpoint(last)
    whole = {"progress": good.progress, "state": good.state, "identity": good.identity}
    rng, refused, failures = np.random.default_rng(0), 0, []
    found = [path for path, _ in places(whole) if path not in ((), ("progress",), ("state",), ("identity",))]
    for path in found:
        kinds = [KeyError, *rng.permutation(np.array([*NONSENSE, *ARRAYS], object))[:4]]
        for other in kinds:
            if isinstance(other, np.ndarray) and path[0] != "state":
                continue
            parts = changed(whole, path, other)
            checkpoint = Checkpoint(parts["identity"], parts["progress"], parts["state"], str(last))
            again = trainer(tmp_path, run, dataset)
            try:
                with np.errstate(all="ignore"):
                    again.resume(checkpoint)
                    list(again.run())
            except CheckpointError:
                refused += 1
            except (DivergenceError, MismatchError):
                pass
            except Exception as error:
                failures.append(f"{path} {other!r}: {type(error).__name__}: {error}")
    assert not failures
    assert refused > len(found) / 2


@pytest.mark.parametrize("what", ["pipe", "device", "empty"])
def test_a_checkpoint_before_one_that_is_damaged_is_taken(tmp_path, what):
    for step in (3, 4):
        write_checkpoint(tmp_path / f"step-{step:012}.npz", Checkpoint({}, {"step": step}, {}))
    put(tmp_path / "step-000000000004.npz", what)
    checkpoint, remarks = Checkpoints(tmp_path).prepare(sar.SERIAL, resume=True)
    assert checkpoint.progress == {"step": 3} and len(remarks) == 1 and "step-000000000004.npz" in remarks[0]
