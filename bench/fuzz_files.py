"""Read altered files of the library: models, checkpoints, calibrations, entries of the DataCache.

    python bench/fuzz_files.py --messages 10000 --seed 0

Each is a good file in which some bytes were changed. In those that are resealed, one of the arrays was changed, and the checksums match
again, so that the damage gets past them. A reader must refuse a file with the error of its kind, in one line that names it, or return what
can be worked with. What can be made anew must be: a calibration is replaced, and an entry of the cache is fetched again. Without a seal
nothing else than what was written may come back. `--only` repeats one file.
"""

from __future__ import annotations

import io
import math
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_readers import INTEGERS, mutated
from fuzzing import Found, demand, main, tried

import sparseallreduce as sar
from sparseallreduce.algorithms.cost import Machine
from sparseallreduce.data_cache import DataCache
from sparseallreduce.data_cache.level import Level, Name
from sparseallreduce.data_cache.samples import pack
from sparseallreduce.errors import CheckpointError, DatasetError
from sparseallreduce.linear import FittedModel, load, load_model, save_model
from sparseallreduce.linear.model_file import ModelFileError
from sparseallreduce.linear.training.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from sparseallreduce.runtime.calibration import Calibration

WORDS = [str(number).encode() for number in (*INTEGERS, 10**400)]
WORDS += [number.to_bytes(size, "little") for number in INTEGERS for size in (1, 2, 4, 8) if number < 256**size]
WORDS += [b"[" * 2000, b'{"a":' * 2000, b"NaN", b"-1", b"null", b'"', b"<U9", b"|O", b"(", b"2.0", b"1e999", b"true", b"PK\1\2", b"PK\5\6"]
SAMPLE = {"image": np.arange(6.0).reshape(2, 3), "label": 7, "name": ("a", None), "scalar": np.float32(2), "raw": b"bytes"}
CONSTANTS = Machine(*[1e-6] * len(Machine._fields))


def run(seed: int, numbers: Any, current: Any = None) -> Found:
    """Files of kinds that are drawn."""
    with tempfile.TemporaryDirectory() as folder:

        def attempt(rng: np.random.Generator) -> tuple[str, bool]:
            kind = str(rng.choice(list(KINDS)))
            path = Path(folder) / "file.npz"
            path.unlink(missing_ok=True)
            resealing = bool(rng.integers(2)) and kind in ARCHIVES
            named = f"{kind}, resealed" if resealing else kind
            return named, KINDS[kind](rng, path, resealing)

        return tried(attempt, seed, numbers, current)


def damage(rng: np.random.Generator, path: Path, resealing: bool) -> None:
    """Change a good archive."""
    if not resealing:
        path.write_bytes(mutated(path.read_bytes(), rng, WORDS))
        return
    with zipfile.ZipFile(path) as given:
        members = {name: given.read(name) for name in given.namelist()}
    name = str(rng.choice(list(members)))
    members[name] = mutated(members[name], rng, WORDS)
    if rng.random() < 0.1:
        del members[str(rng.choice(list(members)))]
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if rng.integers(2) else zipfile.ZIP_STORED) as out:
        for each, content in members.items():
            out.writestr(each, content)
    path.write_bytes(file.getvalue())


def model(rng: np.random.Generator, path: Path, resealing: bool) -> bool:
    classes = int(rng.integers(2, 4))
    weights = rng.standard_normal(5 if classes == 2 else (classes, 5)).astype(np.float32)
    written = FittedModel("logistic", weights, np.zeros(weights.shape[:-1]), np.arange(classes))
    save_model(path, written)
    damage(rng, path, resealing)
    try:
        found = load_model(path)
    except ModelFileError as error:
        return named(error, path)
    demand(len(found.decision_function(np.zeros((2, found.n_features)))) == 2, "no scores")
    demand(resealing or found.weights.tobytes() == weights.tobytes(), "other weights")
    return True


def checkpoint(rng: np.random.Generator, path: Path, resealing: bool) -> bool:
    direction = rng.standard_normal(9)
    write_checkpoint(path, Checkpoint({"model": "svm"}, {"step": 3}, {"direction": direction, "scale": 0.5}))
    damage(rng, path, resealing)
    try:
        found = read_checkpoint(path)
    except CheckpointError as error:
        return named(error, path)
    demand(all(isinstance(part, dict) for part in (found.identity, found.progress, found.state)), "no checkpoint")
    demand(resealing or found.state["direction"].tobytes() == direction.tobytes(), "other arrays")
    return True


def rows(rng: np.random.Generator, path: Path, resealing: bool) -> bool:
    arrays = {"indptr": [0, 1, 3], "indices": [4, 0, 7], "data": rng.standard_normal(3), "labels": [1.0, -1.0]}
    np.savez(path, format=b"csr", shape=(2, 9), **arrays)
    damage(rng, path, resealing)
    try:
        found = load(path, comm=sar.SERIAL, format="npz")[0]
    except DatasetError as error:
        return named(error, path)
    demand(bool(np.isfinite(found.values).all()) and (not found.nnz or int(found.indices.max()) < found.features), "no data set")
    demand(resealing or found.values.tobytes() == arrays["data"].astype(np.float32).tobytes(), "other values")
    return True


def calibration(rng: np.random.Generator, path: Path, resealing: bool) -> bool:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        kept = Calibration("MPI", [b"here"], 2, Path(folder))
        kept.keep(CONSTANTS)
        (file,) = Path(folder).iterdir()
        file.write_bytes(mutated(file.read_bytes(), rng, WORDS))
        found = kept.like(CONSTANTS)
        demand(found is None or all(0 <= value < math.inf for value in found), "no constants")
        kept.keep(CONSTANTS)
        demand(kept.like(CONSTANTS) is not None, "it was not made anew")
    return found is not None


def entry(rng: np.random.Generator, path: Path, resealing: bool) -> bool:
    """Its checksums always match."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        content = mutated(b"".join(pack(SAMPLE)), rng, WORDS)
        Level(Path(folder), 1 << 30).put(Name.of("key", ""), [content])
        cache = DataCache(folder)
        repr(cache.get("key", lambda: SAMPLE))
        fetched = cache.counts.fetched
        cache.get("key", lambda: "not asked for")
        demand(cache.counts.fetched == fetched, "it was not made anew")
    return fetched == 0


def named(error: Exception, path: Path) -> bool:
    demand(str(path) in str(error) and "\n" not in str(error), f"the error does not name the file in one line: {error!r}")
    return False


KINDS = {"model": model, "checkpoint": checkpoint, "rows": rows, "calibration": calibration, "entry": entry}
ARCHIVES = ("model", "checkpoint", "rows")

if __name__ == "__main__":
    main(__doc__.splitlines()[0], run)
