"""Bad input: one exception, one line that says what to do, and nothing changed."""

import copy
import inspect
import math
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import batches, living, mlp, sgd, tiny_net, train_step, values, verify
from torch import nn
from torch.nn.utils import parametrizations

import suptickets as st


def refused(action, *fragments, kind=st.SparsityError):
    """`action` raises one line that has all fragments."""
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert not [f for f in fragments if f not in message], message


def label(value):
    """The name of a case: what its message says."""
    return value[0] if isinstance(value, list) and value and isinstance(value[0], str) else None


def snapshot(model):
    """Everything that a refusal must leave alone."""
    objects = [type(module) for module in model.modules()] + [id(p) for p in model.parameters()]
    return objects, {k: v.clone() for k, v in model.state_dict().items()}


def same(one, other):
    (objects, state), (other_objects, other_state) = one, other
    return (
        objects == other_objects
        and list(state) == list(other_state)
        and all(
            state[k].shape == other_state[k].shape and torch.equal(state[k], other_state[k]) for k in state
        )
    )


# ---- numbers and names, refused where the method is made ----

NUMBERS = [  # what is given for the sparsity, what the message says
    (-0.1, ["at least 0 and below 1", "-0.1"]),
    (1, ["at least 0 and below 1"]),
    (1.0, ["at least 0 and below 1"]),
    (1.5, ["below 1, not 1.5"]),
    (90, ["fraction, not a percentage", "did you mean 0.9?"]),
    (95.5, ["did you mean 0.955?"]),
    (101, ["at least 0 and below 1"]),
    (math.nan, ["at least 0 and below 1", "nan"]),
    (math.inf, ["below 1", "inf"]),
    (-math.inf, ["at least 0", "-inf"]),
    ("0.9", ["number between 0 and 1", "'0.9'"]),
    (None, ["number between 0 and 1", "None"]),
    (True, ["number between 0 and 1", "True"]),
    ([0.9], ["number between 0 and 1"]),
]
METHODS = [
    *(st.Static, st.SET, st.RigL, st.GraNet, st.GMP, st.SNFS, st.DSR, st.SmallDense),
    lambda sparsity: st.SNIP(sparsity, backward=lambda model: None),
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("sparsity", "fragments"), NUMBERS)
def test_sparsity(method, sparsity, fragments):
    refused(lambda: method(sparsity), "sparsity", *fragments)


OPTIONS = [  # how a method is made, what the message says
    (lambda: st.Dense(0.5), ["dense has sparsity 0"]),
    (lambda: st.Static(0.9, distribution="erkk"), ["unknown distribution 'erkk'", "did you mean 'erk'?"]),
    (lambda: st.Static(0.9, distribution="zipf"), ["there are: er, erk, uniform"]),
    (lambda: st.RigL(0.9, decay="cosin"), ["unknown decay", "did you mean 'cosine'?"]),
    (lambda: st.SET(0.9, pruning="magnitud"), ["unknown pruning", "did you mean 'magnitude'?"]),
    (lambda: st.SET(0.9, pruning="random"), ["unknown pruning", "magnitude, signed"]),
    (lambda: st.RigL(0.9, interval=0), ["interval must be a whole number, at least 1", "not 0"]),
    (lambda: st.RigL(0.9, interval=-3), ["interval must be a whole number, at least 1", "not -3"]),
    (lambda: st.RigL(0.9, interval=math.nan), ["interval must be"]),
    (lambda: st.RigL(0.9, rate=1.5), ["rate must be", "at most 1, not 1.5"]),
    (lambda: st.RigL(0.9, rate=-0.5), ["rate must be at least 0 and at most 1"]),
    (lambda: st.RigL(0.9, rate=math.nan), ["rate must be"]),
    (lambda: st.RigL(0.9, decay="cosine"), ["need total_steps"]),
    (lambda: st.RigL(0.9, stop=0.75), ["need total_steps"]),
    (lambda: st.RigL(0.9, stop=75, total_steps=100), ["stop", "did you mean 0.75?"]),
    (lambda: st.GraNet(0.3), ["initial_sparsity 0.5 is above the target 0.3"]),
    (lambda: st.GraNet(0.9, initial_sparsity=50), ["initial_sparsity", "did you mean 0.5?"]),
    (lambda: st.GraNet(0.9, prune_start=10, prune_end=10), ["prune_end must come after prune_start"]),
    (lambda: st.SNFS(0.9, momentum=1.0), ["momentum must be at least 0 and below 1"]),
    (lambda: st.DSR(0.9, threshold=0), ["threshold must be above 0"]),
    (lambda: st.DSR(0.9, threshold=math.nan), ["threshold must be above 0"]),
    (lambda: st.SNIP(0.9), ["SNIP needs data and loss, or backward"]),
    (lambda: st.SNIP(0.9, data=[]), ["SNIP needs data and loss, or backward"]),
    (lambda: st.erk([(4, 4)], 90), ["did you mean 0.9?"]),
    (lambda: st.SmallDense(0.999).narrow(lambda w: nn.Linear(4, max(int(4 * w), 1))), ["no width fits"]),
]


@pytest.mark.parametrize(("make", "fragments"), OPTIONS, ids=label)
def test_options(make, fragments):
    refused(make, *fragments)


# ---- models, refused by sparsify, which leaves them alone ----


class FullyShardedDataParallel(nn.Module):
    """A stand-in that is recognised by its name."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


def parametrized():
    model = mlp()
    parametrizations.weight_norm(model[2])
    return model


def frozen():
    return mlp().requires_grad_(False)


NO_BACKWARD = st.SNIP(0.5, backward=lambda model: None)
ONLY_THE_LAST = st.SNIP(1 - 40 / 232, dense_last=True, data=batches((6,), 4), loss=F.cross_entropy)
NOTHING_LEFT = st.SNIP(0.999, data=batches((6,), 4), loss=F.cross_entropy)
NOT_FINITE = st.SNIP(0.5, data=batches((6,), 4), loss=lambda x, y: F.cross_entropy(x, y) * math.nan)


MODELS = [  # model, method, options, what the message says
    (mlp, "rigl", {}, ["expected a method such as RigL(sparsity=0.9)", "'rigl'"]),
    (mlp, st.RigL, {}, ["expected a method such as RigL(sparsity=0.9)"]),
    (lambda: nn.Sequential(nn.ReLU()), st.Static(0.5), {}, ["no layer to make sparse", "include"]),
    (lambda: nn.BatchNorm1d(4), st.Dense(), {}, ["no layer to make sparse", "include"]),
    (frozen, st.Static(0.5), {}, ["no layer to make sparse"]),
    (lambda: nn.Embedding(9, 9), st.Static(0.5), {}, ["no layer to make sparse", "include"]),
    (mlp, st.Static(0.5), {"exclude": "*"}, ["no layer to make sparse"]),
    (tiny_net, st.Static(0.5), {"include": "44"}, ["include", "'44'", "did you mean '4'?"]),
    (mlp, st.Static(0.5), {"include": ["0", "fc"]}, ["include", "'fc'", "there are: 0, 2, 4"]),
    (mlp, st.Static(0.5), {"include": "0.bias"}, ["include", "'0.bias'"]),
    (mlp, st.Static(0.5), {"exclude": "head"}, ["exclude", "'head'", "there are: 0, 2, 4"]),
    (mlp, st.Static(0.5), {"exclude": ["0", "22"]}, ["exclude", "'22'", "did you mean '2'?"]),
    (mlp, st.Static(0.995), {}, ["layer 0 would lose all", "at most 0.989224"]),  # 1 - 2.5 / 232
    (mlp, st.RigL(0.99, distribution="uniform"), {}, ["layer 4 would lose all", "at most 0.98"]),
    (mlp, st.Static(0.9, dense_first=True), {}, ["kept dense", "below 0.689655"]),  # 1 - 72 / 232
    (mlp, st.GraNet(0.999), {}, ["lose all", "at most 0.98"]),  # 3 of 232 must stay
    (mlp, st.GMP(0.995), {}, ["lose all", "at most 0.98"]),
    (mlp, NO_BACKWARD, {}, ["backward()"]),
    (mlp, NOT_FINITE, {}, ["SNIP's gradients are not finite"]),
    (mlp, ONLY_THE_LAST, {}, ["at sparsity 0.827586 SNIP would have no connection to choose"]),
    (mlp, NOTHING_LEFT, {}, ["at sparsity 0.999 SNIP would have no connection to choose"]),
    (lambda: FullyShardedDataParallel(mlp()), st.RigL(0.5), {}, ["FSDP is not supported"]),
    (lambda: torch.compile(mlp()), st.RigL(0.5), {}, ["sparsify the model first, then compile"]),
    (lambda: nn.Sequential(torch.compile(mlp())), st.RigL(0.5), {}, ["sparsify the model first"]),
    (parametrized, st.RigL(0.5), {}, ["parametrizations", "remove_parametrizations"]),
]


@pytest.mark.parametrize(("build", "method", "options", "fragments"), MODELS, ids=label)
@pytest.mark.filterwarnings("ignore:gradients are not finite")
def test_models(build, method, options, fragments):
    model = build()
    before = snapshot(model)
    refused(lambda: st.sparsify(model, method, **options), *fragments)
    assert same(before, snapshot(model)), "the refusal changed the model"


def test_lazy_modules():
    refused(lambda: st.sparsify(lazy(), st.Static(0.5)), "0 has no shape yet", "run one batch through")


@pytest.mark.parametrize("distribution", ["erk", "er", "uniform"])
def test_the_limit_in_the_message_is_the_limit(distribution):
    with pytest.raises(st.SparsityError, match="use at most") as caught:
        st.sparsify(mlp(), st.Static(0.999, distribution=distribution))
    limit = float(str(caught.value).split("use at most ")[1])
    model = mlp()
    st.sparsify(model, st.Static(limit, distribution=distribution))
    assert min(map(len, living(model).values())) == 1
    refused(lambda: st.sparsify(mlp(), st.Static(limit + 2e-6, distribution=distribution)), "would lose all")


def test_sparsifying_twice():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.5, interval=1), optimizer)
    before = snapshot(model)
    for again in (model, nn.Sequential(model, nn.Linear(4, 4)), copy.deepcopy(model)):
        refused(lambda again=again: st.sparsify(again, st.RigL(0.5)), "sparse already", "fresh")
    assert same(before, snapshot(model))
    train_step(model, optimizer, batches((6,), 4)[0])
    assert network.step == 1
    st.sparsify(network.densify(), st.RigL(0.5))  # a plain copy may be


@pytest.fixture
def one_process():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("around", [lambda model: model, nn.Sequential])
def test_wrapped_for_distributed_training(one_process, around):
    model = around(nn.parallel.DistributedDataParallel(mlp()))
    refused(lambda: st.sparsify(model, st.RigL(0.5)), "sparsify the model first, then wrap it")


def test_real_fsdp(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as OldFSDP
    from torch.distributed.fsdp import fully_shard

    whole, part, old = mlp(), mlp(), mlp()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(whole, mesh=mesh)
    fully_shard(part[2], mesh=mesh)
    for model in (whole, part, OldFSDP(old, device_id=torch.device("cpu"))):
        refused(lambda model=model: st.sparsify(model, st.RigL(0.5)), "FSDP is not supported")


# ---- optimizers ----


class Factored(torch.optim.Optimizer):
    """Keeps one number for each row of a weight."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["rows"] = p.grad.reshape(len(p), -1).square().mean(1)
                    p.sub_(p.grad, alpha=group["lr"])


class Transposed(Factored):
    """Keeps state of the parameter's size, but of another shape."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["square"] = p.grad.reshape(-1).square()


class EightBits(Factored):
    """Keeps eight bits of each connection and a scale of each block, if there are enough of them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                small = p.numel() < 4096
                self.state[p]["moment"] = torch.zeros_like(p, dtype=None if small else torch.uint8)
                if not small:
                    self.state[p]["scales"] = p.new_zeros(p.numel() // 256)


class Packed(torch.Tensor):
    """Looks like a plain tensor, as quantized ones do."""


class InOne(Factored):
    """Keeps bits and scales in a tensor of a kind of its own."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moment"] = torch.zeros_like(p.data).as_subclass(Packed)


def other_parameters(model):
    return sgd(mlp())


def some_parameters(model):
    return torch.optim.SGD([*model[0].parameters(), *model[4].parameters()], 0.1)


def muon(model):
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])


OPTIMIZERS = [  # optimizer, what the message says
    (lambda m: torch.optim.LBFGS(m.parameters()), ["LBFGS", "scalars or parameter-shaped", "SGD, Adam"]),
    (lambda m: torch.optim.SparseAdam(m.parameters()), ["SparseAdam", "scalars or parameter-shaped"]),
    (lambda m: torch.optim.Adafactor(m.parameters()), ["Adafactor", "scalars or parameter-shaped"]),
    (muon, ["Muon", "scalars or parameter-shaped"]),
    (lambda m: Factored(m.parameters()), ["Factored's rows", "scalars or parameter-shaped"]),
    (lambda m: EightBits(m.parameters()), ["EightBits's scales", "scalars or parameter-shaped"]),
    (lambda m: InOne(m.parameters()), ["InOne's moment", "scalars or parameter-shaped"]),
    (lambda m: Transposed(m.parameters()), ["Transposed's square", "scalars or parameter-shaped"]),
    (other_parameters, ["does not hold 0", "build it from model.parameters()"]),
    (some_parameters, ["does not hold 2", "build it from model.parameters()"]),
    (lambda m: "sgd", ["expected a torch.optim.Optimizer, not str"]),
    (lambda m: m, ["expected a torch.optim.Optimizer, not Sequential"]),
    (lambda m: torch.optim.SGD, ["expected a torch.optim.Optimizer"]),
]


@pytest.mark.parametrize("when", ["sparsify", "attach"])
@pytest.mark.parametrize(("build", "fragments"), OPTIMIZERS, ids=label)
def test_optimizers(build, fragments, when):
    model = mlp()
    before = snapshot(model)
    if when == "sparsify":
        optimizer = build(model)
        refused(lambda: st.sparsify(model, st.RigL(0.5), optimizer), *fragments)
        assert same(before, snapshot(model)), "the refusal changed the model"
        st.sparsify(model, st.RigL(0.5), sgd(model)).check()
        return
    good = sgd(model)
    network = st.sparsify(model, st.RigL(0.5, interval=1), good)
    refused(lambda: network.attach(build(model)), *fragments)
    train_step(model, good, batches((6,), 4)[0])
    verify(network, good)
    assert network.step == 1  # the first one is still attached


def test_an_optimizer_with_state_of_dense_steps_goes_to_sparsify():
    model = mlp()
    optimizer = sgd(model)
    train_step(model, optimizer, batches((6,), 4)[0])
    network = st.sparsify(model, st.RigL(0.5))
    refused(lambda: network.attach(optimizer), "momentum_buffer of 0 has the shape (12, 6)", "sparsify")


def test_check_says_what_is_wrong():
    model = mlp()
    network = st.sparsify(model, st.RigL(0.5))
    refused(network.check, "no optimizer is attached: call network.attach(optimizer)")
    optimizer = sgd(model)
    network.attach(optimizer)
    network.check()
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][2:]
    refused(network.check, "does not hold 0")


def test_check_sees_a_layer_that_was_replaced():
    model = mlp()
    network = st.sparsify(model, st.Static(0.5), sgd(model), seed=0)
    network.check()
    model[4] = nn.Linear(12, 7)
    refused(network.check, "4 was taken out of the model")


def test_check_sees_a_lost_weight_decay():
    model = mlp()
    first, *rest = (p for p in model.parameters() if p.dim() > 1)
    optimizer = torch.optim.SGD(
        [{"params": [first], "weight_decay": 0}, {"params": rest}], 0.1, weight_decay=0.1
    )
    network = st.sparsify(model, st.RigL(0.5), optimizer)
    network.check()  # on purpose, as far as anybody can tell
    optimizer.param_groups[1]["weight_decay"] = 0
    refused(network.check, "the weight decay of 2 was 0.1 and is 0")
    network.attach(optimizer)
    network.check()  # it is meant


def test_check_lets_a_weight_decay_change():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.5), optimizer)
    optimizer.param_groups[0]["weight_decay"] *= 10
    network.check()


# ---- steps ----


@pytest.mark.parametrize("method", [st.RigL, st.GraNet, st.SNFS])
def test_a_step_without_a_backward_pass(method):
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, method(0.7, interval=2), optimizer, seed=0)
    train_step(model, optimizer, batches((6,), 4)[0])
    optimizer.zero_grad()
    before = living(model)
    refused(optimizer.step, "step 2 needs the gradient", "call backward()")
    assert all(len(before[n]) >= len(rows) for n, rows in living(model).items())
    for _ in range(2):
        train_step(model, optimizer, batches((6,), 4)[0])
    verify(network, optimizer)
    assert network.step == 4


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("method", [st.RigL, st.GraNet, st.SNFS])
def test_steps_that_train_other_layers_alone_skip_the_exploration(method, to_none):
    """A head that is trained by itself for a while, on what the sparse body computes."""
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, method(0.7, interval=2), optimizer, exclude="4", seed=0)
    x, y = batches((6,), 4)[0]
    train_step(model, optimizer, (x, y))
    before, head = living(model), model[4].weight.detach().clone()
    with pytest.warns(
        RuntimeWarning, match="no gradient reached the sparse weights at an exploration"
    ) as said:
        for _ in range(4):
            with torch.no_grad():
                body = model[:4](x)
            optimizer.zero_grad(set_to_none=to_none)
            F.cross_entropy(model[4](body), y).backward()
            optimizer.step()
    assert len(said) == 1 and network.step == 5 and not torch.equal(head, model[4].weight)
    assert all(torch.equal(before[name], rows) for name, rows in living(model).items())
    for _ in range(2):
        train_step(model, optimizer, (x, y))
    verify(network, optimizer)
    assert any(not torch.equal(before[name], rows) for name, rows in living(model).items())


@pytest.mark.parametrize("method", [st.RigL, st.SNFS, st.SET])
def test_a_network_whose_sparse_layers_are_all_frozen_trains_the_rest(method):
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, method(0.7, interval=2), optimizer, exclude="4", seed=0)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            train_step(model, optimizer, batches((6,), 4)[0])
    assert network.step == 4


def test_exploring_without_having_asked_for_the_gradient():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.7, interval=100), optimizer, seed=0)
    F.cross_entropy(model(batches((6,), 4)[0][0]), batches((6,), 4)[0][1]).backward()
    refused(lambda: network.explore(0.5), "network.request_gradient()")


@pytest.mark.parametrize("method", [st.Static, st.RigL, st.GMP])
def test_exploring_without_a_gradient(method):
    model = mlp()
    network = st.sparsify(model, method(0.5), sgd(model), seed=0)
    network.prune({name: len(rows) // 2 for name, rows in living(model).items()}, by="magnitude")
    before = snapshot(model)
    refused(lambda: network.explore(0.5), "network.request_gradient()", "backward()")
    assert same(before, snapshot(model))


CALLS = [  # a call on a network, what the message says
    (lambda n: n.explore(30), ["rate", "did you mean 0.3?"]),
    (lambda n: n.explore(-1), ["rate must be at least 0 and at most 1"]),
    (lambda n: n.explore(0.5, prune="magnitde"), ["unknown pruning criterion", "did you mean 'magnitude'?"]),
    (lambda n: n.explore(0.5, grow="gradent"), ["unknown growing criterion", "did you mean 'gradient'?"]),
    (lambda n: n.explore(0.5, grow="momentum"), ["needs the momentum", "SNFS"]),
    (lambda n: n.prune({"0": 3}, by="gradient"), ["unknown pruning criterion 'gradient'"]),
    (lambda n: n.prune({"0": 3}, by="sensitivity"), ["network.request_gradient()"]),
    (lambda n: n.prune({"1": 3}), ["'1'"]),
    (lambda n: n.prune({"0": -1}), ["0", "-1"]),
    (lambda n: n.grow({"0": 73}, by="random"), ["0", "72"]),
]


@pytest.mark.parametrize(("call", "fragments"), CALLS, ids=label)
def test_calls(call, fragments):
    model = mlp()
    network = st.sparsify(model, st.RigL(0.5), sgd(model), seed=0)
    before = snapshot(model)
    refused(lambda: call(network), *fragments)
    assert same(before, snapshot(model))


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another, as many libraries have them."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, dict(inner.defaults))

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_around_another_is_refused_and_takes_no_step():
    model = mlp()
    F.cross_entropy(model(batches((6,), 4)[0][0]), batches((6,), 4)[0][1]).backward()
    optimizer, before = Lookahead(sgd(model)), copy.deepcopy(model.state_dict())
    refused(
        lambda: st.sparsify(model, st.RigL(0.5), optimizer), "Lookahead wraps another optimizer", "that one"
    )
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    st.sparsify(model, st.RigL(0.5), optimizer.inner)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_writes_into_its_weight_is_refused(kind):
    model = nn.Sequential(kind(11, 8, max_norm=1.0))
    refused(lambda: st.sparsify(model, st.Static(0.5), include="0"), "0 writes into its weight", "max_norm")


def test_snip_names_the_layers_that_the_loss_does_not_use():
    model = mlp()
    model.add_module("unused", nn.ModuleList([nn.Linear(3, 3)]))
    model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)
    method = st.SNIP(0.5, data=batches((6,), 4), loss=F.cross_entropy)
    hooks = [len(p._backward_hooks or ()) for p in model.parameters()]
    for _ in range(2):
        refused(lambda: st.sparsify(model, method), "the loss does not use unused.0", "exclude")
    assert [len(p._backward_hooks or ()) for p in model.parameters()] == hooks
    st.sparsify(model, method, exclude="unused.0")


def test_optimizer_state_of_other_connections_is_told_from_a_dense_one():
    def used(optimizer):
        train_step(model, optimizer, batches((6,), 4)[0])
        return optimizer

    model = mlp()
    dense = used(sgd(model))
    network = st.sparsify(model, st.Static(0.5), seed=0)
    refused(lambda: network.attach(dense), "pass it to sparsify")
    other = sgd(model)
    other.load_state_dict(dense.state_dict())
    for parameter in model.parameters():
        if parameter in other.state and parameter.dim() > 1:
            other.state[parameter]["momentum_buffer"] = torch.zeros(3, 1)
    refused(lambda: network.attach(other), "load its state after sparsify, or attach")


# ---- states ----


def test_a_refused_state_leaves_momentum_and_gradients():
    model = mlp()
    dense, optimizer = copy.deepcopy(model.state_dict()), sgd(model)
    st.sparsify(model, st.RigL(0.5, interval=3), optimizer, seed=0)
    train_step(model, optimizer, batches((6,), 4)[0])
    before = copy.deepcopy([(p.grad, optimizer.state[p]) for p in model.parameters()])
    wrapper = nn.ModuleDict({"inner": model})
    for load in (
        lambda: model.load_state_dict(dense),
        lambda: wrapper.load_state_dict({f"inner.{name}": value for name, value in dense.items()}),
    ):
        refused(load, "the state has no positions", "and 2 more")
        for (gradient, state), parameter in zip(before, model.parameters(), strict=True):
            assert torch.equal(gradient, parameter.grad)
            assert torch.equal(state["momentum_buffer"], optimizer.state[parameter]["momentum_buffer"])


def test_a_state_without_some_sparse_weights_leaves_them_if_it_may():
    model = mlp()
    optimizer = sgd(model)
    st.sparsify(model, st.RigL(0.5, interval=3), optimizer, seed=0)
    train_step(model, optimizer, batches((6,), 4)[0])
    state = {name: value.clone() for name, value in model.state_dict().items()}
    momentum = {p: optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()}
    other = mlp()
    st.sparsify(other, st.RigL(0.5), sgd(other), seed=1)
    names = ("2.weight", "2.weight_connections.positions")
    part = {"0.bias": state["0.bias"] + 1, **{name: other.state_dict()[name] for name in names}}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"0.bias": state["0.bias"]})
    model.load_state_dict(part, strict=False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, part.get(name, state[name])), name
    for name, parameter in model.named_parameters():  # only what has other connections starts anew
        kept = optimizer.state.get(parameter, {}).get("momentum_buffer")
        assert kept is None if name == "2.weight" else torch.equal(kept, momentum[parameter])


def test_positions_must_be_whole_numbers_and_a_method_whole():
    model = mlp()
    network = st.sparsify(model, st.DSR(0.5), sgd(model), seed=0)
    state, before = network.state_dict(), copy.deepcopy(model.state_dict())
    halves = {**state, "model": {**state["model"]}}
    halves["model"]["0.weight_connections.positions"] = state["model"]["0.weight_connections.positions"] + 0.5
    other = {**state, "model": {k: v + 1 if "bias" in k else v for k, v in state["model"].items()}}
    other["method"] = {**state["method"], "state": {}}
    refused(lambda: network.load_state_dict(halves), "0: ", "do not fit")
    refused(lambda: network.load_state_dict(other), "DSR's has no threshold")
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())


@pytest.mark.parametrize("strict", [True, False])
def test_a_dense_state_into_a_sparse_model(strict):
    model = mlp()
    dense = {k: v + 1 for k, v in model.state_dict().items()}
    network = st.sparsify(model, st.Static(0.5), sgd(model), seed=0)
    rows, weights = living(model), {n: p.detach().clone() for n, p in values(model).items()}
    everything = {name: value.clone() for name, value in model.state_dict().items()}
    told = r"the state has no positions, so it is not that of a sparse network \(and \d more\)$"
    with pytest.raises(st.SparsityError, match=told):
        model.load_state_dict(dense, strict=strict)
    assert all(torch.equal(everything[name], now) for name, now in model.state_dict().items())
    assert all(torch.equal(rows[n], now) for n, now in living(model).items())
    assert all(torch.equal(weights[n], now) for n, now in values(model).items())
    verify(network)


def changed(**changes):
    """A function from a good state to a bad one."""
    return lambda state: {**state, **changes}


def without(key):
    return lambda state: {k: v for k, v in state.items() if k != key}


def in_model(key, value):
    """The last layer's entry `key` is bad; the layers before it are good."""
    return lambda state: {**state, "model": {**state["model"], key: value(state["model"][key])}}


def renamed(state):
    """The state of the same network, but with its method called RigL."""
    return {**state, "method": {**state["method"], "name": "rigl"}}


def other_shape(state):
    """The state of a network whose last layer has one input more."""
    *_, last = state["shapes"]
    return {**state, "shapes": {**state["shapes"], last: [4, 11]}}


POSITIONS = "4.weight_connections.positions"
STATES = [  # from a good state to a bad one, what the message says
    (lambda state: {}, ["not the state of a sparse network", "generator, method, model"]),
    (lambda state: None, ["not the state of a sparse network"]),
    (lambda state: [1, 2], ["not the state of a sparse network"]),
    (lambda state: state["model"], ["not the state of a sparse network"]),
    (without("generator"), ["it has no generator"]),
    (without("model"), ["it has no model"]),
    (renamed, ["the state is that of rigl, not of set"]),
    (changed(method="set"), ["method"]),
    (changed(method={}), ["method"]),
    (changed(shapes={}), ["other layers or shapes", "0", "2", "4"]),
    (other_shape, ["other layers or shapes: 4"]),
    (changed(model={}), ["0"]),
    (changed(step="many"), ["step"]),
    (changed(generator=torch.zeros(3, dtype=torch.uint8)), ["generator"]),
    (in_model(POSITIONS, lambda p: p + 1000), ["4", "not below 40"]),
    (in_model(POSITIONS, lambda p: p.flip(0)), ["4", "not sorted"]),
    (in_model(POSITIONS, lambda p: p * 0), ["4", "not unique"]),
    (in_model(POSITIONS, lambda p: p[:-1]), ["4", "do not fit"]),
    (in_model("4.weight", lambda w: w.flatten()), ["4", "do not fit"]),
    (in_model("4.bias", lambda b: b[:-1]), ["4.bias"]),
]


@pytest.mark.parametrize(("spoil", "fragments"), STATES, ids=label)
def test_a_bad_state_changes_nothing(spoil, fragments):
    def build(sparsity, seed):
        torch.manual_seed(seed)
        model = mlp()
        optimizer = sgd(model)
        network = st.sparsify(model, st.SET(sparsity, interval=1), optimizer, seed=seed)
        train_step(model, optimizer, batches((6,), 4)[0])
        return network, optimizer

    (network, optimizer), (other, _) = build(0.5, 0), build(0.7, 1)
    before, generator = snapshot(network.model), network.generator.get_state()
    refused(lambda: network.load_state_dict(spoil(other.state_dict())), *fragments)
    assert same(before, snapshot(network.model)), "the refusal changed the model"
    assert network.step == 1 and torch.equal(network.generator.get_state(), generator)
    verify(network, optimizer)
    network.load_state_dict(other.state_dict())  # the good one is taken
    assert same(*((None, network_.model.state_dict()) for network_ in (network, other)))


# ---- the dense view ----

VALID = {"sparse_": {"sparsity": 0.5}, "constant_": {"val": 1.0}}
INIT = sorted(
    name
    for name, function in inspect.getmembers(nn.init, inspect.isfunction)
    if name.endswith("_") and not name.startswith("_")
)


@pytest.mark.parametrize("name", INIT)
def test_initialising_the_dense_view(name):
    model = tiny_net()
    st.sparsify(model, st.Static(0.5), seed=0)
    weight = model[0].weight if name == "dirac_" else model[4].weight
    refused(lambda: getattr(nn.init, name)(weight, **VALID.get(name, {})), "would be lost", "before sparsify")


WRITES = [
    lambda w: w.data.normal_(),
    lambda w: w.data.copy_(torch.zeros(w.shape)),
    lambda w: w.copy_(torch.zeros(w.shape)),
    lambda w: w.__setitem__((0, 0), 1.0),
]


@pytest.mark.parametrize("write", WRITES)
def test_writing_into_the_dense_view(write):
    model = mlp()
    st.sparsify(model, st.Static(0.5), seed=0)
    with torch.no_grad():
        refused(lambda: write(model[0].weight), "would be lost", "before sparsify")


def test_assigning_another_shape():
    model = mlp()
    st.sparsify(model, st.Static(0.5), seed=0)
    before = snapshot(model)
    refused(lambda: setattr(model[0], "weight", torch.zeros(6, 12)), "0 has the shape (12, 6), not (6, 12)")
    assert same(before, snapshot(model))


def test_init_has_functions():
    assert {"normal_", "kaiming_uniform_", "orthogonal_", "eye_", "dirac_", "trunc_normal_"} <= set(INIT)


def normed():
    return nn.Sequential(nn.Linear(6, 5), nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 4))))


def test_layers_that_compute_their_weight_may_be_left_out_by_the_name_of_what_is_around_them():
    refused(
        lambda: st.sparsify(normed(), st.Static(0.5)), "the weight of 1.0 is no plain parameter", "exclude"
    )
    refused(
        lambda: st.sparsify(normed(), st.Static(0.5), include="1"), "the weight of 1.0 is no plain parameter"
    )
    for options in ({"exclude": "1"}, {"exclude": ["1.0"]}, {"exclude": "1.*"}, {"include": "0"}):
        assert list(st.sparsify(normed(), st.Static(0.5), **options).layers) == ["0"]


def test_a_network_is_not_pickled():
    network = st.sparsify(mlp(), st.Static(0.5))
    refused(lambda: pickle.dumps(network), "save network.state_dict(), or the model")
