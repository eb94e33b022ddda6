"""Train a recommendation model whose tables have a million rows each: ranks send the rows of their batches, and no others.

mpiexec -n 2 python examples/recommender.py
"""

import argparse

import torch
from mpi4py import MPI
from torch import nn

import sparseallreduce as sar
from sparseallreduce.torch import OkTopkSGD, RowwiseAdagrad, distributed

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=1_000_000, help="of a table")
parser.add_argument("--steps", type=int, default=60)
TABLES, WIDTH, NUMBERS, BATCH, LOOKUPS = 4, 16, 13, 256, 4
comm = MPI.COMM_WORLD


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019): the products of dense features and of embeddings with each other say whether somebody clicks."""

    def __init__(self, rows: int, sparse: bool = True) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=sparse) for _ in range(TABLES))
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.top = nn.Sequential(nn.Linear(WIDTH + TABLES * (TABLES + 1) // 2, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in self.tables:
            nn.init.uniform_(table.weight, -0.05, 0.05)

    def forward(self, numbers: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(numbers)
        features = torch.stack([bottom, *(table(words[:, place]) for place, table in enumerate(self.tables))], 1)
        products = torch.bmm(features, features.transpose(1, 2))
        pairs = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)
        return self.top(torch.cat([bottom, products[:, pairs[0], pairs[1]]], 1)).squeeze(1)


def batch(rows: int, seed: int, samples: int = BATCH) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make clicks that depend on a few frequent words: numbers, lookups by a power law of exponent 1.05, and who clicks."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(samples, NUMBERS, generator=generator)
    uniform = torch.rand(samples, TABLES, LOOKUPS, generator=generator, dtype=torch.float64)
    words = ((1 - uniform * (1 - (rows + 1.0) ** -0.05)) ** -20 - 1).long().clamp_(0, rows - 1)
    score = ((words % 7 == 3).sum((1, 2)) - 2.0) + numbers[:, 0]
    return numbers, words, (torch.rand(samples, generator=generator) < torch.sigmoid(2 * score)).float()


def main() -> None:
    """Train, and print the loss and what was sent."""
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Recommender(given.rows)
    tables, others = list(model.tables.parameters()), [*model.bottom.parameters(), *model.top.parameters()]
    optimizers = [
        distributed(RowwiseAdagrad)(tables, lr=0.05, comm=comm, check_every=0),
        OkTopkSGD(others, lr=0.05, density=0.1, comm=comm),
    ]
    losses = []
    with sar.trace() as traffic:
        for step in range(given.steps):
            numbers, words, clicks = batch(given.rows, 1 + step * comm.size + comm.rank)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(numbers, words), clicks)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(comm.allreduce(loss.item()) / comm.size)
    if comm.rank == 0:
        first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
        sent = traffic.bytes_sent / given.steps / 1e6
        whole = sum(4 * table.numel() for table in tables) * 2 * (comm.size - 1) / comm.size / 1e6
        print(f"loss {first:.3f} -> {last:.3f}; a step sends {sent:.3f} MB a rank, whole tables would be {whole:.0f} MB")


if __name__ == "__main__":
    main()
