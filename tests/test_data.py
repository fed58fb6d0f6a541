"""Order, augmentation, batches of data in memory, digits, and the list of data."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from make_data import cifar_folder, same
from scipy.stats import chisquare

from suptickets.data import DATA, ArrayData, EpochPlan, load_data
from suptickets.data.augment import Normalise, crop
from suptickets.data.order import shares, stable_seed
from suptickets.errors import SparsityError

MEAN, STD = (0.2, 0.5, 0.7), (0.3, 0.2, 0.4)


def made(train=50, test=23, padding=2, mode="reflect", flip=True, size=(6, 7)) -> ArrayData:
    """Random images; the label of each is its place, so that batches can be traced back."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randint(256, (train + test, 3, *size), generator=rng, dtype=torch.uint8)
    y = torch.arange(train + test)
    parts = dict(train_x=x[:train], train_y=y[:train], test_x=x[train:], test_y=y[:test])
    return ArrayData(
        "made", train, **parts, mean=MEAN, std=STD, padding=padding, padding_mode=mode, flip=flip
    )


def normalised(images: np.ndarray) -> np.ndarray:
    mean, std = (np.array(t).reshape(-1, 1, 1) for t in (MEAN, STD))
    return (images / 255 - mean) / std


def joined(batches):
    xs, ys = zip(*batches, strict=True)
    return torch.cat(xs), torch.cat(ys)


# ---- augmentation ----


@pytest.mark.parametrize("mode, numpy_mode", [("reflect", "reflect"), ("zeros", "constant")])
@pytest.mark.parametrize("padding", [1, 2, 5])
def test_every_crop_is_that_of_the_padded_image(mode, numpy_mode, padding):
    image = torch.randint(256, (1, 3, 6, 7), dtype=torch.uint8)
    padded = np.pad(image[0].numpy(), [(0, 0), (padding, padding), (padding, padding)], mode=numpy_mode)
    span = 2 * padding + 1
    dy, dx, flips = (t.flatten() for t in torch.meshgrid(*map(torch.arange, (span, span, 2)), indexing="ij"))
    found = crop(image.expand(len(dy), -1, -1, -1), dy, dx, flips.bool(), padding, mode)
    for y, x, flip, cut in zip(dy, dx, flips, found.numpy(), strict=True):
        expected = padded[:, y : y + 6, x : x + 7]
        np.testing.assert_array_equal(cut, expected[:, :, ::-1] if flip else expected)


@pytest.mark.parametrize("mode, numpy_mode", [("reflect", "reflect"), ("zeros", "constant")])
def test_an_epoch_is_what_its_plan_says(mode, numpy_mode):
    data = made(mode=mode)
    plan, before = data.epoch_plan(3, 1), data.train_x.clone()
    x, y = joined(data.train_batches(8, 3, 1, dtype=torch.float64))
    assert torch.equal(y, data.train_y[plan.order])
    padded = np.pad(data.train_x.numpy(), [(0, 0), (0, 0), (2, 2), (2, 2)], mode=numpy_mode)
    for i, sample in enumerate(plan.order):
        dy, dx = plan.dy[i], plan.dx[i]
        cut = padded[sample, :, dy : dy + 6, dx : dx + 7]
        np.testing.assert_allclose(x[i], normalised(cut[:, :, ::-1] if plan.flips[i] else cut), atol=1e-12)
    assert torch.equal(data.train_x, before)


def test_offsets_and_flips_are_evenly_distributed():
    plan = EpochPlan.draw(50_000, seed=0, epoch=0, padding=4, flip=True)
    cells = Counter(zip(plan.dy.tolist(), plan.dx.tolist(), plan.flips.tolist(), strict=True))
    assert len(cells) == 9 * 9 * 2 and {dy for dy, _, _ in cells} == set(range(9))
    assert chisquare(list(cells.values())).pvalue > 0.01
    moved = torch.stack([plan.order, plan.dy, plan.dx, plan.flips.long()]).double()
    assert torch.corrcoef(moved).fill_diagonal_(0).abs().max() < 0.02


def test_the_order_is_a_new_permutation_every_epoch():
    firsts = []
    for epoch in range(500):
        plan = EpochPlan.draw(10, seed=4, epoch=epoch)
        assert sorted(plan.order.tolist()) == list(range(10))
        firsts.append(int(plan.order[0]))
    assert chisquare([firsts.count(i) for i in range(10)]).pvalue > 0.01
    assert not torch.equal(EpochPlan.draw(50, 4, 0).order, EpochPlan.draw(50, 5, 0).order)
    assert torch.equal(EpochPlan.draw(50, 4, 7).order, EpochPlan.draw(50, 4, 7).order)


def test_without_padding_and_flip_nothing_is_moved():
    data = made(padding=0, flip=False)
    plan = data.epoch_plan(0, 0)
    assert not plan.dy.any() and not plan.dx.any() and not plan.flips.any()
    x, _ = joined(data.train_batches(8, 0, 0, dtype=torch.float64))
    np.testing.assert_allclose(x, normalised(data.train_x[plan.order].numpy()), atol=1e-12)


def test_seeds_of_neighbours_are_unrelated_and_always_the_same():
    assert stable_seed(0, 1) == 9017893900260303862
    seeds = {
        stable_seed(*numbers) for numbers in [(0, 1), (1, 0), (0, 1, 0), (-1, 1), (10, 1), (1, 1), (1, 11)]
    }
    assert len(seeds) == 7 and all(0 <= seed < 2**63 for seed in seeds)


def test_numbers_are_rounded_once():
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    exact = (images.double() / 255 - 0.3) / 0.2
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = Normalise((0.3,), (0.2,), "cpu", dtype)(images)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


# ---- batches ----


def test_an_epoch_shows_every_sample_once_and_keeps_the_last_partial_batch():
    data = made(train=50)
    batches = list(data.train_batches(8, 0, 0))
    assert [len(y) for _, y in batches] == [8] * 6 + [2] and data.steps(8) == 7
    assert sorted(joined(batches)[1].tolist()) == list(range(50))
    assert batches[0][0].shape == (8, *data.shape) == (8, 3, 6, 7)


def test_cifar_at_128_takes_391_steps_the_last_of_80():
    lengths = [len(range(50_000)[s]) for s in shares(50_000, 128)]
    assert len(lengths) == 391 and lengths[-1] == 80 and set(lengths[:-1]) == {128}


def test_the_test_images_come_once_in_order_and_never_augmented():
    data = made(test=23)
    x, y = joined(data.test_batches(5, dtype=torch.float64))
    assert y.tolist() == list(range(23))
    np.testing.assert_allclose(x, normalised(data.test_x.numpy()), atol=1e-12)


@pytest.mark.parametrize("world", [2, 3])
def test_the_processes_together_see_what_one_sees(world):
    data = made(train=50, test=23)
    epochs = [list(data.train_batches(7, 1, 2, rank=r, world=world)) for r in range(world)]
    for step, (x, y) in enumerate(data.train_batches(7, 1, 2)):
        for rank in range(world):
            assert torch.equal(epochs[rank][step][0], x[rank::world])
            assert torch.equal(epochs[rank][step][1], y[rank::world])
    assert {len(epoch) for epoch in epochs} == {data.steps(7)}
    tests = [y for r in range(world) for _, y in data.test_batches(7, rank=r, world=world)]
    assert sorted(torch.cat(tests).tolist()) == list(range(23))


def test_a_process_without_a_share_of_the_last_batch_stays_in_step():
    batches = list(made(train=9).train_batches(8, 0, 0, rank=1, world=2))
    assert [len(y) for _, y in batches] == [4, 0] and batches[-1][0].shape == (0, 3, 6, 7)


@pytest.mark.parametrize("skip", [0, 1, 5, 7])
def test_an_epoch_is_resumed_at_any_step(skip):
    data = made(train=50)
    whole = list(data.train_batches(8, 0, 3))
    rest = list(data.train_batches(8, 0, 3, skip=skip))
    assert len(rest) == len(whole) - skip and same(whole[skip:], rest)


def test_batches_leave_the_global_generator_alone():
    state = torch.get_rng_state()
    list(made().train_batches(8, 0, 0))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(batch_size=0), "at least 1"),
        (dict(batch_size=2, world=4), "too small for 4 processes"),
        (dict(batch_size=8, rank=2, world=2), "from 0 to 1"),
        (dict(batch_size=8, skip=8), "7 steps"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(SparsityError, match=message):
        made().train_batches(**arguments, seed=0, epoch=0)


@pytest.mark.parametrize("wrong", [dict(mode="mirror"), dict(padding=6), dict(padding=-1), dict(train=0)])
def test_data_that_make_no_sense_are_refused(wrong):
    with pytest.raises(SparsityError):
        made(**wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["reflect", "zeros"])
def test_a_gpu_sees_what_a_cpu_sees(mode):
    data = made(mode=mode)
    for source in (data, data.to("cuda")):
        train, test = source.train_batches(8, 0, 0, device="cuda"), source.test_batches(8, device="cuda")
        assert same(list(data.train_batches(8, 0, 0)), [(x.cpu(), y.cpu()) for x, y in train if x.is_cuda])
        assert same(list(data.test_batches(8)), [(x.cpu(), y.cpu()) for x, y in test if x.is_cuda])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_epoch_on_a_gpu_waits_for_nothing():
    data = made().to("cuda")
    batches = data.train_batches(8, 0, 0, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert sum(len(y) for _, y in batches) == 50
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- digits, and the list ----


def test_digits_are_split_by_class_and_normalised():
    data = load_data("digits")
    assert (data.train_size, data.test_size, data.classes, data.shape) == (1437, 360, 10, (1, 8, 8))
    counts = data.train_y.bincount().double()
    assert ((counts / 5).round() - (data.test_y.bincount() * 4 / 5).round()).abs().max() <= 1
    assert (counts / (counts + data.test_y.bincount())).sub(0.8).abs().max() < 0.01
    values = data.train_x.double() / 255
    assert data.mean == (round(float(values.mean()), 4),)
    assert data.std == (round(float(values.std(correction=0)), 4),)
    both = torch.cat([data.train_x, data.test_x])
    assert both.unique().tolist() == [math.floor(v * 255 / 16 + 0.5) for v in range(17)]
    assert not data.padding and not data.flip


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    data = load_data("digits")
    images = torch.cat([data.train_x, data.test_x]).flatten(1)
    ours = torch.cat([torch.cat([data.train_y, data.test_y])[:, None], images], 1)
    rounded = [[label, *(math.floor(v * 255 / 16 + 0.5) for v in x)] for label, *x in np.c_[labels, pixels]]
    assert sorted(ours.tolist()) == sorted(rounded)


def test_the_list_names_all_data_and_suggests_the_nearest():
    assert list(DATA) == ["digits", "fashion-mnist", "cifar10", "cifar100", "imagenet", "folder"]
    assert all(entry.summary and "\n" not in entry.summary for entry in DATA.values())
    with pytest.raises(SparsityError, match="did you mean 'cifar10'"):
        load_data("cifar-10")


def test_data_are_loaded_by_name_and_folder(tmp_path):
    cifar_folder(tmp_path)
    assert load_data("cifar10", str(tmp_path)).train_size == 100
    with pytest.raises(SparsityError, match="workers"):
        load_data("cifar10", tmp_path, workers=-1)


# ---- a part of the training data in place of the test data ----


@pytest.mark.parametrize("train, share", [(50, 0.1), (50, 0.5), (7, 0.2), (1000, 0.333)])
def test_what_is_held_out_is_not_trained_on(train, share):
    data = made(train)
    part = data.held_out(share)
    assert part.test_size == round(share * train) and part.train_size + part.test_size == train
    assert torch.cat([part.train_y, part.test_y]).sort().values.equal(data.train_y)
    for x, y in ((part.train_x, part.train_y), (part.test_x, part.test_y)):
        assert x.equal(data.train_x[y]) and y.equal(y.sort().values)
    assert part.test_y.equal(data.held_out(share).test_y)  # in every run the same
    assert part.name == data.name and part.padding == data.padding
    assert joined(part.test_batches(8))[1].equal(part.test_y)


def test_what_is_held_out_is_spread_over_the_data():
    held = made(1000).held_out(0.5).test_y
    assert 200 < int((held < 500).sum()) < 300 and not held.equal(held[0] + torch.arange(500))


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_a_share_that_leaves_nothing_is_refused(share):
    with pytest.raises(SparsityError, match=r"of 50 samples leaves none to train on, or none to evaluate on"):
        made(50).held_out(share)


def test_data_are_loaded_with_a_part_held_out():
    whole, part = load_data("digits"), load_data("digits", holdout=0.25)
    assert (part.train_size, part.test_size) == (whole.train_size - 359, 359)
