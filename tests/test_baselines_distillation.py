"""The loss of distillation: labels and several teachers, each with the same weight."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import batches, sgd, tiny_net
from torch import nn

import suptickets as st
from suptickets import SparsityError
from suptickets.baselines import Distillation


class Says(nn.Module):
    """A teacher that always says the same."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        return self.logits


def softmax(values, temperature):
    powers = [math.exp(v / temperature) for v in values]
    return [p / sum(powers) for p in powers]


def slow(logits, teachers, labels, temperature):
    """By the definition, one sample and one class at a time."""
    losses = [-math.log(softmax(row, 1)[label]) for row, label in zip(logits, labels, strict=True)]
    total = [sum(losses) / len(losses)]
    for teacher in teachers:
        soft = 0.0
        for row, taught in zip(logits, teacher, strict=True):
            q, p = softmax(row, temperature), softmax(taught, temperature)
            soft += sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))
        total.append(temperature**2 * soft / len(logits))
    return sum(total) / len(total)


@pytest.mark.parametrize("teachers", [1, 3])
@pytest.mark.parametrize("temperature", [1, 4, 0.5])
def test_the_loss_is_the_mean_of_the_hard_and_the_soft_ones(teachers, temperature):
    logits, y = 3 * torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    taught = [3 * torch.randn(6, 5, dtype=torch.float64) for _ in range(teachers)]
    loss = Distillation([Says(one) for one in taught], temperature)(logits, torch.zeros(6), y)
    expected = slow(logits.tolist(), [one.tolist() for one in taught], y.tolist(), temperature)
    assert float(loss) == pytest.approx(expected, rel=1e-12)


def test_its_gradient_is_that_of_hintons_cross_entropies():
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    y, taught = torch.randint(5, (6,)), [torch.randn(6, 5, dtype=torch.float64) for _ in range(3)]
    Distillation([Says(one) for one in taught])(logits, torch.zeros(6), y).backward()
    hard = F.softmax(logits, 1) - F.one_hot(y, 5)
    soft = sum(4 * (F.softmax(logits / 4, 1) - F.softmax(one / 4, 1)) for one in taught)
    assert torch.allclose(logits.grad, (hard + soft) / 4 / 6, atol=1e-12)


def test_a_high_temperature_does_not_silence_the_teachers():
    y, taught = torch.randint(5, (6,)), torch.randn(6, 5, dtype=torch.float64)
    start = torch.randn(6, 5, dtype=torch.float64)

    def soft_gradient(temperature):
        logits = start.clone().requires_grad_()
        Distillation([Says(taught)], temperature, hard=lambda a, b: 0 * a.sum())(logits, y, y).backward()
        return logits.grad

    assert torch.allclose(soft_gradient(1e3), soft_gradient(1e4), rtol=1e-2)
    centred = (start - start.mean(1, keepdim=True)) - (taught - taught.mean(1, keepdim=True))
    assert torch.allclose(soft_gradient(1e4), centred / 5 / 6 / 2, rtol=1e-2, atol=1e-5)


def test_a_student_that_agrees_has_only_the_labels_to_learn_from():
    logits, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(5, (6,))
    loss = Distillation([Says(logits)] * 3)(logits, torch.zeros(6), y)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, y)) / 4, rel=1e-12)


def test_the_hard_loss_may_be_another():
    logits, y = torch.randn(6, 5), torch.randint(5, (6,))
    loss = Distillation([Says(logits)], hard=lambda a, b: torch.tensor(3.0))(logits, y, y)
    assert float(loss) == pytest.approx(1.5)


def test_teachers_are_not_changed_and_get_no_gradient():
    teachers = [tiny_net() for _ in range(2)]
    before = [{k: v.clone() for k, v in teacher.state_dict().items()} for teacher in teachers]
    x, y = batches()[0]
    student = tiny_net()
    Distillation(teachers)(student(x), x, y).backward()
    for teacher, state in zip(teachers, before, strict=True):
        assert not teacher.training
        assert all(torch.equal(value, state[key]) for key, value in teacher.state_dict().items())
        assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_a_sparse_student_learns_from_its_teachers_and_stays_sparse():
    teacher, student = tiny_net(), tiny_net()
    with torch.no_grad():
        teacher[-1].weight *= 10  # decided enough to be learnt from
    optimizer = sgd(student)
    network = st.sparsify(student, st.RigL(0.8, interval=5), optimizer, seed=1)
    loss, x = Distillation([teacher] * 3), batches(size=32)[0][0]
    y = teacher(x).argmax(1)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        value = loss(student(x), x, y)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert network.nonzero == round(0.2 * network.parameters_total)
    assert losses[-1] < 0.5 * losses[0]


def test_bfloat16_logits_are_softened_in_float32():
    logits, y = torch.randn(6, 5), torch.randint(5, (6,))
    taught = torch.randn(6, 5)
    loss = Distillation([Says(taught.bfloat16())])(logits.bfloat16().float(), y, y)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(Distillation([Says(taught)])(logits, y, y)), rel=2e-2)


def test_no_samples_add_nothing():
    def total(a, b):
        return F.cross_entropy(a, b, reduction="sum")

    none = torch.zeros(0, 5, requires_grad=True)
    loss = Distillation([Says(torch.zeros(0, 5))], hard=total)(none, none, torch.zeros(0, dtype=torch.long))
    assert float(loss.detach()) == 0


def test_what_cannot_be_is_refused():
    with pytest.raises(SparsityError, match="at least one teacher"):
        Distillation([])
    for temperature in (0, -1, float("nan"), float("inf"), "4"):
        with pytest.raises(SparsityError, match="temperature must be above 0"):
            Distillation([tiny_net()], temperature)
