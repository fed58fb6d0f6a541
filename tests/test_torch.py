"""What PyTorch users do with a model and its optimizer goes on working when the model is sparse."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from helpers import same_state
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import suptickets as st

METHODS: dict[str, Callable[[], st.Method]] = {
    "static": lambda: st.Static(0.8),
    "set": lambda: st.SET(0.8, interval=3),
    "rigl": lambda: st.RigL(0.8, interval=3),
    "granet": lambda: st.GraNet(0.9, interval=3, prune_end=9),
    "snfs": lambda: st.SNFS(0.8, interval=3),
    "dsr": lambda: st.DSR(0.8, interval=3, threshold=0.05),
}
DYNAMIC = [name for name in METHODS if name != "static"]
Trained = tuple[nn.Module, torch.optim.Optimizer, st.SparseNetwork]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.Tanh(), nn.Linear(20, 4)).double()


def convnet() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.Tanh(), nn.Conv2d(6, 8, (3, 1)), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(64, 4)).double()


def convnet_3d() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Unflatten(2, (2, 3)), nn.Conv3d(1, 5, (2, 1, 3)), nn.Tanh(), nn.Conv3d(5, 3, (1, 3, 1)))
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(4)).double()


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


def adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, **options)


def sparse(
    method: str | st.Method = "rigl",
    model: nn.Module | None = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    seed: int = 0,
) -> Trained:
    model = mlp() if model is None else model
    built = optimizer(model.parameters())
    method = METHODS[method]() if isinstance(method, str) else method
    return model, built, st.sparsify(model, method, built, seed=seed)


def batch(index: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(4, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Any = 12, **options: Any) -> None:
    for index in range(steps) if isinstance(steps, int) else steps:
        x, y = batch(index, **options)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, positions, buffers and optimizer state, by name."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        found |= {
            f"{name}.{key}": torch.as_tensor(value) for key, value in state.items() if value is not None
        }
    return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert list(one) == list(other)
    for name in one:
        torch.testing.assert_close(
            one[name], other[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def values(network: st.SparseNetwork, name: str) -> nn.Parameter:
    return network.weights[name].values


# ---- names, groups, decay ----

GROUPS: dict[str, Callable[[nn.Module, str, nn.Parameter], bool]] = {
    "by dimensions": lambda model, name, parameter: parameter.dim() > 1,
    "by endswith weight": lambda model, name, parameter: name.endswith("weight"),
    "by bias in name": lambda model, name, parameter: "bias" not in name,
    "by class of the module": lambda model, name, parameter: (
        isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear) and name.endswith("weight")
    ),
}


@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("rule", GROUPS.values(), ids=GROUPS)
def test_weight_decay_groups_keep_their_decay(rule: Any, built: str) -> None:
    model = mlp()
    network = st.sparsify(model, st.RigL(0.8)) if built == "after" else None
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if rule(model, n, p)], "weight_decay": 0.5},
        {"params": [p for n, p in named if not rule(model, n, p)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    if network is None:
        network = st.sparsify(model, st.RigL(0.8), optimizer)
    else:
        network.attach(optimizer)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    (0 * model(batch(0)[0]).sum()).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        shrunk = 0.95 if name.endswith("weight") else 1.0
        torch.testing.assert_close(parameter.detach(), shrunk * before[name], rtol=1e-12, atol=0)
    network.check()


def test_names_order_and_keys_of_the_parameters_stay() -> None:
    original, (model, _, _) = convnet(), sparse(model=convnet())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in original.named_parameters()]
    assert [n for n, _ in model.named_buffers() if "connections" not in n] == [
        n for n, _ in original.named_buffers()
    ]
    keys = list(model.state_dict())
    assert [key for key in keys if not key.endswith("_connections.positions")] == list(original.state_dict())
    assert len(keys) == len(original.state_dict()) + 3


def test_the_optimizer_keeps_its_parameter_objects() -> None:
    model = mlp()
    parameters = list(model.parameters())
    sparse(model=model)
    assert all(old is new for old, new in zip(parameters, model.parameters(), strict=True))


# ---- steps ----


@pytest.mark.parametrize("method", DYNAMIC)
def test_accumulated_halves_are_one_batch(method: str) -> None:
    model, optimizer, network = sparse(method)
    train(model, optimizer)
    accumulating, its_optimizer, its_network = sparse(method)
    for index in range(12):
        x, y = batch(index)
        its_optimizer.zero_grad()
        for half in (slice(0, 4), slice(4, 8)):
            (F.cross_entropy(accumulating(x[half]), y[half]) / 2).backward()
        its_optimizer.step()
    assert_same(contents(model, optimizer), contents(accumulating, its_optimizer), 1e-10)
    assert network.nonzero == its_network.nonzero


def test_a_look_at_gradients_does_not_disturb_accumulation() -> None:
    """`torch.autograd.grad` adds to no gradient, so nothing of it belongs to the step."""
    found = []
    for looks in (0, 1, 2):
        model, optimizer, network = sparse("rigl")
        network.request_gradient()
        optimizer.zero_grad()
        for index in range(3):
            x, y = batch(index)
            for _ in range(looks):
                torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
            F.cross_entropy(model(x), y).backward()
        found.append([weight.gradient for weight in network.weights.values()])
    for plain, *others in zip(*found, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_gradients_that_are_replaced_by_zeros_start_anew() -> None:
    def collected(zeros: bool) -> list[Tensor | None]:
        model, _, network = sparse("rigl")
        network.request_gradient()
        for index in (0, 1) if zeros else (1,):
            F.cross_entropy(model(batch(index)[0]), batch(index)[1]).backward()
            if index == 0:
                for parameter in model.parameters():
                    parameter.grad = torch.zeros_like(parameter)
        return [weight.gradient for weight in network.weights.values()]

    for one, other in zip(collected(True), collected(False), strict=True):
        torch.testing.assert_close(one, other)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "fused SGD": lambda parameters: sgd(parameters, fused=True),
    "Adam": adam,
    "fused Adam": lambda parameters: adam(parameters, fused=True),
}


def train_scaled(
    trained: Trained,
    overflow_at: int,
    *,
    zero: str = "before",
    to_none: bool = True,
    forward: Any = None,
) -> None:
    """12 batches with a loss scale; before batch `overflow_at` comes one whose gradient overflows."""
    model, optimizer, _ = trained
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=10**6)
    batches = [(index, 1.0) for index in range(12)]
    batches.insert(overflow_at, (99, float("inf")))
    for index, factor in batches:
        x, y = batch(index)
        if zero == "before":
            optimizer.zero_grad(set_to_none=to_none)
        loss = F.cross_entropy((model if forward is None else forward)(x), y) * factor
        if zero == "between":
            optimizer.zero_grad(set_to_none=to_none)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("to_none", [True, False], ids=["set_to_none", "zeros"])
@pytest.mark.parametrize("zero", ["before", "between"])
@pytest.mark.parametrize("overflow_at", [1, 2, 3], ids=["before an exploring step", "at one", "after one"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_skipped_step_is_not_a_step(optimizer: Any, overflow_at: int, zero: str, to_none: bool) -> None:
    """Whether `zero_grad` comes before the forward pass, or between it and the backward pass."""
    smooth, bumpy = sparse(optimizer=optimizer), sparse(optimizer=optimizer)
    train(*smooth[:2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_scaled(bumpy, overflow_at, zero=zero, to_none=to_none)
    assert bumpy[2].step == smooth[2].step == 12
    assert_same(contents(*smooth[:2]), contents(*bumpy[:2]), 1e-10)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_skipped_step_is_not_a_step_when_driven_explicitly(optimizer: Any) -> None:
    model, optimizer, network = sparse(optimizer=optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for factor in (1.0, 1.0, float("inf"), 1.0):
        x, y = batch(0)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        network.before_step()
        scaler.step(optimizer)
        network.after_step()
        scaler.update()
    assert network.step == 3


@pytest.mark.parametrize("method", DYNAMIC)
def test_the_loss_scale_changes_nothing(method: str) -> None:
    """Not even when it changes in the middle, as it does after an overflow."""
    plain, scaled = sparse(method), sparse(method)
    train(*plain[:2])
    train_scaled(scaled, 5)
    assert_same(contents(*plain[:2]), contents(*scaled[:2]), 1e-10)


def by_hooks(network: st.SparseNetwork, step: Callable[[], Any]) -> None:
    step()


def by_hand(network: st.SparseNetwork, step: Callable[[], Any]) -> None:
    network.before_step()
    step()
    network.after_step()


def seen_scaled(trained: Trained, drive: Any, *, enabled: bool, unscale: bool = False) -> list[Any]:
    """What is there of all positions after 4 steps, the loss scale doubled after each."""
    model, optimizer, network = trained
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1, enabled=enabled)
    for index in range(4):
        x, y = batch(index)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        drive(network, lambda: scaler.step(optimizer))
        scaler.update()
    seen = [w.gradient if w.momentum is None else w.momentum for w in network.weights.values()]
    assert all(tensor is not None for tensor in seen)
    return seen


@pytest.mark.parametrize("hooks", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_momentum_knows_no_loss_scale_when_driven_explicitly(optimizer: Any, hooks: bool) -> None:
    """Without hooks nothing tells of the scale: the loop unscales first."""
    plain, scaled = (sparse(st.SNFS(0.5, interval=100), optimizer=optimizer) for _ in range(2))
    scaled[2].attach(scaled[1], hooks=hooks)
    found = seen_scaled(scaled, by_hand, enabled=True, unscale=not hooks)
    torch.testing.assert_close(found, seen_scaled(plain, by_hooks, enabled=False))


@pytest.mark.parametrize("drive", [by_hooks, by_hand])
def test_a_gradient_that_is_kept_settles_at_every_step(drive: Any) -> None:
    found = []
    for enabled in (True, False):
        trained = sparse(st.SET(0.5, interval=100))
        trained[2].request_gradient()
        found.append(seen_scaled(trained, drive, enabled=enabled))
    torch.testing.assert_close(*found)


def test_a_closure_may_complete_the_gradients_of_a_step_that_is_driven_explicitly() -> None:
    model, optimizer, network = sparse(st.SNFS(0.5, interval=100, momentum=0.0))
    (x, y), weights = batch(0), network.weights.values()

    def closure() -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    closure()
    by_hand(network, lambda: optimizer.step(closure))
    for weight in weights:  # its momentum is the gradient of all positions
        assert weight.momentum is not None and weight.values.grad is not None
        seen = weight.momentum.gather(0, weight.positions.long())
        torch.testing.assert_close(seen, weight.values.grad.flatten())


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=13),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 12),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 4),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_see_no_difference(schedule: Any, optimizer: Any) -> None:
    rates: dict[str, list[Any]] = {"dense": [], "sparse": []}
    for kind in rates:
        model = mlp()
        built = optimizer(model.parameters())
        network = st.sparsify(model, METHODS["granet"](), built) if kind == "sparse" else None
        scheduler = schedule(built)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for index in range(12):
                train(model, built, [index])
                scheduler.step()
                rates[kind].append([{**group, "params": None} for group in built.param_groups])
        if network is not None:
            network.check()
            assert network.sparsity == pytest.approx(0.9, abs=0.001)
    assert rates["sparse"] == rates["dense"]


@pytest.mark.parametrize("optimizer", [sgd, adam, torch.optim.Rprop])
def test_a_scheduler_does_not_hide_the_initial_state(optimizer: Any) -> None:
    """It replaces `optimizer.step` on the instance, and new connections still get what a step gives them."""
    plain, scheduled = sparse(optimizer=optimizer), sparse(optimizer=optimizer)
    scheduler = lr_scheduler.LambdaLR(scheduled[1], lambda _: 1.0)
    for index in range(12):
        train(*plain[:2], [index])
        train(*scheduled[:2], [index])
        scheduler.step()
    assert_same(contents(*plain[:2]), contents(*scheduled[:2]))


# ---- resizes ----


@pytest.mark.parametrize("method", ["set", "rigl"])
def test_contents_change_in_place_while_the_counts_stay(method: str) -> None:
    """So that nothing is compiled or captured again."""
    model, optimizer, network = sparse(method)
    train(model, optimizer, 1)

    def addresses() -> list[int]:
        state = [s["momentum_buffer"] for s in optimizer.state.values()]
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *state)]

    before, rows = addresses(), network.weights["1"].rows().clone()
    train(model, optimizer, 6)
    assert addresses() == before
    assert not torch.equal(network.weights["1"].rows(), rows)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_across_a_resize(to_none: bool) -> None:
    one, other = sparse("granet"), sparse("granet")
    train(*one[:2])
    model, optimizer, network = other
    for index in range(12):
        x, y = batch(index)
        optimizer.zero_grad(set_to_none=to_none)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_same(contents(*one[:2]), contents(*other[:2]))


def test_the_gradient_follows_a_resize() -> None:
    model, _, network = sparse("static")
    x, y = batch(0)
    F.cross_entropy(model(x), y).backward()
    weight = network.weights["1"]
    before = dict(zip(weight.rows().tolist(), weight.values.grad.flatten().tolist(), strict=True))
    for change, count in ((network.prune, 40), (network.grow, 55)):
        change({"1": count}, by="random")
        assert weight.values.shape == weight.values.grad.shape == (count, 1)
    after = dict(zip(weight.rows().tolist(), weight.values.grad.flatten().tolist(), strict=True))
    assert sum(after[row] == before.get(row) for row in after) >= 40
    assert all(after[row] in (0.0, before.get(row)) for row in after)


def test_an_old_loss_may_stay_alive_across_a_resize() -> None:
    one, other = sparse("granet"), sparse("granet")
    train(*one[:2])
    model, optimizer, _ = other
    losses = []
    for index in range(12):
        x, y = batch(index)
        losses.append(F.cross_entropy(model(x), y))
        optimizer.zero_grad()
        losses[-1].backward(retain_graph=True)
        optimizer.step()
    assert_same(contents(*one[:2]), contents(*other[:2]))


# ---- memory formats, dtypes, autocast ----


@pytest.mark.parametrize("when", ["before", "after", "in the middle", "and back"])
@pytest.mark.parametrize("method", METHODS)
def test_channels_last_trains_the_same(method: str, when: str) -> None:
    plain = sparse(method, convnet())
    train(*plain[:2])
    model = convnet()
    if when == "before":
        model.to(memory_format=torch.channels_last)
    model, optimizer, network = sparse(method, model)
    if when == "after":
        model.to(memory_format=torch.channels_last)
    train(model, optimizer, 5)
    if when in ("in the middle", "and back"):
        model.to(memory_format=torch.channels_last)
    train(model, optimizer, range(5, 8))
    if when == "and back":
        model.to(memory_format=torch.contiguous_format)
    train(model, optimizer, range(8, 12))
    assert_same(contents(*plain[:2]), contents(model, optimizer), 1e-10)
    x, _ = batch(50)
    torch.testing.assert_close(model(x), plain[0](x), rtol=0, atol=1e-10)
    network.check()


FORMATS = {
    "channels_last": (convnet, torch.channels_last, "3"),
    "channels_last_3d": (convnet_3d, torch.channels_last_3d, "3"),
}


def initialised(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    model(batch(0)[0])
    return model


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("build, layout, name", FORMATS.values(), ids=FORMATS)
def test_the_dense_weight_has_the_memory_format(build: Any, layout: Any, name: str, when: str) -> None:
    plain = sparse("rigl", initialised(build))
    model = initialised(build)
    if when == "before":
        model.to(memory_format=layout)
    model, optimizer, network = sparse("rigl", model)
    if when == "after":
        model.to(memory_format=layout)
    weight, original = model.get_submodule(name).weight, plain[0].get_submodule(name).weight
    assert weight.is_contiguous(memory_format=layout) and not weight.is_contiguous()
    assert torch.equal(weight, original)
    train(*plain[:2])
    train(model, optimizer)
    assert_same(contents(*plain[:2]), contents(model, optimizer), 1e-10)
    dense = network.densify().get_submodule(name).weight
    assert dense.is_contiguous(memory_format=layout)


def test_saved_positions_are_row_major_and_sorted() -> None:
    model, optimizer, network = sparse("rigl", convnet().to(memory_format=torch.channels_last))
    train(model, optimizer)
    saved = model.state_dict()["3.weight_connections.positions"]
    dense = torch.zeros(model[3].weight.numel(), dtype=torch.float64)
    dense[saved.long()] = values(network, "3").detach().flatten()
    assert torch.equal(saved, saved.sort().values)
    assert torch.equal(dense.view(model[3].weight.shape), model[3].weight.detach())


@pytest.mark.parametrize("convert", ["half", "bfloat16", "float", "double", "to"])
@pytest.mark.parametrize("method", METHODS)
def test_dtype(method: str, convert: str) -> None:
    model, optimizer, network = sparse(method, mlp().float())
    before, count = network.weights["1"].rows().clone(), network.nonzero
    model.to(torch.float64) if convert == "to" else getattr(model, convert)()
    dtype = model[1].bias.dtype
    assert model[1].weight.dtype == values(network, "1").dtype == dtype
    assert model[1].weight_connections.positions.dtype == torch.int32
    assert network.nonzero == count and torch.equal(network.weights["1"].rows(), before)
    train(model, optimizer, dtype=dtype)
    network.check()


def test_a_dtype_that_changes_in_training_takes_the_momentum_of_all_positions_along() -> None:
    model, optimizer, network = sparse("snfs", mlp().float(), lambda p: torch.optim.SGD(p, lr=0.1))
    train(model, optimizer, 4, dtype=torch.float32)
    model.double()
    train(model, optimizer, range(4, 8))
    network.check()
    assert network.weights["1"].momentum.dtype == torch.float64


class Words(nn.Module):
    """An embedding, a sum over words, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding(x).sum(1))


def test_autocast_builds_the_weight_in_bf16_but_not_that_of_an_embedding() -> None:
    model = Words()
    optimizer = sgd(model.parameters())
    network = st.sparsify(model, st.RigL(0.5, interval=2), optimizer, include=["embedding", "out"])
    x, y = torch.arange(12).view(4, 3) % 10, torch.arange(4)
    for _ in range(5):
        with torch.autocast("cpu", torch.bfloat16):
            assert model.out.weight.dtype == torch.bfloat16
            assert model.embedding.weight.dtype == torch.float32
            out = model(x)
        assert out.dtype == torch.bfloat16
        optimizer.zero_grad()
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()
        network.check()
    assert values(network, "out").dtype == values(network, "out").grad.dtype == torch.float32
    assert model.out.weight.dtype == torch.float32


def test_autocast_gives_the_gradient_of_a_dense_bf16_weight() -> None:
    model, _, network = sparse("static", mlp().float())
    plain = network.densify()
    x, y = batch(0, torch.float32)
    for module in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(module(x).float(), y)
        loss.backward()
    living = plain[1].weight.grad.flatten()[network.weights["1"].rows().long()]
    assert torch.equal(values(network, "1").grad.flatten(), living)


# ---- copies and files ----


def test_averaged_model_is_refused_in_one_line() -> None:
    model, _, network = sparse()
    with pytest.raises(st.SparsityError, match="AveragedModel.*densify") as refused:
        AveragedModel(model)
    assert "\n" not in str(refused.value)
    AveragedModel(network.densify()).update_parameters(network.densify())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("trained", ["copy", "original"])
def test_a_deep_copy_is_independent(method: str, trained: str) -> None:
    model, optimizer, network = sparse(method, convnet())
    train(model, optimizer, 5)
    twin = copy.deepcopy(model)
    its_optimizer = sgd(twin.parameters())
    other = model if trained == "copy" else twin
    before = contents(other, optimizer)
    train(twin, its_optimizer) if trained == "copy" else train(model, optimizer)
    assert_same(before, contents(other, optimizer))
    assert not torch.equal(model(batch(0)[0]), twin(batch(0)[0]))
    network.check()


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_torch(model: Any, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=weights_only)


COPIES = {"deepcopy": copy.deepcopy, "pickle": through_pickle, "torch.save": through_torch}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_computes_and_trains_like_the_original(duplicate: Any, method: str) -> None:
    model, optimizer, _ = sparse(method, convnet())
    train(model, optimizer, 5)
    twin = duplicate(model)
    x, y = batch(0)
    model.zero_grad()
    for one in (model, twin):
        F.cross_entropy(one(x), y).backward()
    assert isinstance(twin[0], nn.Conv2d) and type(twin[0]) is type(model[0])
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_has_no_tie_to_the_network(duplicate: Any) -> None:
    """It collects no gradient of all positions, and loading into it leaves the original's optimizer alone."""
    model, optimizer, network = sparse("rigl")
    train(model, optimizer, 2)
    twin = duplicate(model)
    twin.load_state_dict(model.state_dict())
    assert "momentum_buffer" in optimizer.state[values(network, "1")]
    x, y = batch(2)
    F.cross_entropy(twin(x), y).backward()
    F.cross_entropy(model(x), y).backward()
    assert network.weights["1"].gradient is not None
    assert twin[1].weight_connections.gradient is None


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("method", ["rigl", "snfs", "granet"])
def test_what_is_done_in_inference_mode_can_be_trained_on(method: str, layout: torch.memory_format) -> None:
    """Moves that change nothing, and "restore the best", within an evaluation."""
    model, optimizer, network = sparse(method, convnet().to(memory_format=layout))
    first, early = copy.deepcopy(model.state_dict()), copy.deepcopy(network.state_dict())
    train(model, optimizer, 5)
    with torch.inference_mode():
        model.to("cpu")
        model(batch(0)[0])
    train(model, optimizer, 2)
    with torch.inference_mode():
        model.load_state_dict(first)
    train(model, optimizer, 2)
    with torch.inference_mode():
        network.load_state_dict(early)
    train(model, optimizer, 5)
    with torch.inference_mode():
        network.prune({name: weight.nonzero - 1 for name, weight in network.weights.items()})
        network.grow({name: weight.nonzero + 1 for name, weight in network.weights.items()}, "random")
    train(model, optimizer, 5)
    network.check()


def test_a_network_can_be_made_in_inference_mode() -> None:
    def backward(network: nn.Module) -> None:
        x, y = batch(0)
        F.cross_entropy(network(x), y).backward()

    model = mlp()
    optimizer = sgd(model.parameters())
    with torch.inference_mode():
        network = st.sparsify(model, st.SNIP(0.8, backward=backward), optimizer)
    train(model, optimizer, 3)
    network.check()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_shared_memory_has_values_and_positions(layout: torch.memory_format) -> None:
    model, _, network = sparse("rigl", convnet().to(memory_format=layout))
    model.share_memory()
    assert all(w.values.is_shared() and w.positions.is_shared() for w in network.weights.values())


def test_a_copy_of_the_dense_view_is_a_plain_tensor() -> None:
    model, _, _ = sparse("rigl")
    twin = copy.deepcopy(model[1].weight)
    assert type(twin) is torch.Tensor and torch.equal(twin, model[1].weight.detach())


def test_whole_numbers_among_the_parameters_are_no_weights() -> None:
    model = mlp()
    model.register_parameter("table", nn.Parameter(torch.ones(5, 5, dtype=torch.int64), requires_grad=False))
    with pytest.raises(st.SparsityError, match="include name"):
        st.sparsify(model, st.RigL(0.5), include="table")
    assert "table" not in st.sparsify(model, st.RigL(0.5), include="*").weights


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def test_the_class_of_a_sparse_layer_makes_plain_layers_and_bare_objects() -> None:
    model, _, _ = sparse("rigl", convnet())
    kind: Any = type(model[0])
    plain = kind(3, 5, 3, bias=False)
    assert type(plain) is nn.Conv2d and plain.weight.shape == (5, 3, 3, 3) and plain.bias is None
    assert type(kind.__new__(kind)) is kind
    with pytest.raises(st.SparsityError, match="inherit from Conv2d"):
        type("Mine", (kind,), {})(3, 5, 3)


def test_a_layer_with_a_parametrized_bias_is_copied() -> None:
    model, _, _ = sparse("rigl", convnet())
    nn.utils.parametrize.register_parametrization(model[0], "bias", Scaled())
    twin, (x, _) = copy.deepcopy(model), batch(0)
    assert torch.equal(twin.eval()(x), model.eval()(x))


@pytest.mark.parametrize("order", ["network first", "optimizer first"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("method", METHODS)
def test_training_goes_on_from_a_file(method: str, optimizer: Any, order: str) -> None:
    model, its_optimizer, network = sparse(method, convnet(), optimizer)
    train(model, its_optimizer, 5)
    state = through_torch((network.state_dict(), its_optimizer.state_dict()), weights_only=True)
    fresh_method = METHODS[method]()
    fresh_method.sparsity = 0.5 if method != "granet" else 0.9  # other counts; GraNet's differ anyhow
    fresh, fresh_optimizer, fresh_network = sparse(fresh_method, convnet(), optimizer, seed=7)
    train(fresh, fresh_optimizer, 2)
    assert fresh_network.nonzero != network.nonzero
    loads = [(fresh_network, state[0]), (fresh_optimizer, state[1])]
    for target, saved in loads if order == "network first" else reversed(loads):
        target.load_state_dict(saved)
    fresh_network.check()
    fresh_method.sparsity = METHODS[method]().sparsity
    for one, its in ((model, its_optimizer), (fresh, fresh_optimizer)):
        train(one, its, range(5, 14))
    assert fresh_network.step == network.step == 14
    assert_same(contents(model, its_optimizer), contents(fresh, fresh_optimizer))


@pytest.mark.parametrize("method", ["granet", "rigl"], ids=["other counts", "other positions"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_state_dict_loads_strictly_into_other_connections(layout: torch.memory_format, method: str) -> None:
    model, optimizer, _ = sparse(method, convnet())
    train(model, optimizer, 7)
    state = through_torch(model.state_dict(), weights_only=True)
    fresh, fresh_optimizer, network = sparse(method, convnet().to(memory_format=layout), seed=7)
    train(fresh, fresh_optimizer, range(20, 24))
    fresh.load_state_dict(state, strict=True)
    x, _ = batch(0)
    torch.testing.assert_close(fresh.eval()(x), model.eval()(x), rtol=0, atol=1e-12)
    assert_same(dict(model.state_dict()), dict(fresh.state_dict()))
    assert all(w.values not in fresh_optimizer.state for w in network.weights.values())  # that of others
    network.check()
    train(fresh.train(), fresh_optimizer)
    network.check()


def test_a_state_dict_can_be_assigned() -> None:
    model, optimizer, _ = sparse("granet", convnet())
    train(model, optimizer, 4)
    fresh, _, _ = sparse("granet", convnet(), seed=7)
    fresh.load_state_dict(through_torch(model.state_dict()), assign=True)
    assert_same(dict(model.state_dict()), dict(fresh.state_dict()))


def test_loading_a_network_leaves_the_saved_state_alone() -> None:
    model, optimizer, network = sparse("set")
    train(model, optimizer, 5)
    state = copy.deepcopy(network.state_dict())
    saved = {key: tensor.clone() for key, tensor in state["model"].items()}
    fresh, fresh_optimizer, fresh_network = sparse("set", seed=7)
    fresh_network.load_state_dict(state)
    train(fresh, fresh_optimizer)
    assert_same(saved, dict(state["model"]))


# ---- the dense view ----


def test_assigning_a_dense_tensor_sets_the_living_values() -> None:
    model, _, network = sparse()
    mask = model[1].weight.detach() != 0
    dense = torch.arange(1.0, 721.0, dtype=torch.float64).view(20, 36)
    model[1].weight = dense
    assert torch.equal(model[1].weight.detach(), dense * mask)
    assert values(network, "1").shape == (int(mask.sum()), 1)
    with pytest.raises(st.SparsityError, match=r"\(20, 36\), not \(2, 2\)"):
        model[1].weight = torch.zeros(2, 2)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "nn.init": nn.init.kaiming_uniform_,
    "copy_": lambda weight: weight.copy_(torch.zeros_like(weight)),
    "an index": lambda weight: weight.__setitem__(0, 1.0),
    "*=": lambda weight: weight.__imul__(2.0),
    "+=": lambda weight: weight.__iadd__(2.0),
    "data": lambda weight: weight.data.normal_(),
    "data =": lambda weight: setattr(weight, "data", torch.zeros_like(weight)),
    "out= in a tuple": lambda weight: torch.max(weight.clone(), 0, out=(weight[0], torch.zeros(36).long())),
    "set_": lambda weight: weight.set_(torch.zeros(20, 36, dtype=weight.dtype)),
    "inplace=": lambda weight: nn.functional.dropout(weight, inplace=True),
    "T": lambda weight: weight.T.mul_(0),
    "chunk": lambda weight: weight.chunk(2)[1].zero_(),
    "iter": lambda weight: next(iter(weight)).zero_(),
    "ravel": lambda weight: weight.ravel().zero_(),
    "diagonal": lambda weight: weight.diagonal().fill_(1),
    "expand": lambda weight: weight[None].expand(2, -1, -1)[0].zero_(),
    "contiguous": lambda weight: weight.contiguous().zero_(),
    "requires_grad_": lambda weight: weight.requires_grad_(False),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", False),
    "register_hook": lambda weight: weight.register_hook(torch.zeros_like),
    "post-accumulate hook": lambda weight: weight.register_post_accumulate_grad_hook(torch.zeros_like),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_that_would_be_lost_is_refused(write: Any) -> None:
    model, _, _ = sparse()
    with torch.no_grad(), pytest.raises(st.SparsityError, match="would be lost"):
        write(model[1].weight)


def test_what_to_do_instead_of_a_write_is_told() -> None:
    model, _, _ = sparse()
    weight = model[1].weight
    with pytest.raises(
        st.SparsityError, match=r"^requires_grad of .*: freeze by module.requires_grad_\(False"
    ):
        weight.requires_grad = False
    with pytest.raises(st.SparsityError, match=r"^register_hook of .*: use the parameter that model.named_"):
        weight.register_hook(torch.zeros_like)
    with pytest.raises(st.SparsityError, match=r"^zero_ of .*: initialise before sparsify, or assign"):
        nn.init.zeros_(weight)


def test_an_optimizer_of_views_is_told_where_the_parameters_are() -> None:
    model, _, network = sparse()
    with pytest.raises(st.SparsityError, match="dense view .* named_parameters"):
        sgd([{"params": [model[1].weight], "weight_decay": 0.1}, {"params": [model[1].bias]}])
    groups = [[p for name, p in model.named_parameters() if name.endswith(end)] for end in ("weight", "bias")]
    network.attach(sgd([{"params": group} for group in groups]))


@pytest.mark.parametrize("frozen", [False, True])
def test_views_that_are_leaves_are_no_parameters_either(frozen: bool) -> None:
    model, _, _ = sparse()
    model.requires_grad_(not frozen)
    with torch.no_grad(), pytest.raises(st.SparsityError, match="dense view .* named_parameters"):
        torch.optim.Adam([model[1].weight])
    assert model[1].weight.is_leaf is frozen and hasattr(model[1].weight, "retains_grad")


def test_a_view_that_is_kept_keeps_its_gradient() -> None:
    model, _, _ = sparse()
    weight = model[1].weight
    weight.retain_grad()
    weight.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_a_hook_on_a_tensor_of_ones_own() -> None:
    model, _, _ = sparse()
    own, seen = model[1].weight.clone(), []
    own.register_hook(seen.append)
    own.retain_grad()
    own.sum().backward()
    assert torch.equal(seen[0], torch.ones_like(own)) and torch.equal(own.grad, seen[0])


def test_what_is_computed_from_a_weight_is_a_plain_tensor() -> None:
    model, _, _ = sparse()
    weight = model[1].weight
    found = [
        weight * 2,
        weight.clone(),
        weight.double().float(),
        weight.to_sparse(),
        weight.sum(0),
        weight @ weight.T,
    ]
    assert [type(tensor) for tensor in found] == [Tensor] * len(found)
    assert type(weight.max(0).values) is Tensor and type(torch.cat([weight, weight])) is Tensor
    torch.func.vmap(lambda x: nn.functional.linear(x, weight))(torch.zeros(2, 36, dtype=weight.dtype))


def test_a_view_may_be_copied_and_go_into_a_compiled_function() -> None:
    model, _, _ = sparse()
    view = model[1].weight.detach().T
    duplicate = copy.deepcopy(view)
    assert type(duplicate) is Tensor and torch.equal(duplicate, view)
    compiled = torch.compile(lambda w: w.T.chunk(2)[0].sum(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(view), view.T.chunk(2)[0].sum())
    assert type(view._base) is Tensor  # one that is a view has a base in turn, without end


def test_values_that_are_not_of_these_connections_are_refused() -> None:
    """More values than connections would be computed with, in the wrong places."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    network = st.sparsify(model, st.Static(0.5))
    dense = dict(network.densify().named_parameters())
    with pytest.raises(st.SparsityError, match="0 has .*, but was given 6 values: .* dense weights"):
        torch.func.functional_call(model, dense, (torch.ones(1, 8),))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    network.prune({"0": 10})
    with pytest.raises(st.SparsityError, match="0 has 10 connections, but was given 19 values"):
        torch.func.functional_call(model, before, (torch.ones(1, 8),))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.complex64])
def test_positions_are_not_cast(dtype: torch.dtype) -> None:
    """`.type()` casts all buffers: in half precision, positions beyond 2048 would be rounded."""
    model = nn.Sequential(nn.Linear(80, 60))
    weight = st.sparsify(model, st.Static(0.5), seed=0).weights["0"]
    before, values = weight.positions.clone(), weight.values.detach().clone()
    model.type(dtype)
    assert torch.equal(weight.positions, before) and weight.positions.dtype == torch.int32
    assert torch.equal(model[0].weight.flatten()[before.long()], values.flatten().to(dtype))


class Registered(nn.Linear):
    """Its subclasses must say what they are."""

    known: ClassVar[list[str]] = []

    def __init_subclass__(cls, kind: str) -> None:
        cls.known.append(kind)


class Block(Registered, kind="block"):
    """Known as one."""


def test_classes_that_register_their_subclasses() -> None:
    model = nn.Sequential(Block(8, 6))
    network = st.sparsify(model, st.Static(0.5))
    assert isinstance(model[0], Block) and Registered.known == ["block"] and network.nonzero == 24


@pytest.mark.parametrize("fused", [False, True])
def test_exploring_after_a_step_that_was_skipped_is_skipped(fused: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    network, scaler = st.sparsify(model, st.Static(0.5), optimizer), torch.amp.GradScaler("cpu")
    network.request_gradient()
    (scaler.scale(model(torch.ones(4, 8)).sum()) * torch.inf).backward()
    scaler.step(optimizer)
    before = network.weights["0"].positions.clone()
    with pytest.warns(RuntimeWarning, match="at an exploration: it was skipped"):
        assert not network.explore(0.3, grow="gradient")
    assert torch.equal(network.weights["0"].positions, before)


def test_settings_may_change_in_a_running_training() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network = st.sparsify(model, st.RigL(0.5, interval=100), optimizer)
    for step in range(10):
        if step == 9:
            network.method.interval = 5
            network.prepare()
        before = network.weights["0"].positions.clone()
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert not torch.equal(network.weights["0"].positions, before)


def test_functional_call_takes_other_values() -> None:
    model, _, network = sparse(model=convnet().eval())
    doubled = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}
    plain = network.densify()
    expected = {name: 2 * parameter.detach() for name, parameter in plain.named_parameters()}
    x, _ = batch(0)
    out = torch.func.functional_call(model, doubled, (x,))
    assert torch.equal(out, torch.func.functional_call(plain, expected, (x,)))
    assert torch.equal(model(x), plain(x))


# ---- torch.compile ----


class Counting:
    """A backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return aot_eager(graph, inputs)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiler(name: str) -> Any:
    missing = shutil.which("c++") is None and shutil.which("g++") is None and shutil.which("clang") is None
    return pytest.param(
        name, marks=pytest.mark.skipif(name == "inductor" and missing, reason="no C++ compiler")
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", [compiler("aot_eager"), compiler("inductor")])
def test_compiled_outputs_and_gradients_are_those_of_eager(backend: str) -> None:
    """The gradient of all positions too."""
    x, y = batch(0)
    results = []
    for compiled in (False, True):
        model, _, network = sparse(st.RigL(0.8, interval=1))
        out = (torch.compile(model, backend=backend, fullgraph=True) if compiled else model)(x)
        F.cross_entropy(out, y).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([out.detach(), *gradients, *[w.gradient for w in network.weights.values()]])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-12)


GRAPHS = {
    "static": 1,
    "set": 1,
    "rigl": 2,
}  # growth by gradient: one for steps that collect it, one for the others


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("method, graphs", GRAPHS.items())
def test_nothing_is_compiled_again_while_the_counts_stay(method: str, graphs: int) -> None:
    eager, compiled = sparse(method), sparse(method)
    train(*eager[:2])
    backend = Counting()
    train(torch.compile(compiled[0], backend=backend, fullgraph=True), compiled[1])
    assert backend.graphs == graphs
    assert_same(contents(*eager[:2]), contents(*compiled[:2]), 1e-10)


RESIZING: dict[str, Callable[[], st.Method]] = {
    "granet": lambda: st.GraNet(0.9, interval=1, prune_end=12),
    "dsr": lambda: st.DSR(0.8, interval=1, threshold=0.05),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("static", [True, False], ids=["torch's default", "sizes of parameters may vary"])
@pytest.mark.parametrize("method", RESIZING.values(), ids=RESIZING)
def test_changing_counts_compile_right(method: Any, static: bool) -> None:
    """By default every count is compiled anew, until dynamo gives up after eight; two settings avoid that."""
    eager, compiled = sparse(method()), sparse(method())
    train(*eager[:2])
    backend = Counting()
    settings = {"force_parameter_static_shapes": static, "force_nn_module_property_static_shapes": static}
    with torch._dynamo.config.patch(**settings):
        train(torch.compile(compiled[0], backend=backend, fullgraph=not static), compiled[1])
    assert backend.graphs == (8 if static else 2)
    assert_same(contents(*eager[:2]), contents(*compiled[:2]), 1e-10)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("zero", ["before", "between"])
def test_a_skipped_step_is_not_a_step_when_compiled(zero: str) -> None:
    smooth, bumpy = sparse(), sparse()
    train(*smooth[:2])
    train_scaled(bumpy, 2, zero=zero, forward=torch.compile(bumpy[0], backend="aot_eager"))
    assert_same(contents(*smooth[:2]), contents(*bumpy[:2]), 1e-10)


# ---- densify ----


def attributes(model: nn.Module) -> list[tuple[str, type, list[str], list[int]]]:
    """Of each module: its name, class, attributes, and how many hooks there are of each kind."""
    return [
        (name, type(m), sorted(vars(m)), [len(v) for k, v in sorted(vars(m).items()) if k.endswith("_hooks")])
        for name, m in model.named_modules()
    ]


@pytest.mark.parametrize("method", METHODS)
def test_densify_gives_the_original_model_back(method: str) -> None:
    original, (model, optimizer, network) = convnet(), sparse(method, convnet())
    train(model, optimizer, 4)
    plain = network.densify()
    assert attributes(plain) == attributes(original)
    assert list(plain.state_dict()) == list(original.state_dict())
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    original.load_state_dict(plain.state_dict(), strict=True)
    x, _ = batch(0)
    for one in (model, plain, original):
        one.eval()
    assert torch.equal(plain(x), model(x)) and torch.equal(original(x), model(x))
    assert all(
        int((plain.get_submodule(n).weight != 0).sum()) <= w.nonzero for n, w in network.weights.items()
    )


def test_densify_keeps_requires_grad() -> None:
    model = convnet()
    model[0].requires_grad_(False)
    _, _, network = sparse(model=model)
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    plain = network.densify()
    frozen = {name for name, parameter in plain.named_parameters() if not parameter.requires_grad}
    assert frozen == {"0.weight", "0.bias", "3.weight", "3.bias"}


@pytest.mark.parametrize("trained", ["plain", "sparse"])
def test_densify_is_independent(trained: str) -> None:
    model, optimizer, network = sparse("rigl", convnet())
    train(model, optimizer, 4)
    plain = network.densify()
    other = model if trained == "plain" else plain
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    train(plain, sgd(plain.parameters())) if trained == "plain" else train(model, optimizer)
    assert_same(before, dict(other.state_dict()))
    network.check()


def test_densify_of_a_model_in_the_middle_of_a_step() -> None:
    """With a loss alive, gradients there and the gradient of all positions being collected."""
    model, optimizer, network = sparse(st.RigL(0.8, interval=1))
    x, y = batch(0)
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    plain = network.densify()
    assert torch.equal(plain(x), model(x)) and loss.grad_fn is not None
    optimizer.step()
    network.check()


class Remembers(nn.Module):
    """Keeps activations of its last pass, as models do whose features somebody looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.feature = self.linear(x)
        self.all = {"features": [self.feature.tanh()]}
        return self.feature


def test_densify_of_a_model_that_keeps_activations() -> None:
    model = Remembers()
    network = st.sparsify(model, st.Static(0.5), torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, 6)
    model(x).sum().backward()
    plain = network.densify()
    assert type(plain) is Remembers and torch.equal(plain(x), model(x))


class Wrapped(nn.Module):
    """Its methods are wrapped, as compilers and trainers do; some of its attributes are functions."""

    def __init__(self, wrap: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.act, self.scale = lambda x: x.tanh() * 2, functools.partial(torch.mul, other=3)
        self.last = self.output  # a bound method, under another name
        self.hidden = wrap(self.features)
        self.forward = wrap(self.forward)  # type: ignore[method-assign]

    def features(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))

    def output(self, x: Tensor) -> Tensor:
        return self.scale(self.head(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x))


def timed(function: Any) -> Any:
    return functools.wraps(function)(lambda *args: function(*args))


def bound(function: Any) -> Any:
    """As accelerate does it: the function of the class, wrapped and bound again."""
    return MethodType(torch.autocast("cpu", torch.bfloat16)(function.__func__), function.__self__)


WRAPPERS = [timed, functools.lru_cache, functools.partial(torch.compile, backend="eager"), bound]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=["wraps", "cache", "compile", "bound"])
def test_densify_takes_wrappers_off_that_call_the_original(wrap: Callable[[Any], Any]) -> None:
    model = Wrapped(wrap)
    network = st.sparsify(model, st.Static(0.5), torch.optim.SGD(model.parameters(), lr=0.1))
    plain, x = network.densify(), torch.randn(3, 6)
    wanted = Wrapped(lambda method: method)
    wanted.load_state_dict(plain.state_dict())
    with torch.no_grad():
        model.linear.bias.zero_()
        plain.head.bias.add_(1), wanted.head.bias.add_(1)
    if wrap is not bound:  # of another name than the class's: a user's own, and bound to the copy
        assert torch.equal(plain.hidden(x), wanted.hidden(x))
        assert torch.equal(plain(x), wanted(x)) and plain(x).dtype == torch.float32
    assert "forward" not in vars(plain) and plain.last.__self__ is plain and plain.act is model.act


def test_densify_keeps_the_methods_that_a_user_has_put_into_an_instance() -> None:
    model = Remembers()
    model.forward = MethodType(lambda self, x: self.linear(x) + 1, model)  # type: ignore[method-assign]
    plain, x = st.sparsify(model, st.Static(0.5)).densify(), torch.randn(3, 6)
    assert torch.equal(plain(x), plain.linear(x) + 1)


def test_a_network_that_lets_go_collects_no_gradient() -> None:
    model, _, network = sparse("rigl")
    network.request_gradient()
    network.detach()
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    assert all(weight.gradient is None and weight.canvas is None for weight in network.weights.values())


# ---- what others do to a model ----


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_recurrent_layers_in_a_compiled_model(kind: type[nn.RNNBase], backend: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = kind(6, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x.squeeze(1))[0][:, -1])

    model = Net().double()
    optimizer = sgd(model.parameters())
    st.sparsify(model, st.RigL(0.5, interval=2), optimizer, include=["rnn.*", "out"])
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    for index in range(4):
        x, _ = batch(index)
        torch.testing.assert_close(compiled(x), model(x))
        train(compiled, optimizer, range(index, index + 1))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_pass_while_the_network_is_frozen_leaves_nothing_behind(backend: str | None, late: bool) -> None:
    """As when a generator learns from a discriminator that stands still; `late`: until before backward()."""
    model, _, network = sparse(st.RigL(0.7, interval=1))
    torch._dynamo.reset()
    forward = model if backend is None else torch.compile(model, backend=backend)

    def frozen() -> None:
        model.requires_grad_(False)
        loss = 1000 * forward(batch(9)[0].requires_grad_()).sum()
        model.requires_grad_(late)
        loss.backward()
        model.requires_grad_(True)

    dense = network.densify().requires_grad_(True)
    for index in range(2):  # accumulated
        frozen()
        for one in (forward, dense):
            F.cross_entropy(one(batch(index)[0]), batch(index)[1]).backward()
        frozen()
    for name, weight in network.weights.items():
        expected = dense.get_submodule(name).weight.grad
        torch.testing.assert_close(weight.unflatten(weight.gradient), expected)


def wrapped() -> nn.Module:
    """Its state dict has other names than its modules have."""
    model = mlp()
    model[1] = checkpoint_wrapper(model[1])
    return model


def test_names_of_the_state_dict_are_those_of_the_model_itself() -> None:
    plain, ours = sparse("granet"), sparse("granet", wrapped())
    tickets = [st.SupTickets(network, 20, 4, 2, (0.01, 0.1)) for *_, network in (plain, ours)]
    for model, optimizer, _ in (plain, ours):
        train(model, optimizer, 20)
    assert_same(dict(plain[0].state_dict()), dict(ours[0].state_dict()))
    first, second = (one.ticket().state_dict() for one in tickets)
    assert_same(dict(first), dict(second))
    state = ours[2].state_dict()
    other = sparse("granet", wrapped(), seed=5)
    other[2].load_state_dict(state)
    assert_same(dict(other[0].state_dict()), state["model"])
    assert st.superpose([state, state]).keys() == st.superpose([plain[2].state_dict()] * 2).keys()


class Forgetful(nn.Module):
    """Saves its head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.back, self.head = (
            nn.Sequential(nn.Flatten(), nn.Linear(36, 20)).double(),
            nn.Linear(20, 4).double(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.back(x)))

    def state_dict(self, *args: Any, **options: Any) -> Any:
        kept = super().state_dict(*args, **options)
        return {name: value for name, value in kept.items() if not name.startswith("back")}


def test_tickets_of_a_model_that_saves_a_part_of_itself() -> None:
    model = Forgetful()
    optimizer = sgd(model.head.parameters())
    network = st.sparsify(model, st.RigL(0.5, interval=2), optimizer, exclude="back")
    tickets = st.SupTickets(network, 12, 4, 2, (0.01, 0.1))
    train(model, optimizer, 12)
    ticket = tickets.ticket()
    assert torch.equal(ticket.back[1].weight, model.back[1].weight)
    assert int(ticket.head.weight.count_nonzero()) <= 40
    model = Forgetful()
    network = st.sparsify(model, st.RigL(0.5, interval=2), sgd(model.parameters()))
    with pytest.raises(st.SparsityError, match=r"state_dict\(\), .* leaves out back.1"):
        st.SupTickets(network, 12, 4, 2, (0.01, 0.1))


class Renaming(Forgetful):
    """Saves what it does not load."""

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {f"net.{name}": value for name, value in nn.Module.state_dict(self, *args, **options).items()}


def test_a_model_that_does_not_load_what_it_saves_is_refused_before_the_training() -> None:
    model = Renaming()
    network = st.sparsify(model, st.RigL(0.5, interval=2), sgd(model.parameters()))
    with pytest.raises(st.SparsityError, match="does not load what its state_dict.. gives: net.back"):
        st.SupTickets(network, 12, 4, 2, (0.01, 0.1))


class Bare(Forgetful):
    def state_dict(self) -> Any:  # type: ignore[override]
        return nn.Module.state_dict(self)


class Copying(Forgetful):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        found = nn.Module.state_dict(self, *args, **options).items()
        return {name: value.detach().clone() for name, value in found}


@pytest.mark.parametrize("kind", [Bare, Copying])
def test_a_state_dict_of_ones_own_is_taken_as_it_is(kind: type[nn.Module]) -> None:
    model, ours = Forgetful(), []
    for one in (kind(), type("Plain", (Forgetful,), {"state_dict": nn.Module.state_dict})()):
        nn.Module.load_state_dict(one, nn.Module.state_dict(model))
        optimizer = sgd(one.parameters())
        network = st.sparsify(one, st.RigL(0.5, interval=2), optimizer, seed=0)
        tickets = st.SupTickets(network, 12, 4, 2, (0.01, 0.1))
        train(one, optimizer, 12)
        ours.append((dict(tickets.ticket().state_dict()), network.state_dict()["shapes"]))
    assert_same(ours[0][0], ours[1][0])
    assert ours[0][1] == ours[1][1] == {"back.1.weight": [20, 36], "head.weight": [4, 20]}


@pytest.mark.parametrize("scale", [2.0**13, 2.0**15])
def test_a_loss_scale_of_half_precision_changes_no_choice(scale: float) -> None:
    """Squares of such gradients are beyond what half precision has."""

    def grown(scale: float) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 32).half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        network = st.sparsify(model, st.RigL(0.9, interval=1), optimizer, seed=0)
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)).half()
        (scale * model(x).float().square().mean()).backward()
        for parameter in model.parameters():
            parameter.grad.div_(scale)
        optimizer.step()
        return network.weights["weight"].positions.sort().values

    assert torch.equal(grown(scale), grown(1.0))


class Failing(torch.optim.SGD):
    """A step that may raise."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise MemoryError
        return super().step(closure)


def test_an_optimizer_that_is_saved_after_a_step_that_raised_has_the_users_rate() -> None:
    model = mlp()
    optimizer = Failing(model.parameters(), lr=0.5)
    st.SupTickets(st.sparsify(model, METHODS["rigl"](), optimizer), 12, 4, 2, (0.01, 0.1))
    train(model, optimizer, 6)
    optimizer.fails = True
    with pytest.raises(MemoryError):
        train(model, optimizer, 1)
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5


def test_an_optimizer_that_is_saved_in_a_step_has_the_users_rate_and_the_step_counts() -> None:
    model, rates = mlp(), []
    optimizer = sgd(model.parameters())
    saved = lambda *_: rates.append(optimizer.state_dict()["param_groups"][0]["lr"])  # noqa: E731
    optimizer.register_step_post_hook(saved)
    network = st.sparsify(model, METHODS["rigl"](), optimizer)
    optimizer.register_step_pre_hook(saved)
    tickets = st.SupTickets(network, 12, 4, 2, (0.01, 0.5))
    train(model, optimizer, 12)
    assert (network.step, tickets.collected) == (12, [8, 12])
    assert rates == [0.1] * 24


def test_an_explicit_step_whose_closure_raises_is_none() -> None:
    model = mlp()
    optimizer = sgd(model.parameters())
    network = st.sparsify(model, METHODS["set"](), optimizer)
    st.SupTickets(network, 8, 4, 2, (0.01, 0.5))
    network.before_step()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    network.after_step()
    assert network.step == 0 and optimizer.param_groups[0]["lr"] == 0.1


def test_attached_again_it_is_known_that_the_optimizer_was_loaded() -> None:
    model, optimizer, network = sparse("rigl")
    train(model, optimizer, 7)
    states = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(network.state_dict())
    other_model, other, other_network = sparse("rigl", seed=9)
    other.load_state_dict(states[0])
    other_network.attach(other)
    other_network.load_state_dict(states[1])
    assert_same(contents(model, optimizer), contents(other_model, other))


def test_an_optimizer_that_lost_the_weights_is_found_out() -> None:
    _, optimizer, network = sparse("rigl")
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    with pytest.raises(st.SparsityError, match="the optimizer does not hold 1"):
        network.check()


def test_an_optimizer_of_other_connections_is_refused_before_it_steps() -> None:
    model, optimizer, network = sparse("granet")
    train(model, optimizer, 12)
    other_model, other, other_network = sparse("granet")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        with pytest.raises(st.SparsityError, match=r"other connections in 1, 3: load the network's state"):
            train(other_model, other, 1)
    other_network.load_state_dict(network.state_dict())
    train(other_model, other, range(12, 16))
    train(model, optimizer, range(12, 16))
    assert_same(contents(model, optimizer), contents(other_model, other))


def test_an_error_while_a_ticket_is_collected_leaves_the_network_ready() -> None:
    model, optimizer, network = sparse("rigl")
    tickets = st.SupTickets(network, 14, 4, 2, (0.01, 0.1))
    train(model, optimizer, 9)
    tickets.collect, collect = lambda: 1 / 0, tickets.collect
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, range(9, 10))
    tickets.collect = collect
    train(model, optimizer, range(10, 14))
    assert tickets.explored == [7, 11]


def test_data_parallel_is_refused() -> None:
    with pytest.raises(st.SparsityError, match="use DistributedDataParallel"):
        st.sparsify(nn.DataParallel(mlp()), st.RigL(0.5))
    model, *_ = sparse()
    with pytest.raises(st.SparsityError, match="use DistributedDataParallel"):
        [module._replicate_for_data_parallel() for module in model.modules()]


def test_names_may_come_from_any_iterable() -> None:
    assert list(st.sparsify(mlp(), st.RigL(0.5), exclude=(n for n in ["3"])).layers) == ["1"]
    assert list(st.sparsify(mlp(), st.RigL(0.5), include=map(str, [3])).layers) == ["3"]


# ---- what others do with models ----


def test_safetensors_saves_and_loads_tied_weights(tmp_path):
    """As accelerate does: of tied tensors one is in the file."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner = nn.Embedding(10, 16), nn.Linear(16, 16)
            self.out = nn.Linear(16, 10, bias=False)
            self.out.weight = self.embed.weight

    one, other = Tied(), Tied()
    st.sparsify(one, st.Static(0.7), seed=0)
    st.sparsify(other, st.Static(0.7), seed=5)
    save_model(one, str(tmp_path / "t"))
    load_model(other, str(tmp_path / "t"))
    assert same_state(one, other)
    short = {key: value for key, value in one.state_dict().items() if "embed" not in key and "out" not in key}
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(short)


def test_a_layer_with_code_of_its_own_reads_its_weight_as_it_is():
    """Under autocast torch's own layers read theirs in the type that they compute in."""

    class Standard(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
            return self._conv_forward(x, weight, self.bias)

    class Inner(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight * weight.abs().mean(), bias)

    model = nn.Sequential(nn.Conv2d(1, 4, 3), Standard(4, 4, 3), Inner(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[3].forward = MethodType(Standard.forward, model[3])
    st.sparsify(model, st.Static(0.5), seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        found = [layer.weight.dtype for layer in model]
    assert found == [torch.bfloat16, torch.float32, torch.float32, torch.float32]


@pytest.mark.parametrize("exclude", [None, "script"])
def test_a_scripted_part_stays_dense(exclude):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
    model.add_module("script", torch.jit.script(nn.Linear(8, 4)))
    network = st.sparsify(model, st.RigL(0.5), exclude=exclude, seed=0)
    assert list(network.weights) == ["0"] and model(torch.randn(2, 6)).shape == (2, 4)
    other = nn.Sequential(nn.Linear(6, 8))
    other.add_module("script", torch.jit.script(nn.Linear(8, 4)))
    with pytest.raises(st.SparsityError, match="script is compiled by torch.jit"):
        st.sparsify(other, st.RigL(0.5), include="script")


@pytest.mark.parametrize("method", [st.Static, st.SET, st.RigL, st.GraNet])
def test_torchs_defaults_do_not_choose_the_connections(method):
    """Neither the type of numbers, of which bfloat16 would have 256, nor the device."""

    def chosen() -> dict[str, torch.Tensor]:
        gradual = {"prune_end": 4} if method is st.GraNet else {}
        changing = {} if method is st.Static else {"interval": 2, **gradual}
        network = st.sparsify(copy.deepcopy(model), method(0.9, **changing), seed=0)
        optimizer = torch.optim.SGD(network.model.parameters(), lr=0.1)
        network.attach(optimizer)
        for _ in range(4):
            network.model(x).square().mean().backward()
            optimizer.step()
        return {name: weight.rows().clone() for name, weight in network.weights.items()}

    model, x = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 30)), torch.randn(8, 40)
    expected = chosen()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = chosen()
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        elsewhere = chosen()
    for name, rows in expected.items():
        assert torch.equal(found[name], rows) and torch.equal(elsewhere[name], rows)
