"""Faults at every call of the rooms above the runtime, over a real MPI: what :mod:`world.faults` does for operations.

On the rank that is struck a profile function sees each call that code of these rooms makes, of Python's functions and of compiled ones,
and raises in its place. All ranks then tell each other what the call came to, in which they were together; a rank that waits for ever
ends the run, with the stacks of all.
"""

from __future__ import annotations

import faulthandler
import hashlib
import inspect
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from mpi_cases import patience

import sparseallreduce as sar
from sparseallreduce import linear, optim
from sparseallreduce.runtime import objects
from sparseallreduce.runtime.communicators import known_channel
from world.faults import ERRORS

WATCHDOG = 30.0  # seconds after which a call is taken for a hang
_PACKAGE = sar.__file__.removesuffix("__init__.py")
ROOMS = tuple(_PACKAGE + room for room in ("linear/", "data_cache/", "optim/", "torch/", "runtime/objects.py", "runtime/memory/meeting.py"))
_OUTSIDE = "runtime/operation.py"  # what it calls is not struck: schedules, of which :mod:`world.faults` takes care
SAMPLES, FEATURES = 60, 40


class Room(NamedTuple):
    """A call that all ranks make together.

    ``call`` is given a communicator and an empty folder that all ranks share, and returns a digest that has to be the same on all ranks and
    in every run, or none.
    """

    name: str
    call: Callable[[Any, Path], str]
    ranks: int = 1  # at least so many
    late: bool = False  # whether other ranks may complete it, and raise the error of the one that is struck in their next operation


# What comes before a call begins.
_BEFORE = ("ErrorReporter.__init__", "ErrorReporter.__enter__", "latest", "Optimizer.__init__", "DistributedOptimizer.__init__")


class Points:
    """The calls that this rank makes, and at which of them it is struck."""

    def __init__(self) -> None:
        self.passed = self.at = 0
        self.error = ""
        self.struck = ""
        self.late = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        self.passed, self.struck = 0, ""
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if not any(comm is not None for (comm,) in objects._entered.calls):
            caller = frame.f_back
            within = event == "c_call" or (caller is not None and _is_room(caller.f_code.co_filename))
            if not (self.late and within) or frame.f_code.co_qualname in _BEFORE:
                return  # no call has begun that all ranks make
        if event == "c_call":
            if not _is_room(frame.f_code.co_filename):
                return
            called = getattr(argument, "__qualname__", str(argument))
        elif event == "call":
            caller = frame.f_back
            if not (_is_room(frame.f_code.co_filename) or (caller is not None and _is_room(caller.f_code.co_filename))):
                return
            if frame.f_code.co_flags & inspect.CO_GENERATOR or (caller is not None and caller.f_code.co_filename.endswith(_OUTSIDE)):
                return  # a generator may be resumed to be closed, where Python raises nothing
            called, frame = frame.f_code.co_qualname, caller or frame
        else:
            return
        if frame.f_code.co_name == "__del__":  # of which Python raises nothing
            return
        self.passed += 1
        if self.passed == self.at and not self.struck:
            where = frame.f_code.co_filename.removeprefix(_PACKAGE)
            self.struck = f"{called} as called by {where}:{frame.f_lineno} ({frame.f_code.co_qualname})"
            sys.setprofile(None)
            print(f"  at {self.struck}", file=sys.stderr, flush=True)
            raise ERRORS[self.error]()


@cache
def _is_room(file: str) -> bool:
    return file.startswith(ROOMS)


def run(faults: int, seed: int, named: str = "", first: int = 0) -> int:
    """Strike faults one after the other, beginning with number ``first``, in calls whose names have one of the parts of ``named``
    in them; collective.

    Return how many left what is not promised. A hang ends the run, with the stacks of all ranks.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    parts = named.split(",")
    chosen = [room for room in all_rooms() if any(part in room.name for part in parts) and room.ranks <= world.size]
    points, rng, waits, wrong = Points(), random.Random(seed), [], 0
    counts: dict[str, list[int]] = {}
    usual: dict[str, Any] = {}
    kinds: Counter[str] = Counter()
    for number in range(faults):
        room, culprit, error, share = rng.choice(chosen), rng.randrange(world.size), rng.choice(sorted(ERRORS)), rng.random()
        if number < first:
            continue
        if room.name not in counts:  # what comes first imports and compiles
            for _ in range(2):
                points.at, points.late = 0, room.late
                with points.counted():
                    usual[room.name] = _outcome(room, world.Dup(), points)[0]
                assert usual[room.name][0] == "result", usual[room.name]
            counts[room.name] = world.allgather(points.passed)
            assert len(set(world.allgather(usual[room.name]))) == 1, "without any fault the ranks differ"
        points.at, points.error = (1 + int(share * counts[room.name][culprit]) if world.rank == culprit else 0), error
        faulthandler.dump_traceback_later(WATCHDOG * patience(), exit=True)  # a machine that is busy compiles for longer
        if world.rank == 0:
            print(f"fault {number}: {error} on rank {culprit} in {room.name} at {points.at or share}", file=sys.stderr, flush=True)
        comm, points.late = world.Dup(), room.late
        outcome, seconds = _outcome(room, comm, points)
        points.at, struck = 0, points.struck
        if room.late:
            begun = _begun(comm)
            caught_up = [_summed(comm) for _ in range(begun, max(world.allgather(begun)))]  # where others have come to operations more
            then = _summed(comm) if ("right",) not in caught_up else ("wrong",)
        else:
            then = ("right",)
        later = [_outcome(room, comm, points)[0], _summed(comm)]
        faulthandler.cancel_dump_traceback_later()
        said = world.allgather((outcome, later, seconds, struck))
        thens = world.allgather(then)
        if not said[culprit][3]:
            continue
        kinds[room.name] += 1
        what = _wrong([each for each, *_ in said], [each for _, each, *_ in said], culprit, error, usual[room.name], thens, room.late)
        waits += [seconds for rank, (_, _, seconds, _) in enumerate(said) if rank != culprit]
        if what:
            wrong += 1
            if world.rank == 0:
                print(f"fault {number}: {error} on rank {culprit} in {room.name}, {said[culprit][3]}: {what}", flush=True)
        if all(each == ("right",) for _, (_, each), *_ in said):
            comm.Free()
    if world.rank == 0:
        print(f"{dict(kinds)}\n{kinds.total()} faults struck, {wrong} left what is not promised", flush=True)
        waits.sort()
        if waits:
            print(f"the others had their outcome after {waits[min(len(waits) - 1, int(len(waits) * 0.999))]:.3f} s (99.9th percentile)")
    return wrong


def _outcome(room: Room, comm: Any, points: Points) -> tuple[Any, float]:
    """What a call comes to on this rank, and how long it takes."""
    folder = Path(comm.bcast(tempfile.mkdtemp(dir="/dev/shm") if comm.rank == 0 else None))
    comm.Barrier()
    start = time.perf_counter()
    try:
        with points.counted():
            made = room.call(comm, folder)
        outcome: tuple[Any, ...] = ("result", made)
    except BaseException as error:
        outcome = ("error", type(error).__name__, str(error))
    seconds = time.perf_counter() - start
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome, seconds


def _begun(comm: Any) -> int:
    """How many operations this rank has begun."""
    channel = known_channel(comm)
    return 0 if channel is None else channel.sequence


def _summed(comm: Any) -> tuple[str, ...]:
    """What a sum comes to afterwards."""
    try:
        result = sar.allreduce(sar.SparseStream([comm.rank, 50], [1.0, 2.0], 100), comm).to_dense()
    except Exception as error:
        return type(error).__name__, str(error)
    return ("right" if result.sum() == 3 * comm.size else "wrong",)


def _wrong(
    outcomes: Sequence[Any], later: Sequence[Any], culprit: int, error: str, usual: Any, thens: Sequence[Any], late: bool
) -> str:
    """What is not as promised, if anything; ``thens`` are of the operation that comes next."""
    others = {outcome for rank, outcome in enumerate(outcomes) if rank != culprit}
    own = outcomes[culprit]
    if any(outcome[0] == "result" and outcome != usual for outcome in outcomes):
        return f"another result than without a fault: {outcomes}"
    if len(others - {usual} if late else others) > 1:
        return f"the others do not have one outcome: {outcomes}"
    if error == "KeyboardInterrupt":
        if own[:2] != ("error", "KeyboardInterrupt"):
            return f"the interrupt is lost: {outcomes}"
    elif late and own[0] == "error" and (own[1] == error or "struck by a fault" in own[2]):
        pass
    elif own not in others and others != {usual}:  # after all have come to the end of the call, the others have their result
        return f"the rank that was struck has another outcome: {outcomes}"
    raised = {each for rank, each in enumerate(thens) if rank != culprit}
    if usual in others and own != usual:  # which the others are to raise now
        if late and (len(raised) > 1 or f"rank {culprit}" not in str(raised)):
            return f"the others raise no error of the rank that was struck in their next operation: {thens}"
    elif any(each != ("right",) for each in thens):
        return f"the next operation raises, too: {outcomes}, {thens}"
    if any(each[0] != usual or each[1] != ("right",) for each in later):
        return f"the same call, and a sum, afterwards: {later}"
    return ""


# The calls.


def _samples(comm: Any, features: int = FEATURES) -> tuple[Any, np.ndarray, np.ndarray]:
    """This rank's samples: rows, labels of three classes, and numbers."""
    import scipy.sparse

    rng = np.random.default_rng(comm.rank)
    rows = scipy.sparse.random_array((SAMPLES, features), density=min(0.2, 10 / features), rng=rng, format="csr")
    numbers = np.asarray(rows.sum(axis=1)).reshape(-1) + rng.standard_normal(SAMPLES)
    return rows, np.arange(SAMPLES) % 3, numbers


def _bits(*arrays: Any) -> str:
    return hashlib.blake2b(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays), digest_size=8).hexdigest()


def _fit(comm: Any, _folder: Path, estimator: str, classes: int = 2, features: int = FEATURES, **options: Any) -> str:
    """An estimator's fit, and its score."""
    rows, labels, numbers = _samples(comm, features)
    y = numbers if estimator == "LinearRegression" else labels % classes
    model = getattr(linear, estimator)(comm=comm, **{"max_iter": 2, "tol": None, **options}).fit(rows, y)
    return _bits(model.coef_, model.intercept_)


def _fitted(comm: Any, estimator: str) -> Any:
    """An estimator that has been trained on these samples by each rank for itself."""
    rows, labels, numbers = _samples(sar.SERIAL)
    model = getattr(linear, estimator)(comm=sar.SERIAL, max_iter=1, tol=None)
    model.fit(rows, numbers if estimator == "LinearRegression" else labels)
    model.comm = comm
    return model


def _score(comm: Any, _folder: Path, estimator: str) -> str:
    rows, labels, numbers = _samples(comm)
    return _bits(_model_of(comm, estimator).score(rows, numbers if estimator == "LinearRegression" else labels))


def _model_of(comm: Any, estimator: str) -> Any:
    profile = sys.getprofile()
    sys.setprofile(None)  # it is no part of the call
    try:
        return _fitted(comm, estimator)
    finally:
        sys.setprofile(profile)


def _partial_fit(comm: Any, _folder: Path, estimator: str, **options: Any) -> str:
    rows, labels, numbers = _samples(comm)
    model = getattr(linear, estimator)(comm=comm, **options)
    for part in (slice(0, 20), slice(20, 60)):
        if estimator == "LinearRegression":
            model.partial_fit(rows[part], numbers[part])
        else:
            model.partial_fit(rows[part], labels[part], classes=[0, 1, 2])
    return _bits(model.coef_, model.intercept_)


def _train(comm: Any, folder: Path, strategy: str, features: int = FEATURES, **options: Any) -> str:
    """A run of a trainer with checkpoints, and another that goes on from the last of them."""
    rows, labels, _ = _samples(comm, features)
    dataset = linear.Dataset.of_ranks(rows, np.where(labels == 0, 1.0, -1.0), comm)
    if strategy.startswith("ps"):  # whose servers hold no samples: all are given on every rank
        rows, labels, _ = _samples(sar.SERIAL, features)
        dataset = linear.Dataset.from_scipy(rows, np.where(labels == 0, 1.0, -1.0))
    for epochs in (1, 2):
        made = linear.STRATEGIES[strategy](dataset, comm, **options)
        kept = linear.Checkpoints(folder)
        settings = linear.Options(epochs, 8, 0, validation=0.2)
        trainer = linear.Trainer(linear.Logistic(), made, linear.Constant(0.1), settings, checkpoints=kept)
        found, _ = kept.prepare(comm, resume=epochs > 1)
        if found is not None:
            trainer.resume(found)
        list(trainer.run())
    return _bits(trainer.weights.to_array()) if strategy != "ps-async" else ""


def _read(comm: Any, folder: Path, suffix: str) -> str:
    """A file of samples that is generated, converted, and read."""
    text = folder / f"samples.svm{suffix}"
    linear.generate("url-like", folder / "samples.svm", samples=50, features=100, comm=comm)
    if suffix and comm.rank == 0:
        import gzip

        text.write_bytes(gzip.compress((folder / "samples.svm").read_bytes()))
    comm.Barrier()
    from sparseallreduce.linear.data.convert import convert

    convert(text, folder / "samples.csr", comm)
    dataset, _ = linear.load(folder / "samples.csr", comm=comm)
    other, _ = linear.load(text, comm=comm)
    return _bits(sum(comm.allgather(dataset.rows)), dataset.total_samples, other.total_samples)


_SHAPES = ((6, 5), (4,), (3, 2))


def _gradients(seed: Any) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in _SHAPES]


def _steps(comm: Any, _folder: Path, optimizer: str, one_by_one: bool = False, explains: bool = False, **options: Any) -> str:
    """The construction of an optimiser, and two steps of it."""
    parameters = _gradients(0)
    made = getattr(optim, optimizer)(parameters, 0.1, 0.2, comm, **options)
    for step in range(2):
        gradients = _gradients((1, comm.rank, step))
        if one_by_one:
            for layer in reversed(range(len(_SHAPES))):
                made.start(layer, gradients[layer])
            made.finish()
        else:
            made.step(gradients)
    if explains:
        made.explain()
    return _bits(*parameters)


def _network() -> Any:
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))


def _loss(network: Any, seed: Any) -> Any:
    import torch

    return network(torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 6)).astype(np.float32))).square().sum()


def _parameters(network: Any) -> str:
    return _bits(*[parameter.detach().numpy() for parameter in network.parameters()])


def _torch_steps(comm: Any, _folder: Path, optimizer: str, closure: bool = False, **options: Any) -> str:
    """The construction of an optimiser of PyTorch, and three steps of it."""
    from sparseallreduce import torch as ours

    network = _network()
    made = getattr(ours, optimizer)(network.parameters(), 0.1, density=0.2, comm=comm, bucket_bytes=80, **options)
    for step in range(3):

        def backward(step: int = step) -> Any:
            made.zero_grad()
            loss = _loss(network, (1, comm.rank, step))
            loss.backward()
            return loss

        if not closure:
            backward()
        made.step(backward if closure else None)
    made.check_replicas()
    made.gather_state_dict()
    return _parameters(network)


def _hooked_steps(comm: Any, folder: Path, reducer: str) -> str:
    """A step by the hook of DistributedDataParallel; before another its ranks would wait for each other, whichever had left."""
    import torch

    from sparseallreduce.torch import comm_hook

    if not torch.distributed.is_initialized():
        store = f"file://{folder / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=comm.size)
    network = _network()
    parallel = torch.nn.parallel.DistributedDataParallel(network, bucket_cap_mb=0.0001)
    parallel.register_comm_hook(None, comm_hook(reducer, comm, density=0.2))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    _loss(parallel, (1, comm.rank)).backward()
    optimizer.step()
    return _parameters(network)


def all_rooms() -> Iterator[Room]:
    """All of them."""
    fits: dict[str, dict[str, Any]] = {
        "by default": {"estimator": "LogisticRegression"},
        "of three classes, early": {"estimator": "LogisticRegression", "classes": 3, "early_stopping": True},
        "of balanced classes": {"estimator": "LinearSVM", "class_weight": "balanced", "update": "sgd"},
        "of numbers": {"estimator": "LinearRegression"},
        "in rounds": {"estimator": "LinearSVM", "solver": "cocoa", "max_iter": 5},
        "in rounds, of three classes, early": {"estimator": "LinearSVM", "solver": "cocoa", "classes": 3, "early_stopping": True},
        "in dual rounds, free intercept": {"estimator": "LinearSVM", "solver": "dual", "max_iter": 5},
        "in dual rounds, softmax": {"estimator": "LogisticRegression", "solver": "dual", "classes": 3, "max_iter": 5},
        "by Newton's method": {"estimator": "LogisticRegression", "solver": "newton", "max_iter": 5},
        "by Newton's method, softmax": {"estimator": "LogisticRegression", "solver": "newton", "classes": 3, "max_iter": 5},
        "by Newton's method, of many features": {"estimator": "LinearSVM", "solver": "newton", "features": 300_000, "max_iter": 5},
        "by local steps": {"estimator": "LogisticRegression", "update": "ftrl"},
        "by AROW": {"estimator": "LinearSVM", "update": "arow"},
        "of many features": {"estimator": "LinearSVM", "features": 300_000, "update": "sgd"},
    }
    for name, options in fits.items():
        yield Room(f"fit {name}", partial(_fit, **options))
    for strategy in ("dense", "overlapped", "oktopk", "gtopk", "topka", "auto"):
        yield Room(f"fit, {strategy}", partial(_fit, estimator="LogisticRegression", strategy=strategy))
    for estimator in ("LogisticRegression", "LinearRegression"):
        yield Room(f"score {estimator}", partial(_score, estimator=estimator))
        yield Room(f"partial_fit {estimator}", partial(_partial_fit, estimator=estimator))
    yield Room("partial_fit of averages", partial(_partial_fit, estimator="LinearSVM", average=True, update="sgd"))
    for strategy in ("sparse", "local", "dense", "overlapped", "oktopk"):
        yield Room(f"train {strategy}", partial(_train, strategy=strategy))
    yield Room("train many features", partial(_train, strategy="sparse", features=300_000))
    for strategy in ("ps-sync", "ps-async"):
        yield Room(f"train {strategy}", partial(_train, strategy=strategy), ranks=2)
    steps: dict[str, dict[str, Any]] = {
        "of TopKSGD": {"optimizer": "TopKSGD", "momentum": 0.9, "clip_norm": 1.0},
        "of OkTopkSGD": {"optimizer": "OkTopkSGD", "weight_decay": 0.1},
        "of DenseSGD": {"optimizer": "DenseSGD", "adam": optim.Adam()},
        "of AutoSGD": {"optimizer": "AutoSGD", "candidates": ["oktopk", "topkdsa"], "explains": True},
        "of layers": {"optimizer": "TopKSGD", "by_layer": True, "momentum": 0.9, "momentum_correction": True},
        "of layers one by one": {"optimizer": "GTopkSGD", "by_layer": True, "one_by_one": True, "momentum": 0.9},
    }
    for name, options in steps.items():
        yield Room(f"steps {name}", partial(_steps, **options), late=True)
    if find_spec("torch") is not None:
        of_torch: dict[str, dict[str, Any]] = {
            "OkTopkSGD": {"momentum": 0.9},
            "TopKSGD": {"overlap": True},
            "GTopkSGD": {"closure": True, "overlap": True, "check_every": 1},
            "DenseSGD": {"clip_norm": 1.0},
        }
        for optimizer, options in of_torch.items():
            yield Room(f"torch {optimizer}", partial(_torch_steps, optimizer=optimizer, **options), late=True)
        for reducer in ("topk", "dense"):
            yield Room(f"torch hook, {reducer}", partial(_hooked_steps, reducer=reducer), late=True)
    for suffix in ("", ".gz"):
        yield Room(f"read samples{suffix}", partial(_read, suffix=suffix))
