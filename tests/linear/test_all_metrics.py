"""Metrics by name: each equals scikit-learn's function on the samples of all ranks together, also where there is little to measure."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from sklearn import metrics as sk
from sklearn.preprocessing import label_binarize
from thoroughness import examples
from thread_ranks import on_ranks

import sparseallreduce as sar
from sparseallreduce.errors import DatasetError
from sparseallreduce.linear import Dataset, FittedModel, LinearRegression, LogisticRegression
from sparseallreduce.linear.metrics import METRICS, all_metrics, evaluate, evaluate_scores

RANKS = st.sampled_from([1, 2, 3, 5])
NAMES = np.array(["ant", "bee", "cat", "dog", "eel", "fox", "gnu"])


def model_of(kind, classes):
    weights = np.zeros(1) if classes < 3 else np.zeros((classes, 1))
    return FittedModel(kind, weights, np.zeros(weights.shape[:-1]), NAMES[:classes])


def measured(ranks, model, scores, labels, weights, metrics=None, cuts=None):
    """What every rank finds, of samples that are cut at these places."""
    places = sorted(cuts) if cuts is not None else [len(labels) * rank // ranks for rank in range(1, ranks)]

    def mine(comm):
        own = [None if each is None else np.split(each, places)[comm.rank] for each in (scores, labels, weights)]
        return evaluate_scores(model, *own, comm, metrics)

    found = on_ranks(ranks, mine)
    for each in found:
        if isinstance(each, Exception):
            raise each
        np.testing.assert_equal(each, found[0])
    return found[0]


@st.composite
def samples(draw, classes):
    """Scores with ties, labels of few or all classes, weights some of which are zero, and how they are cut for ranks, some without any."""
    rows, ranks = draw(st.integers(1, 25)), draw(RANKS)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shape = (rows, classes) if classes > 2 else rows
    scores = {
        "any": rng.standard_normal(shape) * 3,
        "ties": rng.integers(-2, 3, shape).astype(float),
        "constant": np.full(shape, 0.5),
        "extreme": rng.choice([-800.0, -40.0, 0.0, 40.0, 800.0], shape),
    }[draw(st.sampled_from(["any", "ties", "constant", "extreme"]))]
    labels = rng.integers(0, draw(st.integers(1, classes)), rows)
    weights = draw(st.sampled_from([None, rng.integers(0, 3, rows).astype(float), rng.random(rows) + 0.01]))
    if weights is not None and not weights.any():
        weights[0] = 1.0
    cuts = draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1))
    return ranks, scores, labels, weights, cuts


def of_counts(labels, predicted, weights, classes):
    """Scikit-learn's figures of labels that are strings."""
    y, z, w = NAMES[labels], NAMES[predicted], {"sample_weight": weights}
    wanted = {"accuracy": sk.accuracy_score(y, z, **w), "balanced_accuracy": sk.balanced_accuracy_score(y, z, **w)}
    wanted["confusion_matrix"] = sk.confusion_matrix(y, z, labels=NAMES[:classes], **w)
    for average in ("macro", "weighted"):
        for name, score in (("precision", sk.precision_score), ("recall", sk.recall_score), ("f1", sk.f1_score)):
            wanted[f"{name}_{average}"] = score(y, z, average=average, zero_division=0, **w)
    return wanted


def calibration_error(probabilities, labels, weights):
    """By a loop over the bins."""
    weights = np.ones(len(labels)) if weights is None else weights
    confidence, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    total = 0.0
    for bin in range(15):
        inside = (confidence > bin / 15) & (confidence <= (bin + 1) / 15)
        total += abs(np.dot(weights[inside], right[inside]) - np.dot(weights[inside], confidence[inside]))
    return total / weights.sum()


def compare(found, wanted):
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(np.nan if found[name] is None else found[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@settings(max_examples=examples(25))
@given(samples(2))
def test_metrics_of_two_classes_are_scikit_learns(drawn):
    ranks, scores, labels, weights, cuts = drawn
    model = model_of("logistic", 2)
    found = measured(ranks, model, scores, labels, weights, cuts=cuts)
    predicted, y = (scores > 0).astype(int), NAMES[labels]
    probabilities = model.probabilities_of(scores)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = of_counts(labels, predicted, weights, 2)
        for name, score in (("precision", sk.precision_score), ("recall", sk.recall_score), ("f1", sk.f1_score)):
            wanted[name] = score(labels, predicted, zero_division=0, sample_weight=weights)
        wanted["log_loss"] = sk.log_loss(y, probabilities, labels=NAMES[:2], sample_weight=weights)
        wanted["brier_score"] = sk.brier_score_loss(labels, probabilities[:, 1], pos_label=1, sample_weight=weights)
        wanted["average_precision"] = sk.average_precision_score(labels, scores, sample_weight=weights)
        wanted["roc_auc"] = sk.roc_auc_score(labels, scores, sample_weight=weights)
    wanted["calibration_error"] = calibration_error(probabilities[:, ::-1], 1 - labels, weights)  # of a tie the first is predicted
    compare(found, wanted)


@settings(max_examples=examples(25))
@given(samples(6), st.sampled_from(["multinomial", "logistic", "svm"]))
def test_metrics_of_several_classes_are_scikit_learns(drawn, kind):
    ranks, scores, labels, weights, cuts = drawn
    model = model_of(kind, 6)
    names = [*all_metrics(model), "top_2_accuracy"]
    found = measured(ranks, model, scores, labels, weights, names, cuts)
    predicted, y, binary = scores.argmax(axis=1), NAMES[labels], label_binarize(labels, classes=range(6))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = of_counts(labels, predicted, weights, 6)
        for k in (2, 5):
            hits = (np.argsort(scores, axis=1, kind="mergesort")[:, ::-1][:, :k] == labels[:, None]).any(axis=1)
            wanted[f"top_{k}_accuracy"] = np.average(hits, weights=weights)
            if len(np.unique(labels)) > 2:
                theirs = sk.top_k_accuracy_score(y, scores, k=k, labels=NAMES[:6], sample_weight=weights)
                assert wanted[f"top_{k}_accuracy"] == pytest.approx(theirs)
        wanted["average_precision"] = sk.average_precision_score(binary, scores, sample_weight=weights)
        wanted["roc_auc"] = sk.roc_auc_score(binary, scores, sample_weight=weights)
        if kind != "svm":
            probabilities = model.probabilities_of(scores)
            wanted["log_loss"] = sk.log_loss(y, probabilities, labels=NAMES[:6], sample_weight=weights)
            wanted["brier_score"] = sk.brier_score_loss(y, probabilities, labels=NAMES[:6], sample_weight=weights)
            if (np.sort(scores, axis=1)[:, -2] < scores.max(axis=1)).all():
                wanted["calibration_error"] = calibration_error(probabilities, labels, weights)
            else:
                wanted["calibration_error"] = found["calibration_error"]
    compare(found, wanted)


@settings(max_examples=examples(50))
@given(data=st.data(), ranks=RANKS, rows=st.integers(2, 25), seed=st.integers(0, 2**32))
def test_metrics_of_numbers_are_scikit_learns(data, ranks, rows, seed):
    rng = np.random.default_rng(seed)
    labels = data.draw(st.sampled_from([rng.standard_normal(rows), np.full(rows, 2.0), rng.integers(0, 3, rows) * 1e100]))
    scores = data.draw(st.sampled_from([labels, rng.standard_normal(rows)]))
    weights = data.draw(st.sampled_from([None, rng.random(rows) + 0.01]))
    cuts = data.draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1))
    found = measured(ranks, FittedModel("linear", np.zeros(1)), scores, labels, weights, cuts=cuts)
    w = {"sample_weight": weights}
    determined = sk.r2_score(labels, scores, **w)
    if (labels == labels[0]).all():  # whose weighted mean is inexact, so that scikit-learn divides by the square of its error
        determined = float((labels == scores).all())
    wanted = {"r2": determined, "mae": sk.mean_absolute_error(labels, scores, **w)}
    wanted |= {"mse": sk.mean_squared_error(labels, scores, **w), "rmse": sk.root_mean_squared_error(labels, scores, **w)}
    compare(found, wanted)


def dataset(labels, names=None, weights=None):
    return Dataset.from_scipy(csr_array(np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]])), labels) if names is None else Dataset(
        np.arange(4), np.uint32([0, 1, 0]), np.ones(3, np.float32), np.array(labels, float), 2, names=names, weights=weights
    )


def test_what_cannot_be_measured_is_an_error_that_says_why():
    two = FittedModel("svm", np.float32([1, -1]), 0.0, np.array([0.0, 1.0]))
    for names, said in {
        ("accurracy",): "there is no metric 'accurracy'",
        ("top_K_accuracy",): "a number for K",
        ("log_loss",): "needs the probabilities",
        ("top_2_accuracy",): "more than two classes",
        ("rmse",): "is for regression",
    }.items():
        with pytest.raises(ValueError, match=said):
            evaluate(two, dataset([0, 1, 1]), sar.SERIAL, metrics=names)
    with pytest.raises(ValueError, match="use f1_macro"):
        evaluate_scores(model_of("svm", 3), np.zeros((2, 3)), np.array([0, 1]), None, sar.SERIAL, ["f1"])
    with pytest.raises(ValueError, match="a sample with a weight other than zero"):
        evaluate_scores(two, np.zeros(2), np.array([0, 1]), np.zeros(2), sar.SERIAL)
    with pytest.raises(DatasetError, match=r"sample 1, 7\.0, is none of the model's classes, 0\.0, 1\.0"):
        evaluate(two, dataset([0, 7, 1]), sar.SERIAL)
    with pytest.raises(DatasetError, match="sample 2 has no label"):
        evaluate(two, dataset([0, 1, np.nan]), sar.SERIAL)
    with pytest.raises(DatasetError, match="labels are names, and the model's classes are numbers"):
        evaluate(two, dataset([0, 1, 1], ("ham", "spam")), sar.SERIAL)
    with pytest.raises(DatasetError, match="the model predicts numbers"):
        evaluate(FittedModel("linear", np.zeros(2)), dataset([0, 1, 1], ("ham", "spam")), sar.SERIAL)


def test_labels_that_are_names_and_weights_of_samples_count():
    spam = FittedModel("logistic", np.float32([1, -1]), 0.0, np.array(["ham", "spam"]))
    found = evaluate(spam, dataset([0, 1, 1], ("ham", "spam"), np.array([5.0, 2.0, 1.0])), sar.SERIAL)
    assert found["confusion_matrix"].tolist() == [[0, 5], [2, 1]]
    assert found["accuracy"] == pytest.approx(1 / 8)
    assert list(found) == all_metrics(spam)


def test_all_ranks_learn_of_a_label_that_one_rank_has():
    two = FittedModel("svm", np.float32([1, -1]), 0.0, np.array([0.0, 1.0]))
    found = on_ranks(3, lambda comm: evaluate(two, dataset([0, 7 if comm.rank == 1 else 1, 1]), comm))
    assert len({(type(each), str(each)) for each in found}) == 1 and "none of the model's classes" in str(found[0])


def test_every_name_is_measured_or_told_apart():
    named = set(all_metrics(model_of("logistic", 2))) | set(all_metrics(FittedModel("linear", np.zeros(1)))) | {"top_K_accuracy"}
    assert named == set(METRICS)


@pytest.mark.parametrize("classes", [2, 3])
def test_estimators_evaluate_labels_as_they_are(classes):
    rng = np.random.default_rng(classes)
    X = rng.standard_normal((60, 4))
    y = NAMES[X[:, :classes].argmax(axis=1)]
    weights = rng.random(60)
    model = LogisticRegression(comm=sar.SERIAL).fit(X, y)
    found = model.evaluate(X, y, weights, metrics=["accuracy", "log_loss", "f1_macro"])
    assert found == {
        "accuracy": pytest.approx(model.score(X, y, weights)),
        "log_loss": pytest.approx(sk.log_loss(y, model.predict_proba(X), sample_weight=weights)),
        "f1_macro": pytest.approx(sk.f1_score(y, model.predict(X), average="macro", sample_weight=weights)),
    }
    with pytest.raises(ValueError, match="the label zebra is not among the classes ant"):
        model.evaluate(X, np.where(np.arange(60) == 5, "zebra", y))
    with pytest.raises(ValueError, match="is not among the classes"):
        model.evaluate(X, np.arange(60))


def test_regressions_evaluate_numbers():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 4))
    model = LinearRegression(comm=sar.SERIAL).fit(X, X.sum(axis=1))
    assert model.evaluate(X, X.sum(axis=1))["r2"] == pytest.approx(model.score(X, X.sum(axis=1)))
    with pytest.raises(ValueError, match="NaN"):
        model.evaluate(X, np.full(60, np.nan))
