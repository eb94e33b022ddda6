"""P replicas of some parameters, optimisers for them, and gradients, made from a seed."""

import numpy as np

import sparseallreduce as sar
from sparseallreduce.optim import simulated_step

SHAPES = [(7, 5), (5,), (), (3, 2, 4)]
SIZE = sum(int(np.prod(shape)) for shape in SHAPES)


class Replicas:
    """Parameters of several shapes, or a flat vector of as many elements, one set for each of P ranks."""

    def __init__(self, kind, ranks, *arguments, flat=False, dtype=np.float64, seed=0, **settings):
        self.flat, self.dtype, self.rng = flat, dtype, np.random.default_rng(seed)
        start = self.drawn()
        self.parameters = [self.shaped(start) for _ in range(ranks)]
        self.optimizers = [kind(own, *arguments, comm=sar.SERIAL, **settings) for own in self.parameters]

    def drawn(self):
        return self.rng.normal(size=SIZE).astype(self.dtype)

    def shaped(self, vector):
        """A copy of a vector in the form of the parameters."""
        if self.flat:
            return vector.copy()
        cuts = np.cumsum([int(np.prod(shape)) for shape in SHAPES])[:-1]
        return [part.reshape(shape).copy() for part, shape in zip(np.split(vector, cuts), SHAPES)]

    def joined(self, rank=0):
        own = self.parameters[rank]
        return own.copy() if self.flat else np.concatenate([np.ravel(array) for array in own])

    def step(self, gradients=None, **how):
        """A step with random gradients, or these; returns them, as vectors, and the simulations."""
        gradients = [self.drawn() for _ in self.optimizers] if gradients is None else gradients
        return gradients, simulated_step(self.optimizers, [self.shaped(gradient) for gradient in gradients], **how)

    def assert_alike(self):
        assert len({self.joined(rank).tobytes() for rank in range(len(self.parameters))}) == 1, "replicas have drifted apart"


def top(vector, k):
    """Where the k largest magnitudes are, of equals those of lower index."""
    chosen = np.zeros(len(vector), bool)
    chosen[np.argsort(-np.abs(vector), kind="stable")[:k]] = True
    return chosen
