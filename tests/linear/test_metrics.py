"""Loss, accuracy and area under the curve: equal to scikit-learn's, however the samples are shared out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.linear import MODELS, Dataset
from sparseallreduce.linear.data.labels import weighted_by_class
from sparseallreduce.linear.metrics import ranking
from sparseallreduce.linear.metrics.ranking import area_under_curve
from sparseallreduce.linear.training.metrics import class_threshold, evaluate


def dataset(labels, total=-1, weights=None):
    rows = len(labels)
    return Dataset(np.zeros(rows + 1, np.int64), np.empty(0, np.uint32), np.empty(0, np.float32), labels, 1, 0, total, weights=weights)


def shares(array, ranks):
    return np.array_split(array, ranks)


@given(data=st.data(), ranks=st.integers(1, 4), sample=st.sampled_from([1, 3, 1000]))
def test_the_area_is_scikit_learns(data, ranks, sample):
    rows = data.draw(st.integers(2, 40))
    scores = np.array(data.draw(st.lists(st.sampled_from([-1.5, -1.0, 0.0, 0.25, 1.0, 1e30]), min_size=rows, max_size=rows)))
    positive = np.array([True, False, *data.draw(st.lists(st.booleans(), min_size=rows - 2, max_size=rows - 2))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranking, "_SAMPLES", sample)
        found = on_ranks(ranks, lambda comm: area_under_curve(shares(scores, ranks)[comm.rank], shares(positive, ranks)[comm.rank], comm))
    assert found == [pytest.approx(roc_auc_score(positive, scores))] * ranks


@pytest.mark.parametrize("scores", ["different", "few", "one"])
def test_no_rank_is_sent_many_more_scores_than_its_share(monkeypatch, scores):
    ranks, rows, sent = 4, 40_000, []
    rng = np.random.default_rng(3)
    drawn = {"different": rng.standard_normal(rows), "few": rng.integers(0, 50, rows).astype(float), "one": np.ones(rows)}[scores]
    drawn, positive = np.sort(drawn), rng.random(rows) < 0.3
    real = ranking.exchange
    monkeypatch.setattr(ranking, "exchange", lambda comm, parts: sent.append(received := real(comm, parts)) or received)
    found = on_ranks(ranks, lambda comm: area_under_curve(shares(drawn, ranks)[comm.rank], shares(positive, ranks)[comm.rank], comm))
    assert found == [pytest.approx(roc_auc_score(positive, drawn))] * ranks
    assert max(sum(map(len, received)) for received in sent) < {"different": 1.3 * rows * 0.7 / ranks, "few": 60, "one": 5}[scores]


def test_there_is_no_area_without_both_classes_or_with_scores_that_are_no_numbers():
    scores = np.array([1.0, 2.0])
    assert area_under_curve(scores, np.array([True, True]), sar.SERIAL) is None
    assert area_under_curve(np.array([np.nan, 2.0]), np.array([True, False]), sar.SERIAL) is None
    assert area_under_curve(np.empty(0), np.empty(0, bool), sar.SERIAL) is None


@pytest.mark.parametrize("ranks", [1, 3])
def test_loss_and_accuracy_are_those_of_all_ranks(ranks):
    rng = np.random.default_rng(0)
    labels, scores, counts = rng.choice([-1.0, 1.0], 50), rng.standard_normal(50), rng.random(50) + 0.5
    counts /= counts.mean()

    def measured(comm):
        mine = dataset(shares(labels, ranks)[comm.rank], 50, shares(counts, ranks)[comm.rank])
        return evaluate(MODELS["logistic"](), shares(scores, ranks)[comm.rank], mine, 0.0, comm)

    for found in on_ranks(ranks, measured):
        assert found.loss == pytest.approx(log_loss(labels, 1 / (1 + np.exp(-scores)), sample_weight=counts))
        assert found.accuracy == pytest.approx(((scores > 0) == (labels > 0)).mean())
        assert found.auc == pytest.approx(roc_auc_score(labels, scores))


def test_a_regression_has_classes_only_if_it_has_two_labels():
    model = MODELS["linear"]()
    assert class_threshold(model, dataset(np.array([3.0, 4.0, 4.0])), sar.SERIAL) == 3.5
    assert class_threshold(model, dataset(np.array([3.0, 4.0, 5.0])), sar.SERIAL) is None
    found = evaluate(model, np.array([1.0, 2.0, 4.0]), dataset(np.array([3.0, 4.0, 5.0])), None, sar.SERIAL)
    assert (found.loss, found.accuracy, found.auc) == (pytest.approx(1.5), None, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_balanced_classes_count_alike_and_one_on_average(ranks):
    labels = np.array([1.0] * 9 + [-1.0] * 3)
    found = on_ranks(ranks, lambda comm: weighted_by_class(dataset(shares(labels, ranks)[comm.rank], 12), "balanced", comm).weights)
    weights = np.concatenate(found)
    assert weights.mean() == pytest.approx(1)
    assert weights[labels == 1].sum() == pytest.approx(weights[labels == -1].sum())


def test_class_weights_multiply_those_of_samples():
    ours = weighted_by_class(dataset(np.array([1.0, -1.0, 1.0]), weights=np.array([2.0, 2.0, 3.0])), {1.0: 0.5}, sar.SERIAL)
    assert ours.weights.tolist() == [1.0, 2.0, 1.5]
