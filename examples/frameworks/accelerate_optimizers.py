"""Train with optimisers of this library that Accelerate prepares, with gradient accumulation and a scheduler.

    mpiexec -n 2 python -m sparseallreduce.torch.run examples/frameworks/accelerate_optimizers.py

The model is not prepared: DistributedDataParallel would sum its gradients as well.
"""

import torch
from accelerate import Accelerator
from torch import nn

from sparseallreduce.torch import OkTopkSGD, SparseLoCo, distributed

KINDS = {
    "OkTopkSGD": lambda model: OkTopkSGD(model.parameters(), 0.2, momentum=0.9, density=0.2),
    "AdamW": lambda model: distributed(torch.optim.AdamW(model.parameters(), 0.02), "topk", density=0.2),
    "SparseLoCo": lambda model: SparseLoCo(torch.optim.AdamW(model.parameters(), 0.02), 2, 0.2),
}


def main():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for kind, make in KINDS.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        images = torch.randn(64, 8)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, images[:, :3].argmax(1)), batch_size=4)
        own = make(model)
        optimizer, loader, scheduler = accelerator.prepare(own, loader, torch.optim.lr_scheduler.StepLR(own, 8, 0.5))
        losses = []
        for _ in range(4):
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
        assert len(loader) == 8 and own.steps == 16 and own.param_groups[0]["lr"] < 0.2
        assert sum(losses[-8:]) < 0.8 * sum(losses[:8]), losses
        if kind == "SparseLoCo":
            own.synchronize()
        own.check_replicas()
    print("prepared and trained", ", ".join(KINDS), flush=True)


if __name__ == "__main__":
    main()
