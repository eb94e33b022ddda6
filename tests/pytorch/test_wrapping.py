"""What people do with models and optimisers besides: each has to go on working around ours, or is refused by name. On one rank."""

import copy

import pytest

torch = pytest.importorskip("torch")

from nets import backward, batch, bits, flat, net
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sparseallreduce as sar
from sparseallreduce.errors import CheckpointError
from sparseallreduce.torch import DenseSGD, OkTopkSGD, SparseLoCo, TopKSGD, distributed, flatten_state, unflatten_state

SETTINGS = {"density": 0.2, "comm": sar.SERIAL, "bucket_bytes": 2048}


def steps(model, optimizer, count, first=0, run=None, **zero):
    for step in range(first, first + count):
        optimizer.zero_grad(**zero)
        images, classes = batch(step)
        nn.functional.cross_entropy((run or model)(images), classes).backward()
        optimizer.step()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_compiled_model_trains_as_the_model_itself(overlap):
    models = net(), net()
    for model, run in zip(models, (models[0], torch.compile(models[1], backend="aot_eager"))):
        optimizer = TopKSGD(model.parameters(), 0.05, overlap=overlap, **SETTINGS)
        steps(model, optimizer, 3, run=run)
    torch.testing.assert_close(flat(models[0]), flat(models[1]), rtol=1e-4, atol=1e-5)


class Tied(nn.Module):
    """An embedding whose weights score the next word, too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words):
        return self.head(self.embedding(words))


@pytest.mark.parametrize("overlap", [False, True])
def test_tied_weights_are_one_parameter_with_both_gradients(overlap):
    model, theirs = Tied(), Tied()
    optimizer = DenseSGD(model.parameters(), 0.1, overlap=overlap, comm=sar.SERIAL)
    reference = torch.optim.SGD(theirs.parameters(), 0.1)
    for step in range(4):
        words = torch.arange(6) + step
        for each, own in ((model, optimizer), (theirs, reference)):
            own.zero_grad()
            nn.functional.cross_entropy(each(words), words + 1).backward()
            own.step()
    assert model.head.weight is model.embedding.weight
    assert bits(model) == bits(theirs)


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_that_thaw_later_take_part_from_then_on(overlap):
    model = net()
    for parameter in model[4].parameters():
        parameter.requires_grad_(False)
    optimizer = TopKSGD(model.parameters(), 0.05, overlap=overlap, **SETTINGS)
    before = bits(model[4])
    steps(model, optimizer, 3)
    assert bits(model[4]) == before
    for parameter in model[4].parameters():
        parameter.requires_grad_(True)
    steps(model, optimizer, 3, 3)
    assert bits(model[4]) != before


@pytest.mark.parametrize("overlap", [False, True])
def test_an_average_of_the_weights_is_that_of_the_steps(overlap):
    model = net()
    optimizer = TopKSGD(model.parameters(), 0.05, overlap=overlap, **SETTINGS)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    expected = None
    for step in range(4):
        steps(model, optimizer, 1, step)
        average.update_parameters(model)
        expected = flat(model) if expected is None else 0.5 * expected + 0.5 * flat(model)
    torch.testing.assert_close(flat(average.module), expected, rtol=1e-5, atol=1e-6)
    backward(average.module, 0)  # a copy, of which the optimiser knows nothing
    steps(model, optimizer, 1, 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_that_are_zeros_and_those_that_are_none_are_the_same(overlap):
    models = net(), net()
    for model, to_none in zip(models, (True, False)):
        optimizer = OkTopkSGD(model.parameters(), 0.05, overlap=overlap, momentum=0.9, **SETTINGS)
        steps(model, optimizer, 4, set_to_none=to_none)
    assert bits(models[0]) == bits(models[1])


@pytest.mark.parametrize("overlap", [False, True])
def test_hooks_after_accumulation_change_what_is_summed(overlap):
    """If they were registered before, as hooks are called in that order."""

    def clamp(parameter):
        parameter.grad.clamp_(-0.01, 0.01)

    models = net(), net()
    for model, hooked in zip(models, (True, False)):
        if hooked:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(clamp)
        optimizer = TopKSGD(model.parameters(), 0.05, overlap=overlap and hooked, **SETTINGS)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, step)
            if not hooked:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
    assert bits(models[0]) == bits(models[1])


def test_a_hook_that_steps_a_parameter_after_accumulation_goes_without_the_optimiser():
    """As those who fuse steps into back-propagation have one optimiser a parameter."""
    model = net()
    optimizers = {parameter: DenseSGD([parameter], 0.1, comm=sar.SERIAL) for parameter in model.parameters()}
    theirs = net()
    reference = torch.optim.SGD(theirs.parameters(), 0.1)

    def take(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    for step in range(3):
        backward(model, step)
        backward(theirs, step)
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(flat(model), flat(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("how", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("exists", [False, True])
def test_fused_and_foreach_are_passed_on(base, how, exists):
    models = net(), net()
    for model, given in zip(models, (how, {})):
        if exists:
            optimizer = distributed(base(model.parameters(), 0.01, **given), "topk", **SETTINGS)
        else:
            optimizer = distributed(base, "topk")(model.parameters(), 0.01, **given, **SETTINGS)
        assert all(optimizer.param_groups[0][name] == value for name, value in given.items())
        steps(model, optimizer, 3)
    torch.testing.assert_close(flat(models[0]), flat(models[1]), rtol=1e-4, atol=1e-3)  # where Adam divides by next to nothing


def test_capturable_where_pytorch_has_it_not_is_refused_by_name_and_changes_nothing():
    model = net()
    optimizer = distributed(torch.optim.AdamW, "topk")(model.parameters(), 0.01, capturable=True, **SETTINGS)
    before = bits(model)
    with pytest.raises((AssertionError, RuntimeError), match="capturable"):
        steps(model, optimizer, 1)
    assert bits(model) == before
    optimizer.param_groups[0]["capturable"] = False
    steps(model, optimizer, 1)
    assert bits(model) != before


def test_clip_grad_norm_is_that_of_pytorch_and_of_sparse_gradients_ours():
    def reader():
        torch.manual_seed(0)
        return nn.ModuleList([nn.Embedding(20, 4, sparse=True), nn.Linear(4, 3)])

    def grads(model, words):
        model.zero_grad()
        (100 * model[1](model[0](words))).square().sum().backward()

    model, theirs = reader(), reader()
    optimizer = DenseSGD(model.parameters(), 0.1, clip_norm=0.5, comm=sar.SERIAL)
    reference = torch.optim.SGD(theirs.parameters(), 0.1)
    for step in range(3):
        words = torch.tensor([1, 1, step + 2])
        grads(model, words)
        grads(theirs, words)
        theirs[0].weight.grad = theirs[0].weight.grad.to_dense()  # PyTorch's clipping takes no sparse ones
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(flat(model), flat(theirs), rtol=1e-4, atol=1e-5)
    dense = net()
    other = TopKSGD(dense.parameters(), 0.1, **SETTINGS)
    backward(dense, 0)
    norm = nn.utils.clip_grad_norm_(dense.parameters(), 1e-4)
    before = flat(dense)
    other.step()
    assert norm > 1e-4 and (flat(dense) - before).norm() <= 1.001e-5


def groups_of(model):
    return [
        {"params": model[0].parameters(), "reducer": "gtopk", "density": 0.3},
        {"params": [*model[1].parameters(), *model[6].parameters()], "reducer": "dense"},
        {"params": model[4].parameters()},
    ]


@pytest.mark.parametrize("overlap", [False, True])
def test_each_group_is_summed_by_its_own_reducer(overlap):
    model, theirs = net(), net()
    optimizer = OkTopkSGD(groups_of(model), 0.05, overlap=overlap, momentum=0.9, **SETTINGS)
    parts = groups_of(theirs)
    kinds = (distributed(torch.optim.SGD, "gtopk"), DenseSGD, OkTopkSGD)
    settings = [{**SETTINGS, "momentum": 0.9, "density": part.get("density", 0.2)} for part in parts]
    others = [kind(part["params"], 0.05, **own) for kind, part, own in zip(kinds, parts, settings)]
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
        theirs.zero_grad()
        backward(theirs, step)
        for other in others:
            other.step()
    torch.testing.assert_close(flat(model), flat(theirs), rtol=1e-6, atol=1e-7)
    assert len({type(each.feedback.reducer) for each in optimizer._buckets if each.feedback is not None}) == 2
    assert all(residual is None for residual in optimizer.residuals[2:4])


def test_reducers_of_groups_are_known_saved_and_not_changed_on_the_way():
    model = net()
    with pytest.raises(sar.AlgorithmError, match="no reducer 'magic'"):
        OkTopkSGD([{"params": model.parameters(), "reducer": "magic"}], 0.05, **SETTINGS)
    optimizer = OkTopkSGD(groups_of(model), 0.05, **SETTINGS)
    steps(model, optimizer, 2)
    again = copy.deepcopy(model)
    other = OkTopkSGD(groups_of(again), 0.05, **SETTINGS)
    other.load_state_dict(optimizer.state_dict())
    steps(model, optimizer, 3, 2)
    steps(again, other, 3, 2)
    assert bits(model) == bits(again)
    optimizer.param_groups[0]["reducer"] = "topk"
    with pytest.raises(sar.AlgorithmError, match="chosen when the group is added"):
        steps(model, optimizer, 1)
    optimizer.param_groups[0]["reducer"] = "gtopk"
    steps(model, optimizer, 1)


MAKERS = {
    "OkTopkSGD": lambda model: OkTopkSGD(model.parameters(), 0.05, momentum=0.9, **SETTINGS),
    "AdamW": lambda model: distributed(torch.optim.AdamW, "gtopk")(model.parameters(), 0.01, **SETTINGS),
    "SparseLoCo": lambda model: SparseLoCo(torch.optim.AdamW(model.parameters(), 0.01), 3, 0.1, delay=2, comm=sar.SERIAL),
}


def through_safetensors(tensors, path):
    files = pytest.importorskip("safetensors.torch")
    files.save_file(tensors, path / "state.safetensors")
    return files.load_file(path / "state.safetensors")


def through_distributed_checkpoint(tensors, path):
    import torch.distributed.checkpoint as dcp

    dcp.save(tensors, checkpoint_id=path, no_dist=True)
    found = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    empty = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in found.items()}
    dcp.load(empty, checkpoint_id=path, no_dist=True)
    return empty


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # as it is meant to be
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("through", [through_safetensors, through_distributed_checkpoint])
def test_a_state_goes_through_formats_that_hold_tensors_alone_to_the_bit(kind, through, tmp_path):
    model = net()
    optimizer = MAKERS[kind](model)
    steps(model, optimizer, 4)
    saved = through(flatten_state({"model": model.state_dict(), "optimizer": optimizer.state_dict()}), tmp_path)
    steps(model, optimizer, 5, 4)
    again = net(seed=1)
    other = MAKERS[kind](again)
    state = unflatten_state(saved)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    steps(again, other, 5, 4)
    assert bits(again) == bits(model)


def test_states_that_are_cut_or_hold_something_else_are_refused():
    tensors = flatten_state({"state": {0: {"mean": torch.ones(3)}}, "rates": (0.1, None, True, "x")})
    assert unflatten_state(tensors)["rates"] == (0.1, None, True, "x")
    with pytest.raises(CheckpointError, match="not all of them"):
        unflatten_state({name: tensor for name, tensor in tensors.items() if "mean" not in name})
    with pytest.raises(CheckpointError):
        unflatten_state({"outline": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(sar.StreamTypeError, match="at rates function"):
        flatten_state({"rates": lambda step: step})
    with pytest.raises(sar.StreamTypeError, match="two tensors"):
        flatten_state({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}})
