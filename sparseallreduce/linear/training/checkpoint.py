"""Checkpoints: all that a training run needs to continue, in files that are complete or absent.

A checkpoint is a NumPy ``.npz`` file without compression. Its member ``about`` is JSON text: the number of the format, the ``identity`` of
the run (data, model, options), its ``progress``, and the numbers of the strategy's state; the arrays of that state are separate
members, which ``about`` lists. As in any ZIP file each member has a checksum (CRC-32), which is verified on reading.

A checkpoint is written under another name, synchronised to disk, and renamed; so a file with the final name is complete. The
last two are kept: if the newest is damaged nevertheless, the previous one is used. Damaged files are left in place,
and do not count as one of the two.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from sparseallreduce.atomic_file import atomic_file
from sparseallreduce.checked_file import Damaged, open_regular, parse_json
from sparseallreduce.checked_npz import Npz
from sparseallreduce.errors import CheckpointError
from sparseallreduce.linear import kernels
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.runtime.objects import agreed, broadcast_arrays, gather, together

__all__ = ["Checkpoint", "Checkpoints", "check_identity", "data_fingerprint", "nonsense_refused", "read_checkpoint", "write_checkpoint"]

Array = NDArray[Any]

_LAYOUT = "sparseallreduce checkpoint 3"
_NAME = re.compile(r"step-(\d{12})\.npz")
# Values of settings that checkpoints of earlier versions do not have.
_IMPLIED: dict[str, Any] = {"update": "sgd", "beta": 0.0, "intercept_value": 1.0, "unit of the learning rate": 1.0}
_KEPT = 2
_LONGEST_TEXT = 1 << 28  # largest size of `about` in bytes: with the reducers of a thousand ranks it has some ten million


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run at the end of a step."""

    identity: dict[str, Any]  # settings and data of the run that must be the same to continue it
    progress: dict[str, Any]  # progress of the trainer, as JSON values
    state: dict[str, Any]  # state of the strategy: numbers and arrays
    path: str = "the checkpoint"  # name of the file that it was read from

    def whole_number(self, name: str) -> int:
        """Return a count of at least one from the progress or the identity.

        Raises
        ------
        CheckpointError
            If it is missing or invalid.
        """
        number = self.progress.get(name, self.identity.get(name))
        if type(number) is not int or number < 1:
            raise CheckpointError(f"{self.path} is damaged: its {name} is {number!r:.40}")
        return number


class _DamagedCheckpoint(CheckpointError):
    """Raised for a file that does not hold what was written to it."""


class Checkpoints:
    """A folder of checkpoints of one run, and the times at which to write the next.

    Parameters
    ----------
    folder : path
        Folder on a file system shared by all ranks, or at least by rank 0 and the first worker.
    every_steps : int, optional
        Steps between two checkpoints.
    every_minutes : float, optional
        Minutes between two checkpoints. With neither option, a checkpoint is written after every epoch; with either, also at the end.
    """

    def __init__(self, folder: str | os.PathLike[str], every_steps: int | None = None, every_minutes: float | None = None) -> None:
        self.folder: Path = Path(folder)
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self._last = time.monotonic()
        self._damaged: set[str] = set()  # names of files

    def prepare(self, comm: Any, resume: bool) -> tuple[Checkpoint | None, list[str]]:
        """Create the folder, and find the checkpoint to continue from. Collective.

        Returns
        -------
        checkpoint : Checkpoint or None
            The newest one that is not damaged; None if there is none, or without ``resume``.
        remarks : list of str
            Messages for the user: which damaged files were skipped.

        Raises
        ------
        CheckpointError
            On all ranks, if the folder cannot be used, if it holds checkpoints and ``resume`` is False, if the newest one that is not
            damaged has the format of another version, or if all are damaged.
        """

        def found() -> tuple[Checkpoint | None, list[str]]:
            own = agreed(comm, lambda: self._found(resume) if comm.rank == 0 else None)
            self._last = time.monotonic()
            return cast("tuple[Checkpoint | None, list[str]]", own if comm.size == 1 else _shared(own, comm))

        return together(comm, found)

    @property
    def after_epochs(self) -> bool:
        """True if a checkpoint is written after every epoch, rather than after steps or minutes."""
        return self.every_steps is None and self.every_minutes is None

    def due_after(self, step: int) -> bool:
        """Return True if a checkpoint is due by the number of steps, which is the same on all ranks."""
        return self.every_steps is not None and step % self.every_steps == 0

    def overdue(self) -> bool:
        """Return True if a checkpoint is due by the time, on which ranks may differ."""
        return self.every_minutes is not None and time.monotonic() - self._last >= 60 * self.every_minutes

    def save(self, step: int, checkpoint: Checkpoint, comm: Any) -> None:
        """Write a checkpoint on the first rank of ``comm``, and remove all but the last two. Collective.

        Raises
        ------
        CheckpointError
            On all ranks, if it cannot be written; earlier checkpoints are kept.
        """
        agreed(comm, lambda: self._write(step, checkpoint) if comm.rank == 0 else None)
        self._last = time.monotonic()

    def _found(self, resume: bool) -> tuple[Checkpoint | None, list[str]]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".*step-*.npz"):  # left by a run that was killed while writing
                leftover.unlink(missing_ok=True)
            names = self._names()
        except OSError as error:
            raise CheckpointError(f"cannot use {self.folder} for checkpoints: {error.strerror}; choose another folder") from None
        if not resume:
            if names:
                raise CheckpointError(f"{self.folder} holds the checkpoints of a run: use --resume to continue, or choose another folder")
            return None, []
        remarks: list[str] = []
        for name in names:
            try:
                return read_checkpoint(self.folder / name), remarks
            except _DamagedCheckpoint as error:
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
        """Return the names of the checkpoints in the folder, newest first."""
        return sorted((name for name in os.listdir(self.folder) if _NAME.fullmatch(name)), reverse=True)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a file that appears under its name once it is complete on disk.

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
    with atomic_file(path, own=True) as file:
        np.savez(file, about=text, **arrays)


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint stored in a file.

    Raises
    ------
    CheckpointError
        If it is damaged, not a checkpoint, or of another format.
    """
    try:
        with open_regular(path) as file:
            members = Npz(file)
            about = parse_json(members.array("about", _LONGEST_TEXT).tobytes())
            layout = about.get("layout") if isinstance(about, dict) else None
            if layout == _LAYOUT:
                return _checkpoint(path, about, members)
            if not isinstance(layout, str):
                raise Damaged("its layout is not given")
    except OSError as error:
        raise _DamagedCheckpoint(f"cannot read {path}: {error.strerror or error}") from None
    except Damaged as fault:
        raise _DamagedCheckpoint(f"{path} is damaged ({fault})") from None
    what = f"{path} has the layout {layout!r}, but this version reads {_LAYOUT!r}"
    raise CheckpointError(f"{what}: continue with the version that wrote it, or start again in another folder")


def _checkpoint(path: Path, about: dict[str, Any], members: Npz) -> Checkpoint:
    """Return the checkpoint in a file of this version's format."""
    parts = [about.get(name) for name in ("identity", "progress", "numbers")]
    named = about.get("arrays")
    if not all(isinstance(part, dict) for part in parts) or not isinstance(named, list):
        raise Damaged("it does not say what it is of, or what is in it")
    if sorted(map(str, [*named, "about"])) != sorted(members.names):
        raise Damaged("some of its arrays are missing, or are not its own")
    identity, progress, numbers = cast("list[dict[str, Any]]", parts)
    arrays = {name.removeprefix("state/"): members.array(name) for name in named}
    return Checkpoint(identity, progress, numbers | arrays, str(path))


def _shared(found: tuple[Checkpoint | None, list[str]] | None, comm: Any) -> tuple[Checkpoint | None, list[str]]:
    """Send the first rank's result to all ranks; arrays are sent without pickling."""
    checkpoint, remarks = found or (None, [])
    arrays, rest = None, None
    if found is not None:
        state = {} if checkpoint is None else checkpoint.state
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        numbers = {name: value for name, value in state.items() if name not in arrays}
        rest = remarks, None if checkpoint is None else (checkpoint.identity, checkpoint.progress, numbers, checkpoint.path)
    first = gather(comm, rest)[0]
    assert first is not None
    remarks, outline = first
    arrays = broadcast_arrays(comm, arrays)
    if outline is None:
        return None, remarks
    identity, progress, numbers, path = outline
    return Checkpoint(identity, progress, numbers | arrays, path), remarks


@contextmanager
def nonsense_refused(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise CheckpointError for errors that the contents of a damaged checkpoint cause.

    Raises
    ------
    CheckpointError
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{checkpoint.path} is damaged: its contents are invalid ({what:.200})") from None


def check_identity(checkpoint: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise an error if a checkpoint belongs to another run.

    Raises
    ------
    CheckpointError
        With the first difference in its message.
    """
    for name in dict.fromkeys([*checkpoint, *run]):
        before, now = (settings.get(name, _IMPLIED.get(name)) for settings in (checkpoint, run))
        if before != now:
            difference = f"its {name} is {before}, and here it is {now}"
            raise CheckpointError(f"the checkpoint is of another run: {difference}; use the earlier value, or start in another folder")


def data_fingerprint(dataset: Dataset, comm: Any) -> str:
    """Return a hash of the samples and their order that does not depend on the number of ranks. Collective."""
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
