"""The data sets of ``bench/defaults.py``, made from what packages ship: scikit-learn's own sets, docstrings of packages, and draws."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, issparse
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    load_svmlight_file,
    load_wine,
    make_classification,
    make_regression,
)
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.model_selection import train_test_split

from sparseallreduce.linear import generate

__all__ = ["SETS", "Split", "made"]

Array = NDArray[Any]

_SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Split:
    """Samples to train on and to test on, and whether labels are classes."""

    rows: Any  # ndarray or csr_array
    labels: Array
    test_rows: Any
    test_labels: Array
    classifies: bool = True


def narrow(rows: Any) -> csr_array:
    """Return samples whose indices have 32 bits, as scikit-learn wants them."""
    found = csr_array(rows)
    return csr_array((found.data, found.indices.astype(np.int32), found.indptr.astype(np.int32)), found.shape)


def split(rows: Any, labels: Array, seed: int = 0, test: float = 0.3, classifies: bool = True) -> Split:
    """Hold out a share of the samples, of each class alike."""
    given = train_test_split(rows, labels, test_size=test, random_state=seed, stratify=labels if classifies else None)
    parts = [narrow(part) if issparse(part) else part for part in given[:2]]
    return Split(parts[0], given[2], parts[1], given[3], classifies)


def informative(**options: Any) -> Split:
    """Points around corners of a cube, and columns that decide nothing."""
    return split(*make_classification(random_state=0, **options))


def bags_of_words(samples: int, words: int, length: int, classes: int, unit: bool, seed: int = 0, positive: float | None = None) -> Split:
    """Draw texts whose words follow Zipf's law, where each class uses some of the words three times as often as the others do."""
    rng = np.random.default_rng(seed)
    frequencies = 1 / np.arange(1.0, words + 1)
    shares = None if positive is None else [1 - positive, positive]
    labels = rng.choice(classes, samples, p=shares)
    theirs = np.where(rng.random((classes, words)) < 0.05, 3.0, 1.0) * frequencies
    theirs /= theirs.sum(axis=1, keepdims=True)
    counts = rng.poisson(length * rng.lognormal(0, 0.5, samples))
    rows = [np.bincount(rng.choice(words, counts[i], p=theirs[labels[i]]), minlength=words).astype(np.float32) for i in range(samples)]
    table = csr_array(np.stack(rows))
    if unit:
        lengths = np.sqrt(table.multiply(table).sum(axis=1))
        table = csr_array(table.multiply(1 / np.maximum(lengths, 1.0)[:, None]))
    return split(table.astype(np.float32), labels)


def mail_statistics(samples: int = 4000, seed: int = 0) -> Split:
    """Draw shares of words and lengths of runs, mostly zero, in columns whose units lie between 1e-3 and 1e6."""
    rng = np.random.default_rng(seed)
    labels = rng.random(samples) < 0.4
    columns = 57
    drawn = rng.lognormal(0, 1.0, (samples, columns))
    tilt = rng.normal(0, 0.9, columns)
    present = rng.random((samples, columns)) < 1 / (1 + np.exp(1.2 - np.where(labels[:, None], tilt, -tilt)))
    table = drawn * present * np.exp(0.3 * np.where(labels[:, None], tilt, -tilt))
    return split(table * np.logspace(-3, 6, columns)[rng.permutation(columns)], labels.astype(int))


def measurements(samples: int = 3000, seed: int = 1) -> Split:
    """Draw columns far from zero, of any unit, some of which are sums of others."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(samples, 8))
    table = hidden @ rng.normal(size=(8, 20)) + 0.5 * rng.normal(size=(samples, 20))
    score = hidden @ rng.normal(size=8) + rng.normal(size=samples)
    return split(table * 10.0 ** rng.uniform(-3, 5, 20) + 10.0 ** rng.uniform(-2, 5, 20), (score > 0.3).astype(int))


def categories(samples: int = 6000, seed: int = 2) -> Split:
    """Draw a category of each of fourteen attributes, as a column of zeros and ones a category: 123 columns, 14 ones a sample."""
    rng = np.random.default_rng(seed)
    sizes = [5, 8, 5, 16, 5, 7, 14, 6, 5, 2, 2, 3, 5, 40]
    chosen = [rng.choice(size, samples, p=rng.dirichlet(np.ones(size))) + start for size, start in zip(sizes, np.cumsum([0, *sizes]))]
    columns = np.stack(chosen, axis=1)
    weights = rng.normal(0, 0.8, sum(sizes))
    score = weights[columns].sum(axis=1)
    labels = score + rng.logistic(0, 1, samples) > np.quantile(score, 0.7)
    ones, begins = np.ones(columns.size, np.float32), np.arange(0, columns.size + 1, len(sizes))
    table = csr_array((ones, columns.ravel(), begins), (samples, sum(sizes)))
    return split(table, labels.astype(int))


def few(samples: int = 50, seed: int = 0) -> Split:
    """Fifty noisy samples of 200 columns, and 500 more to test on."""
    X, y = make_classification(samples + 500, 200, n_informative=20, class_sep=1.5, flip_y=0.05, random_state=seed)
    return split(X, y, test=500)


def duplicates(seed: int = 3) -> Split:
    """Samples of which most are there many times, with labels that contradict each other."""
    rng = np.random.default_rng(seed)
    X, y = make_classification(300, 15, n_informative=6, random_state=seed)
    drawn = rng.choice(300, 5000, p=rng.dirichlet(np.full(300, 0.3)))
    labels = np.where(rng.random(5000) < 0.15, 1 - y[drawn], y[drawn])
    return split(np.round(X[drawn], 1), labels)


def docstrings(packages: list[tuple[str, ...]], seed: int = 0) -> Split:
    """Real text: what functions of installed packages say of themselves, by tf-idf; the class is where a function is from."""
    texts, labels = [], []
    for label, modules in enumerate(packages):
        for text in sorted(set(_docstrings(modules))):
            texts.append(text)
            labels.append(label)
    rows = csr_array(TfidfVectorizer(sublinear_tf=True, min_df=2, dtype=np.float32).fit_transform(texts))
    return split(rows, np.array(labels), seed)


def _docstrings(modules: tuple[str, ...]) -> Iterator[str]:
    for name in modules:
        package = importlib.import_module(name)
        places = [package]
        if hasattr(package, "__path__"):
            places += [importlib.import_module(f"{name}.{each.name}") for each in pkgutil.iter_modules(package.__path__) if _is_plain(each)]
        for place in places:
            for _, thing in inspect.getmembers(place, lambda one: inspect.isfunction(one) or inspect.isclass(one)):
                text = inspect.getdoc(thing) or ""
                if thing.__module__.startswith(name) and len(text) > 100:
                    yield text


def _is_plain(module: Any) -> bool:
    return not module.ispkg and not module.name.startswith(("_", "test", "setup", "conftest"))


def generated(kind: str, samples: int, features: int, seed: int = 0) -> Split:
    """Samples of the library's own generator."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.svm"
        generate(kind, path, samples=samples, features=features, seed=seed)
        rows, labels = load_svmlight_file(path, n_features=features, dtype=np.float32)
    return split(narrow(rows), labels, test=0.2)


def shared(name: str, features: int) -> Split:
    """A set of the folder of shared data.

    Raises
    ------
    FileNotFoundError
        If it is not there.
    """
    found = [load_svmlight_file(str(_SHARED / f"{name}{end}"), n_features=features, dtype=np.float32) for end in (".svm.bz2", ".t.svm.bz2")]
    (rows, labels), (test_rows, test_labels) = found
    return Split(narrow(rows), labels, narrow(test_rows), test_labels)


def regression(units: bool) -> Split:
    """Draw numbers that depend on a third of the columns, whose units differ or do not."""
    X, y = make_regression(1500, 30, n_informative=10, noise=30.0, random_state=0)
    return split(X * (10.0 ** np.linspace(-3, 6, 30) if units else 1.0), y / 10 + 50, classifies=False)


def sparse_regression(seed: int = 5) -> Split:
    """Numbers that depend on the words of texts."""
    base = bags_of_words(4000, 5000, 60, 2, True, seed)
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=5000) * (rng.random(5000) < 0.2)
    labels = [20 * (rows @ truth) + rng.normal(size=rows.shape[0]) for rows in (base.rows, base.test_rows)]
    return Split(base.rows, labels[0], base.test_rows, labels[1], False)


_SUBJECTS = {
    "scipy": ("stats", "signal", "sparse", "linalg", "optimize", "special", "ndimage", "interpolate", "spatial"),
    "sklearn": ("linear_model", "metrics", "ensemble", "preprocessing", "datasets", "model_selection", "cluster"),
}
_EACH = [(f"{package}.{name}",) for package, names in _SUBJECTS.items() for name in names]
_TWO = [("sklearn.linear_model", "sklearn.metrics", "sklearn.ensemble"), ("scipy.stats", "scipy.signal", "scipy.sparse")]

#: By name, what makes each.
SETS: dict[str, Callable[[], Split]] = {
    "iris": lambda: split(*load_iris(return_X_y=True)),
    "wine": lambda: split(*load_wine(return_X_y=True)),
    "breast cancer": lambda: split(*load_breast_cancer(return_X_y=True)),
    "digits": lambda: split(*load_digits(return_X_y=True)),
    "50 samples": few,
    "classification": lambda: informative(n_samples=3000, n_features=40, n_informative=15, class_sep=0.7),
    "classes 12": lambda: informative(n_samples=6000, n_features=40, n_informative=20, n_classes=12, n_clusters_per_class=1),
    "duplicates": duplicates,
    "mail statistics": mail_statistics,
    "measurements": measurements,
    "categories": categories,
    "word counts": lambda: bags_of_words(4000, 8000, 80, 2, False),
    "text": lambda: bags_of_words(6000, 20000, 40, 2, True, 1),
    "text 20": lambda: bags_of_words(6000, 10000, 80, 20, True, 2),
    "text 1 %": lambda: bags_of_words(20000, 8000, 60, 2, True, 3, 0.01),
    "docstrings 2": lambda: docstrings(_TWO),
    "docstrings 16": lambda: docstrings(_EACH),
    "url-like": lambda: generated("url-like", 12500, 3231961),
    "webspam-like": lambda: generated("webspam-like", 1000, 16609143),
    "phishing": lambda: shared("phishing_url", 3231961),
    "reviews": lambda: shared("reviews_trigram", 16777216),
    "diabetes": lambda: split(*load_diabetes(return_X_y=True), classifies=False),
    "regression": lambda: regression(False),
    "regression units": lambda: regression(True),
    "text regression": sparse_regression,
}


def made(name: str) -> Split | None:
    """The set of a name; None if it is of the folder of shared data, and not there."""
    try:
        return SETS[name]()
    except FileNotFoundError:
        return None
