"""How many connections each layer gets: literature, formulas, and properties over many shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as some
from torch import nn

import suptickets as st
from suptickets.distribution import DISTRIBUTIONS, apportion, counts, densities
from suptickets.errors import SparsityError
from suptickets.models import build_model

Shapes = Sequence[tuple[int, ...]]

names = some.sampled_from(sorted(DISTRIBUTIONS))
kernels = some.sampled_from([(), (1,), (3,), (1, 1), (3, 3), (5, 5), (1, 7), (3, 3, 3)])
shape_lists = some.lists(
    some.builds(
        lambda io, kernel: (*io, *kernel), some.tuples(some.integers(1, 64), some.integers(1, 64)), kernels
    ),
    min_size=1,
    max_size=9,
)
sparsities = some.one_of(some.sampled_from([0.0, 0.5, 0.8, 0.9, 0.95]), some.floats(1e-6, 0.99))


def sizes_of(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def counts_if_possible(shapes: Shapes, sparsity: float, name: str, dense: Sequence[int] = ()) -> list[int]:
    """`counts`, for examples in which every layer keeps a connection."""
    try:
        return counts(shapes, sparsity, name, dense=dense)
    except SparsityError:
        assume(False)
        raise


# ---- the literature: ResNet-50 ----


@pytest.fixture(scope="module")
def resnet50() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = build_model("resnet50-imagenet", 1000)
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    return {name: tuple(layer.weight.shape) for name, layer in layers.items()}


def test_erk_on_resnet50_gives_the_sparsities_of_the_formula(resnet50: dict[str, tuple[int, ...]]) -> None:
    shapes = list(resnet50.values())
    living = dict(zip(resnet50, counts(shapes, 0.9), strict=True))
    sparsity = {name: 100 * (1 - n / math.prod(resnet50[name])) for name, n in living.items()}
    expected = {"conv1": 58.0, "layer1.0.conv2": 82.3, "layer4.2.conv2": 97.9, "fc": 92.7}
    assert {name: round(sparsity[name], 1) for name in expected} == expected
    assert (round(sparsity["layer1.0.conv1"], 1), round(sparsity["layer1.0.conv3"], 1)) == (0.0, 4.1)
    assert sum(living.values()) == round(0.1 * 25_502_912)


def test_st_erk_is_the_density_per_shape(resnet50: dict[str, tuple[int, ...]]) -> None:
    shapes = list(resnet50.values())
    assert st.erk(shapes, 0.9) == st.erk(iter(shapes), 0.9) == densities(shapes, 0.9, "erk")
    assert 1 - st.erk(shapes, 0.9)[0] == pytest.approx(0.58, abs=5e-4)


# ---- densities ----


def slow_densities(shapes: Shapes, sparsity: float, name: str, dense: Sequence[int] = ()) -> list[float]:
    """Densities are min(1, epsilon x raw); epsilon by bisection on the total."""
    sizes = sizes_of(shapes)
    raw = []
    for shape in shapes:
        inputs, outputs = shape[1], shape[0]
        formulas = {
            "uniform": 1.0,
            "er": (inputs + outputs) / (inputs * outputs),
            "erk": (inputs + outputs + sum(shape[2:])) / (inputs * outputs * math.prod(shape[2:])),
        }
        raw.append(formulas[name])

    def at(epsilon: float) -> list[float]:
        return [1.0 if i in dense else min(1.0, epsilon * r) for i, r in enumerate(raw)]

    low, high = 0.0, 2 / min(raw)
    for _ in range(200):
        middle = (low + high) / 2
        total = sum(d * n for d, n in zip(at(middle), sizes, strict=True))
        low, high = (middle, high) if total < (1 - sparsity) * sum(sizes) else (low, middle)
    return at(low)


@given(shape_lists, sparsities, names)
def test_densities_agree_with_a_slow_reference(shapes: Shapes, sparsity: float, name: str) -> None:
    assert densities(shapes, sparsity, name) == pytest.approx(
        slow_densities(shapes, sparsity, name), abs=1e-9
    )


@given(shape_lists, sparsities, names, some.data())
def test_densities_with_dense_layers_agree_with_a_slow_reference(
    shapes: Shapes, sparsity: float, name: str, data: some.DataObject
) -> None:
    dense = data.draw(some.sets(some.integers(0, len(shapes) - 1), max_size=2))
    sizes = sizes_of(shapes)
    assume(sum(sizes[i] for i in dense) < 0.999 * (1 - sparsity) * sum(sizes))
    ours = densities(shapes, sparsity, name, dense)
    assert ours == pytest.approx(slow_densities(shapes, sparsity, name, list(dense)), abs=1e-9)
    assert all(ours[i] == 1 for i in dense)


@given(shape_lists, sparsities, sparsities, names)
def test_a_higher_sparsity_gives_no_layer_more(shapes: Shapes, one: float, two: float, name: str) -> None:
    lower, higher = sorted((one, two))
    before, after = densities(shapes, lower, name), densities(shapes, higher, name)
    assert all(b >= a - 1e-12 for b, a in zip(before, after, strict=True))


def test_the_formulas() -> None:
    shapes = [(40, 30, 3, 3), (50, 40, 3, 3), (10, 50)]
    assert densities(shapes, 0.75, "uniform") == [0.25] * 3
    er, erk = densities(shapes, 0.9, "er"), densities(shapes, 0.9, "erk")
    assert er[0] / er[1] == pytest.approx((70 / 1200) / (90 / 2000))
    assert erk[0] / erk[1] == pytest.approx((76 / 10800) / (96 / 18000))
    assert er[2] / er[0] == pytest.approx((60 / 500) / (70 / 1200))
    assert erk[2] == 1.0  # it would exceed 1


def test_on_linear_layers_er_and_erk_are_the_same() -> None:
    shapes = [(300, 784), (100, 300), (10, 100)]
    assert densities(shapes, 0.95, "er") == densities(shapes, 0.95, "erk")


@pytest.mark.parametrize("sparsity", [5e-324, 1e-17, 1e-16, 1e-12])
@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_a_sparsity_next_to_nothing_is_fine(name: str, sparsity: float) -> None:
    for shapes in ([(3, 7)], [(5, 9), (49, 3, 3, 3)], [(14, 5, 1, 1), (21, 9), (23, 12, 3, 3)]):
        assert densities(shapes, sparsity, name) == pytest.approx([1.0] * len(shapes))
        assert counts(shapes, sparsity, name) == sizes_of(shapes)


def test_bad_input_gets_one_clear_error() -> None:
    with pytest.raises(SparsityError, match="unknown distribution 'erdos'"):
        densities([(3, 3)], 0.5, "erdos")
    for sparsity in (-0.1, 1.0, 1.5, math.nan, math.inf):
        with pytest.raises(SparsityError, match="sparsity"):
            densities([(3, 3)], sparsity)
    with pytest.raises(SparsityError, match="did you mean 0.9?"):
        st.erk([(3, 3)], 90)


# ---- apportion ----

splits = some.lists(some.tuples(some.integers(0, 1000), some.integers(0, 500)), min_size=1, max_size=9)


@given(some.integers(0, 3000), splits)
def test_apportion_is_exact_and_within_caps(total: int, split: list[tuple[int, int]]) -> None:
    shares, caps = [share for share, _ in split], [cap for _, cap in split]
    result = apportion(total, shares, caps)
    assert sum(result) == min(total, sum(caps))
    assert all(0 <= n <= cap for n, cap in zip(result, caps, strict=True))


@given(some.integers(0, 3000), splits)
def test_apportion_without_caps_is_largest_remainder(total: int, split: list[tuple[int, int]]) -> None:
    shares = [share for share, _ in split]
    assume(sum(shares) > 0)
    result = apportion(total, shares, [10**9] * len(shares))
    quotas = [total * share / sum(shares) for share in shares]
    assert all(abs(n - quota) < 1 + 1e-9 for n, quota in zip(result, quotas, strict=True))
    up = [q - math.floor(q) for n, q in zip(result, quotas, strict=True) if n > q + 1e-9]
    down = [q - math.floor(q) for n, q in zip(result, quotas, strict=True) if n < q - 1e-9]
    assert not up or not down or min(up) >= max(down) - 1e-9


@given(some.integers(0, 3000), splits)
def test_apportion_gives_a_larger_share_no_less(total: int, split: list[tuple[int, int]]) -> None:
    shares, caps = [share for share, _ in split], [cap for _, cap in split]
    result = apportion(total, shares, caps)
    for i in range(len(split)):
        for j in range(len(split)):
            if shares[i] > shares[j] and caps[i] >= caps[j]:
                assert result[i] >= result[j]


@given(some.integers(0, 3000), some.integers(0, 3000), splits)
def test_apportion_of_more_gives_nobody_noticeably_less(
    one: int, two: int, split: list[tuple[int, int]]
) -> None:
    """Largest remainder may take one away (the Alabama paradox), never more."""
    shares, caps = [share for share, _ in split], [cap for _, cap in split]
    less, more = (apportion(total, shares, caps) for total in sorted((one, two)))
    assert all(m >= n - 1 for n, m in zip(less, more, strict=True))


def test_apportion_without_shares_is_even() -> None:
    assert apportion(9, [0, 0, 0], [10, 10, 10]) == [3, 3, 3]
    assert apportion(9, [0, 0, 0], [1, 10, 10]) == [1, 4, 4]
    assert apportion(9, [], []) == []


# ---- counts ----


@given(shape_lists, sparsities, names)
def test_counts_are_exact_in_total_and_in_range(shapes: Shapes, sparsity: float, name: str) -> None:
    result, sizes = counts_if_possible(shapes, sparsity, name), sizes_of(shapes)
    assert sum(result) == round((1 - sparsity) * sum(sizes))
    assert all(1 <= n <= size for n, size in zip(result, sizes, strict=True))
    expected = [d * size for d, size in zip(densities(shapes, sparsity, name), sizes, strict=True)]
    assert all(abs(n - e) <= 1.5 + 1e-9 for n, e in zip(result, expected, strict=True))


@given(shape_lists, sparsities, names, some.data())
def test_dense_layers_stay_dense_and_the_total_holds(
    shapes: Shapes, sparsity: float, name: str, data: some.DataObject
) -> None:
    dense = sorted(data.draw(some.sets(some.integers(0, len(shapes) - 1), max_size=2)))
    result, sizes = counts_if_possible(shapes, sparsity, name, dense), sizes_of(shapes)
    assert sum(result) == round((1 - sparsity) * sum(sizes))
    assert [result[i] for i in dense] == [sizes[i] for i in dense]


def test_rounding_the_total_down_takes_nothing_from_a_dense_layer() -> None:
    """The total, 257.44, becomes 257; 225 of them are the dense layer's, whatever that does to the shares."""
    shapes = [(39, 5, 1, 1), (9, 25, 1, 1), (12, 33, 3, 3)]
    assert counts(shapes, 0.9353811800993233, "uniform", dense=[1])[1] == 9 * 25


@given(shape_lists, sparsities, sparsities, names)
def test_counts_fall_with_the_sparsity(shapes: Shapes, one: float, two: float, name: str) -> None:
    lower, higher = sorted((one, two))
    before, after = (counts_if_possible(shapes, s, name) for s in (lower, higher))
    assert sum(before) >= sum(after)
    assert all(b >= a - 1 for b, a in zip(before, after, strict=True))


narrow_lists = some.lists(
    some.tuples(some.integers(1, 6), some.integers(1, 6)) | some.tuples(*[some.integers(1, 5)] * 4),
    min_size=2,
    max_size=7,
)


@given(narrow_lists, some.floats(0.5, 0.9999), names, some.booleans())
@example([(3, 4), (3, 3), (2, 3, 3, 5), (2, 3)], 0.8763504445431903, "erk", True)  # remainders that are equal
@settings(max_examples=200)
def test_the_limit_in_the_error_is_usable_and_the_next_one_is_not(
    shapes: Shapes, sparsity: float, name: str, dense_first: bool
) -> None:
    dense = [0] if dense_first else []
    try:
        counts(shapes, sparsity, name, dense=dense)
        assume(False)
    except SparsityError as error:
        message = str(error)
    found = re.fullmatch(
        r"at sparsity \S+ the layer \d+ would lose all its connections: use at most (0\.\d{6})", message
    )
    assume(found is not None)
    limit = float(found[1])
    assert 0 not in counts(shapes, limit, name, dense=dense)
    assert limit < sparsity
    with pytest.raises(SparsityError):
        counts(shapes, limit + 1e-6, name, dense=dense)


def test_an_empty_layer_is_named() -> None:
    with pytest.raises(SparsityError, match=r"the layer head would lose all .*: use at most 0\.\d{6}$"):
        counts([(100, 100), (2, 2)], 0.99, "uniform", names=["body", "head"])


@given(shape_lists, some.floats(0.05, 0.99), names)
def test_too_many_dense_layers_are_refused_with_a_usable_limit(
    shapes: Shapes, sparsity: float, name: str
) -> None:
    sizes = sizes_of(shapes)
    assume(len(shapes) > 1 and sizes[0] >= (1 - sparsity) * sum(sizes))
    with pytest.raises(SparsityError, match="kept dense") as error:
        densities(shapes, sparsity, name, {0})
    limit = float(str(error.value).rsplit(" ", 1)[1])
    assume(limit > 1e-6)
    densities(shapes, limit - 1e-6, name, {0})
    with pytest.raises(SparsityError):
        densities(shapes, limit + 1e-6, name, {0})


# ---- what sparsify makes of it ----


class Odd(nn.Module):
    """Grouped, depthwise, transposed and one-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(32, 64, 3, groups=4)
        self.depthwise = nn.Conv2d(64, 64, 5, groups=64)
        self.transposed = nn.ConvTranspose2d(64, 24, 3)
        self.both = nn.ConvTranspose3d(24, 48, (1, 3, 3), groups=3)
        self.line = nn.Conv1d(48, 40, 7)
        self.head = nn.Linear(40, 10)


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.9])
def test_grouped_and_transposed_convolutions_count_by_their_weights(name: str, sparsity: float) -> None:
    shapes = {
        "grouped": (64, 8, 3, 3),
        "depthwise": (64, 1, 5, 5),
        "transposed": (64, 24, 3, 3),
        "both": (24, 16, 1, 3, 3),
        "line": (40, 48, 7),
        "head": (10, 40),
    }
    network = st.sparsify(Odd(), st.Static(sparsity, distribution=name))
    assert {n: tuple(layer.shape) for n, layer in network.layers.items()} == shapes
    expected = counts(list(shapes.values()), sparsity, name)
    assert [layer.nonzero for layer in network.layers.values()] == expected
    assert network.nonzero == round((1 - sparsity) * sum(sizes_of(list(shapes.values()))))


@pytest.mark.parametrize("name", sorted(DISTRIBUTIONS))
def test_first_and_last_layer_can_stay_dense(name: str) -> None:
    model = build_model("vgg-small", 10, width=0.5)
    network = st.sparsify(model, st.Static(0.8, distribution=name, dense_first=True, dense_last=True))
    layers = list(network.layers.values())
    assert layers[0].sparsity == layers[-1].sparsity == 0
    assert network.nonzero == round(0.2 * network.parameters_total)
