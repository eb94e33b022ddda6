"""Checkpoints: all that a training run needs to go on where it was, in files that are whole or not there.

A checkpoint is a NumPy ``.npz`` file without compression. Its member ``about`` is JSON text: the layout's number, the ``identity`` of
the run (data, model, options), its ``progress``, and the numbers of the strategy's state; the arrays of that state are members of their
own, which ``about`` lists. As in any ZIP file each member carries a checksum (CRC-32), which is tested in reading.

A checkpoint is written under another name, forced to the disk, and renamed; so a name that is there is that of a whole file. The
last two are kept: should the newest be damaged all the same, the one before is taken. What was found damaged is left where it is,
and counts for neither of the two.
"""

from __future__ import annotations

import json
import os
import re
import time
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.errors import CheckpointError
from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather

__all__ = ["Checkpoint", "Checkpoints", "check_identity", "data_fingerprint", "read_checkpoint", "write_checkpoint"]

Array = NDArray[Any]

_LAYOUT = "sparseallreduce checkpoint 3"
_NAME = re.compile(r"step-(\d{12})\.npz")
# Of what a run had that wrote a checkpoint before these could be chosen.
_IMPLIED: dict[str, Any] = {"update": "sgd", "beta": 0.0, "intercept_value": 1.0, "unit of the learning rate": 1.0}
_KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A run at the end of a step."""

    identity: dict[str, Any]  # of the run: what must be the same for going on to make sense
    progress: dict[str, Any]  # of the trainer, in what JSON can express
    state: dict[str, Any]  # of the strategy: numbers, and arrays


class _Damaged(CheckpointError):
    """A file does not hold what was written to it."""


class Checkpoints:
    """A folder of checkpoints of one run, and when to write the next.

    Parameters
    ----------
    folder : path
        On a file system that all ranks see, or at least rank 0 and the first worker.
    every_steps : int, optional
        Steps between two checkpoints.
    every_minutes : float, optional
        Minutes between two checkpoints. Given neither, one is written after every epoch; given either, one at the end of training.
    """

    def __init__(self, folder: str | os.PathLike[str], every_steps: int | None = None, every_minutes: float | None = None) -> None:
        self.folder = Path(folder)
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self._last = time.monotonic()
        self._damaged: set[str] = set()  # names of files

    def prepare(self, comm: Any, resume: bool) -> tuple[Checkpoint | None, list[str]]:
        """Make the folder ready, and find where to go on; collective.

        Returns
        -------
        checkpoint : Checkpoint or None
            The newest that is not damaged; None if there is none, or not to ``resume``.
        remarks : list of str
            What the user should know: which damaged files were passed over.

        Raises
        ------
        CheckpointError
            On all ranks, if the folder cannot be used, if it holds checkpoints and there is no word of resuming, if the newest that is
            not damaged is of another version's layout, or if all are damaged.
        """
        found = agreed(comm, lambda: self._found(resume) if comm.rank == 0 else None)
        self._last = time.monotonic()
        return cast("tuple[Checkpoint | None, list[str]]", found if comm.size == 1 else _told(found, comm))

    @property
    def after_epochs(self) -> bool:
        """Whether to write one after every epoch, rather than after steps or minutes."""
        return self.every_steps is None and self.every_minutes is None

    def due_after(self, step: int) -> bool:
        """Whether to write one because of the number of steps taken, which all ranks know alike."""
        return self.every_steps is not None and step % self.every_steps == 0

    def overdue(self) -> bool:
        """Whether to write one because of the time, which each rank has its own idea of."""
        return self.every_minutes is not None and time.monotonic() - self._last >= 60 * self.every_minutes

    def save(self, step: int, checkpoint: Checkpoint, comm: Any) -> None:
        """Write a checkpoint on the first rank of ``comm``, and remove all but the last two; collective.

        Raises
        ------
        CheckpointError
            On all ranks, if it cannot be written; what was there before is kept.
        """
        agreed(comm, lambda: self._write(step, checkpoint) if comm.rank == 0 else None)
        self._last = time.monotonic()

    def _found(self, resume: bool) -> tuple[Checkpoint | None, list[str]]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".*step-*.npz"):  # of a run that was killed while it wrote
                leftover.unlink(missing_ok=True)
            names = self._names()
        except OSError as error:
            raise CheckpointError(f"cannot use {self.folder} for checkpoints: {error.strerror}; choose another folder") from None
        if not resume:
            if names:
                raise CheckpointError(f"{self.folder} holds the checkpoints of a run: give --resume to go on, or choose another folder")
            return None, []
        remarks: list[str] = []
        for name in names:
            try:
                return read_checkpoint(self.folder / name), remarks
            except _Damaged as error:
                self._damaged.add(name)
                remarks.append(f"{error}; passed over")
        if names:
            raise CheckpointError(f"all checkpoints in {self.folder} are damaged: {remarks[0].removesuffix('; passed over')}")
        return None, [f"no checkpoint in {self.folder} yet: starting from the beginning"]

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        try:
            written = self.folder / f"step-{step:012}.npz"
            write_checkpoint(written, checkpoint)
            self._damaged.discard(written.name)
            names = self._names()
            kept = [name for name in names if name not in self._damaged][:_KEPT]
            for name in names:
                if name < kept[-1]:
                    (self.folder / name).unlink()
        except OSError as error:
            reason = f"cannot write a checkpoint to {self.folder}: {error.strerror}"
            raise CheckpointError(f"{reason}; make room or choose another folder") from None

    def _names(self) -> list[str]:
        """Those of the checkpoints in the folder, newest first."""
        return sorted((name for name in os.listdir(self.folder) if _NAME.fullmatch(name)), reverse=True)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a file that appears under its name when all of it is on the disk.

    Raises
    ------
    OSError
    """
    arrays: dict[str, Any] = {}
    numbers: dict[str, Any] = {}
    for name, value in checkpoint.state.items():
        if isinstance(value, np.ndarray) and value.ndim:
            arrays[f"state/{name}"] = value
        else:
            numbers[name] = value
    about = {"layout": _LAYOUT, "identity": checkpoint.identity, "progress": checkpoint.progress, "numbers": numbers, "arrays": [*arrays]}
    text = np.frombuffer(json.dumps(about, default=_plain).encode(), np.uint8)
    with atomic_file(path) as file:
        np.savez(file, about=text, **arrays)


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a file.

    Raises
    ------
    CheckpointError
        If it is damaged, no checkpoint, or one of another layout.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            members = {name: file[name] for name in file.files}
        about = json.loads(members.pop("about").tobytes())
        layout, named = about["layout"], about.get("arrays")
        if layout == _LAYOUT:
            if set(members) != set(named):
                raise ValueError("some of its arrays are missing")
            arrays = {name.removeprefix("state/"): array for name, array in members.items()}
            return Checkpoint(about["identity"], about["progress"], about["numbers"] | arrays)
    except OSError as error:
        raise _Damaged(f"cannot read {path}: {error.strerror or error}") from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        NotImplementedError,
        RuntimeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise _Damaged(f"{path} is damaged ({' '.join(str(error).split())})") from None
    what = f"{path} has the layout {layout!r}, and this version reads {_LAYOUT!r}"
    raise CheckpointError(f"{what}: go on with the version that wrote it, or start anew in another folder")


def _told(found: tuple[Checkpoint | None, list[str]] | None, comm: Any) -> tuple[Checkpoint | None, list[str]]:
    """What the first rank has found, on all; arrays travel as they are."""
    checkpoint, remarks = found or (None, [])
    arrays, rest = None, None
    if found is not None:
        state = {} if checkpoint is None else checkpoint.state
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        numbers = {name: value for name, value in state.items() if name not in arrays}
        rest = remarks, checkpoint and (checkpoint.identity, checkpoint.progress, numbers)
    remarks, outline = cast("Any", gather(comm, rest)[0])
    arrays = broadcast_arrays(comm, arrays)
    if outline is None:
        return None, remarks
    identity, progress, numbers = outline
    return Checkpoint(identity, progress, numbers | arrays), remarks


def check_identity(checkpoint: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Refuse to go on with what is no continuation.

    Raises
    ------
    CheckpointError
        Naming the first difference.
    """
    for name in dict.fromkeys([*checkpoint, *run]):
        before, now = (settings.get(name, _IMPLIED.get(name)) for settings in (checkpoint, run))
        if before != now:
            difference = f"its {name} is {before}, and here it is {now}"
            raise CheckpointError(f"the checkpoint is of another run: {difference}; give what it was, or start anew in another folder")


def data_fingerprint(dataset: Dataset, comm: Any) -> str:
    """A number that other samples, in this order, will not have, whatever the number of ranks that share them; collective."""
    bits = dataset.values.view(f"u{dataset.values.itemsize}")
    own = int(kernels.fingerprint(dataset.indptr, dataset.indices, bits, dataset.labels.view(np.uint64), dataset.first_sample))
    if dataset.weights is not None:
        nothing = np.zeros(dataset.rows + 1, np.int64)
        first = dataset.first_sample + dataset.total_samples
        own += int(kernels.fingerprint(nothing, dataset.indices, bits, dataset.weights.view(np.uint64), first))
    return f"{sum(gather(comm, own)) % 2**64:016x}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be part of a checkpoint")
