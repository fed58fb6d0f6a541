"""`SupTickets` in a training loop: rates, what happens at which step, results, state, cost, bad input."""

import copy
import functools
import gc
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import tickets_worker
import torch
import torch.nn.functional as F
from helpers import refused
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.optim import lr_scheduler
from torch.utils._python_dispatch import TorchDispatchMode

import suptickets as st
from suptickets.batch_norm import recompute

RULES = ("cia", "caa", "cima")
LOW, HIGH = 0.003, 0.04


# ---- a small training ----


def build_model():
    """328 weights to make sparse, a batch norm, and a dropout that draws from the global random state."""
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.Tanh(),
        nn.Dropout(0.2),
        nn.Linear(16, 10),
        nn.Tanh(),
        nn.Linear(10, 4),
    )


METHODS = {
    "dense": lambda: st.Dense(),
    "static": lambda: st.Static(0.6),
    "set": lambda: st.SET(0.6, interval=4),
    "rigl": lambda: st.RigL(0.6, interval=4),
    "granet": lambda: st.GraNet(0.6, interval=2, prune_end=4),
    "snfs": lambda: st.SNFS(0.6, interval=4),
    "dsr": lambda: st.DSR(0.6, interval=4, threshold=0.02),
}
LIVING = 131  # 40 % of 328


class Training:
    """Six steps, then three cycles of four; group k of the optimizer has the rate 0.1 / (k + 1)."""

    def __init__(
        self,
        method="rigl",
        *,
        normal=6,
        length=4,
        cycles=3,
        groups=1,
        tensor=False,
        seed=0,
        kind=None,
        **options,
    ):
        torch.manual_seed(seed)
        self.model = build_model()
        parameters = list(self.model.parameters())
        rates = [torch.tensor(0.1 / (k + 1)) if tensor else 0.1 / (k + 1) for k in range(groups)]
        settings = {"momentum": 0.9, "weight_decay": 1e-3} if kind is None else {}
        self.optimizer = (kind or torch.optim.SGD)(
            [{"params": parameters[k::groups], "lr": rates[k]} for k in range(groups)], lr=0.1, **settings
        )
        self.stepped = []  # the network between the optimizer's step and what it sets off
        self.optimizer.register_step_post_hook(
            lambda *_: self.stepped.append(copy.deepcopy(self.network.state_dict()))
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "weight decay")
            self.network = st.sparsify(self.model, METHODS[method](), self.optimizer, seed=seed)
        self.total = normal + cycles * length
        options.setdefault("lr", (LOW, HIGH))
        self.tickets = st.SupTickets(self.network, self.total, length, cycles, **options)
        self.rates = []  # of all groups, inside the optimizer's step
        self.optimizer.register_step_pre_hook(
            lambda *_: self.rates.append([float(group["lr"]) for group in self.optimizer.param_groups])
        )

    def backward(self):
        x, y = batch(self.network.step)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(x), y).backward()

    def run(self, steps=None, each=lambda training: None):
        for _ in range(self.total - self.network.step if steps is None else steps):
            self.backward()
            self.optimizer.step()
            each(self)
        return self

    def positions(self):
        return {name: weight.rows().tolist() for name, weight in self.network.weights.items()}

    def everything(self):
        """All that a training is made of."""
        state = [self.network.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()]
        return copy.deepcopy(state)


def batch(step):
    stream = torch.Generator().manual_seed(100 + step)
    return torch.randn(12, 8, generator=stream), torch.randint(4, (12,), generator=stream)


def plain(state):
    """The state dict of the plain model, from that of a sparse network."""
    result = {}
    for key, value in state["model"].items():
        if key in state["shapes"]:
            rows = state["model"][f"{key}_connections.positions"].long()
            value = torch.zeros(state["shapes"][key]).flatten().index_copy(0, rows, value.detach().flatten())
            value = value.view(state["shapes"][key])
        if not key.endswith("positions"):
            result[key] = value
    return result


def assert_equal(one, other, where="."):
    """Bit for bit, through dicts and lists."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for k, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_equal(a, b, f"{where}/{k}")
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    else:
        assert one == other, where


def equation_3(i, length, low, high):
    """Eq. 3 as printed, for the i-th iteration of the cycles."""
    t = ((i - 1) % length + 1) / length
    if t <= 1 / 2:
        return (1 - 2 * t) * low + 2 * t * high
    return (2 - 2 * t) * high + (2 * t - 1) * low


# ---- the learning rate ----


@pytest.mark.parametrize("length", [2, 3, 4, 7, 10])
@pytest.mark.parametrize("normal", [0, 5])
def test_the_rate_is_equation_3_at_every_step_of_every_cycle(length, normal):
    training = Training(normal=normal, length=length).run()
    rates = [rate for (rate,) in training.rates]
    assert rates[:normal] == [0.1] * normal
    for i, rate in enumerate(rates[normal:], 1):
        assert rate == pytest.approx(equation_3(i, length, LOW, HIGH), rel=1e-12)
    for cycle in range(3):
        start = normal + cycle * length
        assert rates[start] == pytest.approx(LOW + 2 * (HIGH - LOW) / length, rel=1e-12)
        assert rates[start + length - 1] == LOW  # exactly
    assert training.optimizer.param_groups[0]["lr"] == 0.1


def test_steps_of_the_cycles_add_no_hooks_to_the_optimizer():
    training = Training().run(7)
    hooks = [len(held) for name, held in vars(training.optimizer).items() if name.endswith("_hooks")]
    training.run()
    assert hooks == [len(held) for name, held in vars(training.optimizer).items() if name.endswith("_hooks")]


@pytest.mark.parametrize("tensor", [False, True])
def test_groups_keep_their_proportions(tensor):
    training = Training(groups=3, tensor=tensor)
    tensors = [group["lr"] for group in training.optimizer.param_groups]
    training.run()
    for i, rates in enumerate(training.rates[6:], 1):
        expected = [equation_3(i, 4, LOW, HIGH) / (k + 1) for k in range(3)]
        assert rates == pytest.approx(expected, rel=1e-6 if tensor else 1e-12)
    for k, group in enumerate(training.optimizer.param_groups):
        assert float(group["lr"]) == pytest.approx(0.1 / (k + 1), rel=1e-7)
        assert not tensor or group["lr"] is tensors[k]  # a captured graph holds on to it


def test_groups_keep_their_proportions_when_a_scheduler_has_brought_them_near_zero():
    """They are those of the initial rates."""
    for factors in ((1.0, 1e-9), (0.0, 0.0)):
        training = Training(groups=2)
        scheduler = lr_scheduler.LambdaLR(training.optimizer, [lambda _, f=f: f for f in factors])
        training.run(each=lambda _, scheduler=scheduler: scheduler.step())
        for i, rates in enumerate(training.rates[6:], 1):
            rate = equation_3(i, 4, LOW, HIGH)
            assert rates == pytest.approx([rate, rate / 2], rel=1e-12)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_group_at_rate_zero_while_another_learns_stays_at_rest_in_the_cycles(scheduled):
    training = Training(groups=2)
    scheduler = lr_scheduler.LambdaLR(training.optimizer, [lambda step: float(step < 3), lambda step: 1.0])
    first, _ = training.optimizer.param_groups

    def each(training):
        if scheduled:
            scheduler.step()
        elif training.network.step >= 3:
            first["lr"] = 0.0

    training.run(each=each)
    for i, rates in enumerate(training.rates[6:], 1):
        assert rates == pytest.approx([0.0, equation_3(i, 4, LOW, HIGH)], rel=1e-12)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_group_that_was_unfrozen_takes_part_in_the_cycles(scheduled):
    training = Training(groups=2)
    second = training.optimizer.param_groups[1]
    second["lr"] = 0.0
    scheduler = lr_scheduler.StepLR(training.optimizer, 100) if scheduled else None

    def each(training):
        if scheduler is not None:
            scheduler.step()
        if training.network.step == 3:
            second["lr"] = 0.05

    training.run(each=each)
    for i, rates in enumerate(training.rates[6:], 1):
        rate = equation_3(i, 4, LOW, HIGH)
        assert rates == pytest.approx([rate, rate / 2], rel=1e-12)


@pytest.mark.parametrize("tensor", [False, True])
def test_rates_that_are_loaded_or_set_after_a_broken_step_are_the_users(tensor):
    """A notebook: an interrupt within a step of the cycles, then an earlier state, in the same objects."""
    training = Training(tensor=tensor, groups=2).run(3)
    saved = copy.deepcopy([x.state_dict() for x in (training.network, training.optimizer, training.tickets)])
    saved[1]["param_groups"][0]["lr"] = torch.tensor(0.025) if tensor else 0.025

    def interrupt():
        training.run(5 if training.network.step == 3 else 1)
        handle = training.optimizer.register_step_pre_hook(lambda *_: pytest.fail("interrupted"))
        training.backward()
        with pytest.raises(pytest.fail.Exception):
            training.optimizer.step()
        handle.remove()

    interrupt()
    for part, state in zip((training.network, training.optimizer, training.tickets), saved, strict=True):
        part.load_state_dict(copy.deepcopy(state))
    training.run(1)
    assert [float(g["lr"]) for g in training.optimizer.param_groups] == pytest.approx([0.025, 0.05])
    training.run(4)
    interrupt()
    first, second = training.optimizer.param_groups
    first["lr"] = torch.tensor(0.07) if tensor else 0.07
    training.run(1)
    assert [float(first["lr"]), float(second["lr"])] == pytest.approx([0.07, 0.05])


def test_proportions_are_those_of_the_optimizer_that_is_attached():
    training = Training(groups=2).run(8)
    first, second = (group["params"] for group in training.optimizer.param_groups)
    other = torch.optim.Adam([{"params": first, "lr": 0.1}, {"params": second, "lr": 0.4}], lr=0.1)
    training.network.attach(other)
    seen = []
    other.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in other.param_groups]))
    training.backward()
    other.step()
    rate = equation_3(3, 4, LOW, HIGH)
    assert seen == [pytest.approx([rate, 4 * rate], rel=1e-12)]
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.4]


def test_proportions_that_are_loaded_stay_whichever_optimizer_there_is():
    training = Training(groups=2).run(8)
    states = training.network.state_dict(), training.tickets.state_dict()
    first, second = (group["params"] for group in training.optimizer.param_groups)
    other = torch.optim.SGD([{"params": first}, {"params": second}], lr=0.0)  # rates that the user manages
    seen = []
    other.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in other.param_groups]))
    training.network.attach(other)
    other.register_step_pre_hook(lambda *_: seen.append([group["lr"] for group in other.param_groups]))
    training.network.load_state_dict(states[0])
    training.tickets.load_state_dict(states[1])
    training.backward()
    other.step()
    rate = equation_3(3, 4, LOW, HIGH)
    assert seen == [[0.0, 0.0], pytest.approx([rate, rate / 2], rel=1e-12)]


def test_two_networks_with_one_optimizer_grow_with_the_rate_of_the_cycle():
    models = [build_model() for _ in range(2)]
    optimizer = torch.optim.Rprop([p for model in models for p in model.parameters()], lr=0.1)
    networks = [st.sparsify(model, st.SET(0.6, interval=2), optimizer, seed=0) for model in models]
    tickets = [st.SupTickets(network, 18, 4, 3, (LOW, HIGH)) for network in networks]
    for step in range(7):
        x, y = batch(step)
        optimizer.zero_grad()
        sum(F.cross_entropy(model(x), y) for model in models).backward()
        optimizer.step()
    for network, one in zip(networks, tickets, strict=True):
        sizes = [optimizer.state[weight.values]["step_size"] for weight in network.weights.values()]
        assert one.explored == [7] and sum(int((size == one.lr).sum()) for size in sizes) > 20
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_grows_in_a_cycle_begins_with_the_rate_of_the_cycle():
    """Rprop's steps begin at the learning rate."""
    training = Training("set", kind=torch.optim.Rprop).run(7)
    sizes = [training.optimizer.state[w.values]["step_size"] for w in training.network.weights.values()]
    grown = torch.cat([size[size == training.rates[6][0]] for size in sizes])
    assert training.tickets.explored == [7] and len(grown) > 20
    assert training.optimizer.param_groups[0]["lr"] == 0.1


def test_swa_is_a_saw_tooth_collected_at_its_end():
    training = Training(schedule="swa").run()
    teeth = [HIGH - (HIGH - LOW) * i / 4 for i in (1, 2, 3, 4)]
    assert [rate for (rate,) in training.rates[6:]] == pytest.approx(teeth * 3, rel=1e-12)
    assert training.tickets.collected == [10, 14, 18] and training.rates[9] == [LOW]


def test_fge_is_collected_at_its_middle():
    training = Training(schedule="fge", length=6, keep=True).run()
    valley = [LOW + (HIGH - LOW) * abs(1 - 2 * i / 6) for i in range(1, 7)]
    assert [rate for (rate,) in training.rates[6:]] == pytest.approx(valley * 3, rel=1e-12)
    assert training.tickets.collected == [9, 15, 21] and training.rates[8] == [LOW]
    for step, ticket in zip((9, 15, 21), training.tickets.tickets, strict=True):
        assert_equal(ticket.state_dict(), plain(training.stepped[step - 1]))


def test_a_schedule_of_the_users_own():
    """A function of the position in the cycle and the two rates."""
    training = Training(schedule=lambda t, low, high: high if t <= 0.5 else low).run()
    assert training.rates[6:] == [[HIGH], [HIGH], [LOW], [LOW]] * 3
    assert training.tickets.collected == [10, 14, 18]


def test_a_schedule_may_ask_for_the_tickets_and_give_any_kind_of_number():
    """While SupTickets is being made there are none."""
    training = Training(
        schedule=lambda t, low, high: torch.tensor(high / 2 ** len(training.tickets.collected))
    )
    training.run()
    assert training.rates[6::4] == [[pytest.approx(HIGH / 2**k)] for k in range(3)]


def test_a_constant_rate_is_allowed():
    training = Training(lr=(0.01, 0.01)).run()
    assert training.rates[6:] == [[pytest.approx(0.01)]] * 12


SCHEDULERS = {
    "step": lambda o: lr_scheduler.StepLR(o, 4, 0.5),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [5, 11], 0.1),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 18, 0.001),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, [0.2 / (k + 1) for k in range(2)], 19),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1, 4), lr_scheduler.CosineAnnealingLR(o, 14)], [4]
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_users_scheduler_is_where_it_would_have_been(name, tensor):
    """Also one that computes its rate from the last: exactly, at every step, momentum included."""

    def follow(step, optimizer, scheduler):
        metric = (float(step // 5),) if name == "plateau" else ()
        scheduler.step(*metric)
        rates = [(float(g["lr"]), g["momentum"]) for g in optimizer.param_groups]
        return rates, [float(rate) for rate in scheduler.get_last_lr()]

    dummies = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rates = [torch.tensor(0.1 / (k + 1)) if tensor else 0.1 / (k + 1) for k in range(2)]
    alone = torch.optim.SGD(
        [{"params": [p], "lr": r} for p, r in zip(dummies, rates, strict=True)], momentum=0.9
    )
    scheduler, expected = SCHEDULERS[name](alone), []
    for step in range(18):
        alone.step()
        expected.append(follow(step, alone, scheduler))

    training, seen = Training(groups=2, tensor=tensor), []
    scheduler = SCHEDULERS[name](training.optimizer)
    training.run(each=lambda t: seen.append(follow(len(seen), t.optimizer, scheduler)))
    assert seen == expected
    assert len({str(rates) for rates, _ in expected}) > 2  # it did change
    for i, (rate, _) in enumerate(training.rates[6:], 1):
        assert rate == pytest.approx(equation_3(i, 4, LOW, HIGH), rel=1e-6)


def test_lr_tells_the_rate_in_force():
    training, seen = Training(), []
    scheduler = lr_scheduler.StepLR(training.optimizer, 4, 0.5)
    assert training.tickets.lr == 0.1
    for _ in range(6):
        training.run(1)
        scheduler.step()
        seen.append(training.tickets.lr)
    assert seen == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05]
    inside = []
    training.optimizer.register_step_pre_hook(lambda *_: inside.append(training.tickets.lr))
    training.run(each=lambda t: seen.append(t.tickets.lr))
    assert seen[6:] == inside == [rate for (rate,) in training.rates[6:]]
    training.run(1)  # more steps than announced: the user's rate is in force again
    assert training.tickets.lr == training.rates[-1][0] == 0.05


def test_epochs_to_steps():
    assert st.epochs_to_steps(8, 391) == 3128
    assert st.epochs_to_steps(2.5, [None] * 10) == 25
    assert st.epochs_to_steps(0.5, torch.utils.data.DataLoader(range(30), 4)) == 4


# ---- what happens at which step ----


@pytest.mark.parametrize(
    ("explore_at", "explored"), [("start", [7, 11, 15]), ("end", [10, 14])], ids=["start", "end"]
)
@pytest.mark.parametrize("method", ["static", "set", "rigl", "granet", "snfs", "dsr"])
def test_it_explores_once_a_cycle_and_the_method_keeps_still(method, explore_at, explored):
    training = Training(method, explore_at=explore_at)
    changed, before = [], training.positions()
    for step in range(1, 19):
        training.run(1)
        after = training.positions()
        if after != before and step > 6:
            changed.append(step)
            for name, rows in after.items():  # half of each layer, as many come as go
                count = len(before[name])
                assert len(rows) == count
                assert len(set(rows) & set(before[name])) >= count - int(count / 2 + 0.5)
        before = after
    assert changed == explored == training.tickets.explored
    assert training.tickets.collected == [10, 14, 18]
    assert training.network.nonzero == LIVING


def test_at_the_end_of_a_cycle_it_collects_before_it_explores():
    training = Training(explore_at="end", keep=True).run()
    for step, ticket in zip((10, 14, 18), training.tickets.tickets, strict=True):
        assert_equal(ticket.state_dict(), plain(training.stepped[step - 1]))


@pytest.mark.parametrize("explore_at", ["start", "end"])
def test_dense_does_not_explore(explore_at):
    training = Training("dense", explore_at=explore_at).run()
    assert training.tickets.explored == [] and training.tickets.collected == [10, 14, 18]


class Calls:
    """The explorations of a network: (after which step, rate, prune, grow)."""

    def __init__(self, network):
        self.made, explore = [], network.explore

        def spy(rate, prune=None, grow=None):
            self.made.append((network.step, rate, prune or network.method.prune, grow or network.method.grow))
            return explore(rate, prune, grow)

        network.explore = spy


OWN = {
    "static": ("magnitude", "gradient"),
    "rigl": ("magnitude", "gradient"),
    "granet": ("magnitude", "gradient"),
    "set": ("magnitude", "random"),
    "snfs": ("magnitude", "momentum"),
    "dsr": ("magnitude", "random"),
}


@pytest.mark.parametrize("method", OWN)
def test_it_explores_with_the_methods_own_criteria(method):
    training = Training(method, rate=0.3)
    training.run(6)
    calls = Calls(training.network)
    training.run()
    assert calls.made == [(step, 0.3, *OWN[method]) for step in (7, 11, 15)]


@pytest.mark.parametrize("explore_at", ["start", "end"])
def test_other_criteria_for_all_cycles_or_for_each(explore_at):
    """At the end of a cycle, the pair is that of the cycle that follows."""
    pairs = [("largest", "random"), ("random", "gradient"), ("sensitivity", "random")]
    for criteria in (pairs[0], pairs):
        training = Training("set", criteria=criteria, explore_at=explore_at)
        training.run(6)
        calls = Calls(training.network)
        training.run()
        used = [pairs[0]] * 3 if criteria is pairs[0] else pairs
        expected = zip((7, 11, 15), used, strict=True)
        if explore_at == "end":
            expected = zip((10, 14), used[1:], strict=True)
        assert calls.made == [(step, 0.5, *pair) for step, pair in expected]


def test_other_criteria_choose_other_connections():
    """`largest` prunes the half that `magnitude` would keep."""
    training = Training(criteria=("largest", "random"))
    training.run(7)
    before, after = training.stepped[-1]["model"], training.positions()
    for name in training.network.weights:
        rows = before[f"{name}.weight_connections.positions"].tolist()
        values = dict(zip(rows, before[f"{name}.weight"].flatten().abs().tolist(), strict=True))
        smallest = sorted(rows, key=values.get)[: len(rows) - int(len(rows) / 2 + 0.5)]
        assert set(smallest) <= set(after[name])


@pytest.mark.parametrize("normal", [0, 6])
def test_include_start_takes_the_network_before_the_cycles_too(normal):
    training = Training(normal=normal, include_start=True, keep=True)
    stepped = [copy.deepcopy(training.network.state_dict())]
    stepped += training.run().stepped
    assert training.tickets.collected == [normal, normal + 4, normal + 8, normal + 12]
    assert len(training.tickets.tickets) == 4
    for step, ticket in zip(training.tickets.collected, training.tickets.tickets, strict=True):
        assert_equal(ticket.state_dict(), plain(stepped[step]))
    expected = st.superpose([stepped[step] for step in training.tickets.collected])
    assert_close(training.tickets.ticket().state_dict(), expected)


def test_include_start_with_granet_keeps_to_the_target():
    """Its last pruning falls on the step before the cycles, after which the first ticket is taken."""
    training = Training("granet", normal=4, include_start=True).run()
    assert training.tickets.collected == [4, 8, 12, 16] and training.network.nonzero == LIVING
    assert training.tickets.summary()["nonzero"] == LIVING
    assert nonzero(training.tickets.ticket()) == LIVING


# ---- the superposed ticket ----


def nonzero(module):
    return sum(int(p.count_nonzero()) for p in module.parameters() if p.dim() > 1)


def assert_close(ours, expected):
    assert ours.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(ours[key], value)
        if value.dim() > 1:
            assert torch.equal(ours[key] != 0, value != 0), key


@pytest.mark.parametrize("explore_at", ["start", "end"])
@pytest.mark.parametrize("prune", ["global", "layer"])
@pytest.mark.parametrize("when", ["each", "end"])
@pytest.mark.parametrize("rule", RULES)
def test_the_ticket_is_the_superposition_of_the_network_at_the_ends_of_the_cycles(
    rule, when, prune, explore_at
):
    options = {"beta": 0.6, "prune": prune, "prune_when": when}
    training = Training(rule=rule, explore_at=explore_at, **options)
    for ended in (1, 2, 3):  # after each cycle, the ticket so far
        training.run(10 if ended == 1 else 4)
        ends = [training.stepped[step - 1] for step in (10, 14, 18)[:ended]]
        expected = st.superpose(ends, rule, **options)
        assert_close(training.tickets.ticket().state_dict(), expected)
    assert nonzero(training.tickets.ticket()) == training.network.nonzero == LIVING
    if prune == "layer":
        counts = {name: weight.nonzero for name, weight in training.network.weights.items()}
        ticket = training.tickets.ticket()
        assert {name: int(ticket.get_submodule(name).weight.count_nonzero()) for name in counts} == counts


def test_global_pruning_moves_connections_between_layers():
    """As the paper's table of layer sparsities shows; so the two options differ."""
    training = Training().run()
    ticket = training.tickets.ticket()
    counts = {name: weight.nonzero for name, weight in training.network.weights.items()}
    assert {name: int(ticket.get_submodule(name).weight.count_nonzero()) for name in counts} != counts


def assert_plain(module):
    """No trace of the library: classes, names, hooks, and what is pickled."""
    fresh = build_model()
    assert [type(m) for m in module.modules()] == [type(m) for m in fresh.modules()]
    assert [n for n, _ in module.named_parameters()] == [n for n, _ in fresh.named_parameters()]
    assert all(type(p) is nn.Parameter and p.requires_grad and p.is_leaf for p in module.parameters())
    assert list(module.state_dict()) == list(fresh.state_dict())
    for ours, theirs in zip(module.modules(), fresh.modules(), strict=True):
        assert vars(ours).keys() - {"_is_torch_compile"} == vars(theirs).keys()
        for name in [name for name in vars(ours) if name.endswith("_hooks")]:
            assert not getattr(ours, name)
    file = io.BytesIO()
    torch.save(module, file)
    assert b"suptickets" not in file.getvalue()
    fresh.load_state_dict(module.state_dict())


@pytest.mark.parametrize("method", ["rigl", "dense"])
def test_tickets_are_plain_modules(method):
    training = Training(method, keep=True).run()
    for module in [training.tickets.ticket(), *training.tickets.tickets]:
        assert_plain(module)


def test_tickets_are_independent_of_the_live_network_and_of_each_other():
    training = Training(keep=True).run(10)
    expected = copy.deepcopy(training.tickets.ticket().state_dict())
    for module in [training.tickets.ticket(), *training.tickets.tickets]:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    assert_equal(training.tickets.ticket().state_dict(), expected)
    training.run(2)
    assert_equal(training.tickets.ticket().state_dict(), expected)
    assert nonzero(training.network.densify()) > 0


def test_more_steps_than_announced_change_nothing_in_the_ticket():
    training = Training().run()
    expected = training.tickets.ticket().state_dict()
    training.run(5)
    assert_equal(training.tickets.ticket().state_dict(), expected)
    assert training.tickets.collected == [10, 14, 18]


def test_an_average_with_too_few_non_zeros_says_so():
    """Two tickets that cancel each other out."""
    training = Training().run(6)
    training.tickets.collect()
    with torch.no_grad():
        for weight in training.network.weights.values():
            weight.values.neg_()
    training.tickets.collect()
    with pytest.warns(RuntimeWarning, match="has 0 non-zero connections, fewer than its target of 131"):
        ticket = training.tickets.ticket()
    assert nonzero(ticket) == 0


def test_summary_is_fit_for_json():
    training = Training(rule="caa", explore_at="end")
    empty = training.tickets.summary()
    assert (empty["nonzero"], empty["sparsity"], empty["collected"], empty["step"]) == (None, None, [], 0)
    training.run()
    assert json.loads(json.dumps(training.tickets.summary())) == {
        "method": "rigl",
        "rule": "caa",
        "start": 6,
        "total_steps": 18,
        "cycle_steps": 4,
        "cycles": 3,
        "lr": [LOW, HIGH],
        "step": 18,
        "collected": [10, 14, 18],
        "explored": [10, 14],
        "nonzero": LIVING,
        "sparsity": 1 - LIVING / 328,
    }
    assert Training("dense").run().tickets.summary()["sparsity"] == 0


# ---- batch norm ----


def test_statistics_are_averaged_as_means_and_standard_deviations():
    training = Training(keep=True).run()
    single = [ticket[1] for ticket in training.tickets.tickets]
    ours = training.tickets.ticket()[1]
    torch.testing.assert_close(ours.running_mean, sum(layer.running_mean for layer in single) / 3)
    torch.testing.assert_close(ours.running_var, (sum(layer.running_var.sqrt() for layer in single) / 3) ** 2)
    torch.testing.assert_close(ours.weight, sum(layer.weight for layer in single) / 3)
    torch.testing.assert_close(ours.bias, sum(layer.bias for layer in single) / 3)
    assert int(ours.num_batches_tracked) == 18


def test_statistics_are_recomputed_from_data():
    """For batches of one size that is torch's `update_bn`; nothing but the statistics changes."""
    averaged = Training().run().tickets.ticket()
    training = Training(batch_norm="recompute").run()
    loader = [batch(200 + k) for k in range(5)]
    before = training.everything()
    ours = training.tickets.ticket(loader)
    assert_equal(training.everything(), before)

    torch.manual_seed(0)
    theirs = copy.deepcopy(averaged)
    theirs[3] = nn.Identity()
    torch.optim.swa_utils.update_bn(loader, theirs)
    torch.testing.assert_close(ours[1].running_mean, theirs[1].running_mean)
    torch.testing.assert_close(ours[1].running_var, theirs[1].running_var)
    assert int(ours[1].num_batches_tracked) == 18 and ours.training == training.model.training
    for key, value in averaged.state_dict().items():
        assert "running" in key or torch.equal(value, ours.state_dict()[key])
    assert not torch.allclose(averaged[1].running_var, ours[1].running_var)


@pytest.mark.parametrize("bad", [{"x": torch.zeros(4, 8)}, ({"x": torch.zeros(4, 8)},), "text", (), {}])
def test_batches_that_are_no_tensors_are_refused_in_one_line(bad):
    training = Training(batch_norm="recompute").run()
    said = "must give tensors, or tuples or dicts of tensors, not|dicts (must have|do not fit)"
    with pytest.raises(st.SparsityError, match=f"the loader('s)? ({said})") as caught:
        training.tickets.ticket([bad])
    assert "\n" not in str(caught.value)


def test_complex_parameters_are_averaged_too():
    def one(value):
        return {"weight": torch.eye(2), "phase": torch.full((3,), value, dtype=torch.complex64)}

    result = st.superpose([one(1 + 2j), one(3 - 4j)], layers="weight")
    assert torch.equal(result["phase"], torch.full((3,), 2 - 1j, dtype=torch.complex64))


class Twice(nn.Module):
    """One batch norm, two calls a pass."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x):
        for _ in range(2):
            x = self.norm(self.linear(x)).tanh()
        return self.last(x)


def test_a_batch_norm_that_is_called_twice_is_recomputed_from_both():
    torch.manual_seed(0)
    ours, loader = Twice(), [batch(k)[0] for k in range(4)]
    theirs = copy.deepcopy(ours)
    recompute(ours, loader)
    torch.optim.swa_utils.update_bn(loader, theirs)
    torch.testing.assert_close(ours.norm.running_mean, theirs.norm.running_mean)
    torch.testing.assert_close(ours.norm.running_var, theirs.norm.running_var)
    assert ours.norm.momentum == 0.1 and not ours.norm._forward_pre_hooks


class Counted(nn.Module):
    """Keeps running statistics that are not of batch norm, and counts its passes."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)
        self.register_buffer("passes", torch.tensor(3))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.other(self.norm(x).unsqueeze(-1).expand(-1, -1, 2))


def test_recompute_changes_the_statistics_of_batch_norm_alone():
    model = Counted()
    before = copy.deepcopy(model.state_dict())
    recompute(model, [torch.randn(4, 8) + 1])
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"norm.running_mean", "norm.running_var"}


class Cached(nn.Module):
    """A buffer that shares memory with the statistics, one that grows, one that none may write."""

    def __init__(self):
        super().__init__()
        self.norm, self.length = nn.BatchNorm1d(8), 2
        self.register_buffer("mean", self.norm.running_mean, persistent=False)
        self.register_buffer("places", torch.zeros(2, 1), persistent=False)
        self.register_buffer("same", torch.zeros(1, 8).expand(3, 8), persistent=False)

    def forward(self, x):
        if len(x) > self.length:
            self.length = len(x)
            self.register_buffer("places", torch.zeros(len(x), 1), persistent=False)
        return self.norm(x + self.places[: len(x)])


def test_recompute_leaves_views_of_statistics_and_caches_that_have_grown():
    model, x = Cached(), torch.randn(4, 8) + 1
    recompute(model, [x])
    torch.testing.assert_close(model.norm.running_mean, x.mean(0))
    assert model.mean is model.norm.running_mean
    assert model.eval()(x).shape == x.shape


def test_recompute_can_be_asked_with_other_data_again():
    training = Training(batch_norm="recompute").run()
    one, other = ([batch(k)] for k in (300, 301))
    first = training.tickets.ticket(one).state_dict()
    assert not torch.equal(
        training.tickets.ticket(other).state_dict()["1.running_mean"], first["1.running_mean"]
    )
    assert_equal(training.tickets.ticket(one).state_dict(), first)


def test_layers_that_keep_their_counts_keep_them_from_a_file_too(tmp_path):
    """Frozen, with small weights that pruning the whole network would take."""

    def build():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        model[0].weight.data.mul_(1e-2)
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        network = st.sparsify(model, st.RigL(0.5, interval=5), optimizer, include=["0", "2"], seed=1)
        return network, optimizer, st.SupTickets(network, 18, 4, 3, (LOW, HIGH), prune_when="end")

    network, optimizer, tickets = build()
    for k in range(18):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network.model(batch(k)[0]), batch(k)[1]).backward()
        optimizer.step()
    torch.save([network.state_dict(), optimizer.state_dict(), tickets.state_dict()], tmp_path / "state.pt")
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    again = build()
    for part, state in zip(again, states, strict=True):
        part.load_state_dict(state)
    assert again[2].counts() == tickets.counts()
    assert_equal(again[2].ticket().state_dict(), tickets.ticket().state_dict())
    assert tickets.counts()["0"] == network.weights["0"].nonzero


# ---- nothing else is touched ----


@pytest.mark.parametrize("method", ["rigl", "set", "snfs", "dense"])
@pytest.mark.parametrize(
    "options", [{}, {"rule": "caa", "keep": True, "prune_when": "end"}, {"rule": "cima"}]
)
def test_training_with_collection_and_without_are_the_same(monkeypatch, method, options):
    """Weights, positions, optimizer and random state, at every step, bit for bit."""
    with_it, without = [], []

    def look(training):
        with_it.append(training.everything())
        if training.tickets.collected:
            training.tickets.ticket(), training.tickets.summary(), training.tickets.state_dict()

    Training(method, include_start=True, **options).run(each=look)
    monkeypatch.setattr(st.SupTickets, "collect", lambda self: None)
    Training(method, include_start=True, **options).run(each=lambda t: without.append(t.everything()))
    assert_equal(with_it, without)


def test_collecting_leaves_gradients_and_modes_alone():
    training = Training().run(6)
    training.backward()
    training.model[1].eval()
    modes = [module.training for module in training.model.modules()]
    gradients = [p.grad.clone() for p in training.model.parameters()]
    versions = [(p._version, p.data_ptr()) for p in training.model.parameters()]
    training.tickets.collect()
    assert [(p._version, p.data_ptr()) for p in training.model.parameters()] == versions
    assert_equal([p.grad for p in training.model.parameters()], gradients)
    assert [module.training for module in training.model.modules()] == modes


# ---- driving ----


def by_hand(training):
    training.network.before_step()
    training.optimizer.step()
    training.network.after_step()


def alternating(training):
    by_hand(training) if training.network.step % 2 else training.optimizer.step()


@pytest.mark.parametrize("drive", [by_hand, alternating])
@pytest.mark.parametrize("method", ["rigl", "snfs", "granet"])
def test_explicit_driving_equals_hooks(method, drive):
    hooks, explicit = Training(method).run(), Training(method)
    for _ in range(18):
        explicit.backward()
        drive(explicit)
    assert explicit.rates == hooks.rates
    assert_equal(explicit.everything(), hooks.everything())
    assert_equal(explicit.tickets.state_dict(), hooks.tickets.state_dict())


def test_explicit_driving_without_the_optimizers_hooks():
    """A step inside a captured graph calls no hooks: the rate must be in place between the two calls."""
    training, rates = Training(), []
    training.network.attach(training.optimizer, hooks=False)
    step = torch.optim.SGD.step.__wrapped__  # without what calls the hooks
    for _ in range(18):
        training.backward()
        training.network.before_step()
        rates.append([training.optimizer.param_groups[0]["lr"]])
        step(training.optimizer)
        training.network.after_step()
        assert training.optimizer.param_groups[0]["lr"] == 0.1
    hooks = Training().run()
    assert rates == hooks.rates
    assert_equal(training.tickets.state_dict(), hooks.tickets.state_dict())


def test_an_optimizer_whose_step_calls_another_makes_one_step():
    """Torch then calls the hooks twice."""

    class Wrapping(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    plain, wrapping = Training(kind=torch.optim.SGD).run(), Training(kind=Wrapping).run()
    assert_equal(wrapping.everything(), plain.everything())
    assert_equal(wrapping.tickets.state_dict(), plain.tickets.state_dict())
    assert wrapping.optimizer.param_groups[0]["lr"] == 0.1


def hooked(training, step):
    step()


def explicit(training, step):
    training.network.before_step()
    step()
    training.network.after_step()


@pytest.mark.parametrize("drive", [hooked, explicit])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_grad_scaler_skips_is_no_step(fused, drive):
    """Rate, count and connections stay as they were; the same step, with finite gradients, follows."""

    def attempt(training, scaler, factor=1.0):
        x, y = batch(training.network.step)
        training.optimizer.zero_grad()
        scaler.scale(F.cross_entropy(training.model(x * factor), y)).backward()
        drive(training, lambda: scaler.step(training.optimizer))
        scaler.update(2.0**10)

    def skip(training, scaler):
        before = training.network.step, training.positions(), training.optimizer.param_groups[0]["lr"]
        stream, statistics = torch.get_rng_state(), copy.deepcopy(training.model[1].state_dict())
        attempt(training, scaler, torch.inf)
        after = training.network.step, training.positions(), training.optimizer.param_groups[0]["lr"]
        assert after == before
        torch.set_rng_state(stream)
        training.model[1].load_state_dict(statistics)

    def train(skipped):
        training = Training(kind=lambda groups, lr: torch.optim.SGD(groups, lr=lr, fused=fused))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(18):
            if step in skipped:
                skip(training, scaler)
            attempt(training, scaler)
        return training

    clean, skipping = train([]), train([6, 8, 9, 10, 17])  # first, middle, last, first, last of a cycle
    assert skipping.tickets.collected == [10, 14, 18] and skipping.tickets.explored == [7, 11, 15]
    assert_equal(skipping.everything(), clean.everything())
    assert_equal(skipping.tickets.state_dict(), clean.tickets.state_dict())


def test_a_closure_sees_the_cyclical_rate():
    plain, closure, seen = Training().run(), Training(), []

    def evaluate():
        seen.append(closure.optimizer.param_groups[0]["lr"])
        closure.backward()

    for _ in range(18):
        closure.optimizer.step(evaluate)
    assert [[rate] for rate in seen] == plain.rates
    assert_equal(closure.everything(), plain.everything())


def test_gradient_accumulation():
    """Several backward passes, one step: cycles count steps of the optimizer."""
    training = Training()
    for _ in range(18):
        training.optimizer.zero_grad()
        for k in range(3):
            x, y = batch(k)
            (F.cross_entropy(training.model(x), y) / 3).backward()
        training.optimizer.step()
    assert training.tickets.collected == [10, 14, 18] and training.tickets.explored == [7, 11, 15]
    assert nonzero(training.tickets.ticket()) == LIVING


def test_a_compiled_model():
    """The loop runs the compiled module; what comes out is plain, and batch norm is recomputed uncompiled."""
    torch._dynamo.reset()
    eager, training = Training("rigl").run(), Training("rigl", batch_norm="recompute")
    compiled = torch.compile(training.model, backend="aot_eager")
    for _ in range(18):
        x, y = batch(training.network.step)
        training.optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        training.optimizer.step()
    ticket = training.tickets.ticket([batch(0)])
    assert_plain(ticket)
    for ours, theirs in zip(ticket.parameters(), eager.tickets.ticket().parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert nonzero(ticket) == LIVING and training.tickets.explored == [7, 11, 15]


# ---- stopping and going on ----


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(stop, orders, method="rigl", groups=1, kind=None, **options):
    """Train to the end, but stop after step `stop` and go on with what was saved, loaded in this order."""

    def start(seed):
        training = Training(method, groups=groups, seed=seed, kind=kind, **options)
        return training, lr_scheduler.CosineAnnealingLR(training.optimizer, 18)

    training, scheduler = start(0)
    training.run(stop, each=lambda _: scheduler.step())
    state = saved(
        {
            "network": training.network.state_dict(),
            "optimizer": training.optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "tickets": training.tickets.state_dict(),
            "random": torch.get_rng_state(),
        }
    )
    training, scheduler = start(5)  # everything is different but for what is loaded
    parts = {
        "network": training.network,
        "optimizer": training.optimizer,
        "scheduler": scheduler,
        "tickets": training.tickets,
    }
    for name in orders:
        parts[name].load_state_dict(state[name])
    torch.set_rng_state(state["random"])
    training.run(each=lambda _: scheduler.step())
    return training, scheduler


def outcome(training, scheduler):
    result = [*training.everything(), training.tickets.state_dict(), scheduler.state_dict()]
    result += [training.tickets.summary(), training.tickets.ticket().state_dict()]
    return [*result, [m.state_dict() for m in training.tickets.tickets] if training.tickets.keep else []]


ORDERS = [("network", "optimizer", "scheduler", "tickets"), ("tickets", "scheduler", "optimizer", "network")]


SETTINGS = {
    "rigl": {},
    "caa": {"rule": "caa", "prune": "layer"},
    "cima, end": {"rule": "cima", "prune_when": "end", "beta": 0.3},
    "explore at the end": {"explore_at": "end", "criteria": [("random", "random")] * 3},
    "start and all tickets": {"include_start": True, "keep": True},
    "fge": {"schedule": "fge"},
    "groups": {"groups": 3},
    "Adam": {"kind": torch.optim.Adam},
    **{method: {"method": method} for method in METHODS if method != "rigl"},
}


@functools.cache
def uninterrupted(name):
    training = Training(**SETTINGS[name])
    scheduler = lr_scheduler.CosineAnnealingLR(training.optimizer, 18)
    return outcome(training.run(each=lambda _: scheduler.step()), scheduler)


@pytest.mark.parametrize("order", ORDERS, ids=["network first", "network last"])
@pytest.mark.parametrize("stop", range(19))
def test_stopped_after_any_step_it_goes_on_as_if_it_had_not_been(stop, order):
    assert_equal(outcome(*resumed(stop, order)), uninterrupted("rigl"))


@pytest.mark.parametrize("stop", [0, 6, 7, 10, 13, 17])
@pytest.mark.parametrize("name", SETTINGS)
def test_going_on_with_every_setting(name, stop):
    assert_equal(outcome(*resumed(stop, ORDERS[0], **SETTINGS[name])), uninterrupted(name))


def test_tickets_of_another_schedule_are_refused():
    state = Training(schedule="fge").run(13).tickets.state_dict()
    with refused("other SupTickets", "schedule: fge -> triangle"):
        Training().tickets.load_state_dict(state)
    state["settings"]["schedule"] = "triangle"
    del state["settings"]["cycles"]
    with refused("other SupTickets", "cycles: None -> 3"):
        Training().tickets.load_state_dict(state)


def test_tickets_of_another_model_are_refused():
    state = Training(keep=True).run(13).tickets.state_dict()
    state["average"]["shapes"]["0.weight"] = [17, 8]
    training = Training(keep=True)
    before = copy.deepcopy(training.tickets.state_dict())
    with refused("of another model", "0.weight (16x8 and 17x8)"):
        training.tickets.load_state_dict(state)
    assert_equal(training.tickets.state_dict(), before)


@pytest.mark.parametrize(
    ("part", "value"), [("average", {"x": 1}), ("settings", None), ("kept", [3]), ("collected", None)]
)
def test_a_damaged_state_of_tickets_is_refused(part, value):
    state = {**Training(keep=True).run(13).tickets.state_dict(), part: value}
    with refused("the state of SupTickets is damaged"):
        Training(keep=True).tickets.load_state_dict(state)


def test_tickets_without_the_network_that_they_are_of_take_no_step():
    state = Training().run(13).tickets.state_dict()
    training = Training()
    training.tickets.load_state_dict(state)
    training.backward()
    with refused("saved at step 13, but the network is at step 0", "network.load_state_dict"):
        training.optimizer.step()


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("targets", "ab"),
        ("targets", {}),
        ("total", "x"),
        ("proportions", "x"),
        ("average", None),
        ("step", -1),
    ],
)
def test_a_state_of_tickets_that_is_refused_leaves_nothing_behind(part, value):
    state = {**Training(keep=True).run(13).tickets.state_dict(), part: value}
    training = Training(keep=True)
    before = copy.deepcopy(training.tickets.state_dict())
    with refused("the state of SupTickets is damaged" if part != "step" else "step must be a whole number"):
        training.tickets.load_state_dict(state)
    assert_equal(training.tickets.state_dict(), before)
    assert training.tickets.superposition.average is None


@pytest.mark.parametrize(
    "change", [lambda rows: rows[:-1], lambda rows: rows + 1000, lambda rows: rows.flip(0)]
)
@pytest.mark.parametrize("where", ["average", "kept"])
def test_saved_positions_that_do_not_fit_are_refused(where, change):
    state = Training(keep=True).run(13).tickets.state_dict()
    ticket = state["average"] if where == "average" else state["kept"][0]
    ticket["sparse"]["0.weight"]["rows"] = change(ticket["sparse"]["0.weight"]["rows"])
    with refused("the positions of 0.weight do not fit its values"):
        Training(keep=True).tickets.load_state_dict(state)


def test_lr_is_that_of_the_state_that_is_loaded():
    training = Training()
    states = copy.deepcopy((training.network.state_dict(), training.tickets.state_dict()))
    training.run(8)
    training.network.load_state_dict(states[0])
    training.tickets.load_state_dict(states[1])
    assert training.tickets.lr == 0.1


@pytest.mark.parametrize("rate", [None, float("nan"), -1.0, float("inf"), "0.1"])
def test_a_schedule_that_gives_no_rate_is_refused(rate):
    with refused("the schedule must give rates, at least 0", repr(rate), "t = 0.75"):
        Training(schedule=lambda t, low, high: rate if t > 0.5 else low)


def test_a_state_may_be_loaded_twice_and_shares_nothing():
    training = Training(rule="caa", keep=True).run(10)
    state = training.tickets.state_dict()
    frozen = copy.deepcopy(state)
    other = Training(rule="caa", keep=True).run(10)
    other.tickets.load_state_dict(state)
    other.run()
    assert_equal(state, frozen)
    training.run()  # nor does the one that it came from write into it
    assert_equal(state, frozen)


# ---- cost ----


def tensor_bytes():
    """Bytes of all tensors that are alive, each memory counted once."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in gc.get_objects()
            if type(t) in (torch.Tensor, nn.Parameter)
            and t.device.type == "cpu"
            and t.layout is torch.strided
        }
    return sum(storages.values())


def bytes_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("rule", RULES)
def test_superposing_keeps_one_sparse_copy_of_the_network(rule):
    """Values, positions, everything dense; CAA has a counter of two bytes for each connection on top."""
    training = Training(rule=rule)
    own = bytes_of(training.model.state_dict().values())
    counters = 2 * LIVING if rule == "caa" else 0
    assert own < 0.9 * bytes_of(build_model().state_dict().values())
    for _ in range(18):
        training.run(1)
        average = training.tickets.superposition.average
        if average is not None:
            connections = [t for c in average.sparse.values() for t in vars(c).values() if t is not None]
            assert bytes_of([*connections, *average.dense.values()]) == own + counters
    assert training.tickets.collected == [10, 14, 18]


def test_all_the_tensors_that_superposing_keeps_alive_are_that_copy():
    training = Training(rule="caa").run(10)
    own = bytes_of(training.model.state_dict().values()) + 2 * LIVING
    training.run(4)
    training.stepped.clear()
    with_it = tensor_bytes()
    training.tickets.superposition.average = None
    assert with_it - tensor_bytes() == own
    training.tickets.superposition.count = 0
    training.tickets.collect()
    assert tensor_bytes() == with_it


def tensors_in(value):
    """All tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def test_what_the_options_cost_on_top():
    """The union of the tickets with `prune_when="end"`; every ticket with `keep`."""

    def kept(**options):
        training = Training(**options).run()
        training.stepped.clear()
        tensors = tensors_in(training.tickets.state_dict())
        union = len(
            {(n, i) for t in training.tickets._kept for n, c in t.sparse.items() for i in c.rows.tolist()}
        )
        return bytes_of(tensors), bytes_of(training.model.state_dict().values()), union

    once, own, _ = kept()
    assert once == own
    three, own, union = kept(keep=True)
    assert three == own + 3 * own
    at_the_end, own, union = kept(keep=True, prune_when="end")
    assert union > LIVING
    assert at_the_end == own + 3 * own + (union - LIVING) * 8


class Operations(TorchDispatchMode):
    """Counts what torch computes."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_only_steps_that_explore_or_collect_compute_anything():
    """In all others not one tensor operation: setting the rate is all."""
    training, busy = Training("rigl"), []
    for _ in range(18):
        training.backward()
        with Operations() as before:
            training.network.before_step()
        training.optimizer.step()
        with Operations() as after:
            training.network.after_step()
        if before.count + after.count:
            busy.append(training.network.step)
    assert [step for step in busy if step > 6] == [7, 10, 11, 14, 15, 18]


def test_only_steps_that_explore_collect_the_gradient_of_all_positions():
    """Not those after which RigL itself would be due, were it not held off: 8, 12 and 16."""
    training, collecting = Training("rigl"), []
    for _ in range(18):
        training.backward()
        if any(weight.gradient is not None for weight in training.network.weights.values()):
            collecting.append(training.network.step + 1)
        training.optimizer.step()
    assert collecting == [4, 7, 11, 15]


# ---- two processes ----


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes reports of every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    worker = Path(__file__).parent / "tickets_worker.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(worker), str(folder)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("model", tickets_worker.MODELS)
@pytest.mark.parametrize("scenario", tickets_worker.SCENARIOS)
def test_two_processes_hold_the_same_ticket(ranks, scenario, model):
    """Every tensor of it, bit for bit, though the processes see different data."""
    one, other = (rank[f"{scenario}, {model}"] for rank in ranks)
    assert "error" not in one, one["error"]
    assert one["data"] != other["data"]
    assert one["explored"] == other["explored"] and one["collected"] == other["collected"] == [8, 12, 16]
    assert one["nonzero"] == other["nonzero"] == one["target"]
    differing = [key for key in one["ticket"] if one["ticket"][key] != other["ticket"][key]]
    assert one["ticket"].keys() == other["ticket"].keys() and not differing, differing


def test_two_processes_find_the_ticket_of_one(ranks):
    """Without batch norm, in double precision: halves of a batch on two ranks are the batch on one."""
    alone = tickets_worker.train("rigl cia", "no batch norm", rank=None)
    for key, value in alone.ticket().state_dict().items():
        theirs = torch.tensor(ranks[0]["rigl cia, no batch norm"]["values"][key], dtype=torch.float64)
        torch.testing.assert_close(theirs, value.flatten(), rtol=1e-9, atol=1e-12)


# ---- a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
def test_a_state_loaded_to_the_cpu_goes_on_on_the_gpu(rule):
    """`torch.load(map_location="cpu")` is what most people write."""

    def start(seed):
        torch.manual_seed(seed)
        model = build_model().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        network = st.sparsify(model, st.RigL(0.6, interval=4), optimizer, seed=seed)
        return model, optimizer, network, st.SupTickets(network, 18, 4, 3, (LOW, HIGH), rule=rule, keep=True)

    def go(model, optimizer, network, tickets, until):
        for _ in range(network.step, until):
            x, y = (t.cuda() for t in batch(network.step))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    parts = start(0)
    go(*parts, until=12)
    file = io.BytesIO()
    torch.save([part.state_dict() for part in parts[1:]], file)
    file.seek(0)
    parts = start(1)
    for part, state in zip(parts[1:], torch.load(file, map_location="cpu", weights_only=True), strict=True):
        part.load_state_dict(state)
    go(*parts, until=18)
    ticket = parts[3].ticket()
    assert nonzero(ticket) == LIVING and next(ticket.parameters()).is_cuda
    assert len(parts[3].tickets) == 3


# ---- bad input ----


def sparse(method="rigl", model=None):
    model = build_model() if model is None else model
    return st.sparsify(model, METHODS[method](), torch.optim.SGD(model.parameters(), lr=0.1), seed=0)


@given(some.integers(1, 60), some.integers(2, 20), some.integers(1, 9))
def test_cycles_that_do_not_fit_are_refused_and_told_how_many_do(total, length, cycles):
    network = sparse("static", nn.Linear(4, 4))
    if cycles * length <= total:
        assert st.SupTickets(network, total, length, cycles, (LOW, HIGH)).start == total - cycles * length
        return
    with refused(
        f"{cycles} cycles of {length} steps", f"{total} steps left", f"at most {total // length} do"
    ):
        st.SupTickets(network, total, length, cycles, (LOW, HIGH))


def test_steps_that_were_made_are_not_left():
    training = Training().run(8)
    training.network.booster = None
    with refused("3 cycles of 4 steps do not fit into the 10 steps left: at most 2 do"):
        st.SupTickets(training.network, 18, 4, 3, (LOW, HIGH))
    with refused("at most 0 do"):
        st.SupTickets(training.network, 5, 4, 1, (LOW, HIGH))


@pytest.mark.parametrize("method", [st.GraNet(0.5), st.GMP(0.0)])
def test_a_method_that_begins_at_its_target_has_reached_it(method):
    model = build_model()
    network = st.sparsify(model, method, torch.optim.SGD(model.parameters(), lr=0.1))
    assert network.sparsity == method.sparsity
    assert st.SupTickets(network, 20, 4, 3, (LOW, HIGH)).start == 8


@pytest.mark.parametrize("method", ["granet", "gmp"])
def test_a_method_that_has_not_reached_its_target_is_refused_with_the_steps_it_needs(method):
    """Pruning ends at step 7, so with the update after step 8: 8 + 3 x 4 steps are enough, 19 are not."""
    kind = {"granet": st.GraNet, "gmp": st.GMP}[method]
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network = st.sparsify(model, kind(0.8, interval=2, prune_end=7), optimizer, seed=0)
    with refused(method, "after 8 steps", "begin after 7", "at least 20 total steps"):
        st.SupTickets(network, 19, 4, 3, (LOW, HIGH))
    tickets = st.SupTickets(network, 20, 4, 3, (LOW, HIGH))
    for step in range(20):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert tickets.collected == [12, 16, 20]
    assert nonzero(tickets.ticket()) == round(0.2 * 328) == network.nonzero


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"lr": (0.005, 0.001)}, ("low <= high", "(0.005, 0.001)")),
        ({"lr": (-0.1, 0.1)}, ("0 <= low",)),
        ({"lr": (0.1, float("nan"))}, ("low <= high",)),
        ({"lr": (0.1, float("inf"))}, ("low <= high",)),
        ({"lr": 0.005}, ("(low, high)",)),
        ({"lr": (0.001, 0.005, 0.01)}, ("(low, high)",)),
        ({"beta": 0.0}, ("beta must be above 0 and below 1",)),
        ({"beta": 1.0}, ("beta must be above 0 and below 1",)),
        ({"beta": 1.5}, ("beta",)),
        ({"rate": 1.5}, ("rate",)),
        ({"rate": -0.5}, ("rate",)),
        ({"cycles": 0}, ("cycles must be a whole number, at least 1",)),
        ({"cycles": 1.5}, ("cycles must be a whole number, at least 1",)),
        ({"cycle_steps": 1}, ("cycle_steps must be a whole number, at least 2",)),
        ({"cycle_steps": 4.5}, ("cycle_steps must be a whole number",)),
        ({"total_steps": 18.5}, ("total_steps must be a whole number",)),
        ({"rule": []}, ("rule",)),
        ({"criteria": 5}, ("one (prune, grow) pair",)),
        ({"rule": "cyma"}, ("did you mean 'cima'",)),
        ({"prune": "globally"}, ("did you mean 'global'",)),
        ({"prune_when": "ends"}, ("did you mean 'end'",)),
        ({"batch_norm": "averaged"}, ("did you mean 'average'",)),
        ({"explore_at": "begin"}, ("end, start",)),
        ({"schedule": "triangel"}, ("did you mean 'triangle'",)),
        ({"criteria": ("magnitud", "gradient")}, ("did you mean 'magnitude'",)),
        ({"criteria": ("magnitude", "gradients")}, ("did you mean 'gradient'",)),
        ({"criteria": [("magnitude", "gradient")] * 2}, ("one (prune, grow) pair", "each of the 3 cycles")),
        ({"criteria": []}, ("one (prune, grow) pair",)),
        ({"criteria": ("magnitude", "momentum")}, ("momentum",)),
    ],
)
def test_bad_options_are_refused_and_leave_the_network_as_it_was(options, fragments):
    network = sparse()
    arguments = {"total_steps": 18, "cycle_steps": 4, "cycles": 3, "lr": (LOW, HIGH)}
    with refused(*fragments):
        st.SupTickets(network, **(arguments | options))
    st.SupTickets(network, **arguments)


def test_a_second_one_is_refused():
    training = Training()
    with refused("already"):
        st.SupTickets(training.network, 18, 4, 3, (LOW, HIGH))


def test_no_batch_norm_statistics_to_average():
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16, track_running_stats=False), nn.Linear(16, 4))
    network = sparse(model=model)
    with refused("no batch-norm statistics", "track_running_stats"):
        st.SupTickets(network, 18, 4, 3, (LOW, HIGH))


def test_no_batch_norm_to_recompute():
    network = sparse(model=nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))
    with refused("no batch norm"):
        st.SupTickets(network, 18, 4, 3, (LOW, HIGH), batch_norm="recompute")
    st.SupTickets(network, 18, 4, 3, (LOW, HIGH))  # averaging has nothing to do, and that is fine


def test_no_loader_to_recompute_with():
    training = Training(batch_norm="recompute").run()
    with refused("ticket(loader)"):
        training.tickets.ticket()
    with refused("no batch"):
        training.tickets.ticket([])
    with refused("no batch"):
        recompute(build_model(), iter([]))


@pytest.mark.parametrize(("schedule", "first"), [("triangle", 10), ("swa", 10), ("fge", 8)])
def test_a_ticket_before_the_first_cycle_ended(schedule, first):
    training = Training(schedule=schedule)
    for _ in range(first):
        with refused("no ticket yet", f"after step {first}"):
            training.tickets.ticket()
        training.run(1)
    training.tickets.ticket()


def test_single_tickets_that_were_not_kept():
    training = Training().run()
    with refused("keep=True"):
        training.tickets.tickets  # noqa: B018


def test_a_ticket_too_few_is_told():
    """A loop that ends before `total_steps`, as when GradScaler has skipped steps."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network = st.sparsify(model, st.RigL(0.8, interval=4), optimizer, seed=0)
    tickets = st.SupTickets(network, 18, 4, 3, (LOW, HIGH))

    def go(steps):
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    with refused(
        "there is no ticket yet: the first is collected after step 10, and the network has seen 0 ste"
    ):
        tickets.ticket()
    go(17)
    with pytest.warns(
        RuntimeWarning, match="2 of 3 tickets .* 18 steps, .* has seen 17 steps of its optimizer"
    ):
        tickets.ticket()
    go(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tickets.ticket()


@pytest.mark.parametrize("method", [st.RigL(0.8), st.Static(0.8)])
@pytest.mark.parametrize("boosted", [False, True])
def test_training_without_an_optimizer_is_told_once(method, boosted):
    model = build_model()
    network = st.sparsify(model, method, seed=0)
    if boosted:
        st.SupTickets(network, 18, 4, 3, (LOW, HIGH))
    x, _ = batch(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(x)
        model.eval()(x)
        assert not told
        model.train()(x)
        model(x)
    expected = boosted or isinstance(method, st.RigL)
    assert [str(one.message)[:24] for one in told] == ["no optimizer is attached"] * expected
    network.attach(torch.optim.SGD(model.parameters(), lr=0.1))


def test_lr_is_that_of_the_first_group_that_learns():
    model = build_model()
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.0}, {"params": others, "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    tickets = st.SupTickets(st.sparsify(model, st.SET(0.8), optimizer, seed=0), 12, 6, 2, (LOW, HIGH))
    assert tickets.lr == 0.1
    F.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    optimizer.step()
    assert tickets.lr == pytest.approx(equation_3(1, 6, LOW, HIGH))


def test_no_optimizer():
    network = st.sparsify(build_model(), st.RigL(0.8), seed=0)
    tickets = st.SupTickets(network, 18, 4, 3, (LOW, HIGH))
    with refused("network.attach(optimizer)"):
        tickets.lr  # noqa: B018


def test_an_optimizer_attached_afterwards():
    model = build_model()
    network = st.sparsify(model, st.RigL(0.8, interval=4), seed=0)
    tickets = st.SupTickets(network, 18, 4, 3, (LOW, HIGH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    network.attach(optimizer)
    for step in range(18):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert tickets.collected == [10, 14, 18] and tickets.explored == [7, 11, 15]
