"""Calls of ``partial_fit`` that continue earlier ones, on live weights if possible, otherwise from ``coef_`` and saved progress."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from sklearn.utils.validation import check_is_fitted

from sparseallreduce.errors import MismatchError
from sparseallreduce.linear.data.checks import check_rows
from sparseallreduce.linear.data.dataset import Dataset
from sparseallreduce.linear.data.feature_scaling import feature_scales
from sparseallreduce.linear.data.occurring import only_occurring
from sparseallreduce.linear.estimators.feature_numbers import FeatureNumbers, resized, room_for, spread_of, weighed
from sparseallreduce.linear.estimators.live import Live, checksum, new_token
from sparseallreduce.linear.estimators.packing import packed, unpacked
from sparseallreduce.linear.estimators.parameters import REPLICATED, is_auto
from sparseallreduce.linear.estimators.progress import Progress
from sparseallreduce.linear.estimators.run import Call, TrainedEstimator
from sparseallreduce.linear.model_file import FittedModel, fitted, is_sparse
from sparseallreduce.linear.models import LinearModel
from sparseallreduce.linear.strategies import SparseStrategy
from sparseallreduce.linear.training.trainer import Epoch
from sparseallreduce.runtime.objects import agreed, gather

__all__ = ["StreamingEstimator"]

Array = NDArray[Any]

_NO_FEATURE = np.empty(0, np.int64)
_MANY = 1 << 22  # number of weights from which calls of partial_fit number features
_OF_SAMPLES = ("_eigenvalue", "_moments")  # attributes that learning rates depend on


class StreamingEstimator(TrainedEstimator):
    """Keeps the learned weights as live weights or as ``coef_``, which is computed from them on access."""

    intercept_: Any  # of the classes derived from this one
    _live: Live | None = None
    _progress: tuple[int, Any] | None = None  # checksum of the weights that it belongs to, and the progress
    _numbers: FeatureNumbers | None = None  # features in magnitudes, live weights and progress; None for all
    _nonzeros = 0  # number of non-zeros in the training samples

    @property
    def coef_(self) -> Any:
        """The weights of the scores."""
        own = self.__dict__
        if "coef_" not in own:
            live = self._live
            if live is None:
                raise AttributeError(f"this {type(self).__name__} has no coef_ yet: call fit or partial_fit first")
            if live.failed:
                live.put_back(self._magnitudes)
            whole = spread_of(live.fitted(self._magnitudes, self._labels()), self._numbers, self._nonzeros)
            own["coef_"] = self._shaped(whole.weights)
            live.seen = checksum(own["coef_"])
        return own["coef_"]

    @coef_.setter
    def coef_(self, weights: Any) -> None:
        self.__dict__["coef_"] = csr_array(weights) if is_sparse(weights) else weights

    @coef_.deleter
    def coef_(self) -> None:
        if not self._has_weights():
            raise AttributeError("coef_")
        self.__dict__.pop("coef_", None)
        self._live = None

    def __sklearn_is_fitted__(self) -> bool:
        return self._has_weights()

    def __copy__(self) -> Self:
        # Calls of partial_fit change live weights and magnitudes in place.
        twin = object.__new__(type(self))
        changing = {name: copy.copy(self.__dict__.get(name)) for name in ("_live", "_magnitudes", "_numbers")}
        twin.__dict__.update(self.__dict__, **changing)
        return twin

    def __getstate__(self) -> Any:
        live = self._present()
        state = super().__getstate__() | {"comm": None}
        if live is not None:
            state.pop("coef_", None)
        if self._magnitudes is not None:
            state["_magnitudes"] = packed(self._magnitudes)
        return state

    def __setstate__(self, state: Any) -> None:
        magnitudes = unpacked(state.get("_magnitudes"))
        super().__setstate__(state if magnitudes is None else state | {"_magnitudes": magnitudes})

    def sparsify(self) -> Self:
        """Convert ``coef_`` to a SciPy sparse array with one row per score, which saves memory if most weights are zero.

        Predictions, files, pickles and further training do not change.

        Returns
        -------
        self
        """
        check_is_fitted(self)
        if not is_sparse(self.coef_):
            self._recast(csr_array(np.atleast_2d(self.coef_)))
        return self

    def densify(self) -> Self:
        """Convert ``coef_`` to a NumPy array, as it was before :meth:`sparsify`, whatever memory that takes.

        Returns
        -------
        self
        """
        check_is_fitted(self)
        if is_sparse(self.coef_):
            whole = self.coef_.toarray()
            self._recast(whole if np.ndim(self.intercept_) else whole[0])
        return self

    def _recast(self, weights: Any) -> None:
        """Store the same weights in another form, keeping the state that depends on them."""
        live, (learned, progress) = self._present(), self._progress or (None, None)
        is_known = progress is not None and learned == self._learned()
        self.coef_ = weights
        if live is not None:
            live.seen = checksum(self.coef_)
        elif is_known:
            self._progress = self._learned(), progress

    def _has_weights(self) -> bool:
        """Return True if there is a ``coef_``, without computing it."""
        return self._live is not None or "coef_" in self.__dict__

    def _labels(self) -> Array:
        """Return the classes, if there are any."""
        return getattr(self, "classes_", np.empty(0))

    def _shaped(self, weights: Array) -> Array:
        """Return the weights of a model in the form of ``coef_``."""
        return weights

    def _present(self) -> Live | None:
        """Return the live weights, if ``coef_`` and ``intercept_`` have not been changed since they were computed."""
        live = self._live
        if live is None:
            return None
        if live.failed:
            live.put_back(self._magnitudes)
        unchanged = np.array_equal(np.ravel(self.intercept_), np.ravel(live.intercept))
        if unchanged and ("coef_" not in self.__dict__ or checksum(self.coef_) == live.seen):
            return live
        _ = self.coef_
        self._live = self._progress = None
        return None

    def _scores_of(self, samples: Any) -> Array:
        """Return the scores of samples; with live weights at the cost of their non-zeros."""
        live = self._live
        if live is None or "coef_" in self.__dict__ or not is_sparse(samples) or samples.nnz >= samples.shape[1]:
            return self._fitted().decision_function(samples)
        if live.failed:
            live.put_back(self._magnitudes)
        # One weight per non-zero, so that the sums have the same order as with the weights of all features.
        numbers = samples.indices if self._numbers is None else self._numbers.of(samples.indices)
        known = slice(None) if self._numbers is None else numbers < len(self._numbers)
        weights = np.zeros((*np.shape(self.intercept_), samples.nnz), live.weights.unscaled.dtype)
        weights[..., known] = self._shaped(live.fitted(self._magnitudes, self._labels(), numbers[known]).weights)
        entries = csr_array((samples.data, np.arange(samples.nnz), samples.indptr), shape=(samples.shape[0], samples.nnz))
        return self._fitted(weights).decision_function(entries)

    def _meaning(self) -> FittedModel:
        """Return the model without weights, to interpret scores."""
        check_is_fitted(self)
        return self._fitted(np.empty((*np.shape(self.intercept_), 0)))

    def _settled(self) -> None:
        """Replace live weights by ``coef_`` and saved progress."""
        live = self._present()
        if live is not None:
            _ = self.coef_
            progress = live.progress(self._scales(live.scaled))
            self._progress, self._live = (self._learned(), progress), None

    def _scales(self, are_scaled: bool) -> Array:
        """Return the scales of the features; a single one if they are not scaled."""
        return np.ones(1) if self._magnitudes is None or not are_scaled else feature_scales(self._magnitudes)

    def _progress_so_far(self, comm: Any) -> Progress | None:
        """Return the progress of earlier calls, if weights and ranks are the same as then. Collective."""
        self._settled()
        learned, progress = self._progress or (None, None)
        # Pickles of versions that trained one class after the other hold a list, which is usable if it has one element.
        if isinstance(progress, list):
            progress = progress[0] if len(progress) == 1 else None
        own: Progress | None = progress if learned == self._learned() else None
        if comm.size == 1:
            return own
        ranks = gather(comm, None if own is None else own.checksum())
        if any(rank is None for rank in ranks):
            return None
        if any(rank != ranks[0] for rank in ranks):
            raise _different_calls()
        return own

    def _learned(self) -> int:
        """Return a checksum of weights and intercepts."""
        return checksum(self.coef_, self.intercept_)

    def _numbered(
        self, model: LinearModel, dataset: Dataset, comm: Any, onward: bool, partial: bool
    ) -> tuple[Dataset, FeatureNumbers | None]:
        """Assign numbers to the features that need weights in this call, and return the samples with these numbers. Collective.

        Numbers are None, and samples unchanged, if all features have weights. Continued calls keep the earlier numbers.
        """
        if not (onward or partial):
            found = only_occurring(dataset, comm)
            if found is None:
                return dataset, None
            return agreed(comm, lambda: found.renumbered(dataset)), FeatureNumbers(found.features, dataset.features)
        if onward:
            is_live, numbers = self._present() is not None, self._numbers
            begins = numbers is None and is_sparse(self.__dict__.get("coef_")) and self._magnitudes is None and self._progress is None
            begins = begins and dataset.features >= _MANY
        else:
            is_live, numbers, begins = False, None, dataset.features * (model.columns or 1) >= _MANY
        if begins:
            numbers = FeatureNumbers(np.empty(0, dataset.indices.dtype), dataset.features)
        if len(set(gather(comm, None if numbers is None else numbers.checksum()))) > 1:
            raise _different_calls()
        if numbers is None:
            return dataset, None
        agreed(comm, lambda: check_rows(dataset))
        numbers.forget()
        numbers.add_missing(dataset, _NO_FEATURE if is_live or not onward else weighed(self.coef_), comm)
        room = room_for(len(numbers)) if partial else max(1, len(numbers))
        return agreed(comm, lambda: numbers.renumbered(dataset, room)), numbers

    def _live_on_all(self, model: LinearModel, dataset: Dataset, comm: Any) -> Live | None:
        """Return the live weights, if all ranks have the same, and this call can continue with them. Collective."""
        live, kind = self._present(), REPLICATED[self.strategy or SparseStrategy.name]
        if live is not None and self._numbers is not None:
            live.make_room(dataset.features)
            if self._magnitudes is not None:
                self._magnitudes = resized(self._magnitudes, dataset.features)
        made = self._descent(model), dataset.features, dataset.values.dtype, self._scales_now()
        if live is not None and not (issubclass(kind, SparseStrategy) and live.fits(*made)):
            live = None
        if live is not None and live.strategy is not None and not self._goes_on_with(live.strategy, comm):
            live.strategy = None
        if comm.size == 1:
            return live
        ranks = gather(comm, (None, False) if live is None else (live.token, live.strategy is not None))
        if any(token is None for token, _ in ranks):
            return None
        if any(token != ranks[0][0] for token, _ in ranks):
            raise _different_calls()
        if live is not None and not all(has_strategy for _, has_strategy in ranks):
            live.strategy = None
        return live

    def _scales_now(self) -> bool:
        """Return True if a call that continues earlier training scales the features."""
        return bool(self._is_scaled if is_auto(self.scale_features) else self.scale_features)

    def _goes_on_with(self, strategy: SparseStrategy, comm: Any) -> bool:
        """Return True if a strategy is the one that this estimator would create."""
        name = self.strategy or SparseStrategy.name
        as_asked = strategy.name == name and strategy.algorithm == self.algorithm and strategy.threads.count == self._thread_count
        return as_asked and strategy.comm is comm

    def _go_on(self, live: Live, model: LinearModel, dataset: Dataset, call: Call, comm: Any) -> list[Epoch]:
        """Train live weights; any error leaves them as they were before. Collective."""
        before = {name: self.__dict__[name] for name in _OF_SAMPLES if name in self.__dict__}
        try:
            live.begin()
            dataset = live.conditioned(dataset, self._magnitudes, comm)
            rate = self._initial_rate(model, dataset, comm, True, True)
            unit = self._rate_unit(model, dataset, comm, True)
            strategy = live.strategy
            if strategy is None:
                strategy = live.strategy = self._exact_strategy(model, dataset, comm)
                strategy.adopt(live.weights)
            else:
                strategy.renew(dataset)
            epochs, schedule = self._run(model, strategy, call, rate, unit, comm, (live.passes, live.schedule, live.rates))
            token = new_token(comm)
        except BaseException:
            live.put_back(self._magnitudes)
            self.__dict__.update(before)
            raise
        live.model, live.passes, live.schedule, live.rates = model, live.passes + 1, schedule, self._rates()
        if call.numbers is not None:
            call.numbers.settle()
        live.commit(token)
        self._show(live, call.numbers)
        return epochs

    def _show(self, live: Live, numbers: FeatureNumbers | None) -> None:
        """Set the attributes from live weights of the features with these numbers."""
        part = live.fitted(self._magnitudes, self._labels(), _NO_FEATURE)
        live.intercept = np.array(part.intercept)
        self._take(part)
        self._live, self._progress, self._numbers = live, None, numbers
        del self.__dict__["coef_"]

    def _train_anew(self, model: LinearModel, dataset: Dataset, call: Call, onward: bool, comm: Any) -> list[Epoch]:
        """Train new weights, from zero or, if ``onward``, from ``coef_``. Collective."""
        scaling = self._magnitudes, self._is_scaled
        try:
            return self._trained(model, dataset, call, onward, comm)
        except BaseException:
            self._magnitudes, self._is_scaled = scaling
            raise

    def _trained(self, model: LinearModel, dataset: Dataset, call: Call, onward: bool, comm: Any) -> list[Epoch]:
        before = self._progress_so_far(comm) if onward else None
        if before is not None and not call.partial and not (before.adaptive and self._choices().update != "sgd"):
            before = None
        dataset, scales = self._conditioned(dataset, comm, onward)
        rate = self._initial_rate(model, dataset, comm, call.partial, onward)
        unit = self._rate_unit(model, dataset, comm, call.partial and onward)
        if not call.partial and not onward:
            self._pick_rate(model, dataset, call, unit, comm)
        start = self._start(model, dataset, self._found(call.numbers, dataset.features) if onward else None, scales, comm)
        strategy = self._exact_strategy(model, dataset, comm) if call.partial else self._strategy(model, dataset, comm)
        strategy.assign(start)
        if before is not None:
            self._take_up(before, strategy, scales, call.partial)
        earlier = None if before is None or not call.partial else (before.passes, before.schedule, before.rates)
        epochs, schedule = self._run(model, strategy, call, rate, unit, comm, earlier)
        passes = (0 if earlier is None else earlier[0]) + call.passes
        if call.partial and isinstance(strategy, SparseStrategy):
            live = Live(strategy.weights, model, bool(self._is_scaled), strategy)
            live.passes, live.schedule, live.rates = passes, schedule, self._rates()
            self._commit(live, call.numbers, comm)
            return epochs
        progress: Progress | None = None
        if call.partial:
            progress = Progress.of(strategy, schedule, self._rates(), passes, scales)
        elif strategy.descent.adaptive:
            progress = Progress.kept(0, strategy.weights.memory(), {}, "", None, scales, dataset.features)
        self._keep(model, strategy.weights.to_array(), scales, call.numbers)
        if progress is not None:  # the checksum detects weights that users replace or change, for which the progress is void
            self._progress = self._learned(), progress
        return epochs

    def _commit(self, live: Live, numbers: FeatureNumbers | None, comm: Any) -> None:
        """Make weights that further calls of ``partial_fit`` continue from the estimator's own; collective."""
        token = new_token(comm)
        if numbers is not None:
            numbers.settle()
        live.commit(token)
        self._show(live, numbers)

    def _found(self, numbers: FeatureNumbers | None, features: int) -> FittedModel:
        """Return the present model, with weights by feature number."""
        if numbers is None:
            return self._fitted()
        weights = np.zeros((len(np.atleast_1d(self.intercept_)), features), self.coef_.dtype)
        if is_sparse(self.coef_):
            rows = np.repeat(np.arange(len(weights)), np.diff(self.coef_.indptr))
            weights[rows, numbers.of(self.coef_.indices)] = self.coef_.data
        else:
            weights[:, : len(numbers)] = np.atleast_2d(self.coef_)[:, numbers.features]
        return self._fitted(weights if np.ndim(self.intercept_) else weights[0])

    def _keep(self, model: LinearModel, learned: Array, scales: Array, numbers: FeatureNumbers | None) -> None:
        """Store the result of a training: weights of scaled features with these numbers, intercept last."""
        features = learned.shape[0] - bool(self.fit_intercept)
        intercept = learned[features:].sum(axis=0, dtype=np.float64)
        if numbers is not None:
            numbers.settle()
        found = fitted(model, (learned[:features].T / scales).T, intercept, self._labels())
        self._take(spread_of(found, numbers, self._nonzeros))
        self._live, self._progress, self._numbers = None, None, numbers

    def _exact_strategy(self, model: LinearModel, dataset: Dataset, comm: Any) -> Any:
        """Return a strategy for continued calls: each rank has its own weights, whose changes it can undo alone."""
        strategy = self._strategy(model, dataset, comm, partial=True)
        strategy.shares = False
        return strategy

    def _take(self, model: FittedModel) -> None:
        """Set scikit-learn's attributes from a model."""
        raise NotImplementedError


def _different_calls() -> MismatchError:
    return MismatchError("the ranks have made different calls of partial_fit before: use the same model on all ranks")
