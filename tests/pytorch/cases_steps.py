"""Steps of the optimisers over MPI: the same bits everywhere, nothing lost, and the mean of all ranks' gradients."""

import copy
import io

import pytest
import torch
from mpi_cases import each, on_ranks
from nets import ALL, LOSSY, assert_alike, backward, bits, flat, flat_gradient, mean_over, net
from torch import nn

import sparseallreduce as sar
from sparseallreduce.torch import AutoSGD, DenseSGD, GTopkSGD, OkTopkSGD, TopKSGD, distributed

FORMS = {
    "plain": {},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "dampened": {"momentum": 0.9, "dampening": 0.1},
}


@each(kind=ALL, form=FORMS)
def case_replicas_stay_the_same_to_the_bit(comm, kind, form):
    model = net(seed=comm.rank)
    optimizer = kind(model.parameters(), 0.05, density=0.05, comm=comm, bucket_bytes=4000, **FORMS[form])
    assert_alike(comm, model)
    before = bits(model)
    for step in range(6):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    assert bits(model) != before
    assert_alike(comm, model)


@each(form=FORMS)
def case_parameters_begin_with_those_of_rank_0_and_descend_by_the_mean_gradient(comm, form):
    model = net(seed=comm.rank)
    DenseSGD(model.parameters(), 0.1, comm=comm)
    assert bits(model) == bits(net(seed=0))
    reference = copy.deepcopy(model)
    optimizer = DenseSGD(model.parameters(), 0.1, comm=comm, **FORMS[form])
    theirs = torch.optim.SGD(reference.parameters(), 0.1, **FORMS[form])
    for step in range(4):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        with torch.no_grad():
            for parameter, own in zip(reference.parameters(), model.parameters()):
                parameter.grad = mean_over(comm, own.grad).float()
        optimizer.step()
        theirs.step()
        torch.testing.assert_close(flat(model), flat(reference), rtol=1e-5, atol=1e-6)


@each(base=[torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop], reducer=["dense", "topk", "oktopk"])
def case_other_optimisers_take_the_mean_too(comm, base, reducer):
    model = net(seed=0)
    reference = copy.deepcopy(model)
    optimizer = distributed(base, reducer)(model.parameters(), lr=0.01, weight_decay=0.1, density=1.0, comm=comm)
    theirs = base(reference.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        with torch.no_grad():
            for parameter, own in zip(reference.parameters(), model.parameters()):
                parameter.grad = mean_over(comm, own.grad).float()
        optimizer.step()
        theirs.step()
    assert_alike(comm, model)
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-3, atol=2e-3)


@each(kind=LOSSY, overlap=[False, True], dtype=["float32", "float64"])
def case_nothing_is_lost(comm, kind, overlap, dtype):
    """What has come in, as a mean, is what the parameters have gone, and what the residuals hold."""
    model = net(seed=1, dtype=getattr(torch, dtype))
    rate = 0.25
    optimizer = kind(model.parameters(), rate, density=0.03, comm=comm, overlap=overlap, bucket_bytes=5000)
    before, fed = flat(model), torch.zeros_like(flat(model))
    for step in range(7):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        fed += flat_gradient(model)
        optimizer.step()
    unit = 1.0 if kind is OkTopkSGD else rate  # in which residuals are
    held = torch.cat([each.double().reshape(-1) for each in dense_residuals(optimizer)])
    torch.testing.assert_close(before - flat(model) + unit * mean_over(comm, held), rate * mean_over(comm, fed), rtol=1e-3, atol=1e-4)


def dense_residuals(optimizer):
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return [torch.zeros(own.shape) if each is None else each for own, each in zip(parameters, optimizer.residuals)]


@each(kind=[OkTopkSGD, GTopkSGD, TopKSGD])
def case_biases_and_normalisation_are_summed_whole(comm, kind):
    model = net()
    optimizer = kind(model.parameters(), 0.1, density=0.01, comm=comm)
    backward(model, comm.rank)
    mean = mean_over(comm, model[1].weight.grad)
    before = model[1].weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close((before - model[1].weight.detach()).double() / 0.1, mean, rtol=1e-3, atol=1e-5)
    assert [residual is None for residual in optimizer.residuals] == [parameter.ndim <= 1 for parameter in model.parameters()]


@each(dense=[True, False])
def case_a_group_says_what_is_dense(comm, dense):
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.1, density=0.01, comm=comm, dense=dense)
    backward(model, comm.rank)
    optimizer.step()
    assert all((residual is None) == dense for residual in optimizer.residuals)


@each(kind=[OkTopkSGD, TopKSGD], overlap=[False, True])
def case_groups_have_rates_decays_and_densities_of_their_own(comm, kind, overlap):
    model = net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.0, "weight_decay": 1.0},
        {"params": [*model[1].parameters(), *model[4].parameters()], "density": 1.0},
        {"params": model[6].parameters(), "density": 0.02, "dense": False, "lr": 0.5},
    ]
    optimizer = kind(groups, 0.1, density=0.01, comm=comm, overlap=overlap)
    start = [each.detach().clone() for each in model.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    now = list(model.parameters())
    assert torch.equal(now[0], start[0]) and torch.equal(now[1], start[1]), "a rate of 0 moves nothing"
    assert (now[4] != start[4]).float().mean() > 0.5, "a density of 1 moves all that has a gradient"
    if kind is TopKSGD:  # Ok-Topk takes about k, with thresholds of the first step
        assert 0 < (now[6] != start[6]).sum() <= 3 * 2 * comm.size
    assert_alike(comm, model)


@each(kind=[OkTopkSGD, TopKSGD])
def case_at_a_rate_of_zero_nothing_moves_and_no_residual_is_lost(comm, kind):
    model = net()
    optimizer = kind(model.parameters(), 0.5, density=0.02, comm=comm)
    backward(model, comm.rank)
    optimizer.step()
    before, held = bits(model), mean_over(comm, optimizer.residuals[0])
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert bits(model) == before
    if kind is OkTopkSGD:  # whose residuals are what parameters still have to go; elsewhere what is summed has had its effect
        torch.testing.assert_close(mean_over(comm, optimizer.residuals[0]), held)


@each(overlap=[False, True])
def case_a_missing_gradient_counts_as_zero_and_missing_everywhere_leaves_the_parameter(comm, overlap):
    torch.manual_seed(0)
    layers = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    optimizer = TopKSGD(layers, 1.0, density=1.0, momentum=0.5, weight_decay=0.5, comm=comm, overlap=overlap, bucket_bytes=64)
    for step in range(2):
        optimizer.zero_grad()
        loss = layers[0].sum() + (layers[1].sum() if comm.rank == 0 else 0)
        loss.backward()
        before = [layer.detach().clone() for layer in layers]
        optimizer.step()
        if step == 0:
            torch.testing.assert_close(before[0] - layers[0], torch.full((4, 4), 1.5))
            torch.testing.assert_close(before[1] - layers[1], torch.full((4, 4), 0.5 + 1 / comm.size))
        assert torch.equal(before[2], layers[2]), "no decay and no momentum of what has no gradient anywhere"
    assert all(layer.grad is None for layer in layers[2:])
    assert_alike(comm, layers)


def case_the_gradients_of_a_rank_are_left_as_they_are(comm):
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.1, density=0.05, comm=comm)
    backward(model, comm.rank)
    before, objects = flat_gradient(model), [each.grad for each in model.parameters()]
    optimizer.step()
    assert torch.equal(before, flat_gradient(model))
    assert all(parameter.grad is given for parameter, given in zip(model.parameters(), objects))


@each(kind=[OkTopkSGD, DenseSGD])
def case_layouts_in_memory_do_not_matter(comm, kind):
    plain, channels_last = net(), net().to(memory_format=torch.channels_last)
    transposed = nn.Parameter(torch.arange(12.0).reshape(3, 4).T)
    straight = nn.Parameter(transposed.detach().contiguous())
    first = kind([*plain.parameters(), straight], 0.1, density=0.1, comm=comm, momentum=0.9)
    second = kind([*channels_last.parameters(), transposed], 0.1, density=0.1, comm=comm, momentum=0.9)
    for step in range(3):
        plain.zero_grad()
        backward(plain, comm.rank, step)
        for own, other in zip(channels_last.parameters(), plain.parameters()):
            own.grad = other.grad.to(memory_format=torch.channels_last) if own.ndim == 4 else other.grad
        for extra, optimizer in ((straight, first), (transposed, second)):
            extra.grad = torch.full_like(extra, 1.0 + comm.rank)
            optimizer.step()
        assert torch.equal(flat(plain), flat(channels_last)) and torch.equal(straight, transposed)
    assert channels_last[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert_alike(comm, channels_last)


def case_schedulers_and_closures_work(comm):
    model = net()
    optimizer = GTopkSGD(model.parameters(), 0.4, density=0.05, comm=comm, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer, 0.25, total_iters=2), torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)],
        [2],
    )
    rates = []
    for step in range(4):

        def closure(step=step):
            optimizer.zero_grad()
            return backward(model, comm.rank, step)

        assert optimizer.step(closure).requires_grad
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.2])
    one_cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
    optimizer.step()
    one_cycle.step()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    plateau.step(1.0)
    assert_alike(comm, model)


def case_a_group_is_added_on_the_way(comm):
    model = net()
    more = nn.Parameter(torch.full((6, 6), float(comm.rank)))
    optimizer = TopKSGD(model[:6].parameters(), 0.1, density=0.02, comm=comm)
    backward(model, comm.rank)
    optimizer.step()
    held = [each.clone() for each in optimizer.residuals if each is not None]
    optimizer.add_param_group({"params": [more, *model[6].parameters()], "lr": 0.5, "density": 0.1})
    assert torch.equal(more, torch.zeros(6, 6)), "with the values of rank 0"
    kept = [each for each in optimizer.residuals if each is not None]
    assert all(torch.equal(*pair) for pair in zip(held, kept))
    (model[6].weight.sum() * 2 + more.square().sum() + 50 * more.sum()).backward()
    optimizer.step()
    assert (more != 0).sum() >= 1
    assert_alike(comm, [*model.parameters(), more])
    with pytest.raises(sar.AlgorithmError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [more if comm.rank == comm.size - 1 else nn.Parameter(torch.zeros(6, 6))]})
    assert len(optimizer.param_groups) == 2
    optimizer.step()
    assert_alike(comm, [*model.parameters(), more])


@each(clip=[1e-3, 1e3])
def case_clipping_of_a_dense_sum_is_that_of_the_mean(comm, clip):
    model = net()
    reference = copy.deepcopy(model)
    optimizer = DenseSGD(model.parameters(), 0.1, comm=comm, clip_norm=clip)
    backward(model, comm.rank)
    for parameter, own in zip(reference.parameters(), model.parameters()):
        parameter.grad = mean_over(comm, own.grad).float()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
    torch.optim.SGD(reference.parameters(), 0.1).step()
    optimizer.step()
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-5, atol=1e-6)


def case_clipping_of_a_lossy_sum_limits_each_rank(comm):
    model = net()
    optimizer = TopKSGD(model.parameters(), 1.0, density=0.02, comm=comm, clip_norm=0.01, overlap=True)
    for step in range(2):
        optimizer.zero_grad()
        start = flat(model)
        backward(model, comm.rank, step)
        own = flat_gradient(model)
        scale = min(1.0, 0.01 / comm.size**0.5 / float(own.norm()))
        before = mean_over(comm, torch.cat([each.reshape(-1) for each in dense_residuals(optimizer)])) if step else 0.0
        optimizer.step()
        held = mean_over(comm, torch.cat([each.reshape(-1) for each in dense_residuals(optimizer)]))
        torch.testing.assert_close(start - flat(model) + held - before, mean_over(comm, own * scale), rtol=1e-2, atol=1e-7)


@on_ranks(2)
def case_a_hundred_layers_are_few_agreements(comm):
    layers = [nn.Parameter(torch.randn(20, 20)) for _ in range(100)] + [nn.Parameter(torch.randn(20)) for _ in range(100)]
    optimizer = OkTopkSGD(layers, 0.1, density=0.05, comm=comm)
    for layer in layers:
        layer.grad = torch.randn(layer.shape)
    optimizer.step()
    with sar.trace() as traffic:
        optimizer.step()
    assert traffic.operations == 3, "one to agree, one for the matrices, one for the biases"


def case_saved_state_goes_through_a_file_without_trust_and_goes_on_to_the_bit(comm):
    for kind in ALL:
        model = net()
        settings = {"density": 0.05, "comm": comm, "momentum": 0.9, "bucket_bytes": 4000, "momentum_correction": kind in LOSSY[::2]}
        first = kind(model.parameters(), 0.05, **settings)
        schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.9)
        for step in range(5):
            first.zero_grad()
            backward(model, comm.rank, step)
            first.step()
            schedule.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": first.state_dict(), "schedule": schedule.state_dict()}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        resumed = net(seed=5)
        second = kind(resumed.parameters(), 0.7, **settings)
        again = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)
        resumed.load_state_dict(loaded["model"])
        second.load_state_dict(loaded["optimizer"])
        again.load_state_dict(loaded["schedule"])
        for step in range(5, 9):
            for own, optimizer, scheduler in ((model, first, schedule), (resumed, second, again)):
                optimizer.zero_grad()
                backward(own, comm.rank, step)
                optimizer.step()
                scheduler.step()
        assert bits(model) == bits(resumed), kind.__name__
        assert all(torch.equal(*pair) for pair in zip(first.residuals, second.residuals) if pair[0] is not None)


def trained(comm, kind=TopKSGD, **settings):
    model = net()
    optimizer = kind(model.parameters(), 0.1, density=0.02, comm=comm, momentum=0.9, **settings)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    return model, optimizer


def velocity_of(optimizer):
    """Of the first parameter on this rank; zero if it has none."""
    size = optimizer.param_groups[0]["params"][0].numel()
    return optimizer.state_dict()["sums"]["velocities"][optimizer.comm.rank].get(0, torch.zeros(size))


@on_ranks(3)
@each(fewer=[True, False], gathered=[True, False])
def case_residuals_are_shared_out_among_another_number_of_ranks(comm, fewer, gathered):
    two = comm.Split(int(comm.rank == 2), comm.rank)
    old, new = (comm, two) if fewer else (two, comm)
    state = whole = held = None
    if comm.rank < 2 or old is comm:
        _, optimizer = trained(old, momentum_correction=True)
        held = [mean_over(old, each) for each in (optimizer.residuals[0], velocity_of(optimizer))]
        state = optimizer.state_dict()
        whole = optimizer.gather_state_dict()
    states, held, whole = comm.allgather(state), comm.bcast(held), comm.bcast(whole)
    if comm.rank < 2 or new is comm:
        resumed = net()
        optimizer = TopKSGD(resumed.parameters(), 0.1, density=0.02, comm=new, momentum=0.9, momentum_correction=True)
        if gathered:
            optimizer.load_state_dict(whole)
        elif fewer:
            optimizer.load_state_dict(states if new.rank == 0 else states[0])  # rank 0 has the files of all
        else:
            optimizer.load_state_dict(states[new.rank % 2])
        torch.testing.assert_close([mean_over(new, each) for each in (dense_residuals(optimizer)[0], velocity_of(optimizer))], held)
        backward(resumed, new.rank, 7)
        optimizer.step()
        assert_alike(new, resumed)
    two.Free()


def case_residuals_that_nobody_brings_are_an_error_on_all_ranks(comm):
    model, optimizer = trained(comm)
    state = comm.bcast(optimizer.state_dict())
    other = TopKSGD(net().parameters(), 0.1, density=0.02, comm=comm, momentum=0.9)
    with pytest.raises(ValueError, match=r"no rank brings the residuals of \[1"):
        other.load_state_dict(state)
    assert not any(each is not None and each.any() for each in other.residuals)
    other.load_state_dict(state, missing="zeros")
    backward(model, comm.rank, 9)
    assert other.steps == 4


def case_states_that_do_not_fit_are_an_error_on_all_ranks(comm):
    _, optimizer = trained(comm)
    state = optimizer.state_dict()
    other = GTopkSGD(net().parameters(), 0.1, comm=comm)
    with pytest.raises(ValueError, match="is of a TopKSGD, and this is a GTopkSGD"):
        other.load_state_dict(state if comm.rank == comm.size - 1 else other.state_dict())
    less = TopKSGD(list(net().parameters())[:3], 0.1, comm=comm)
    with pytest.raises(ValueError, match="groups of"):
        less.load_state_dict(state)
    wider = TopKSGD([nn.Parameter(torch.zeros(3, 3)) for _ in range(8)], 0.1, comm=comm)
    with pytest.raises(ValueError, match="other parameters"):
        wider.load_state_dict(state)
    plain = torch.optim.SGD(net().parameters(), 0.3, momentum=0.9)
    fresh = TopKSGD(net().parameters(), 0.1, momentum=0.9, comm=comm)
    fresh.load_state_dict(plain.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.3 and fresh.param_groups[0]["density"] == 0.01


def case_momenta_of_rank_0_come_with_synchronize(comm):
    model, optimizer = trained(comm)
    if comm.rank:
        with torch.no_grad():
            model[4].weight += 1
            optimizer.state[model[4].weight]["momentum_buffer"] *= 2
    with pytest.raises(sar.MismatchError, match=r"the replicas differ: parameter 4 of shape \(20, 128\) has other values on rank"):
        optimizer.check_replicas()
    held = optimizer.residuals[0]
    optimizer.synchronize()
    optimizer.check_replicas()
    assert torch.equal(held, optimizer.residuals[0])
    buffers = comm.allgather(optimizer.state[model[4].weight]["momentum_buffer"])
    assert all(torch.equal(buffers[0], each) for each in buffers)
    backward(model, comm.rank, 5)
    optimizer.step()
    assert_alike(comm, model)


def case_an_optimiser_that_exists_is_taken_over_with_the_state_of_rank_0(comm):
    model = net(seed=comm.rank)
    inner = torch.optim.AdamW([{"params": list(model.parameters())[:2], "lr": 0.02}, {"params": list(model.parameters())[2:]}], lr=0.01)
    for step in range(comm.rank and 3):  # rank 0 has none
        backward(model, comm.rank, step)
        inner.step()
    optimizer = distributed(inner, "oktopk", density=0.05, comm=comm)
    assert_alike(comm, model)
    assert not optimizer.state
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.01]
    assert_alike(comm, model)
    averages = comm.allgather(optimizer.state[model[0].weight]["exp_avg"])
    assert all(torch.equal(averages[0], each) for each in averages)


@each(where=range(2))
def case_a_mistake_about_an_optimiser_that_exists_is_raised_on_all_ranks(comm, where):
    inner = torch.optim.SGD(net().parameters(), 0.1)
    options = {"lr": 0.2} if comm.rank == where else {}
    with pytest.raises(sar.AlgorithmError, match="lr is a setting of the existing optimiser"):
        distributed(inner, "oktopk", comm=comm, **options)
    distributed(inner, "oktopk", comm=comm)


def case_replicas_that_were_changed_are_noticed_at_once(comm):
    model = net()
    names = dict(model.named_parameters())
    optimizer = TopKSGD(model.named_parameters(), 0.1, density=0.02, comm=comm, check_every=1)
    backward(model, comm.rank)
    optimizer.step()
    before = comm.allgather(bits(model))
    assert len(set(before)) == 1
    if comm.rank == 1:
        with torch.no_grad():
            names["4.bias"][3] = float("nan")
    changed = bits(model)
    held = optimizer.residuals
    with pytest.raises(sar.MismatchError, match=r"parameter '4.bias' of shape \(20,\) has other values on rank"):
        optimizer.step()
    assert bits(model) == changed
    assert all(torch.equal(*pair) for pair in zip(held, optimizer.residuals) if pair[0] is not None)


MISTAKES = {
    "rate": lambda optimizer, model: optimizer.param_groups[0].update(lr=0.2),
    "density": lambda optimizer, model: optimizer.param_groups[0].update(density=0.5),
    "decay": lambda optimizer, model: optimizer.param_groups[0].update(weight_decay=0.5),
    "layout": lambda optimizer, model: setattr(model[4].weight, "grad", model[4].weight.grad.to_sparse()),
    "nan": lambda optimizer, model: model[4].weight.grad.fill_(float("nan")),
}


@each(mistake=MISTAKES, overlap=[False, True])
def case_a_mistake_on_one_rank_is_raised_on_all_and_changes_no_parameter(comm, mistake, overlap):
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.1, density=0.05, comm=comm, overlap=overlap, clip_norm=1.0 if mistake == "nan" else None)
    for step in range(2):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
    before = bits(model)
    start = mean_over(comm, dense_residuals(optimizer)[0])
    kept = copy.deepcopy(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["density"]
    optimizer.zero_grad()
    backward(model, comm.rank, 2)
    if comm.rank == comm.size - 1:
        MISTAKES[mistake](optimizer, model)
    with pytest.raises(sar.SparseAllreduceError) as raised:
        optimizer.step()
    assert len(set(comm.allgather(f"{type(raised.value)} {raised.value}"))) == 1
    assert bits(model) == before
    if not overlap:
        torch.testing.assert_close(mean_over(comm, dense_residuals(optimizer)[0]), start)
    optimizer.param_groups[0].update(lr=kept[0], density=kept[1], weight_decay=0)
    optimizer.zero_grad()
    backward(model, comm.rank, 3)
    optimizer.step()
    assert_alike(comm, model)


WRONG = {
    "rate": ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    "density": ({"density": 0.0}, "the density is a share"),
    "option": ({"threshold": 3}, "threshold"),
    "nesterov": ({"nesterov": True}, "Nesterov momentum requires"),
    "bucket": ({"bucket_bytes": 0}, "bucket_bytes is the most"),
    "clip": ({"clip_norm": -1.0}, "clip_norm must be above 0"),
    "check": ({"check_every": -1}, "check_every is a number of steps"),
}


@each(wrong=WRONG, everywhere=[True, False])
def case_wrong_arguments_are_an_error_on_all_ranks(comm, wrong, everywhere):
    settings, text = WRONG[wrong]
    given = settings if everywhere or comm.rank == comm.size - 1 else {}
    with pytest.raises((ValueError, TypeError), match=text):
        OkTopkSGD(net().parameters(), **{"lr": 0.1, "comm": comm} | given)


def case_parameters_that_differ_are_an_error_on_all_ranks(comm):
    parameters = list(net().parameters())
    with pytest.raises(sar.MismatchError, match="shapes of the parameters"):
        TopKSGD(parameters[: len(parameters) - (comm.rank == 0)], 0.1, comm=comm)
    with pytest.raises(sar.MismatchError, match="disagree on the groups"):
        TopKSGD(parameters, 0.1 + 0.1 * (comm.rank == 0), comm=comm)


@each(overlap=[False, True])
def case_what_is_chosen_for_each_bucket_is_said_and_goes_on_from_a_state(comm, overlap):
    settings = {"density": 0.05, "comm": comm, "bucket_bytes": 4000, "overlap": overlap}
    for names in (["topka", "oktopk", "gtopk"], ["hitopk", "dense"]):
        model = net(seed=comm.rank)
        optimizer = AutoSGD(model.parameters(), 0.05, candidates=names, **settings)
        before = optimizer.explain()
        for step in range(4):
            optimizer.zero_grad()
            backward(model, comm.rank, step)
            optimizer.step()
        chosen = optimizer.explain()
        assert len({str(every) for every in comm.allgather(chosen)}) == 1
        assert [each.size for each in chosen] == [each.size for each in before] == [100, 2560, 216]
        assert all(each.choice in names for each in chosen)
        assert_alike(comm, model)
        resumed = net(seed=5)
        again = distributed(torch.optim.SGD, "auto")(resumed.parameters(), 0.05, candidates=names, **settings)
        state = optimizer.state_dict()
        state["sums"]["optimiser"] = type(again).__name__
        resumed.load_state_dict(model.state_dict())
        again.load_state_dict(state)
        for step in range(4, 6):
            for own, taking in ((model, optimizer), (resumed, again)):
                taking.zero_grad()
                backward(own, comm.rank, step)
                taking.step()
        assert bits(model) == bits(resumed) and [each.choice for each in again.explain()] == [each.choice for each in chosen]
    with pytest.raises(ValueError, match="there is no candidate 'best'"):
        AutoSGD(net().parameters(), 0.1, candidates=["best"], comm=comm)


def case_a_period_that_is_found_goes_on_from_a_state(comm):
    def step(model, optimizer, number):
        optimizer.zero_grad()
        backward(model, comm.rank, number)
        optimizer.step()

    settings = {"density": 0.05, "comm": comm, "threshold_period": "auto"}
    model, resumed = net(), net(seed=5)
    optimizer, again = (OkTopkSGD(own.parameters(), 0.05, **settings) for own in (model, resumed))
    for number in range(36):
        step(model, optimizer, number)
    histories = comm.allgather([bucket.feedback.reducer._history.drift for bucket in optimizer._buckets if bucket.feedback is not None])
    assert all(each == histories[0] for each in histories) and histories[0][0].number > 0
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(torch.load(file, weights_only=True))
    for number in range(36, 44):
        step(model, optimizer, number)
        step(resumed, again, number)
    assert bits(model) == bits(resumed)
    assert_alike(comm, model)


@each(kind=[OkTopkSGD, DenseSGD])
def case_parameters_without_elements_are_no_matter(comm, kind):
    parameters = [nn.Parameter(torch.ones(shape)) for shape in ((0, 3), (4, 3), (0,))]
    optimizer = kind(parameters, 0.1, density=0.5, comm=comm, check_every=1)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, comm.rank + 1.0)
        optimizer.step()
    optimizer.check_replicas()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()
    assert len({str(each) for each in comm.allgather(parameters[1].tolist())}) == 1
    assert (parameters[1] < 1).any()
    alone = kind(parameters[:1], 0.1, comm=comm)
    alone.step()


@each(ranks=["all", "one"])
def case_parameters_on_the_meta_device_are_one_error_on_all_ranks(comm, ranks):
    def made():
        device = "meta" if ranks == "all" or comm.rank == comm.size - 1 else "cpu"
        return [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4, 3, device=device))]

    optimizer = TopKSGD([nn.Parameter(torch.ones(2))], 0.1, comm=comm)
    for call in (lambda: TopKSGD(made(), 0.1, comm=comm), lambda: optimizer.add_param_group({"params": made()})):
        with pytest.raises(TypeError, match=r"parameter [12] is on the meta device, where it has a shape and no values") as told:
            call()
        assert len(set(comm.allgather(str(told.value)))) == 1


def case_a_step_that_has_begun_on_one_rank_is_an_error_of_all_that_gather_states(comm):
    parameter = nn.Parameter(torch.ones(4, 3))
    optimizer = TopKSGD([parameter], 0.1, comm=comm)
    state = optimizer.state_dict()
    optimizer._expect_idle = (lambda: 1 / 0) if comm.rank == comm.size - 1 else (lambda: None)
    for call in (optimizer.gather_state_dict, lambda: optimizer.load_state_dict(state)):
        with pytest.raises(ZeroDivisionError):
            call()
    del optimizer._expect_idle
    optimizer.load_state_dict(state)
