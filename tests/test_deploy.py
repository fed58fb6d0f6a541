"""The CPU runtime: what comes out is what torch makes of the plain network, whatever its shape."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor, nn

import suptickets as st
from suptickets.deploy import accelerate, acceleration, native
from suptickets.deploy.runtime import Part, groups
from suptickets.models import MODELS, build_model

BATCHES = (1, 2, 7, 16, 17)
ALL = {nn.Conv2d: 2.0, nn.Linear: 2.0}
SMALL = {"vgg16": 0.1, "resnet50": 0.1, "wrn28-10": 0.05, "resnet50-imagenet": 0.1}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels run layers of any density."""
    monkeypatch.setattr(acceleration, "DENSE", ALL)


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def thin(model: nn.Module, density: float, seed: int = 0) -> nn.Module:
    """Random zeros, and batch norms that have seen something."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            kept = torch.rand(module.weight.shape, generator=generator) < density
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * kept
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            for values, low, high in ((module.running_mean, -1, 1), (module.running_var, 0.5, 2)):
                values.uniform_(low, high, generator=generator)
            nn.init.uniform_(module.weight, 0.5, 2, generator=generator)
            nn.init.uniform_(module.bias, -1, 1, generator=generator)
    return model.eval()


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def check(model: nn.Module, x: Tensor, *, made: nn.Module | None = None) -> nn.Module:
    """Accelerated, it gives what the plain one gives."""
    made = accelerate(model, x) if made is None else made
    expected, got = model(x.clone()), made(x)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert float((got - expected).abs().max()) <= 1e-4 * float(expected.abs().max()) + 1e-6
    return made


def parts(made: nn.Module) -> list[Part]:
    return [module for module in made.modules() if isinstance(module, Part)]


# ---- the kernels against torch ----


@settings(max_examples=150, deadline=None)
@given(data=some.data())
def test_convolutions(data: some.DataObject) -> None:
    pick = lambda *values: data.draw(some.sampled_from(values))  # noqa: E731
    group, kernel, stride = (
        pick(1, 1, 1, 2),
        pick((1, 1), (3, 3), (7, 7), (5, 5), (2, 3)),
        pick(1, 1, 2, 3, (2, 1)),
    )
    inputs, outputs = group * pick(1, 3, 10, 40), group * pick(1, 5, 33)
    padding, dilation = pick(0, 1, 2, 3, (1, 0)), pick(1, 1, 1, 2)
    size = pick(1, 2, 4, 5, 8, 11, 16, 19), pick(1, 2, 4, 7, 8, 16, 32)
    pads = padding if isinstance(padding, tuple) else (padding, padding)
    if any(s + 2 * p <= dilation * (k - 1) for s, p, k in zip(size, pads, kernel, strict=True)):
        return
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, group, bias=pick(True, False))
    model = thin(conv, pick(0.0, 0.02, 0.1, 0.5, 1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceleration, "DENSE", ALL)
        made = check(
            nn.Sequential(model, nn.ReLU()) if pick(True, False) else model,
            images(pick(*BATCHES), inputs, *size),
        )
    assert len(parts(made)) == 1


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
def test_linear_layers(batch: int, density: float, always: None) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(75, 30), nn.ReLU(), nn.BatchNorm1d(30), nn.Linear(30, 7))
    assert parts(check(thin(model, density), images(batch, 3, 5, 5)))


def test_rows_without_weights(always: None) -> None:
    conv = thin(nn.Conv2d(4, 6, 3, padding=1), 0.5)
    conv.weight.data[::2] = 0
    conv.weight.data[:, 1] = 0
    check(conv, images(3, 4, 9, 9))


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(3, 1, 1),
        nn.MaxPool2d((2, 3), (3, 2)),
        nn.AvgPool2d(2),
        nn.AvgPool2d(3, 1),
        nn.AdaptiveAvgPool2d(1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("relu", [True, False])
def test_pools(pool: nn.Module, relu: bool) -> None:
    model = nn.Sequential(thin(nn.Conv2d(3, 5, 3, padding=1), 0.3), pool, *[nn.ReLU()] * relu)
    for batch in (1, 3):
        made = check(model, images(batch, 3, 11, 10))
        assert len(parts(made)) == 1 and len(list(made.network.graph.nodes)) == 3


# ---- networks ----


@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_library(name: str) -> None:
    size = 64 if name == "resnet50-imagenet" else MODELS[name].size
    model = thin(build_model(name, 10, 3, size, SMALL.get(name, 1.0)), 0.2)
    made = accelerate(model, images(2, 3, size, size))
    for batch in BATCHES:
        check(model, images(batch, 3, size, size, seed=batch), made=made)
    assert len(parts(made)) == 1 and not made.dense
    layers = {n: m.weight for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    for layer, weight in layers.items():
        assert made.sparse[layer] == pytest.approx(float((weight != 0).float().mean()))


class Sums(nn.Module):
    """Values with several readers, sums of three, of a value with itself, before and after activations."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = F.relu(self.b(a))
        c = self.c(b) + a + b
        d = torch.add(a, self.norm(a))
        e = (b + b).relu() + x
        return (c + d) + F.relu(e + self.b(e))


def test_sums() -> None:
    model = thin(Sums(), 0.3)
    for batch in BATCHES:
        assert len(parts(check(model, images(batch, 4, 6, 7)))) == 1


class InPlace(nn.Module):
    """What is read after it was changed is read changed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.relu = nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = y * 2
        self.relu(y)
        y += x
        return y + z


def test_changes_in_place() -> None:
    check(thin(InPlace(), 0.4), images(3, 3, 5, 5))


class Begins(nn.Module):
    """Changes what it is given, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.a = nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(x)
        return self.a(y) + x


@pytest.mark.parametrize("density", [0.3, 1.0])  # by the kernels, and by torch
@pytest.mark.parametrize(
    "build",
    [
        Begins,
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3)),
        lambda: nn.Sequential(nn.Hardswish(inplace=True), nn.Conv2d(3, 4, 3)),
    ],
    ids=["read again", "relu", "unknown"],
)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_network_that_begins_in_place(build: Any, density: float, batch: int) -> None:
    model, x = thin(build(), density), images(batch, 3, 5, 5)
    made = accelerate(model, x)
    assert torch.equal(x, images(batch, 3, 5, 5))
    for other in (1, 2, 7):
        check(model, images(other, 3, 5, 5, seed=1), made=made)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4, (2, 5)])
@pytest.mark.parametrize("dilation", [1, 2, (1, 3)])
@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(kernel, dilation, padding) -> None:
    conv = nn.Conv2d(3, 8, kernel, dilation=dilation, padding=padding)
    made = check(thin(nn.Sequential(conv, nn.ReLU()), 0.3), images(2, 3, 13, 14))
    assert made.sparse and not made.dense


class Mixed(nn.Module):
    """The kernels know the convolutions, not what is between; one of them twice; two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect")
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.twice(self.first(x))))
        x = F.max_pool2d(torch.relu(self.twice(x)), 2)
        scale = torch.sigmoid(x.mean((2, 3), keepdim=True))
        return self.last(F.adaptive_avg_pool2d(x * scale, 1).flatten(1)) + x.size(0)


def test_the_rest_stays_with_torch() -> None:
    model = thin(Mixed(), 0.2)
    made = check(model, images(2, 3, 8, 8))
    assert made.dense == ["first"] and set(made.sparse) == {"twice", "last"}
    assert "sparse: twice, last; dense: first" in repr(made)
    for batch in BATCHES:
        check(model, images(batch, 3, 8, 8), made=made)


def test_what_is_not_sparse_stays_dense() -> None:
    with pytest.warns(RuntimeWarning, match="no layer gains by its zeros"):
        made = check(thin(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), 1.0), images(2, 3, 8, 8))
    assert not parts(made) and made.dense == ["0"] and made.sparse == {}


def test_several_outputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            a = self.a(x)
            return a, {"b": F.relu(self.b(a))}

    model, x = thin(Two(), 0.3), images(5, 3, 9, 9)
    a, b = model(x)
    made = accelerate(model, x)(x)
    assert torch.allclose(made[0], a, atol=1e-5) and torch.allclose(made[1]["b"], b["b"], atol=1e-5)


# ---- a good citizen ----


@pytest.fixture(scope="module")
def vgg() -> tuple[nn.Module, nn.Module]:
    model = thin(build_model("vgg-small", 10), 0.1)
    return model, accelerate(model, images(1, 3, 32, 32))


@pytest.mark.parametrize("batch", [1, 3, 8, 16, 17, 40])
def test_threads_do_not_change_a_bit(batch: int, vgg: tuple[nn.Module, nn.Module], threads: Any) -> None:
    x, results = images(batch, 3, 32, 32), []
    for count in (1, 2, 2, 3, 5):
        threads(count)
        results.append(vgg[1](x))
    assert all(torch.equal(results[0], result) for result in results)


def test_calls_from_several_threads(vgg: tuple[nn.Module, nn.Module]) -> None:
    made = [vgg[1], copy.deepcopy(vgg[1])]
    batches = [images(k % 9 + 1, 3, 32, 32, seed=k) for k in range(24)]
    expected = [vgg[1](x) for x in batches]
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda k: made[k % 2](batches[k]), range(24)))
    assert all(map(torch.equal, expected, got))


def test_the_given_model_is_not_changed() -> None:
    model = thin(build_model("resnet50", 10, width=0.1), 0.1).train()
    state, modules = copy.deepcopy(model.state_dict()), [*model.named_modules()]
    made = accelerate(model, images(2, 3, 32, 32))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.training and [*model.named_modules()] == modules
    assert all(parameter.requires_grad for parameter in model.parameters())
    x = images(2, 3, 32, 32)
    before = made(x)
    nn.init.zeros_(model.fc.weight)
    assert torch.equal(made(x), before) and not made.train().training


def test_copies(vgg: tuple[nn.Module, nn.Module]) -> None:
    x = images(3, 3, 32, 32)
    assert torch.equal(copy.deepcopy(vgg[1])(x), vgg[1](x))
    with pytest.raises(st.SparsityError, match="cannot be saved: save the plain one"):
        pickle.dumps(vgg[1])


def test_a_network_in_training_is_taken_as_it_is() -> None:
    network = st.sparsify(build_model("lenet5", 10), st.Static(0.9), seed=0)
    made = check(
        network.densify().eval(), images(2, 3, 32, 32), made=accelerate(network.model, images(1, 3, 32, 32))
    )
    assert len(made.sparse) == 5


def test_inputs_of_any_layout(vgg: tuple[nn.Module, nn.Module]) -> None:
    x = images(3, 3, 32, 32)
    for other in (x.contiguous(memory_format=torch.channels_last), x.clone().requires_grad_()):
        assert torch.equal(vgg[1](other), vgg[1](x))
    assert vgg[1](x[:0]).shape == (0, 10)


def test_groups_of_a_batch() -> None:
    assert list(groups(17, 8)) == [(0, 8, 8), (8, 8, 8), (16, 1, 1)]
    assert list(groups(7, 8)) == [(0, 7, 8)] and list(groups(3, 2)) == [(0, 2, 2), (2, 1, 1)]
    assert list(groups(0, 8)) == []


# ---- what is refused, in one line ----


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Counts(nn.Module):
    """Does something else when it is called again; a trace sees one of them."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Three(nn.Module):
    """Takes three images."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.ones(3, 1)


@pytest.mark.parametrize(
    ("model", "x", "message"),
    [
        (Asks(), images(1, 3), "the network cannot be traced by torch.fx: "),
        (Counts(), images(1, 3), "torch.fx does not see all that the network does: use the plain one"),
        (nn.Conv2d(3, 3, 1), images(1, 2, 4, 4), "the network does not take the example: "),
        (
            Three(),
            images(3, 3),
            "the network does not take 2 images like the example: The size of tensor a (2)",
        ),
        (nn.Linear(3, 3), images(0, 3), "the network does not take 2 images like the example: "),
    ],
)
def test_bad_models(capsys: pytest.CaptureFixture[str], model: nn.Module, x: Tensor, message: str) -> None:
    with pytest.raises(st.SparsityError) as error:
        accelerate(model, x)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_batches_that_differ(always: None) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) + self.conv(x[-3:])

    made = check(Fixed(), images(2, 3, 4, 4))
    with pytest.raises(st.SparsityError, match="different numbers of images"):
        made(images(4, 3, 4, 4))


def test_bad_inputs(vgg: tuple[nn.Module, nn.Module]) -> None:
    with pytest.raises(st.SparsityError, match="accelerated for inputs of 3 x 32 x 32, not of 3 x 16 x 16"):
        vgg[1](images(1, 3, 16, 16))
    with pytest.raises(st.SparsityError, match="takes float32 on a CPU, not torch.float64 on cpu"):
        vgg[1](images(1, 3, 32, 32).double())
    with pytest.raises(st.SparsityError, match="takes a torch.Tensor, not ndarray"):
        vgg[1](images(1, 3, 32, 32).numpy())
    with pytest.raises(st.SparsityError, match="takes a network, not OrderedDict: load it into one"):
        accelerate(nn.Linear(2, 2).state_dict(), torch.randn(1, 2))
    with pytest.raises(st.SparsityError, match=r"takes batches: x\[None\] is one of a single input"):
        vgg[1](images(1, 3, 32, 32)[0])
    with pytest.raises(st.SparsityError, match="cannot be saved: save the plain one"):
        vgg[1].state_dict()


# ---- compiling ----


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As if nothing had been compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.kernels.cache_clear()
    yield tmp_path
    native.kernels.cache_clear()


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(st.SparsityError) as error:
        accelerate(nn.Linear(3, 3), images(1, 3))
    message = "the sparse kernels need a C++ compiler: install g++ or clang++, or set CXX to one"
    assert str(error.value) == message


def test_without_a_place(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    with pytest.raises(st.SparsityError, match="no place for the sparse kernels, set XDG_CACHE_HOME: "):
        native.kernels()


def compiler(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\nfor last; do :; done\n{body}\n")  # its last argument: the file to make
    path.chmod(0o755)
    return str(path)


def test_a_compiler_that_fails(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler(fresh, "echo notes >&2; echo 'x.cpp:1: error: no' >&2; exit 1"))
    with pytest.raises(
        st.SparsityError, match="cannot compile the sparse kernels, set CXX to another: x.cpp:1: err"
    ):
        native.kernels()
    assert list((fresh / "cache" / "suptickets").iterdir()) == []


def again() -> Path:
    """What another process would do; returns the one file there is."""
    native.kernels.cache_clear()
    native.kernels()
    (made,) = native.folder().iterdir()
    return made


def test_compiled_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second process finds what the first has made; another source, or compiler, has another place."""
    first, name = again(), native.pattern(native.find_compiler())
    kept = first.stat().st_mtime_ns
    assert again() == first and first.match(name) and first.stat().st_mtime_ns == kept
    assert native.pattern(compiler(fresh, "echo another")) != name
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    assert native.pattern(native.find_compiler()) != name


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native._compiled(str(native.find_compiler()), tmp_path_factory.mktemp("made") / "kernels.so")


@pytest.fixture
def copies(fresh: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is quick."""
    monkeypatch.setenv("CXX", compiler(fresh, f'test "$1" = --version || cp "{made}" "$last"'))


@pytest.mark.parametrize("damage", [b"", b"garbage", None])
def test_damaged_kernels_are_made_again(copies: None, damage: bytes | None) -> None:
    made = again()
    whole = made.read_bytes()
    made.unlink()  # it is in use
    made.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    made = made.rename(made.with_stem(made.stem[:-16] + 16 * "0"))
    assert again() != made and again().read_bytes() == whole


def test_a_compiler_is_needed_only_once(fresh: Path, copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = again()
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX")
    assert native.find_compiler() is None and again() == made


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('test "$1" = --version || echo no > "$last"', "made kernels that do not load from .*: set CXX to a"),
        ("true", "cannot compile the sparse kernels, set CXX to another: exit status 0"),
    ],
)
def test_a_compiler_that_makes_no_kernels(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler(fresh, body))
    with pytest.raises(st.SparsityError, match=message):
        native.kernels()
    assert list(native.folder().iterdir()) == []


def test_a_compiler_that_is_no_program(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path(compiler(fresh, ""))
    made.write_text("no program")
    monkeypatch.setenv("CXX", str(made))
    with pytest.raises(st.SparsityError, match="cannot be run, set CXX to another compiler: "):
        native.kernels()


def test_a_place_that_is_read_only(copies: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**given: Any) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", refused)
    with pytest.raises(st.SparsityError, match="no place for the sparse kernels, .*: read only"):
        native.kernels()


class Indexing(nn.Module):
    """Takes parts of what a convolution gives."""

    def __init__(self, part):
        super().__init__()
        self.conv, self.part = nn.Conv2d(3, 8, 3, padding=1), part

    def forward(self, x):
        return self.conv(torch.relu(self.conv(x)[:, :3]))[self.part]


@pytest.mark.parametrize("part", [(..., 0, 0), (slice(None), slice(None), slice(None, None, 2)), 0])
def test_indexing_is_left_to_torch(part):
    torch.manual_seed(0)
    model = Indexing(part).eval()
    model.conv.weight.data *= torch.rand_like(model.conv.weight) > 0.8
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(accelerate(model, x)(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_type_does_not_matter(dtype: torch.dtype) -> None:
    model = thin(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)), 0.1)
    x = images(64, 1, 8, 8)
    made, expected = accelerate(model, x), model(x)
    torch.set_default_dtype(dtype)
    try:
        again, found = accelerate(model, x)(x), made(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_than_the_kernels_are_refused(dtype: torch.dtype) -> None:
    model = thin(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), 0.1).to(dtype)
    with pytest.raises(st.SparsityError, match=r"float32: call model.float\(\) first"):
        accelerate(model, images(2, 8).to(dtype))


class _Layers(nn.Module):
    """Two layers, and a forward pass of one's own."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.first, self.last, self.relu = nn.Linear(8, 8), nn.Linear(8, 2), nn.ReLU6(inplace=True)
        self.own = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self, x)


def _aliased(net: Any, x: Tensor) -> Tensor:
    h = alias = net.first(x)
    h += 1.5
    h *= net.first(h)
    return net.last(alias) + net.last(h)


def _read_before(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    before = net.last(h)
    net.relu(h)
    h.clamp_(max=3).sub_(1)
    return net.last(h) - before


def _changed(change: Any) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        change(h)
        return net.last(h)

    return forward


def _twice(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    net.relu(h)
    g = net.first(h)
    net.relu(g)
    return net.last(g)


def _masked(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    mask = (h > -1) & (h < 1)
    mask |= h > 2
    return net.last(h * mask)


def _sized(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    size = end = h.size(1)
    end -= 4
    return net.last(torch.cat([h[:, :end], h[:, end:]], 1)) / size


@torch.fx.wrap
def _clipped(h: Tensor) -> Tensor:
    return h.clamp_(max=6)


@torch.fx.wrap
def _clips(h: Tensor) -> None:
    h.clamp_(max=6)


@torch.fx.wrap
def _itself(h: Tensor) -> Tensor:
    return h


@torch.fx.wrap
def _both(h: Tensor) -> tuple[Tensor, Tensor]:
    return h + 1, h


def _multiplied(net: Any, x: Tensor) -> Tensor:
    """Not in place."""
    h = before = net.first(x)
    h @= net.first.weight
    return net.last(h) + net.last(before)


def _filled(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.last(torch.zeros_like(h).copy_(h).requires_grad_(False) + h.new_empty(h.shape).fill_(1.0))


CHANGES = {
    "twice": _twice,
    "masked": _masked,
    "sized": _sized,
    "filled": _filled,
    "alias": _aliased,
    "read before": _read_before,
    "method": _changed(lambda h: h.clamp_(max=6)),
    "function": _changed(lambda h: F.hardtanh(h, -6, 6, inplace=True)),
    "by place": _changed(lambda h: F.hardtanh(h, -6, 6, True)),
    "by name": _changed(lambda h: F.leaky_relu_(h, 0.1)),
    "keyword": lambda net, x: net.last(input=net.first(input=x)),
    "input": lambda net, x: net.last(net.first(x.nan_to_num_())),
    "wrapped": _changed(lambda h: _clipped(h)),
    "out": _changed(lambda h: torch.clamp(h, max=6, out=h)),
    "product": _multiplied,
    "dropout": lambda net, x: net.last(F.relu(F.dropout(net.first(x), 0.5, net.training), inplace=True)),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_what_changes_tensors_in_place_is_followed(always: None, name: str) -> None:
    """Also where the example does not tell."""
    model = thin(_Layers(CHANGES[name]), 0.5)
    made = accelerate(model, images(1, 8) * 0.01)
    for scale in (0.01, 100.0):
        x = images(3, 8, seed=1) * scale
        torch.testing.assert_close(made(x.clone()), model(x.clone()), rtol=1e-4, atol=1e-4)


def _of_view(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    part = h[:, :4]
    part.clamp_(max=6)
    return net.last(h)


def _of_base(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    turned = h.view(-1, 8)
    h.clamp_(max=6)
    return net.last(turned)


def _of_data(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    data = h.data
    data -= F.relu(data - 6)
    return net.last(h)


def _shared(share: Any) -> Any:
    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        other = share(h)
        h.clamp_(max=6)
        return net.last(other.view(-1, 8))

    return forward


SHARED = {
    "dropout": lambda h: F.dropout(h, 0.5, False),
    "ravel": lambda h: h.ravel(),
    "turned": lambda h: h.t().reshape(8, -1).t().contiguous(),
    "type": lambda h: h.type_as(h),
    "parts": lambda h: h.hsplit(1)[0],
    "wrapped": lambda h: _itself(h),
    "wrapped parts": lambda h: _both(h)[1],
}


@pytest.mark.parametrize(
    "forward",
    [_of_view, _of_base, _of_data, *map(_shared, SHARED.values())],
    ids=["view", "base", "data", *SHARED],
)
def test_changes_of_what_is_known_by_another_name_are_refused(forward: Any) -> None:
    """An example would tell only if it is clipped."""
    with pytest.raises(st.SparsityError, match="it changes a view. Use the plain network"):
        accelerate(thin(_Layers(forward), 0.5), images(1, 8) * 0.01)


def test_changes_by_unknown_functions_are_refused() -> None:
    with pytest.raises(st.SparsityError, match="does not follow _clips: use the plain network"):
        accelerate(thin(_Layers(_changed(lambda h: _clips(h))), 0.5), images(1, 8) * 0.01)


@pytest.mark.parametrize("missing", [("weight", "bias"), ("bias",), ()])
@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU()])
@pytest.mark.parametrize("pair", [(nn.Linear(8, 8), nn.BatchNorm1d), (nn.Conv2d(8, 8, 1), nn.BatchNorm2d)])
def test_batch_norms_without_weights(always: None, pair: Any, between: Any, missing: Any) -> None:
    layer, norm = pair[0], pair[1](8).eval()
    for name in missing:
        norm.register_parameter(name, None)
    norm.running_mean.uniform_(), norm.running_var.uniform_(1, 2)
    x = images(3, 8) if isinstance(layer, nn.Linear) else images(3, 8, 4, 4)
    assert len(parts(check(nn.Sequential(layer, between, norm), x))) == 1


def test_batch_norms_of_rows_are_not_folded() -> None:
    check(thin(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), 0.5), images(3, 8, 8))


def test_hooks_of_modules_that_do_nothing() -> None:
    model = thin(nn.Sequential(nn.Linear(8, 8), nn.Identity()), 0.2)
    model[1].register_forward_hook(lambda module, given, made: made * 2)
    check(model, images(3, 8))


def test_weights_that_are_read_elsewhere_are_not_folded(always: None) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.relu(self.norm(self.layer(x))), self.layer.weight.t())

    check(thin(Tied(), 0.5), images(3, 8))


def test_other_arguments_have_their_defaults(always: None) -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 6)

        def forward(self, x: Tensor, mask: Any = None, *more: Any, feat: bool = False, **rest: Any) -> Any:
            x = self.layer(x)
            return x if feat else F.relu(x if mask is None else x * mask)

    assert len(parts(check(thin(Optional(), 0.5), images(3, 8)))) == 1


@pytest.mark.parametrize("count", [2, 3])
def test_parameters_with_a_few_rows_are_no_images(always: None, count: int) -> None:
    class Prototypes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.prototypes = nn.Linear(8, 8), nn.Parameter(images(count, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ F.relu(self.layer(self.prototypes)).t()

    model = thin(Prototypes(), 0.5)
    made = accelerate(model, images(1, 8))
    for batch in BATCHES:
        check(model, images(batch, 8), made=made)


@pytest.mark.parametrize(("density", "sparse"), [(0.25, ["0", "4"]), (0.5, ["0"]), (0.9, [])])
def test_linear_layers_must_be_sparser(density: float, sparse: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 8, 3), nn.SiLU(), nn.Flatten(), nn.SiLU(), nn.Linear(128, 64))
    assert [*check(thin(model, density), images(2, 2, 6, 6)).sparse] == sparse


@pytest.mark.parametrize(
    "pool", [nn.MaxPool2d([2, 2]), nn.AvgPool2d((2,)), nn.MaxPool2d((3,), stride=[1, 2])]
)
@torch.no_grad()
def test_sizes_of_windows_may_be_lists(always: None, pool: nn.Module) -> None:
    check(thin(nn.Sequential(nn.Conv2d(1, 4, 1), pool), 0.8), images(2, 1, 8, 8))


@torch.no_grad()
def test_what_is_not_a_number_stays_so_in_a_window(always: None) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.MaxPool2d(2)).eval()
    x = images(2, 1, 8, 8)
    made = accelerate(model, x)
    x[0, 0, 0, 0] = x[1, 0, 3, 4] = torch.nan
    assert torch.equal(made(x).isnan(), model(x).isnan()) and made(x).isnan().sum() == 8
