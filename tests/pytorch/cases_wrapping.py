"""What people do with models and optimisers besides, where it takes several ranks: GANs, groups with reducers, padding alone."""

import copy

import torch
from mpi_cases import each
from nets import assert_alike, backward, flat, mean_over, net
from torch import nn

from sparseallreduce.torch import DenseSGD, OkTopkSGD, distributed

RANKS = (2,)


@each(overlap=[False, True])
def case_a_generator_and_a_discriminator_have_an_optimiser_each(comm, overlap):
    """Back-propagation of the generator goes through the discriminator, whose gradients of that pass are not its own."""
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    models = [generator, discriminator]
    theirs = copy.deepcopy(models)
    ours = [DenseSGD(model.parameters(), 0.1, comm=comm, overlap=overlap) for model in models]
    for step in range(3):
        torch.manual_seed(10 * step + comm.rank)
        noise, real = torch.randn(6, 3), torch.randn(6, 4)

        def loss_of_discriminator(pair, noise=noise, real=real):
            return (pair[1](pair[0](noise).detach()) - pair[1](real)).mean()

        def loss_of_generator(pair, noise=noise):
            return -pair[1](pair[0](noise)).mean()

        for place, loss in ((1, loss_of_discriminator), (0, loss_of_generator)):
            ours[place].zero_grad()
            with ours[1 - place].no_sync():
                loss(models).backward()
            ours[place].step()
            own = list(theirs[place].parameters())
            gradients = torch.autograd.grad(loss(theirs), own)
            with torch.no_grad():
                for parameter, gradient in zip(own, gradients):
                    parameter -= 0.1 * mean_over(comm, gradient).float()
        ours[1].zero_grad()
    for model, reference in zip(models, theirs):
        assert_alike(comm, model)
        torch.testing.assert_close(flat(model), flat(reference), rtol=1e-4, atol=1e-6)


@each(overlap=[False, True], base=[torch.optim.SGD, torch.optim.SparseAdam])
def case_a_batch_of_padding_alone_on_one_rank_is_a_gradient_of_no_rows(comm, overlap, base):
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, padding_idx=0, sparse=True)
    theirs = copy.deepcopy(table)
    optimizer = distributed(base, "oktopk")(table.parameters(), lr=0.1, comm=comm, overlap=overlap)
    reference = base(theirs.parameters(), lr=0.1)
    for step in range(3):
        words = torch.zeros(3, dtype=torch.int64) if comm.rank == step % comm.size else torch.tensor([1 + step, 0, 7])
        optimizer.zero_grad()
        (table(words) * (1 + torch.arange(4))).sum().backward()
        mean = mean_over(comm, table.weight.grad.to_dense()).float()
        optimizer.step()
        theirs.weight.grad = mean.to_sparse(1)
        reference.step()
    assert_alike(comm, table)
    assert torch.equal(table.weight[0], torch.zeros(4))
    torch.testing.assert_close(table.weight, theirs.weight, rtol=1e-4, atol=1e-6)


@each(overlap=[False, True])
def case_groups_with_reducers_of_their_own_keep_replicas_alike(comm, overlap):
    model = net()
    groups = [
        {"params": model[0].parameters(), "reducer": "gtopk", "density": 0.3},
        {"params": model[4].parameters(), "reducer": "dense"},
        {"params": [*model[1].parameters(), *model[6].parameters()]},
    ]
    optimizer = OkTopkSGD(groups, 0.05, density=0.1, comm=comm, overlap=overlap, bucket_bytes=2048, check_every=1)
    reference = copy.deepcopy(model[4])
    for step in range(4):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        for own, theirs in zip(model[4].parameters(), reference.parameters()):
            theirs.grad = mean_over(comm, own.grad).float()
        optimizer.step()
        torch.optim.SGD(reference.parameters(), 0.05).step()
    assert_alike(comm, model)
    torch.testing.assert_close(flat(model[4]), flat(reference), rtol=1e-4, atol=1e-6)
