"""A perceptron with two hidden layers, in NumPy, trained with every optimiser: loss against epochs, and against bytes sent.

mpiexec -n 4 python examples/perceptron.py --plot perceptron.png          (or without mpiexec, on one process)
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import sparseallreduce as sar
from sparseallreduce import optim

OPTIMISERS = {
    "dense SGD": optim.DenseSGD,
    "TopK SGD": optim.TopKSGD,
    "approximate TopK SGD": optim.ApproximateTopKSGD,
    "Ok-Topk SGD": optim.OkTopkSGD,
    "gTop-k SGD": optim.GTopkSGD,
    "MSTopK SGD": optim.MSTopKSGD,
}


class Perceptron:
    """Layers of rectified linear units, and a softmax at the end; ``parameters`` are a matrix and a bias for each layer."""

    def __init__(self, widths, seed=0):
        rng = np.random.default_rng(seed)
        self.parameters = []
        for before, after in pairwise(widths):
            self.parameters.append(rng.normal(0, np.sqrt(2 / before), (before, after)).astype(np.float32))
            self.parameters.append(np.zeros(after, np.float32))

    def loss_and_gradients(self, x, y):
        """The mean loss of the samples, and its derivative by every parameter."""
        inputs, probabilities = self._forward(x)
        loss = -np.log(np.maximum(probabilities[np.arange(len(y)), y], 1e-30)).mean()
        slope = probabilities
        slope[np.arange(len(y)), y] -= 1
        slope /= len(y)
        gradients = []
        for number in reversed(range(len(inputs))):
            gradients[:0] = [inputs[number].T @ slope, slope.sum(0)]
            slope = (slope @ self.parameters[2 * number].T) * (inputs[number] > 0)
        return float(loss), gradients

    def accuracy(self, x, y):
        return float((self._forward(x)[1].argmax(1) == y).mean())

    def _forward(self, x):
        """What goes into each layer, and the probabilities of the classes."""
        inputs = []
        for weights, bias in zip(self.parameters[::2], self.parameters[1::2]):
            inputs.append(x)
            scores = x @ weights + bias
            x = np.maximum(scores, 0)
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        return inputs, exponentials / exponentials.sum(1, keepdims=True)


def digits():
    """1,500 images of 8 x 8 pixels to learn from, and 297 to test with."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    x = (x[order] / 16).astype(np.float32)
    return (x[:1500], y[order][:1500]), (x[1500:], y[order][1500:])


def batches(samples, size, epoch, rank, ranks):
    """This rank's share of every batch of an epoch."""
    order = np.random.default_rng(epoch).permutation(samples)
    for start in range(0, samples - size + 1, size):
        yield order[start + rank : start + size : ranks]


def train(optimiser, arguments, comm):
    """Loss, test accuracy and bytes sent by a rank until then, after every epoch."""
    (x, y), test = digits()
    model = Perceptron([64, 256, 128, 10])
    optimizer = optimiser(model.parameters, arguments.learning_rate, arguments.density, comm, momentum=0.9)
    history, sent = [], 0
    for epoch in range(arguments.epochs):
        with sar.trace() as traffic:
            for rows in batches(len(y), arguments.batch, epoch, comm.rank, comm.size):
                _, gradients = model.loss_and_gradients(x[rows], y[rows])
                optimizer.step(gradients)
        sent += traffic.bytes_sent
        history.append({"loss": model.loss_and_gradients(x, y)[0], "test_accuracy": model.accuracy(*test), "bytes_sent": sent})
    return history


def plot(histories, path, title):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    epochs, volumes = figure.subplots(1, 2, sharey=True)
    for name, history in histories.items():
        losses = [each["loss"] for each in history]
        epochs.plot(range(1, len(losses) + 1), losses, label=name)
        volumes.plot([each["bytes_sent"] / 1e6 for each in history], losses, label=name)
    epochs.set(xlabel="epochs", ylabel="training loss", yscale="log")
    volumes.set(xlabel="MB sent by rank 0", xscale="log")
    epochs.legend()
    figure.savefig(path, dpi=150)


def communicator():
    """Return all ranks, or one alone where there is no MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return sar.SERIAL
    return MPI.COMM_WORLD


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimisers", default=",".join(OPTIMISERS), help="names separated by commas")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=100, help="samples a step, of all ranks")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--plot", type=Path, help="where to draw the curves")
    parser.add_argument("--json", type=Path, help="where to write them")
    arguments = parser.parse_args()
    comm = communicator()
    histories = {}
    for name in arguments.optimisers.split(","):
        with threadpool_limits(1):  # the ranks of a machine share its cores
            histories[name] = train(OPTIMISERS[name], arguments, comm)
        if comm.rank == 0:
            last = histories[name][-1]
            figures = f"loss {last['loss']:.4f}, test accuracy {last['test_accuracy']:.3f}, {last['bytes_sent'] / 1e6:.2f} MB sent"
            print(f"{name:21}{figures}", flush=True)
    if comm.rank == 0 and arguments.json:
        arguments.json.write_text(json.dumps({"ranks": comm.size, "density": arguments.density, "histories": histories}, indent=1) + "\n")
    if comm.rank == 0 and arguments.plot:
        plot(histories, arguments.plot, f"density {arguments.density:g}, {comm.size} ranks")


if __name__ == "__main__":
    main()
