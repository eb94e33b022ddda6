"""What the networks learn: scikit-learn's digits, and sources of Python's standard library, a character after the other."""

from __future__ import annotations

import encodings
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits

__all__ = ["TEXTS", "Data", "Samples", "data_of", "digits", "documentation", "shares", "sources", "text"]

CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))  # others are spaces or question marks


class Samples(NamedTuple):
    """Inputs and what they should give, the first dimension of both is that of the samples."""

    x: torch.Tensor
    y: torch.Tensor


class Data(NamedTuple):
    """A data set, the same on every machine that has the same version of Python and of scikit-learn."""

    train: Samples
    test: Samples
    classes: int


@cache
def digits() -> Data:
    """1,500 images of 8 x 8 pixels to learn from, and 297 to test with."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = torch.tensor(pixels[order], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels[order])
    return Data(Samples(x[:1500], y[:1500]), Samples(x[1500:], y[1500:]), 10)


@cache
def text(length: int = 32) -> Data:
    """Pieces of the code pages of Python's package `encodings`, 36,000 of 32 characters.

    They are in any order. A twelfth of them is to test with, of which 512 pieces are taken.
    """
    folder = Path(encodings.__file__).parent
    whole = "\n".join(path.read_text("utf-8") for path in sorted(folder.glob("*.py")) if path.name.startswith(("cp", "iso", "mac", "koi")))
    return _pieces(whole, length, 512)


@cache
def documentation(length: int = 32) -> Data:
    """Pieces of Python's documentation of its language, as `help()` shows it: 14,500 of 32 characters, a twelfth of them to test with."""
    return _pieces("\n".join(topics[name] for name in sorted(topics)), length, 2**20)


@cache
def sources(length: int = 32) -> Data:
    """Pieces of the modules of Python's standard library that are no packages, 140,000 of 32 characters, 2,048 of them to test with."""
    whole = "\n".join(path.read_text("utf-8") for path in sorted(Path(encodings.__file__).parents[1].glob("*.py")))
    return _pieces(whole, length, 2048)


#: Texts to learn by their names.
TEXTS = {"documentation": documentation, "sources": sources}


def _pieces(whole: str, length: int, most_tests: int) -> Data:
    numbers = np.full(128, CHARACTERS.index(" "))
    numbers[[ord(character) for character in CHARACTERS]] = range(len(CHARACTERS))
    codes = torch.from_numpy(numbers[np.frombuffer(whole.encode("ascii", "replace"), np.uint8)])
    pieces = (len(codes) - 1) // length
    x, y = (codes[shift : shift + pieces * length].reshape(pieces, length) for shift in (0, 1))
    last = pieces - pieces // 12
    order = torch.from_numpy(np.random.default_rng(0).permutation(pieces))
    train, test = order[:last], order[last:][:most_tests]
    return Data(Samples(x[train], y[train]), Samples(x[test], y[test]), len(CHARACTERS))


def data_of(model: str) -> Data:
    """What a model learns."""
    return text() if model in ("lstm", "transformer") else digits()


def shares(samples: int, batch: int, seed: int, rank: int, ranks: int) -> np.ndarray:
    """This rank's samples of every batch of an epoch, of shape (steps, batch / ranks).

    The batches of all ranks together depend on the seed alone.
    """
    order = np.random.default_rng(seed).permutation(samples)
    steps = samples // batch
    return order[: steps * batch].reshape(steps, batch)[:, rank::ranks]
