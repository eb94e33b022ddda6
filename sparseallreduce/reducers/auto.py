"""A reducer that uses the one that the cost model expects to be fastest, chosen in the first operation, and its explanation."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from sparseallreduce.algorithms.agreement import Intent
from sparseallreduce.algorithms.steps import Step
from sparseallreduce.errors import AlgorithmError, CheckpointError
from sparseallreduce.reducers.arrays import nothing
from sparseallreduce.reducers.base import Array, Reduced, Reducer, Reducing
from sparseallreduce.reducers.by_hosts import timed
from sparseallreduce.reducers.cost import CANDIDATES, Predicted, case_of, fastest, predicted
from sparseallreduce.reducers.dense import Dense
from sparseallreduce.reducers.gtopk import GTopk
from sparseallreduce.reducers.hitopk import HiTopK
from sparseallreduce.reducers.oktopk import OkTopk
from sparseallreduce.reducers.topka import TopkA
from sparseallreduce.reducers.topkdsa import TopkDSA
from sparseallreduce.runtime.launching import ErrorReporter, launch
from sparseallreduce.streams.kernels.backend import on_device
from sparseallreduce.streams.selection import ExactTopK, Selector
from sparseallreduce.streams.stream import SparseStream

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparseallreduce.runtime.serial import SerialCommunicator

__all__ = ["Auto", "ReducerChoice", "explain_reducer"]

_PREFIX = "chosen."


@dataclass(frozen=True)
class ReducerChoice:
    """The choice of :class:`Auto`, and the predictions that it is based on.

    Attributes
    ----------
    choice : str
        The name of a reducer, or "dense".
    predicted : dict of Predicted
        For each candidate, the parts of its step in seconds: the total ``seconds``, and of these ``select``, ``latency``, ``wire``,
        ``sums``, and ``copies`` between GPU and host; also ``algorithm`` for an exact sum, and ``bytes`` received by the busiest rank.
    size, k, ranks, hosts : int
    on_device : bool
        Whether the vectors are on GPUs.
    """

    choice: str
    predicted: dict[str, Predicted]
    size: int
    k: int
    ranks: int
    hosts: int
    on_device: bool = False

    def __str__(self) -> str:
        named = ("select", "latency", "wire", "sums", *(("copies",) if self.on_device else ()))
        lines = [
            f"auto takes {self.choice}: {self.k:,} of {self.size:,} values on {self.ranks} rank(s) of {self.hosts} host(s)"
            f"{', on GPUs' if self.on_device else ''}; ms a step",
            f"{'reducer':<34}{'expected':>10}{''.join(f'{name:>10}' for name in named)}{'bytes in':>16}",
        ]
        for name, parts in sorted(self.predicted.items(), key=lambda item: item[1].seconds):
            shown = f"{'*' if name == self.choice else ' '} {name}" + (f", {parts.algorithm}" if parts.algorithm else "")
            times = "".join(f"{1e3 * getattr(parts, each):>10.3f}" for each in ("seconds", *named))
            lines.append(f"{shown:<34}{times}{parts.bytes:>16,.0f}")
        return "\n".join(lines)


def explain_reducer(
    size: int,
    k: int,
    comm: MPI.Intracomm | SerialCommunicator | None = None,
    *,
    candidates: Sequence[str] = CANDIDATES,
    dtype: DTypeLike = np.float32,
    on_device: bool = False,
) -> ReducerChoice:
    """Return the choice of ``Auto(size, k, candidates=...)`` on the ranks of ``comm``, and the predictions. Collective.

    Parameters
    ----------
    size, k
        As for :class:`Auto`.
    comm : mpi4py.MPI.Intracomm or SERIAL, optional
        ``MPI.COMM_WORLD`` by default.
    candidates : sequence of str
        As for :class:`Auto`.
    dtype : data-type
        Dtype of the accumulators: float32 or float64.
    on_device : bool
        Whether they are on GPUs. No GPU is needed: copies are predicted from measured constants if there are any, and otherwise from those
        of PCI Express 4.0.

    Returns
    -------
    ReducerChoice
        The same on all ranks; ``print`` shows it as a table.

    Raises
    ------
    SparseAllreduceError
        The same error on every rank: AlgorithmError for invalid arguments, MismatchError if they differ.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> sar.explain_reducer(1000, 10, sar.SERIAL, candidates=["oktopk", "topka"]).predicted.keys()
    dict_keys(['topka', 'oktopk'])
    """
    with ErrorReporter(comm):
        names: tuple[str, ...] = ()
        try:
            names = checked_candidates(candidates)
            Dense(size, k)  # checks both
            described = {"operation": "explain a reducer", "size": size, "k": k, "candidates": names, "dtype": np.dtype(dtype)}
            described["memory of the accumulators"] = "a GPU's" if on_device else "the host's"
            intent = Intent(tuple((name, str(value)) for name, value in described.items()), 0)
        except Exception as error:  # reported to the other ranks
            intent = Intent((), 0, error)

        def explained(_rank: int, ranks: int) -> Generator[Step, Any, ReducerChoice]:
            case = yield from case_of(size, k, np.dtype(dtype).itemsize, ranks, on_device)
            times = predicted(case, names)
            return ReducerChoice(fastest(times), dict(times), size, k, ranks, len(case.hosts.members), on_device)

        return launch(comm, intent, explained, blocking=True).wait()  # type: ignore[no-any-return]


class Auto(Reducer):
    """A reducer that delegates to the candidate that is expected to take the least time.

    The choice is made in the first operation by the cost model, from latencies and bandwidths inside and between hosts, the speed of
    additions and selections, N, k, and the layout of ranks on hosts. All ranks have the same numbers, and so make the same choice. It lasts
    until :meth:`reset` and is part of the state: training that is resumed from a state is bitwise identical to uninterrupted training, on
    any network.

    With error feedback nothing is lost, whatever the choice: values of a rank that are not in the sum stay in its residual. But the
    candidates sum different values: all N ("dense"), the ranks' top k, up to P k ("topka", "topkdsa"), or k in total ("oktopk", "gtopk");
    "hitopk" selects k of each host's sum, and keeps residuals of those. Restrict ``candidates`` to those that suit the training.

    Parameters
    ----------
    size, k : int
        As for :class:`~sparseallreduce.Reducer`.
    candidates : sequence of str
        Names out of "dense", "topka", "topkdsa", "gtopk", "oktopk", "hitopk"; all by default. "topkdsa" uses the exact algorithm that is
        expected to be fastest.
    selector : callable
        Selects each rank's values for "topka", "topkdsa" and "gtopk", as for :class:`~sparseallreduce.TopkA`.
    threshold_period : int or "auto"
        Period of "oktopk".

    Attributes
    ----------
    chosen : Reducer or None
        The reducer in use, once chosen.

    Raises
    ------
    AlgorithmError
        If a candidate is unknown.

    Examples
    --------
    >>> import sparseallreduce as sar
    >>> reducers = [sar.Auto(20_000, k=2_000) for _ in range(8)]
    >>> gradients = list(np.random.default_rng(0).standard_normal((8, 20_000), np.float32))
    >>> out = sar.simulate(gradients, reducers, sar.Network(latency=1e-6, bandwidth=1e7))
    >>> reducers[0].chosen.name, out.outputs[0].update.nnz
    ('oktopk', 2000)
    """

    hosts: bool

    name = "auto"
    _changing = (*Reducer._changing, "chosen", "hosts", "_ranks")

    def __init__(
        self,
        size: int,
        k: int,
        *,
        candidates: Sequence[str] = CANDIDATES,
        selector: Callable[[int], Selector] = ExactTopK,
        threshold_period: int | str = 32,
    ) -> None:
        super().__init__(size, k)
        self.candidates: tuple[str, ...] = checked_candidates(candidates)
        self.threshold_period = threshold_period
        self._selector = selector
        self.chosen: Reducer | None = None
        self._ranks = 0  # number of ranks that the choice was made for
        for name in self.candidates:  # checks their options
            self._made(name, "ssar_split_allgather")

    def options(self) -> dict[str, Any]:
        described = {"candidates": self.candidates, "selector": getattr(self._selector, "__name__", "of the caller's")}
        described |= {"period of thresholds": self.threshold_period, "choice": None if self.chosen is None else self.chosen.name}
        of_chosen = {} if self.chosen is None else {f"{name} of the choice": value for name, value in self.chosen.options().items()}
        return described | of_chosen

    def reduce(self, accumulator: Array, gradient: Array | None, rank: int, ranks: int) -> Reducing:
        chosen = self.chosen
        if chosen is None or self._ranks != ranks:
            case = yield from case_of(self.size, self.k, accumulator.itemsize, ranks, on_device(accumulator))
            times = predicted(case, self.candidates)
            name = fastest(times)
            chosen = self._take(name, times[name].algorithm, ranks)
        chosen.returned = nothing(self.size, accumulator)
        reduced: Reduced = yield from timed(chosen.schedule(accumulator, gradient, rank, ranks), self)
        self.returned: SparseStream = chosen.returned
        chosen.steps += 1
        return reduced

    def explained(self, comm: Any, dtype: DTypeLike, on_device: bool = False) -> ReducerChoice:
        """Return the model's predictions for the candidates on this communicator, with the actual choice if made. Collective."""
        made = explain_reducer(self.size, self.k, comm, candidates=self.candidates, dtype=dtype, on_device=on_device)
        return made if self.chosen is None else replace(made, choice=self.chosen.name)

    def reset(self) -> None:
        super().reset()
        self.chosen, self.hosts, self._ranks = None, False, 0

    def state(self) -> dict[str, Any]:
        if self.chosen is None:
            return super().state() | {"choice": "", "ranks": 0}
        own = {_PREFIX + name: value for name, value in self.chosen.state().items()}
        algorithm = getattr(self.chosen, "algorithm", "")
        return super().state() | {"choice": self.chosen.name, "algorithm": algorithm, "ranks": self._ranks} | own

    def restore(self, state: Mapping[str, Any]) -> None:
        choice = state.get("choice", "")
        if choice and choice not in self.candidates:
            raise CheckpointError(f"this state is of the chosen reducer {choice}, but the candidates here are {', '.join(self.candidates)}")
        super().restore(state)
        self.chosen, self.hosts, self._ranks = None, False, 0
        if choice:
            chosen = self._take(choice, state["algorithm"], int(state["ranks"]))
            chosen.restore({name.removeprefix(_PREFIX): value for name, value in state.items() if name.startswith(_PREFIX)})

    def _take(self, name: str, algorithm: str, ranks: int) -> Reducer:
        """Use this reducer from now on."""
        chosen = self.chosen = self._made(name, algorithm)
        chosen.reduction = self.reduction  # whose work is counted
        self.hosts, self._ranks = chosen.hosts, ranks
        return chosen

    def _made(self, name: str, algorithm: str) -> Reducer:
        size, k, selector = self.size, self.k, self._selector
        if name == "dense":
            return Dense(size, size)
        if name == "topka":
            return TopkA(size, k, selector=selector)
        if name == "topkdsa":
            return TopkDSA(size, k, selector=selector, algorithm=algorithm)
        if name == "gtopk":
            return GTopk(size, k, selector=selector)
        return OkTopk(size, k, threshold_period=self.threshold_period) if name == "oktopk" else HiTopK(size, k)

    def _kept(self) -> dict[str, Any]:
        return super()._kept() | {"of the choice": None if self.chosen is None else self.chosen._kept()}

    def _take_back(self, kept: dict[str, Any]) -> None:
        of_choice = kept.pop("of the choice")
        super()._take_back(kept)
        if self.chosen is not None:
            self.chosen._take_back(of_choice)


def checked_candidates(candidates: Sequence[str]) -> tuple[str, ...]:
    """Return the names in the order of preference among equals; raise AlgorithmError if there is none, or one is unknown."""
    given = [candidates] if isinstance(candidates, str) else list(candidates)
    unknown = [name for name in given if name not in CANDIDATES]
    if unknown or not given:
        what = f"there is no candidate {unknown[0]!r}" if unknown else "no candidate is named"
        raise AlgorithmError(f"{what}: name some of {', '.join(CANDIDATES)}")
    return tuple(name for name in CANDIDATES if name in given)
