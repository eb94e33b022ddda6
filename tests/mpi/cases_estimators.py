"""Estimators under MPI: each rank's own samples, one model on all of them, and errors that all ranks share."""

import numpy as np
import pytest
import scipy.sparse
from mpi_cases import each, limit, on_ranks, shared_folder, skip
from sklearn.model_selection import GridSearchCV

import sparseallreduce as sar
from sparseallreduce.errors import MismatchError
from sparseallreduce.linear import Constant, LinearRegression, LinearSVM, LogisticRegression

RANKS = (1, 3)
ESTIMATORS = [LogisticRegression, LinearSVM, LinearRegression]
SAMPLES = 120


def problem(estimator, classes=3):
    """The samples of all ranks, the same on each."""
    rng = np.random.default_rng(5)
    X = scipy.sparse.random_array((SAMPLES, 40), density=0.2, rng=rng, data_sampler=rng.standard_normal).tocsr()
    scores = X @ rng.standard_normal((40, classes))
    return X, (scores[:, 0] if estimator is LinearRegression else np.array(["ant", "bee", "wasp"])[scores.argmax(axis=1)])


def share(comm, total=SAMPLES):
    """This rank's rows: blocks of different sizes."""
    bounds = [total * rank**2 // comm.size**2 for rank in range(comm.size + 1)]
    return slice(bounds[comm.rank], bounds[comm.rank + 1])


def same(comm, *values):
    """Whether all ranks hold the same, to the bit."""
    bits = [value.tobytes() if isinstance(value, np.ndarray) and value.dtype.kind == "f" else repr(value) for value in values]
    return all(other == bits for other in comm.allgather(bits))


def told(comm, action, error=ValueError):
    """The message of the error that the action raises, which has to be the same on all ranks."""
    try:
        action()
        message = None
    except error as raised:
        message = str(raised)
    assert message is not None, "no error on this rank"
    assert same(comm, message)
    assert comm.allreduce(1) == comm.size
    return message


@limit(120)
@each(estimator=ESTIMATORS, strategy=["sparse", "dense"])
def case_all_ranks_end_with_the_model_of_one_process(comm, estimator, strategy):
    X, y = problem(estimator)
    own = share(comm)
    settings = {"strategy": strategy, "max_iter": 15, "tol": None, "learning_rate": 0.3}
    ours = estimator(comm=comm, batch_size=3, **settings).fit(X[own], y[own])
    alone = estimator(comm=sar.SERIAL, batch_size=3 * comm.size, **settings).fit(X, y)
    assert same(comm, ours.coef_, ours.intercept_, ours.n_iter_, getattr(ours, "classes_", None))
    np.testing.assert_allclose(ours.coef_, alone.coef_, rtol=1e-6, atol=1e-9)
    if estimator is not LinearRegression:
        assert (ours.predict(X) == alone.predict(X)).mean() > 0.99
    np.testing.assert_allclose(ours.score(X[own], y[own]), alone.score(X, y), atol=0.01)


@limit(120)
@each(estimator=ESTIMATORS, update=["sgd", "ftrl"])
def case_the_learning_rate_and_the_end_are_agreed(comm, estimator, update):
    X, y = problem(estimator)
    own = share(comm)
    model = estimator(comm=comm, max_iter=100, tol=1e-2, update=update).fit(X[own], y[own])
    assert same(comm, model.coef_, [[epoch.loss for epoch in epochs] for epochs in model.history_])
    assert model.score(X[own], y[own]) > 0.8


@limit(120)
@each(estimator=ESTIMATORS)
def case_the_same_samples_are_held_out_on_any_number_of_ranks(comm, estimator):
    X, y = problem(estimator)
    own = share(comm)
    settings = {"early_stopping": True, "learning_rate": 0.3, "max_iter": 20}
    ours = estimator(comm=comm, batch_size=3, **settings).fit(X[own], y[own])
    alone = estimator(comm=sar.SERIAL, batch_size=3 * comm.size, **settings).fit(X, y)
    assert same(comm, ours.coef_, ours.n_iter_)
    np.testing.assert_allclose(ours.coef_, alone.coef_, rtol=1e-6, atol=1e-9)
    for epochs, expected in zip(ours.history_, alone.history_, strict=True):
        assert [epoch.validation_loss for epoch in epochs] == pytest.approx([epoch.validation_loss for epoch in expected])


@each(estimator=[LogisticRegression, LinearSVM])
def case_a_rank_may_see_some_classes_or_nothing(comm, estimator):
    X, y = problem(estimator)
    order = np.argsort(y)
    mine = np.array_split(order, max(1, comm.size - 1))[comm.rank] if comm.rank < max(1, comm.size - 1) else order[:0]
    model = estimator(comm=comm, max_iter=5, tol=None).fit(X[mine], y[mine])
    assert model.classes_.tolist() == ["ant", "bee", "wasp"]
    assert same(comm, model.coef_)
    model.partial_fit(X[mine], y[mine])
    assert same(comm, model.coef_)
    assert 0 <= model.score(X[mine], y[mine]) <= 1


def case_classes_of_a_first_partial_fit_are_those_of_all_ranks(comm):
    X, y = problem(LogisticRegression)
    names = ["ant", "bee", "wasp"]
    model = LogisticRegression(comm=comm)
    model.partial_fit(X[share(comm)], y[share(comm)], classes=names if comm.rank == comm.size - 1 else names[:1])
    assert model.classes_.tolist() == names
    assert same(comm, model.coef_)


def case_features_of_a_scale_that_one_rank_alone_sees(comm):
    X, y = problem(LinearSVM)
    X = X.toarray()
    X[-1] *= 1000  # of the last rank
    own = share(comm)
    model = LinearSVM(comm=comm, max_iter=5, tol=None).fit(X[own], y[own])
    assert same(comm, model.coef_, model._magnitudes)


BAD = {
    "features": lambda X, y: (X[:, :-1], y),
    "lengths": lambda X, y: (X, y[:-1]),
    "nan": lambda X, y: (np.full(X.shape, np.nan), y),
    "numbers": lambda X, y: (X, np.arange(len(y)) % 2),
    "dimensions": lambda X, y: (X.toarray()[0], y),
}


@each(what=BAD)
def case_bad_samples_of_one_rank_are_the_same_error_on_all(comm, what):
    if comm.size < 2:
        skip("needs two ranks")
    X, y = problem(LogisticRegression)
    mine = (X[share(comm)], y[share(comm)])
    if comm.rank == comm.size - 1:
        mine = BAD[what](*mine)
    model = LogisticRegression(comm=comm, max_iter=3, tol=None)
    told(comm, lambda: model.fit(*mine))
    model.fit(X[share(comm)], y[share(comm)])
    told(comm, lambda: model.partial_fit(*mine))
    if what in ("lengths", "nan", "dimensions"):
        told(comm, lambda: model.score(*mine))


def case_parameters_that_differ_are_the_same_error_on_all(comm):
    if comm.size < 2:
        skip("needs two ranks")
    X, y = problem(LogisticRegression)
    own = share(comm)
    message = told(comm, lambda: LogisticRegression(comm=comm, max_iter=3 + comm.rank).fit(X[own], y[own]), MismatchError)
    assert "max_iter is 3 and 4" in message
    told(comm, lambda: LogisticRegression(comm=comm, l2=-1.0 if comm.rank else 0.1).fit(X[own], y[own]))

    def mixed(passes):
        model = LogisticRegression(comm=comm, max_iter=passes)
        return model.partial_fit(X[own], y[own], np.unique(y)) if comm.rank else model.fit(X[own], y[own])

    for passes in (1, 3):
        assert "call the same" in told(comm, lambda passes=passes: mixed(passes), MismatchError)


@each(parameters=[{}, {"average": True, "l1": 1e-3}, {"strategy": "oktopk", "density": 0.2}, {"update": "ftrl", "l1": 1e-3}])
def case_partial_fits_go_on_alike_on_all_ranks(comm, parameters):
    X, y = problem(LogisticRegression)
    own = share(comm)
    model = LogisticRegression(comm=comm, batch_size=5, **parameters)
    for call in range(4):
        model.partial_fit(X[own] * (1 + call), y[own], np.unique(y), sample_weight=np.full(len(y[own]), 1.0 + comm.rank))
        assert same(comm, model.coef_, model.t_, model.history_[0][-1].loss)
    if comm.size > 1:
        rate, model.learning_rate = model.learning_rate, 0.1
        if comm.rank == 0:  # one rank forgets the calls, and all begin anew from the weights
            model.coef_ = model.coef_.copy()
        model.partial_fit(X[own], y[own])
        assert same(comm, model.coef_)
        model.learning_rate = rate
        if comm.rank == 0:
            model.coef_ += 1
        told(comm, lambda: model.partial_fit(X[own], y[own]), MismatchError)


def case_no_samples_anywhere_is_an_error(comm):
    X, y = problem(LogisticRegression)
    told(comm, lambda: LogisticRegression(comm=comm).fit(X[:0], y[:0]))
    told(comm, lambda: LogisticRegression(comm=comm).fit(X[share(comm)], y[share(comm)], np.zeros(len(y[share(comm)]))))


def case_a_pickle_goes_to_a_rank_that_has_no_model(comm):
    X, y = problem(LinearRegression)
    part = comm.Split(0, comm.rank)
    try:
        model = LinearRegression(comm=part, max_iter=5, tol=None).fit(X[share(comm)], y[share(comm)])
        other = comm.bcast(model if comm.rank == 0 else None)
    finally:
        part.Free()
    np.testing.assert_array_equal(other.predict(X), model.predict(X))
    assert other.comm is None


def case_a_file_of_rank_0_is_read_by_all(comm):
    X, y = problem(LogisticRegression)
    model = LogisticRegression(comm=comm, max_iter=5, tol=None).fit(X[share(comm)], y[share(comm)])
    with shared_folder(comm) as folder:
        if comm.rank == 0:
            model.to_file(folder / "model.npz")
        comm.Barrier()
        again = LogisticRegression.from_file(folder / "model.npz", comm=comm, max_iter=5, tol=None)
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))


@limit(120)
def case_a_grid_search_chooses_the_same_on_all_ranks(comm):
    X, y = problem(LogisticRegression)
    own = slice(comm.rank * SAMPLES // comm.size, (comm.rank + 1) * SAMPLES // comm.size)
    search = GridSearchCV(LogisticRegression(comm=comm, max_iter=10, tol=None), {"l2": [1e-4, 1e-2, 10.0]}, cv=2)
    search.fit(X[own], y[own])
    assert same(comm, search.best_params_, search.best_score_, search.best_estimator_.coef_)
    assert search.best_params_["l2"] < 10


def case_a_rank_trains_alone_with_serial(comm):
    X, y = problem(LogisticRegression)
    if comm.rank == 0:
        LogisticRegression(comm=sar.SERIAL, max_iter=3, tol=None).fit(X, y)


@each(parameter=["schedule", "random_state"], partial=[False, True])
def case_a_parameter_that_cannot_be_used_on_one_rank_is_the_same_error_on_all(comm, parameter, partial):
    """One that need not be the same on all ranks, or whose code fails on one of them."""
    X, y = problem(LogisticRegression)

    def rates(rate):
        if comm.rank == comm.size - 1:
            raise ZeroDivisionError("no rate")
        return Constant(rate)

    wrong = rates if parameter == "schedule" else "chance" if comm.rank == comm.size - 1 else 0
    model = LogisticRegression(comm=comm, max_iter=3, **{parameter: wrong})
    learn = (lambda: model.partial_fit(X, y, np.unique(y))) if partial else (lambda: model.fit(X, y))
    told(comm, learn, ZeroDivisionError if parameter == "schedule" else ValueError)


@on_ranks(2, 3)
@each(estimator=[LogisticRegression, LinearSVM], classes=[2, 3])
def case_rounds_come_to_one_model_on_all_ranks(comm, estimator, classes):
    X, y = problem(estimator, classes)
    settings = {"solver": "cocoa", "tol": 1e-6, "l2": 1e-2, "class_weight": "balanced", "loss": "squared_hinge"}
    if estimator is LogisticRegression:
        del settings["loss"]
    bounds = np.linspace(0, SAMPLES, comm.size).astype(int)  # the last rank has no samples
    own = slice(*np.append(bounds, SAMPLES)[comm.rank : comm.rank + 2])
    counts = np.random.default_rng(1).uniform(0.5, 1.5, SAMPLES)
    ours = estimator(comm=comm, **settings).fit(X[own], y[own], counts[own])
    alone = estimator(comm=sar.SERIAL, **settings).fit(X, y, counts)
    assert same(comm, ours.coef_, ours.intercept_, ours.n_iter_, ours.classes_, [figures.gap for figures in ours.history_[0]])
    np.testing.assert_allclose(ours.coef_, alone.coef_, atol=5e-3 * np.abs(alone.coef_).max())
    assert ours.history_[0][-1].gap <= 1e-6 * ours.history_[0][-1].loss


@on_ranks(2, 3)
@each(estimator=[LogisticRegression, LinearSVM, LinearRegression], classes=[2, 4], features=[30, 600])
def case_defaults_come_to_one_model_and_that_of_one_rank(comm, estimator, classes, features):
    rng = np.random.default_rng(features)
    density = 0.1 if features < 60 else 0.05  # for Newton's method, and for dual ascent
    X = scipy.sparse.random_array((SAMPLES, features), density=density, rng=rng, format="csr") * np.logspace(-3, 3, features)
    scores = X @ (rng.standard_normal((features, classes)) / np.logspace(-3, 3, features)[:, np.newaxis])
    y = scores[:, 0] if estimator is LinearRegression else scores.argmax(axis=1)
    bounds = np.linspace(0, SAMPLES, comm.size).astype(int)  # the last rank has no samples
    own = slice(*np.append(bounds, SAMPLES)[comm.rank : comm.rank + 2])
    settings = {"tol": 1e-6, "max_iter": 5000}
    if estimator is LinearSVM:
        settings["loss"] = "squared_hinge"
    ours = estimator(comm=comm, **settings).fit(X[own], y[own])
    assert same(comm, ours.coef_, ours.intercept_, ours.n_iter_)
    assert ours.solver_ == ("newton" if features < 60 or estimator is LinearRegression else "dual")
    alone = estimator(comm=sar.SERIAL, **settings).fit(X, y)
    scale = np.logspace(-3, 3, features)
    np.testing.assert_allclose(ours.coef_ * scale, alone.coef_ * scale, atol=0.02 * np.abs(alone.coef_ * scale).max())


@on_ranks(2, 3)
def case_rounds_hold_the_same_samples_out_on_any_number_of_ranks(comm):
    X, y = problem(LogisticRegression, 2)
    settings = {"solver": "cocoa", "tol": 1e-6, "l2": 1e-2, "early_stopping": True, "n_iter_no_change": 50, "validation_fraction": 0.25}
    ours = LogisticRegression(comm=comm, **settings).fit(X[share(comm)], y[share(comm)])
    alone = LogisticRegression(comm=sar.SERIAL, **settings).fit(X, y)
    assert same(comm, ours.coef_, ours.history_[0][-1].validation_loss)
    assert abs(ours.history_[0][-1].validation_loss - alone.history_[0][-1].validation_loss) < 1e-2


@on_ranks(2)
def case_parameters_of_rounds_that_are_wrong_on_one_rank_are_the_same_error_on_all(comm):
    X, y = problem(LogisticRegression, 2)
    own = share(comm)
    wrong = {"l2": 0.0} if comm.rank == 1 else {}
    assert "needs an L2 penalty" in told(comm, lambda: LogisticRegression(comm=comm, solver="cocoa", **wrong).fit(X[own], y[own]))
    other = "sgd" if comm.rank == 1 else "cocoa"
    assert "solver is" in told(comm, lambda: LogisticRegression(comm=comm, solver=other).fit(X[own], y[own]), MismatchError)


@on_ranks(2, 3)
@each(estimator=[LogisticRegression, LinearRegression])
def case_what_cannot_be_scored_on_one_rank_is_the_same_error_on_all(comm, estimator):
    X, y = problem(estimator)
    own, last = share(comm), comm.rank == comm.size - 1
    model = estimator(comm=comm, max_iter=3, tol=None).fit(X[own], y[own])
    before = model.score(X[own], y[own])
    wrong = {
        "one too few": y[own][:-1],
        "None": None,
        "two columns": np.stack([y[own], y[own]], axis=1),
        "another type": np.arange(len(y[own])) if estimator is LogisticRegression else np.full(len(y[own]), "a"),
        "one label for all": y[own][:1],
    }
    for labels in wrong.values():
        told(comm, lambda labels=labels: model.score(X[own], labels if last else y[own]), (ValueError, TypeError))
        assert same(comm, model.score(X[own], y[own])) and model.score(X[own], y[own]) == before
    column = y[own].reshape(-1, 1) if last else y[own]
    assert model.score(X[own], column) == before
    weights = np.zeros(len(y[own]))
    assert "no rank has a sample with a weight" in told(comm, lambda: model.score(X[own], y[own], weights))
    assert same(comm, model.score(X[own], y[own], weights if last else None))


@on_ranks(2, 3)
@each(error=[MemoryError, RuntimeError, KeyboardInterrupt], call=["fit", "partial_fit", "score"])
def case_what_fails_on_one_rank_between_two_sums_is_an_error_of_all(comm, error, call):
    """On the last rank the labels raise, where no other rank looks."""
    X, y = problem(LogisticRegression)
    own, last = share(comm), comm.rank == comm.size - 1
    model = LogisticRegression(comm=comm, max_iter=3, tol=None, strategy="dense" if call == "fit" else "sparse")
    model.fit(X[own], y[own])
    calls = {"fit": model.fit, "score": model.score, "partial_fit": model.partial_fit}
    where = {"fit": "_conditioned", "partial_fit": "_rate_unit", "score": "_meaning"}[call]

    def breaking(*_, **__):
        raise error("of my own")

    if last:
        setattr(model, where, breaking)
    try:
        calls[call](X[own], y[own])
        outcome = None
    except BaseException as raised:
        outcome = type(raised).__name__, str(raised)
    everyones = comm.allgather(outcome)
    if error is KeyboardInterrupt:
        assert everyones.pop()[0] == "KeyboardInterrupt"
    assert None not in everyones and len(set(everyones)) == 1, everyones
    assert error.__name__ in everyones[0][1] or everyones[0][0] == error.__name__
    if last:
        delattr(model, where)
    calls[call](X[own], y[own])
    assert same(comm, model.coef_)
