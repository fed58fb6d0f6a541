"""Models: parameter counts of the literature, names, shapes, widths, and that each can be made sparse."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import suptickets as st
from suptickets.errors import SparsityError
from suptickets.models import MODELS, build_model
from suptickets.models.vgg import MaxOfFour

Change = Callable[[nn.Module], object]


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def weights(model: nn.Module) -> int:
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return sum(layer.weight.numel() for layer in layers)


def on_meta(name: str, classes: int = 10, **options: float) -> nn.Module:
    """The model without memory for its weights: shapes are all that is asked of it."""
    with torch.device("meta"):
        return build_model(name, classes, **options)  # type: ignore[arg-type]


# ---- counts ----


def test_resnet50_imagenet_has_the_counts_of_the_literature() -> None:
    model = on_meta("resnet50-imagenet", 1000)
    assert parameters(model) == 25_557_032
    assert weights(model) == 25_502_912


def test_resnet50_for_cifar_differs_in_stem_and_bias_only() -> None:
    imagenet, cifar = on_meta("resnet50-imagenet", 10), on_meta("resnet50", 10)
    assert parameters(imagenet) - parameters(cifar) == 64 * 3 * (7**2 - 3**2) + 10
    assert set(imagenet.state_dict()) - set(cifar.state_dict()) == {"fc.bias"}


def wide_resnet_parameters(depth: int, factor: int, classes: int) -> int:
    blocks, widths = (depth - 4) // 6, [16 * factor, 32 * factor, 64 * factor]
    total, inputs = 3 * 16 * 9, 16
    for width in widths:
        total += inputs * width  # the projection
        for _ in range(blocks):
            total += 2 * inputs + 9 * inputs * width + 2 * width + 9 * width * width
            inputs = width
    return total + 2 * inputs + inputs * classes + classes


@pytest.mark.parametrize("classes", [10, 100])
def test_wide_resnet_has_the_counts_of_the_literature(classes: int) -> None:
    count = parameters(on_meta("wrn28-10", classes))
    assert count == wide_resnet_parameters(28, 10, classes)
    assert count == {10: 36_479_194, 100: 36_536_884}[classes]
    assert round(count / 1e6, 1) == 36.5


@pytest.mark.parametrize("classes", [10, 100])
def test_vgg16_has_thirteen_convolutions_and_one_hidden_layer(classes: int) -> None:
    outputs = [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6
    convolutions = [9 * i * o for i, o in zip([3, *outputs], outputs, strict=False)]
    model = on_meta("vgg16", classes)
    assert weights(model) == sum(convolutions) + 512 * 512 + 512 * classes
    biases_and_norms = 3 * sum(outputs) + 3 * 512 + classes
    assert parameters(model) == weights(model) + biases_and_norms
    assert sum(isinstance(module, nn.Conv2d) for module in model.modules()) == 13


def test_small_models_have_the_counts_of_the_literature() -> None:
    assert parameters(on_meta("mlp", channels=1, size=28)) == 266_610  # LeNet-300-100
    assert parameters(on_meta("lenet5", channels=1, size=28)) == 61_706
    assert parameters(on_meta("lenet5", channels=1, size=32)) == 61_706


# ---- names ----


def resnet50_names() -> list[str]:
    names = ["conv1", "bn1"]
    for stage, blocks in enumerate([3, 4, 6, 3], 1):
        for block in range(blocks):
            inside = ["conv1", "bn1", "conv2", "bn2", "conv3", "bn3"]
            inside += ["downsample.0", "downsample.1"] if block == 0 else []
            names += [f"layer{stage}.{block}.{name}" for name in inside]
    return [*names, "fc"]


@pytest.mark.parametrize("name", ["resnet50", "resnet50-imagenet"])
def test_resnet50_has_the_usual_names_in_the_usual_order(name: str) -> None:
    model = on_meta(name)
    assert [n for n, m in model.named_modules() if list(m.parameters(recurse=False))] == resnet50_names()
    strides = {n: m.stride for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    strided = {n for n, stride in strides.items() if stride != (1, 1)} - {"conv1"}
    expected = {f"layer{i}.0.{c}" for i in (2, 3, 4) for c in ("conv2", "downsample.0")}
    assert strided == expected


def test_vgg_layers_are_named_by_block() -> None:
    names = [n for n, m in on_meta("vgg16").named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    convolutions = [
        f"features.conv{i}_{j}" for i, n in enumerate([2, 2, 3, 3, 3], 1) for j in range(1, n + 1)
    ]
    assert names == [*convolutions, "classifier.fc1", "classifier.fc2"]


# ---- shapes and widths ----


@pytest.mark.parametrize("name", MODELS)
def test_images_of_several_sizes_give_logits(name: str) -> None:
    sizes = {"vgg16": [32, 48], "lenet5": [4, 8, 28, 32, 40], "mlp": [8, 28], "vgg-small": [8, 28, 32]}
    for size in sizes.get(name, [8, 32]):
        model = build_model(name, 7, channels=2, size=size, width=0.25).eval()
        with torch.no_grad():
            logits = model(torch.randn(3, 2, size, size))
        assert logits.shape == (3, 7) and logits.isfinite().all()


def test_images_that_pooling_would_consume_are_refused() -> None:
    for name, least in {"vgg16": 32, "vgg-small": 8, "lenet5": 4}.items():
        build_model(name, 10, size=least, width=0.25)
        with pytest.raises(SparsityError, match=rf"{name} needs images of at least {least}x{least}"):
            build_model(name, 10, size=least - 1)


@pytest.mark.parametrize("name", MODELS)
def test_width_narrows_every_layer_but_not_image_and_classes(name: str) -> None:
    wide, narrow = (
        {n: m for n, m in on_meta(name, width=width).named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
        for width in (1.0, 0.5)
    )
    assert list(wide) == list(narrow)
    for layer in list(wide)[:-1]:
        assert narrow[layer].weight.shape[0] * 2 == wide[layer].weight.shape[0]
    first, last = list(wide)[0], list(wide)[-1]
    assert narrow[first].weight.shape[1:] == wide[first].weight.shape[1:]
    assert narrow[last].weight.shape[0] == wide[last].weight.shape[0] == 10


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [0.001, 0.0, -1.0, math.nan, math.inf])
def test_a_width_without_channels_is_refused(name: str, width: float) -> None:
    with pytest.raises(ValueError, match="width"):
        on_meta(name, width=width)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sparsity", [0.8, 0.95])
def test_small_dense_narrows_to_the_sparse_count(name: str, sparsity: float) -> None:
    narrow = st.SmallDense(sparsity).narrow(lambda width: on_meta(name, width=width))
    share = parameters(narrow) / parameters(on_meta(name))
    assert 0.8 * (1 - sparsity) < share <= 1 - sparsity


# ---- the registry ----


def test_the_registry_knows_the_names_of_the_design() -> None:
    assert {"vgg16", "resnet50", "wrn28-10", "resnet50-imagenet"} < set(MODELS)
    for name, entry in MODELS.items():
        assert entry.name == name and entry.summary and "\n" not in entry.summary
        assert list(inspect.signature(entry.build).parameters) == ["classes", "channels", "size", "width"]


def test_bad_requests_get_one_clear_error() -> None:
    with pytest.raises(SparsityError, match="unknown model 'vgg-16': did you mean 'vgg16'?"):
        build_model("vgg-16", 10)
    for option in ("classes", "channels", "size"):
        with pytest.raises(SparsityError, match=f"{option} must be at least 1, not 0"):
            build_model("mlp", **{"classes": 10, option: 0})


# ---- use ----


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_sparse(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, 10, size=32, width=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    network = st.sparsify(model, st.RigL(0.8, interval=1), optimizer, seed=0)
    x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    network.check()
    assert network.nonzero == round(0.2 * network.parameters_total)


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name: str) -> None:
    def state(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build_model(name, 10, width=0.25).state_dict()

    first, again, other = state(1), state(1), state(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def both_forms(
    monkeypatch: pytest.MonkeyPatch,
    channels: int = 3,
    size: int = 8,
    width: float = 1.0,
    change: Change = nn.Module.train,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits and gradients of a VGG as it is, and in the form that a compiled step on a GPU has."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_model("vgg-small", 5, channels, size, width).double()
        change(model)
        network = st.sparsify(model, st.Static(sparsity=0.5), seed=1)
        monkeypatch.setattr("suptickets.models.vgg._compiled", lambda x, compiled=compiled: compiled)
        logits = model(torch.randn(4, channels, size, size, dtype=torch.float64))
        logits.square().sum().backward()
        found.append([logits, *(weight.values.grad for weight in network.weights.values())])
    return found[0], found[1]


@pytest.mark.parametrize("width", [1.0, 0.3])
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 8), (8, 8), (11, 8), (3, 30), (2, 33)])
def test_the_compiled_form_changes_nothing(
    channels: int, size: int, width: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a compiled step does for tensor cores: same logits, same gradients, of a sparse network too."""
    for ours, theirs in zip(*both_forms(monkeypatch, channels, size, width), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


OTHERS: dict[str, Change] = {
    "stride": lambda model: setattr(model.features[0], "stride", (2, 2)),
    "reflection": lambda model: setattr(
        model.features, "conv1_1", nn.Conv2d(3, 32, 3, padding=1, padding_mode="reflect").double()
    ),
    "5x5": lambda model: setattr(model.features, "conv1_1", nn.Conv2d(3, 32, 5, padding=2).double()),
    "overlapping pool": lambda model: setattr(model.features, "pool1", nn.MaxPool2d(3, 2, 1)),
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=list(OTHERS))
def test_another_layer_in_a_vgg_is_the_same_in_the_compiled_form(
    change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    for ours, theirs in zip(*both_forms(monkeypatch, size=16, change=change), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_only_images_become_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a narrow network's hidden layers would take nine times their memory."""
    seen, unfold = [], nn.functional.unfold
    monkeypatch.setattr(
        nn.functional, "unfold", lambda x, *rest, **more: seen.append(x) or unfold(x, *rest, **more)
    )
    both_forms(monkeypatch, width=0.3)
    assert [x.shape[1] for x in seen] == [3]


class Doubled(nn.Conv2d):
    """A user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_users_own_convolution_in_a_vgg_is_called_in_training_too() -> None:
    torch.manual_seed(0)
    model = build_model("vgg-small", 5, 3, 8)
    doubled = Doubled(3, 32, 3, padding=1)
    seen: list[int] = []
    doubled.register_full_backward_pre_hook(lambda *_: seen.append(1))
    model.features.conv1_1 = doubled
    x = torch.randn(4, 3, 8, 8)
    norm = model.features.bn1_1
    model.train()(x).sum().backward()
    expected = doubled(x).mean((0, 2, 3)) * norm.momentum
    torch.testing.assert_close(norm.running_mean, expected.detach())
    assert seen


def test_hooks_of_a_pool_are_called_in_the_compiled_form(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    both_forms(
        monkeypatch,
        change=lambda model: model.features.pool1.register_forward_hook(lambda *_: calls.append(1)),
    )
    assert len(calls) == 2


@pytest.mark.parametrize("shape", [(1, 1, 2, 2), (3, 5, 4, 8), (2, 7, 6, 2)])
def test_a_pool_made_for_a_compiler_gives_the_values_and_gradients_of_torchs(shape: tuple[int, ...]) -> None:
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(-1, 2, shape, generator=generator).double()  # full of ties
        x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
        theirs = nn.functional.max_pool2d(x, 2)
        ours = MaxOfFour.apply(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        gradient = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
        assert torch.equal(ours, theirs)
        wanted, got = (torch.autograd.grad(y, x, gradient)[0] for y in (theirs, ours))
        assert torch.equal(got, wanted) and got.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("training", [True, False])
def test_a_pool_before_the_relu_changes_nothing(training: bool) -> None:
    """The literature's order: activations, then the pool."""
    torch.manual_seed(0)
    model = build_model("vgg-small", 5, 3, 16).double().train(training)
    x = torch.randn(6, 3, 16, 16, dtype=torch.float64)

    def in_order(y: torch.Tensor) -> torch.Tensor:
        layers = dict(model.features.named_children())
        for i in (1, 2, 3):
            for name in (*(f"{kind}{i}_{j}" for j in (1, 2) for kind in ("conv", "bn", "relu")), f"pool{i}"):
                y = layers[name](y)
        return y

    found = []
    for features in (model.features, in_order):
        model.zero_grad()
        logits = model.classifier(model.pool(features(x)).flatten(1))
        logits.square().sum().backward()
        found.append([logits, *(p.grad for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def test_vggs_statistics_are_those_of_its_layers_one_by_one() -> None:
    """Biases of convolutions are left out of the sums in training; the running means know them."""
    torch.manual_seed(0)
    model = build_model("vgg-small", 10, channels=3, size=8)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.bias)
    plain = copy.deepcopy(model)
    plain.features.__class__ = nn.Sequential
    for x in torch.randn(3, 16, 3, 8, 8):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    ours, theirs = dict(model.named_buffers()), dict(plain.named_buffers())
    assert ours.keys() == theirs.keys() and len(ours) > 5
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-4, msg=name)
