"""The rate and the beta of adaptive steps, picked by trials on the first samples of all ranks."""

import numpy as np
import pytest
import scipy.sparse
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.linear import MODELS, Dataset, Descent, LinearSVM, LogisticRegression, generate, load
from sparseallreduce.linear.training.batches import divided
from sparseallreduce.linear.training.picking import CANDIDATES, first_samples, picked


def samples(comm, rows=300, noise=0.0):
    """This rank's samples: one of them has no samples if there are three ranks."""
    rng = np.random.default_rng(2)
    X = scipy.sparse.random_array((rows, 50), density=0.2, rng=rng, format="csr")
    y = np.where(X @ rng.standard_normal(50) + noise * rng.standard_normal(rows) > 0, 1.0, -1.0)
    low, high = [0, rows // 2, rows, rows][comm.rank], [rows // 2 if comm.size > 1 else rows, rows, rows][comm.rank]
    return Dataset.from_scipy(X[low:high], y[low:high], first_sample=low, total_samples=rows)


def choice(comm, model="logistic", seed=1, share=0.0, data=None):
    data = samples(comm) if data is None else data
    division = divided(data, share, seed, comm)
    return picked(
        MODELS[model](), data, comm, division, lambda beta, batch: Descent(update="ftrl", beta=beta / batch), 10 * comm.size, 10, seed, 1.0
    )


@pytest.mark.parametrize("model", ["logistic", "svm"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.2])
def test_all_ranks_pick_the_same_candidate_every_time(model, ranks, share):
    found = {pick for _ in range(2) for pick in on_ranks(ranks, lambda comm: choice(comm, model, share=share))}
    assert len(found) == 1 and found <= set(CANDIDATES)


def test_samples_held_out_are_not_tried_and_those_of_the_first_steps_are():
    def tried(comm):
        data = samples(comm)
        division = divided(data, 0.5, 0, comm)
        chosen = first_samples(data, division, 20, 0, most=30)
        rows = {row.tobytes() for row in data.to_scipy().toarray()[division.rows]}
        return chosen.rows, all(row.tobytes() in rows for row in chosen.to_scipy().toarray())

    told = on_ranks(2, tried)
    assert sum(rows for rows, _ in told) == 40  # of whole steps
    assert all(trained_on for _, trained_on in told)


def test_a_candidate_whose_loss_is_no_number_is_not_picked(monkeypatch):
    from sparseallreduce.linear.training import picking

    monkeypatch.setattr(picking, "CANDIDATES", (CANDIDATES[0]._replace(rate=1e38), CANDIDATES[2]))
    with np.errstate(all="ignore"):
        assert on_ranks(1, choice) == [CANDIDATES[2]]


@pytest.mark.parametrize("pick", CANDIDATES)
def test_rates_decay_with_the_passes_that_have_been(pick):
    rates = pick.schedule(40)
    assert rates(0) == pick.rate
    np.testing.assert_allclose([rates(40), rates(120)], [pick.rate / 2**pick.power, pick.rate / 4**pick.power])


@pytest.mark.parametrize("estimator", [LogisticRegression, LinearSVM])
def test_estimators_pick_the_rate_of_adaptive_steps_unless_it_is_given(estimator, tmp_path):
    """Rare features outweigh frequent ones at a common rate without beta."""
    generate("url-like", tmp_path / "all.svm", samples=6000, features=100_000, seed=3)
    data, _ = load(tmp_path / "all.svm", comm=sar.SERIAL)
    X, y = data.to_scipy(), data.labels
    options = {"solver": "sgd", "max_iter": 3, "tol": None, "comm": sar.SERIAL}
    picking, given = (estimator(**how, **options).fit(X[:5000], y[:5000]) for how in ({}, {"update": "ftrl"}))
    assert picking.score(X[5000:], y[5000:]) > given.score(X[5000:], y[5000:]) + 0.01
    before = picking.score(X[5000:], y[5000:])
    assert picking.partial_fit(X[:1000], y[:1000]).score(X[5000:], y[5000:]) > before - 0.03  # goes on at the picked rate
