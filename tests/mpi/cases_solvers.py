"""Dual coordinate ascent in rounds under MPI: one optimum for any number of ranks, the same bits on all, and errors that all share."""

import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from mpi_cases import each, on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError, SparseAllreduceError, TrainingStopped
from sparseallreduce.linear import Dataset, Hinge, Logistic, Multinomial, OneVsRest, SquaredHinge, generate, load, two_classes
from sparseallreduce.linear.solvers import CoCoA, RoundOptions, RoundTrainer, TruncatedNewton, cocoa, exchange
from sparseallreduce.linear.solvers.gathered import Gathered
from sparseallreduce.linear.solvers.local import LocalProblem
from sparseallreduce.linear.solvers.newton import Newton
from sparseallreduce.linear.training.batches import Fold

FEATURES, SAMPLES, L2 = 60, 120, 0.02
LOSSES = {"hinge": Hinge, "squared_hinge": SquaredHinge, "logistic": Logistic}


def matrix():
    rng = np.random.default_rng(4)
    X = scipy.sparse.random_array((SAMPLES, FEATURES), density=0.1, rng=rng, format="csr", dtype=np.float32)
    y = np.where(X @ rng.standard_normal(FEATURES) + 0.1 * rng.standard_normal(SAMPLES) > 0, 1.0, -1.0)
    return X, y


def part(comm, bounds=None):
    """This rank's samples, by default about as many as each other's."""
    X, y = matrix()
    bounds = np.linspace(0, SAMPLES, comm.size + 1).astype(int) if bounds is None else bounds
    low, high = bounds[comm.rank], bounds[comm.rank + 1]
    return Dataset.from_scipy(X[low:high], y[low:high], first_sample=int(low), total_samples=SAMPLES)


def solved(data, comm, loss, **options):
    found = CoCoA(data, LOSSES[loss](), l2=L2, comm=comm, **{"tolerance": 1e-6, "rounds": 5000} | options)
    return found, found.fit()


def check_alike_and_best(comm, found, weights, loss):
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1
    X, y = matrix()
    _, alone = solved(Dataset.from_scipy(X, y), sar.SERIAL, loss)

    def value(w):
        return L2 / 2 * w @ w + np.mean(LOSSES[loss]().loss(X @ w[:-1] + w[-1], y))

    assert found.converged
    assert abs(value(weights) - value(alone)) <= 4e-6 * value(alone)


@on_ranks(1, 2, 3, 4, 5)
@each(loss=LOSSES)
def case_any_number_of_ranks_comes_to_the_same_optimum(comm, loss):
    check_alike_and_best(comm, *solved(part(comm), comm, loss), loss)


@on_ranks(1, 2, 3, 5)
@each(loss=["squared_hinge", "logistic"], split=["alike", "one has all"])
def case_newton_steps_do_not_depend_on_the_number_of_ranks(comm, loss, split):
    bounds = None if split == "alike" else np.r_[0, np.full(comm.size, SAMPLES)]
    options = {"l2": L2, "tolerance": 1e-8}
    found = TruncatedNewton(part(comm, bounds), LOSSES[loss](), comm=comm, **options)
    weights = found.fit()
    alone = TruncatedNewton(Dataset.from_scipy(*matrix()), LOSSES[loss](), comm=sar.SERIAL, **options)
    np.testing.assert_allclose(weights, alone.fit(), atol=1e-9)
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1
    assert (len(found.history), found.products) == (len(alone.history), alone.products)
    check_alike_and_best(comm, found, weights, loss)


@on_ranks(2, 3)
@each(loss=["hinge", "squared_hinge", "logistic"], solver=["dual", "newton"])
def case_a_fold_and_penalties_in_turn_come_to_what_one_rank_finds(comm, loss, solver):
    if (loss, solver) == ("hinge", "newton"):
        return
    options = RoundOptions(gap=1e-5, intercept=True, free_intercept=True, solver=solver, validation=Fold(1, 3))
    ours = RoundTrainer(LOSSES[loss](), part(comm), comm, 0.1, options)
    alone = RoundTrainer(LOSSES[loss](), Dataset.from_scipy(*matrix()), sar.SERIAL, 0.1, options)
    for l2 in (0.1, 0.01, 0.001):
        if l2 < 0.1:
            ours.penalise(l2)
            alone.penalise(l2)
        last, expected = list(ours.run())[-1], list(alone.run())[-1]
        assert ours.converged and last.loss == pytest.approx(expected.loss, rel=1e-4)
        assert last.validation_loss == pytest.approx(expected.validation_loss, rel=0.03)
        assert len({each.tobytes() for each in comm.allgather(ours.weights())}) == 1
    with pytest.raises(SparseAllreduceError, match="l2"):
        ours.penalise(0.01 + comm.rank)


@on_ranks(2, 4)
@each(loss=["squared_hinge", "logistic"])
def case_ranks_with_few_samples_or_none_take_part(comm, loss):
    bounds = np.full(comm.size + 1, SAMPLES)
    bounds[:2] = 0, SAMPLES - 1
    bounds[0] = 0
    check_alike_and_best(comm, *solved(part(comm, bounds), comm, loss), loss)


@on_ranks(2, 3)
def case_several_passes_a_round_come_to_the_same_optimum(comm):
    check_alike_and_best(comm, *solved(part(comm), comm, "logistic", local_passes=3), "logistic")


@on_ranks(3)
def case_values_that_are_wrong_on_one_rank_are_refused_on_all(comm):
    data = part(comm)
    if comm.rank == 1:
        values = np.array(data.values)
        values[0] = np.nan
        data = Dataset(data.indptr, data.indices, values, data.labels, FEATURES, data.first_sample, SAMPLES)
    with pytest.raises(DatasetError):
        solved(data, comm, "hinge")


@on_ranks(2, 3)
def case_settings_that_differ_are_refused_on_all(comm):
    with pytest.raises(SparseAllreduceError, match="l2"):
        CoCoA(part(comm), Hinge(), l2=0.1 + comm.rank, comm=comm)


@on_ranks(1, 2, 3)
@each(validation=[0.0, 0.25], classes=[2, 3])
def case_figures_of_rounds_are_those_of_all_samples(comm, validation, classes):
    X, y = matrix()
    y = y if classes == 2 else np.arange(SAMPLES) % 3.0
    model = Logistic() if classes == 2 else OneVsRest(Logistic(), 3)
    low, high = (SAMPLES * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    own = Dataset.from_scipy(X[low:high], y[low:high], first_sample=low, total_samples=SAMPLES)
    run = RoundTrainer(model, own, comm, L2, RoundOptions(rounds=200, gap=1e-5, validation=validation, intercept=True))
    figures = list(run.run(own))
    assert run.converged
    told = [replace(each, seconds={}) for each in figures]
    assert all(other == told for other in comm.allgather(told))
    columns = np.stack([solver.weights_of() for solver in run.solvers], axis=1)
    scores = X @ columns[:-1] + columns[-1]
    right = (scores[:, 0] > 0) == (y > 0) if classes == 2 else scores.argmax(axis=1) == y
    assert figures[-1].test_accuracy == pytest.approx(np.mean(right))
    trained = np.ones(SAMPLES, bool)
    if validation:
        parts = comm.allgather(run.division.held_out + low)
        trained[np.concatenate(parts)] = False
        assert trained.sum() == 90 and figures[-1].validation_accuracy == pytest.approx(np.mean(right[~trained]))
    assert figures[-1].train_accuracy == pytest.approx(np.mean(right[trained]))
    losses = model.loss(scores if classes > 2 else scores[:, 0], y)
    assert figures[-1].loss == pytest.approx(losses[trained].mean() + L2 / 2 * (columns**2).sum(), rel=1e-5)
    weights = run.weights()
    assert weights.shape == ((FEATURES + 1,) if classes == 2 else (FEATURES + 1, 3))
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1


@on_ranks(1, 2, 3)
def case_a_request_on_one_rank_stops_rounds_on_all(comm):
    run = RoundTrainer(Hinge(), part(comm), comm, 1e-6, RoundOptions(gap=1e-12))
    rounds = run.run()
    next(rounds), next(rounds)
    if comm.rank == comm.size - 1:
        run.request_stop("SIGTERM")
    with pytest.raises(TrainingStopped, match="SIGTERM after round 2"):
        next(rounds)


@on_ranks(2, 3)
def case_options_of_rounds_that_differ_are_refused_on_all(comm):
    with pytest.raises(SparseAllreduceError, match="options"):
        RoundTrainer(Hinge(), part(comm), comm, 0.1, RoundOptions(seed=comm.rank))
    with pytest.raises(SparseAllreduceError, match="test set"):
        list(RoundTrainer(Hinge(), part(comm), comm, 0.1).run(part(comm) if comm.rank else None))


@on_ranks(2, 3, 5)
@each(loss=LOSSES)
def case_what_ranks_add_up_never_lowers_the_dual_objective(comm, loss):
    """Whatever features they have in common, and however weak the penalty."""
    for seed, l2 in enumerate((1.0, 1e-2, 1e-4)):
        rng = np.random.default_rng(seed)
        shares = np.repeat([0.7, 0.05], [rng.integers(0, 8), rng.integers(1, 40)])
        X = np.where(rng.random((60, len(shares))) < shares, rng.standard_normal((60, len(shares))), 0.0)
        data = Dataset.from_scipy(scipy.sparse.csr_array(X), np.where(rng.random(60) < 0.5, 1.0, -1.0))
        found = CoCoA(data, LOSSES[loss](), l2=l2, comm=comm, tolerance=1e-12, seed=seed)
        for _ in range(8):
            found.advance()
        dual = np.array([each.dual for each in found.history])
        assert np.all(np.diff(dual) >= -1e-12 * np.abs(dual[1:])), (l2, dual)


@contextmanager
def in_parts(comm, loss, classes=2, **options):
    """All samples, and a solver whose passes have several parts, between which some of the features in common are summed."""
    rng = np.random.default_rng(3)
    shares = np.repeat([0.5, 0.03], [6, 60])
    X = scipy.sparse.csr_array(np.where(rng.random((120, len(shares))) < shares, rng.standard_normal((120, len(shares))), 0.0))
    y = rng.integers(0, classes, 120).astype(float)
    data = Dataset.from_scipy(X, y if classes > 2 else 2 * y - 1)
    sizes = {(cocoa, "_PARTS"): 4, (cocoa, "_PART"): 1, (cocoa, "_ENTRIES"): 1, (cocoa, "_PER_FEATURE"): 0, (exchange, "_FREQUENT"): 10}
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), size in sizes.items():
            patch.setattr(module, name, size)
        found = CoCoA(data, loss, comm=comm, tolerance=1e-12, **options)
        assert 0 < found._exchange.frequent_features < found._exchange.shared_features
        assert found._parts() == 4
        yield data, found


@on_ranks(2, 3, 5)
@each(loss=[*LOSSES, "multinomial"], intercept=[False, True])
def case_sums_of_frequent_features_within_a_pass_keep_weights_those_of_the_dual_variables(comm, loss, intercept):
    several = loss == "multinomial"
    for l2 in (1.0, 1e-3):
        model = Multinomial(3) if several else LOSSES[loss]()
        with in_parts(comm, model, classes=3 if several else 2, l2=l2, intercept=intercept) as (data, found):
            for _ in range(6):
                found.advance()
            dual = np.array([each.dual for each in found.history])
            assert np.all(np.diff(dual) >= -1e-6 * np.abs(dual[1:])), (l2, dual)
            variables = np.concatenate(comm.allgather(found._local.dual))
            if several:
                factors = (np.eye(3)[data.labels.astype(int)] - variables) / (l2 * data.rows)
            else:
                factors = variables * data.labels
            whole = scipy.sparse.hstack([data.to_scipy(), np.ones((data.rows, int(intercept)))])
            weights = found.weights_of()
            assert np.allclose(weights, whole.T @ factors, rtol=1e-4, atol=1e-5 * np.abs(weights).max())
            assert len({each.tobytes() for each in comm.allgather(weights)}) == 1


@on_ranks(2, 3)
@each(part=[0, 2, 3], error=[MemoryError, KeyboardInterrupt])
def case_a_rank_that_fails_in_a_part_of_a_pass_has_all_raise_and_undo_the_pass(comm, part, error):
    with in_parts(comm, Logistic(), l2=1e-2) as (_, found):
        found.advance()
        before, ascend = found.weights_of(), LocalProblem.ascend_part

        def strike(problem, number, ascend=ascend):
            if number == part and comm.rank == comm.size - 1:
                raise error("struck")
            return ascend(problem, number)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalProblem, "ascend_part", strike)
            with pytest.raises((error, SparseAllreduceError), match=r"struck|KeyboardInterrupt"):
                found.advance()
        assert found.weights_of().tobytes() == before.tobytes()
        for _ in range(50):
            found.advance(certify=True)
        assert found.history[-1].gap <= 1e-3 * found.history[-1].primal
        assert len({each.tobytes() for each in comm.allgather(found.weights_of())}) == 1


@on_ranks(2)
def case_a_pass_that_was_cut_short_between_two_sums_is_undone_by_the_next(comm):
    with in_parts(comm, Logistic(), l2=1e-2) as (_, found):
        found.advance()
        before, own, add = found.weights_of(), found._local.dual.copy(), type(found._exchange).add_early
        with pytest.MonkeyPatch.context() as patch:
            calls = []

            def cut(summed, change):
                calls.append(add(summed, change))
                if len(calls) == 2:
                    raise KeyboardInterrupt
                return calls[-1]

            patch.setattr(type(found._exchange), "add_early", cut)
            with pytest.raises(KeyboardInterrupt):
                found.advance()
        found._exchange.open()
        assert found._local.dual.tobytes() == own.tobytes()
        assert found.weights_of().tobytes() == before.tobytes()


@on_ranks(2, 3, 4)
@each(loss=LOSSES)
def case_a_gap_of_a_thousandth_takes_few_rounds_on_data_with_rare_features(comm, loss):
    """Without sums on the way of a pass, the hinge took more than a thousand rounds of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.svm"
        generate("url-like", path, samples=6000, features=20_000, seed=1)
        data, _ = two_classes(load(path, comm=sar.SERIAL, n_features=20_000)[0], sar.SERIAL)
    found = CoCoA(data, LOSSES[loss](), l2=1 / 6000, comm=comm, rounds=1000)
    found.fit()
    assert found.converged, found.history[-1]


def with_features_in_common(rows=2000):
    """Samples with 20 of 40 frequent features, and five rare ones of their own; hardly any is settled."""
    rng = np.random.default_rng(1)
    places = np.repeat(np.arange(rows), 5), rng.integers(0, 200_000, 5 * rows)
    rare = scipy.sparse.csr_array((np.ones(5 * rows, np.float32), places), shape=(rows, 200_000))
    common = scipy.sparse.csr_array((rng.random((rows, 40)) < 0.5).astype(np.float32))
    X = scipy.sparse.csr_array(scipy.sparse.hstack([common, rare]))
    X.sum_duplicates()
    return Dataset.from_scipy(X, np.where(X @ rng.standard_normal(X.shape[1]) > 0, 1.0, -1.0))


@on_ranks(2, 3, 4)
@each(loss=["squared_hinge", "logistic"])
def case_a_gap_that_falls_too_slowly_on_several_ranks_is_closed_by_one(comm, loss):
    """Of the squared hinge, two ranks side by side had a gap of 1.2e-2 after 300 rounds, at any sigma; one alone takes 25."""
    data = with_features_in_common()
    found = CoCoA(data, LOSSES[loss](), l2=1 / data.rows, comm=comm, rounds=100)
    weights = found.fit()
    assert found.converged, found.history[-1]
    assert any(each.gathered for each in found.history) or loss == "logistic"
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1
    told = [replace(each, seconds={}) for each in found.history]
    assert all(other == told for other in comm.allgather(told))
    again = CoCoA(data, LOSSES[loss](), l2=1 / data.rows, comm=comm, rounds=100)
    assert again.fit().tobytes() == weights.tobytes()
    value = weights @ weights / (2 * data.rows) + np.mean(LOSSES[loss]().loss(data.to_scipy() @ weights[:-1] + weights[-1], data.labels))
    assert -1e-6 * value <= value - found.history[-1].dual <= 1.001e-3 * value


@on_ranks(2)
def case_ranks_go_on_side_by_side_where_one_alone_is_no_faster(comm):
    data = with_features_in_common()
    found = CoCoA(data, SquaredHinge(), l2=1 / data.rows, comm=comm, tolerance=1e-12, rounds=1)
    until_gathered(found)
    found._pace._apart = 0.0  # as if the ranks had been about to end
    while found.history[-1].gathered:
        found.advance(certify=True)
    dual = found.history[-1].dual
    for _ in range(10):
        found.advance()
    assert not any(each.gathered for each in found.history[-10:]) and found.history[-1].dual > dual
    weights = found.weights_of()
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1


def few_active(comm, **options):
    """A solver of the hinge, of whose samples most are settled soon."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.svm"
        generate("url-like", path, samples=3000, features=20_000, seed=1)
        data, _ = two_classes(load(path, comm=sar.SERIAL, n_features=20_000)[0], sar.SERIAL)
    return data, CoCoA(data, Hinge(), l2=1 / 3000, comm=comm, **{"rounds": 1000} | options)


def until_gathered(found):
    while not (found.history and found.history[-1].gathered):
        found.advance()
    return found


@on_ranks(2, 3, 4)
@each(intercept=[False, True], counted=[False, True])
def case_active_samples_are_gathered_and_come_to_the_same_optimum(comm, intercept, counted):
    data, _ = few_active(comm)
    if counted:
        data = replace(data, weights=np.random.default_rng(2).integers(0, 3, data.rows).astype(float))
    options = {"l2": 1 / 3000, "tolerance": 1e-5, "rounds": 1000, "intercept": intercept}
    found = until_gathered(CoCoA(data, Hinge(), comm=comm, **options))
    weights = found.fit()
    assert found.converged and found.history[-1].gathered
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1
    told = [replace(each, seconds={}) for each in found.history]
    assert all(other == told for other in comm.allgather(told))
    alone = CoCoA(data, Hinge(), comm=sar.SERIAL, **options)
    alone.fit()
    assert abs(found.history[-1].dual - alone.history[-1].dual) <= 2e-5 * alone.history[-1].dual
    w, offset = (weights[:-1], weights[-1]) if intercept else (weights, 0.0)
    counts = 1.0 if data.weights is None else data.weights
    value = weights @ weights / 6000 + np.mean(counts * Hinge().loss(data.to_scipy() @ w + offset, data.labels))
    assert 0 <= value - found.history[-1].dual <= 2e-5 * value


def until_raised(found):
    while True:
        found.advance(certify=True)


# What may fail while samples are gathered, and on which rank.
STRUCK = {
    "ascend_until": (LocalProblem, 0),
    "certify": (LocalProblem, -1),
    "_taken": (Gathered, -1),
    "_take_in": (Gathered, 0),
    "_learn": (Gathered, -1),
}


@on_ranks(2, 3)
@each(struck=STRUCK, error=[MemoryError, KeyboardInterrupt])
def case_a_rank_that_fails_while_samples_are_gathered_has_all_raise_and_a_second_fit_ends(comm, struck, error):
    _, found = few_active(comm)
    until_gathered(found)
    owner, rank = STRUCK[struck]
    kept = getattr(owner, struck)

    def strike(*_arguments, **_named):
        raise error("struck")

    if comm.rank == rank % comm.size:
        setattr(owner, struck, strike)
    try:
        with pytest.raises((error, SparseAllreduceError), match="struck" if error is MemoryError else "struck|KeyboardInterrupt"):
            until_raised(found)
    finally:
        setattr(owner, struck, kept)
    weights = found.fit()
    assert found.converged
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1
    _, alone = few_active(sar.SERIAL)
    alone.fit()
    assert abs(found.history[-1].dual - alone.history[-1].dual) <= 2e-3 * alone.history[-1].dual


@on_ranks(3)
def case_a_rank_without_samples_sees_others_gather_theirs(comm):
    data, _ = few_active(comm)
    bounds = [0, 0, 1200, data.rows][comm.rank : comm.rank + 2]
    rows = slice(*bounds)
    own = Dataset.from_scipy(data.to_scipy()[rows], data.labels[rows], first_sample=bounds[0], total_samples=data.rows)
    found = CoCoA(own, Hinge(), l2=1 / 3000, comm=comm, rounds=1000)
    weights = until_gathered(found).fit()
    assert found.converged
    assert len({each.tobytes() for each in comm.allgather(weights)}) == 1


@on_ranks(2)
def case_samples_too_many_for_one_rank_stay_where_they_are(comm):
    _, found = few_active(comm, rounds=12)
    found._gathered._room = 1
    found.fit()
    assert not any(each.gathered for each in found.history)
    assert found.history[-1].dual > found.history[0].dual


@on_ranks(1, 2, 3)
@each(free=[False, True])
def case_columns_whose_squares_overflow_on_some_rank_are_scaled_on_all(comm, free):
    X, y = matrix()
    X = X.astype(np.float64)
    X.sort_indices()
    X.data[X.indices == 7] *= 1e300
    X.data[X.indices == 8] *= 1e200
    rows = np.array_split(np.arange(SAMPLES), comm.size)[comm.rank]
    whole = replace(Dataset.from_scipy(abs(X) > 0, y), values=X.data)  # float64
    data = Dataset.from_scipy(X[rows] != 0, y[rows], first_sample=int(rows[0]), total_samples=SAMPLES)
    data = replace(data, values=X[rows].data)
    options = {"l2": L2, "tolerance": 1e-7, "free_intercept": free, "scale_features": None}
    for solver in (CoCoA, TruncatedNewton):
        found = solver(data, Logistic(), comm=comm, rounds=5000, **options).fit()
        alone = solver(whole, Logistic(), comm=sar.SERIAL, rounds=5000, **options).fit()
        assert np.isfinite(found).all() and found[7] != 0
        np.testing.assert_allclose(X @ found[:-1] + found[-1], X @ alone[:-1] + alone[-1], atol=1e-2)
        refused = DatasetError if free else SparseAllreduceError
        with pytest.raises(refused):
            solver(data, Logistic(), comm=comm, **options | {"scale_features": False}).fit()


@on_ranks(1, 2, 3)
def case_a_softmax_of_many_classes_is_that_of_one_process(comm):
    X, _ = matrix()
    y = np.arange(SAMPLES) % 9.0
    bounds = np.linspace(0, SAMPLES, comm.size).astype(int) if comm.size > 1 else [0, SAMPLES]  # the last rank has none
    own = slice(bounds[comm.rank], bounds[comm.rank + 1]) if comm.rank < len(bounds) - 1 else slice(SAMPLES, SAMPLES)
    data = Dataset.from_scipy(X[own], y[own], first_sample=own.start, total_samples=SAMPLES)
    found = Newton(data, Multinomial(9), l2=0.01, comm=comm, tolerance=1e-8).fit()
    assert found.shape == (FEATURES + 1, 9) and len({each.tobytes() for each in comm.allgather(found)}) == 1
    alone = Newton(Dataset.from_scipy(X, y), Multinomial(9), l2=0.01, comm=sar.SERIAL, tolerance=1e-8).fit()
    np.testing.assert_allclose(found, alone, atol=1e-4)
