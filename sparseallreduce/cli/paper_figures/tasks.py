"""Learning tasks for lossy sums, which stand in for the papers' networks: their gradients are dense, and an epoch takes about a second."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["TASKS", "Task", "make_task"]

Array = NDArray[Any]

_CLASSES = 10
_TEST = 297  # digits
_PIECE = 24  # characters of text that a recurrent network reads in one go
_PIECES, _TEST_PIECES = 1200, 300
_ALPHABET = "\n abcdefghijklmnopqrstuvwxyz0123456789_.,:()'\"=-"


class Samples(NamedTuple):
    """Inputs and classes of the training and test samples."""

    x: Array
    y: Array
    test_x: Array
    test_y: Array


class Task(ABC):
    """A model with all its parameters in one float32 vector of ``size`` values, and the samples from which it learns.

    Attributes
    ----------
    title : str
        Short name of the model.
    rate : float
        Learning rate of SGD without momentum.
    """

    title: str
    rate: float

    def __init__(self, samples: Samples, shapes: dict[str, tuple[int, ...]]) -> None:
        self.samples = samples
        self._shapes = shapes
        self.size: int = sum(int(np.prod(shape)) for shape in shapes.values())

    @property
    def count(self) -> int:
        """The number of training samples."""
        return len(self.samples.y)

    def start(self, seed: int) -> Array:
        """Return the parameters at the start: biases are zero, and matrices have normally distributed values."""
        rng = np.random.default_rng(seed)
        return np.concatenate([self._drawn(shape, rng).reshape(-1) for shape in self._shapes.values()]).astype(np.float32)

    def _drawn(self, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
        return np.zeros(shape) if len(shape) == 1 else rng.standard_normal(shape) / np.sqrt(shape[0])

    def parts(self, vector: Array) -> dict[str, Array]:
        """Return views of the matrices and biases in a vector of parameters or gradients, by name."""
        found, begin = {}, 0
        for name, shape in self._shapes.items():
            end = begin + int(np.prod(shape))
            found[name] = vector[begin:end].reshape(shape)
            begin = end
        return found

    def gradient(self, parameters: Array, rows: Array) -> Array:
        """Return the gradient of the mean loss of some training samples; zeros for none."""
        total = np.zeros(self.size, np.float32)
        if len(rows):
            self._descend(self.parts(parameters), self.samples.x[rows], self.samples.y[rows], self.parts(total))
        return total

    def loss(self, parameters: Array) -> float:
        """Return the mean cross-entropy of the training samples."""
        scores, classes = self._scores(self.parts(parameters), self.samples.x), self.samples.y.reshape(-1)
        chances = _softmax(scores.reshape(-1, scores.shape[-1]))
        return float(-np.log(np.maximum(chances[np.arange(len(classes)), classes], 1e-12)).mean())

    def accuracy(self, parameters: Array) -> float:
        """Return the fraction of test classes that are predicted correctly."""
        return float((self._scores(self.parts(parameters), self.samples.test_x).argmax(axis=-1) == self.samples.test_y).mean())

    @abstractmethod
    def _scores(self, given: dict[str, Array], x: Array) -> Array:
        """Return the scores of all classes, in the last dimension."""

    @abstractmethod
    def _descend(self, given: dict[str, Array], x: Array, y: Array, out: dict[str, Array]) -> None:
        """Write the gradient of the mean loss to ``out``."""


class Softmax(Task):
    """Softmax regression on random features of scikit-learn's digits, each the positive part of a random projection."""

    title: str
    rate: float

    title, rate = "softmax regression", 4.0

    def __init__(self, width: int, seed: int) -> None:
        x, y, test_x, test_y = _digits(seed)
        projection = np.random.default_rng((seed, 1)).standard_normal((x.shape[1], width)) / 8
        first, second = (np.maximum(images @ projection, 0).astype(np.float32) for images in (x, test_x))
        factor = np.float32(4 / np.sqrt((first**2).sum(axis=1).mean()))
        super().__init__(Samples(first * factor, y, second * factor, test_y), {"weights": (width, _CLASSES)})

    def start(self, seed: int) -> Array:
        return np.zeros(self.size, np.float32)

    def _scores(self, given: dict[str, Array], x: Array) -> Array:
        scores: Array = x @ given["weights"]
        return scores

    def _descend(self, given: dict[str, Array], x: Array, y: Array, out: dict[str, Array]) -> None:
        np.matmul(x.T, _errors(self._scores(given, x), y), out=out["weights"])


class Perceptron(Task):
    """A perceptron with one hidden layer on scikit-learn's digits."""

    title: str
    rate: float

    title, rate = "perceptron", 0.2

    def __init__(self, width: int, seed: int) -> None:
        samples = _digits(seed)
        pixels = samples.x.shape[1]
        super().__init__(samples, {"into": (pixels, width), "bias": (width,), "out": (width, _CLASSES), "last": (_CLASSES,)})

    def _scores(self, given: dict[str, Array], x: Array) -> Array:
        scores: Array = np.maximum(x @ given["into"] + given["bias"], 0) @ given["out"] + given["last"]
        return scores

    def _descend(self, given: dict[str, Array], x: Array, y: Array, out: dict[str, Array]) -> None:
        hidden = np.maximum(x @ given["into"] + given["bias"], 0)
        errors = _errors(hidden @ given["out"] + given["last"], y)
        np.matmul(hidden.T, errors, out=out["out"])
        out["last"][:] = errors.sum(axis=0)
        back = (errors @ given["out"].T) * (hidden > 0)
        np.matmul(x.T, back, out=out["into"])
        out["bias"][:] = back.sum(axis=0)


class Recurrent(Task):
    """A recurrent network (Elman) that predicts the next character of English text: of the descriptions of scikit-learn's data sets."""

    title: str
    rate: float

    title, rate = "recurrent network", 1.0
    _MOST = 1.0  # gradients with a larger norm are scaled down

    def __init__(self, width: int, seed: int) -> None:
        characters = len(_ALPHABET)
        shapes = {"into": (characters, width), "again": (width, width), "bias": (width,), "out": (width, characters), "last": (characters,)}
        super().__init__(_text(seed), shapes)

    def _states(self, given: dict[str, Array], x: Array) -> Array:
        """Return the state before the first character and after each, of shape (characters + 1, samples, width)."""
        states = np.zeros((x.shape[1] + 1, len(x), len(given["bias"])), np.float32)
        for step in range(x.shape[1]):
            states[step + 1] = np.tanh(given["into"][x[:, step]] + states[step] @ given["again"] + given["bias"])
        return states

    def _scores(self, given: dict[str, Array], x: Array) -> Array:
        scores: Array = self._states(given, x)[1:].swapaxes(0, 1) @ given["out"] + given["last"]
        return scores

    def _descend(self, given: dict[str, Array], x: Array, y: Array, out: dict[str, Array]) -> None:
        states = self._states(given, x)
        scores = states[1:] @ given["out"] + given["last"]
        errors = _errors(scores.reshape(-1, scores.shape[-1]), y.T.reshape(-1)).reshape(scores.shape)
        back = np.zeros_like(states[0])
        for step in reversed(range(x.shape[1])):
            now = states[step + 1]
            out["out"] += now.T @ errors[step]
            back = (errors[step] @ given["out"].T + back) * (1 - now**2)
            np.add.at(out["into"], x[:, step], back)
            out["again"] += states[step].T @ back
            out["bias"] += back.sum(axis=0)
            back = back @ given["again"].T
        out["last"] += errors.sum(axis=(0, 1))
        norm = float(np.sqrt(sum((part**2).sum() for part in out.values())))
        for part in out.values():
            part *= np.float32(min(1.0, self._MOST / max(norm, 1e-12)))


#: By name: the class, and the width of the model in a preview and in full.
TASKS: dict[str, tuple[type[Any], int, int]] = {
    "softmax": (Softmax, 256, 4096),
    "perceptron": (Perceptron, 32, 512),
    "recurrent": (Recurrent, 16, 160),
}


@cache
def make_task(name: str, small: bool, seed: int, times: int = 1) -> Task:
    """Return a task by name, with a model ``times`` as wide as usual."""
    kind, narrow, wide = TASKS[name]
    made: Task = kind(times * (narrow if small else wide), seed)
    return made


@cache
def _digits(seed: int) -> Samples:
    from sklearn.datasets import load_digits

    images, digits = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(digits))
    images = ((images - images.mean()) / images.std()).astype(np.float32)
    train, test = order[_TEST:], order[:_TEST]
    return Samples(images[train], digits[train], images[test], digits[test])


@cache
def _text(seed: int) -> Samples:
    """Return pieces of text, and the next character for each of theirs."""
    from importlib.resources import files

    folder = files("sklearn.datasets.descr")
    documents = [file.read_text("utf-8") for file in sorted(folder.iterdir(), key=lambda file: file.name) if file.name.endswith(".rst")]
    characters = np.array([_ALPHABET.index(each) for each in "\n".join(documents).lower() if each in _ALPHABET])
    starts = np.arange((len(characters) - 1) // _PIECE) * _PIECE
    starts = np.random.default_rng((seed, 2)).permutation(starts)[: _PIECES + _TEST_PIECES]
    x, y = (characters[starts[:, None] + np.arange(_PIECE) + shift] for shift in (0, 1))
    count = len(starts) // 5
    return Samples(x[count:], y[count:], x[:count], y[:count])


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances: Array = powers / powers.sum(axis=1, keepdims=True)
    return chances


def _errors(scores: Array, classes: Array) -> Array:
    """Return the derivative of the mean cross-entropy by the scores."""
    errors = _softmax(scores)
    errors[np.arange(len(classes)), classes] -= 1
    return (errors / len(classes)).astype(np.float32)
