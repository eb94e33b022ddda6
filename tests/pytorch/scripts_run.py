"""A script as people have it for torchrun, and initialisation by the library. What test_run.py runs."""

import os
import sys
from datetime import timedelta

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from sparseallreduce.torch import init_process_group


class Samples(torch.utils.data.Dataset):
    """Samples that a worker of a DataLoader computes, by a sum that is its own alone."""

    def __len__(self):
        return 6

    def __getitem__(self, number):
        import sparseallreduce as sar

        return torch.from_numpy(sar.allreduce(sar.SparseStream([number], [1.0], 6)).to_dense()).float()


def main():
    how, *rest = sys.argv[1:]
    if how == "exit":
        sys.exit(int(rest[0]) if os.environ["RANK"] == "1" else 0)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    if how == "fail" and rank == 1:
        raise ValueError("this rank alone fails")
    torch.manual_seed(rank)
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for method in ("fork", "spawn"):
        for batch in torch.utils.data.DataLoader(Samples(), batch_size=3, num_workers=1, multiprocessing_context=method):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
    weights = [torch.empty(1, 6) for _ in range(distributed.get_world_size())]
    distributed.all_gather(weights, model.module.weight.data)
    assert all(torch.equal(each, weights[0]) for each in weights)
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"
    print("trained", *(os.environ[name] for name in names), *rest, flush=True)
    distributed.destroy_process_group()
    again()


def again():
    """Have process groups one after the other, which PyTorch's own initialisation under torchrun does not allow."""
    for _ in range(2):
        init_process_group("gloo", timeout=timedelta(seconds=60))
        found = torch.ones(1)
        distributed.all_reduce(found)
        assert found == distributed.get_world_size()
        distributed.destroy_process_group()
    print("again", flush=True)


if __name__ == "__main__":
    main()
