"""Learning-rate schedules on their own: Eq. 3, FGE's and SWA's cycles, whole trainings, torch's interface."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn

from suptickets import schedules

rates = some.floats(0, 1).flatmap(lambda low: some.tuples(some.just(low), some.floats(low, 2)))
lengths = some.integers(2, 50)


def equation_3(i, length, low, high):
    """Eq. 3 as printed, for the i-th iteration of the cycles."""
    t = ((i - 1) % length + 1) / length
    if 0 < t <= 1 / 2:
        return (1 - 2 * t) * low + 2 * t * high
    return (2 - 2 * t) * high + (2 * t - 1) * low


# ---- one cycle after the other ----


@given(lengths, rates)
def test_the_triangle_is_equation_3(length, lr):
    low, high = lr
    rate = schedules.cycles("triangle", length, low, high)
    for i in range(1, 3 * length + 1):
        assert rate(i) == pytest.approx(equation_3(i, length, low, high), rel=1e-12, abs=1e-15)
    for cycle in range(3):
        first, last = cycle * length + 1, (cycle + 1) * length
        assert rate(first) == pytest.approx(low + 2 * (high - low) / length, rel=1e-12, abs=1e-15)
        assert rate(last) == low  # exactly
    if length % 2 == 0:
        assert rate(length // 2) == high


@given(lengths, rates)
def test_swa_is_a_saw_tooth(length, lr):
    """It jumps up and falls in equal steps to exactly the low rate, where the ticket is collected."""
    low, high = lr
    rate = schedules.cycles("swa", length, low, high)
    for i in range(1, length + 1):
        expected = high - (high - low) * i / length
        assert rate(i) == pytest.approx(expected, rel=1e-9, abs=1e-12)
        assert rate(i + length) == rate(i)
    assert rate(length) == low
    assert schedules.CYCLES["swa"].collected_at(length) == length


@given(lengths, rates)
def test_fge_falls_and_rises_and_is_collected_at_its_middle(length, lr):
    low, high = lr
    rate = schedules.cycles("fge", length, low, high)
    for i in range(1, length + 1):
        t = i / length
        assert rate(i) == pytest.approx(low + (high - low) * abs(1 - 2 * t), rel=1e-9, abs=1e-12)
    assert rate(length) == high
    middle = schedules.CYCLES["fge"].collected_at(length)
    assert middle == length // 2
    assert rate(middle) == pytest.approx(min(rate(i) for i in range(1, length + 1)), rel=1e-9, abs=1e-12)
    if length % 2 == 0:
        assert rate(middle) == low  # exactly


# ---- a whole training, beside torch's own schedulers ----


def optimizer(lr=0.1, groups=1, tensor=False):
    """Group k has the rate `lr / (k + 1)`."""
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(groups)]
    rate = [
        torch.tensor(lr / (k + 1), dtype=torch.float64) if tensor else lr / (k + 1) for k in range(groups)
    ]
    return torch.optim.SGD([{"params": [p], "lr": rate[k]} for k, p in enumerate(parameters)], lr=lr)


def followed(sgd, scheduler, steps):
    """The rates of each group at each step."""
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in sgd.param_groups])
        sgd.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("milestones", "factor"), [((7, 12), 0.1), ((3,), 0.5), ((), 0.1), ((4, 4), 0.5)])
def test_step_drops_are_multi_step_lr(milestones, factor):
    sgd = optimizer()
    theirs = followed(sgd, torch.optim.lr_scheduler.MultiStepLR(sgd, list(milestones), factor), 20)
    ours = schedules.step_drops(0.1, milestones, factor)
    assert [ours(step) for step in range(1, 21)] == pytest.approx([rate for (rate,) in theirs])


@pytest.mark.parametrize("low", [0.0, 0.01])
def test_cosine_decay_is_cosine_annealing(low):
    sgd = optimizer()
    theirs = followed(sgd, torch.optim.lr_scheduler.CosineAnnealingLR(sgd, 20, low), 20)
    ours = schedules.cosine_decay(0.1, 20, low)
    assert [ours(step) for step in range(1, 21)] == pytest.approx([rate for (rate,) in theirs])
    assert ours(1) == 0.1 and ours(21) == ours(99) == low


def test_cubic_is_gradual_pruning():
    """Zhu and Gupta: final + (initial - final) (1 - (step - start) / (end - start))^3 between the two."""
    for step in range(40):
        progress = min(max((step - 5) / 25, 0), 1)
        expected = 0.9 + (0.2 - 0.9) * (1 - progress) ** 3
        assert schedules.cubic(step, 5, 30, 0.2, 0.9) == pytest.approx(expected, rel=1e-12)
    assert schedules.cubic(30, 5, 30, 0.2, 0.9) == 0.9


# ---- as a scheduler of torch ----

WHOLE = {
    "step drops": schedules.step_drops(0.1, (5, 9)),
    "cosine": schedules.cosine_decay(0.1, 12),
    "triangle": schedules.cycles("triangle", 6, 0.01, 0.05),
    "swa": schedules.cycles("swa", 6, 0.01, 0.05),
    "fge": schedules.cycles("fge", 6, 0.01, 0.05),
}


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_scheduler_follows_the_schedule_and_groups_keep_their_proportions(name, tensor):
    sgd = optimizer(groups=3, tensor=tensor)
    scheduler = schedules.Scheduler(sgd, WHOLE[name])
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    for step, seen in enumerate(followed(sgd, scheduler, 12), 1):
        assert seen == pytest.approx([WHOLE[name](step) / (k + 1) for k in range(3)], rel=1e-12)
    assert all(isinstance(group["lr"], torch.Tensor) == tensor for group in sgd.param_groups)


def test_scheduler_goes_on_from_its_state():
    sgd = optimizer(groups=2)
    whole = followed(sgd, schedules.Scheduler(sgd, WHOLE["triangle"]), 12)

    first = optimizer(groups=2)
    scheduler = schedules.Scheduler(first, WHOLE["triangle"])
    before = followed(first, scheduler, 5)
    saved = {"optimizer": first.state_dict(), "scheduler": scheduler.state_dict()}
    assert not any(callable(value) for value in saved["scheduler"].values())

    second = optimizer(groups=2)
    scheduler = schedules.Scheduler(second, WHOLE["triangle"])
    second.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    assert before + followed(second, scheduler, 7) == whole


def test_scheduler_without_rates_gives_all_groups_the_schedule():
    """There is no proportion to a rate of 0."""
    sgd = optimizer()
    sgd.param_groups[0]["lr"] = 0.0
    sgd.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.0})
    scheduler = schedules.Scheduler(sgd, lambda step: 0.2)
    assert followed(sgd, scheduler, 2) == [[0.2, 0.2], [0.2, 0.2]]


def test_half_a_cosine():
    for step in range(-3, 15):
        angle = math.pi * min(max(step, 0), 10) / 10
        expected = 0.2 + 0.3 * (1 + math.cos(angle))
        assert schedules.cosine(step, 10, 0.8, 0.2) == pytest.approx(expected)


@pytest.mark.parametrize("rates", [(0.0, 0.1, 0.01), (0.1, 0.0, 0.01), (0.1, 0.2, 0.3)])
def test_groups_keep_their_proportions_to_the_first_that_learns(rates):
    """One with the rate 0 is frozen, and stays so."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = schedules.cycles("triangle", 4, 0.001, 0.01)
    scheduler = schedules.Scheduler(optimizer, schedule)
    first = next(rate for rate in rates if rate)
    for step in range(1, 9):
        expected = [schedule(step) * (rate / first) for rate in rates]
        assert [group["lr"] for group in optimizer.param_groups] == expected
        optimizer.step()
        scheduler.step()
