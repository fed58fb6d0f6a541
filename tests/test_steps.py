"""What may happen around the steps of an optimizer: loads, errors, several networks, layers that rest."""

import copy
import warnings
from dataclasses import dataclass, field

import pytest
import torch
from helpers import batches, mlp, sgd, train_step
from torch import nn

import suptickets as st
from suptickets.criteria import Criterion

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=5e-4),
    "fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.AdamW(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
}


# ---- loading weights between steps ----


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("part", [False, True])
def test_loading_the_same_connections_leaves_the_optimizer_alone(name, part):
    """Look at other weights and come back: as if nothing had been."""

    def trained(look: bool) -> dict:
        torch.manual_seed(0)
        model = mlp()
        optimizer = OPTIMIZERS[name](model.parameters())
        network = st.sparsify(model, st.Static(0.5), optimizer, seed=0)
        first = {key: value.clone() for key, value in model.state_dict().items()}
        for batch in batches((6,), 4, count=6):
            train_step(model, optimizer, batch)
            if look:
                where = model[0] if part else model
                now = {key: value.clone() for key, value in where.state_dict().items()}
                where.load_state_dict({key: first[f"0.{key}" if part else key] for key in now})
                where.load_state_dict(now)
        network.check()
        return model.state_dict()

    plain = trained(look=False)
    assert all(torch.equal(value, plain[key]) for key, value in trained(look=True).items())


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("sparsity", [0.5, 0.7])
def test_loading_other_connections_starts_their_state_anew(part, sparsity):
    model, other = mlp(), mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    network = st.sparsify(model, st.Static(0.5), optimizer, seed=0)
    st.sparsify(other, st.Static(sparsity), seed=1)
    for batch in batches((6,), 4):
        train_step(model, optimizer, batch)
    bias = optimizer.state[model[0].bias]["exp_avg"].clone()
    (model[0] if part else model).load_state_dict((other[0] if part else other).state_dict())
    values = {name: weight.values for name, weight in network.weights.items()}
    assert not optimizer.state.get(values["0"]) and torch.equal(
        optimizer.state[model[0].bias]["exp_avg"], bias
    )
    assert bool(optimizer.state.get(values["2"])) == part
    network.check()
    for batch in batches((6,), 4):
        train_step(model, optimizer, batch)
    network.check()


# ---- steps that raise, and several networks ----


class Broken(Exception):
    """Raised once."""


@pytest.mark.parametrize("closure", [False, True])
def test_gradients_that_a_closure_completes_are_taken_whole(closure):
    """Accumulation and clipping, the last pass and the clipping inside the step or before it."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.SNFS(0.5, interval=100, momentum=0.0), optimizer, seed=0)
    for x, y in batches((6,), 4, count=3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[:3]), y[:3]).backward()

        def complete(x=x, y=y):
            nn.functional.cross_entropy(model(x[3:]), y[3:]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)

        optimizer.step(complete) if closure else (complete(), optimizer.step())
        for weight in network.weights.values():  # its momentum is the gradient of all positions
            seen = weight.momentum.gather(0, weight.positions.long())
            torch.testing.assert_close(seen, weight.values.grad.flatten())


@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_that_raises_leaves_rates_as_they_were(keyword):
    """The step is done again; rates, scheduler and tickets are those of a training without it."""

    def trained(broken: int | None) -> tuple[list, dict]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        network = st.sparsify(model, st.RigL(0.5, interval=4), optimizer, seed=0)
        tickets = st.SupTickets(network, 12, 4, 2, (0.001, 0.005))
        rates = []
        for number, (x, y) in enumerate(batches((6,), 4, count=12)):

            def closure(raises: bool = False, x=x, y=y):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                if raises:
                    raise Broken
                return loss

            if number == broken:
                with pytest.raises(Broken):
                    optimizer.step(lambda: closure(True))
                assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**number)
            optimizer.step(closure=closure) if keyword else optimizer.step(closure)
            rates.append((tickets.lr, optimizer.param_groups[0]["lr"]))
            scheduler.step()
        return rates, tickets.ticket().state_dict()

    rates, ticket = trained(None)
    for broken in (2, 3, 4, 7, 11):
        again, other = trained(broken)
        assert again == rates and all(torch.equal(other[key], value) for key, value in ticket.items())


def test_a_step_that_breaks_off_is_put_right_by_the_next():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.SET(0.5), optimizer, seed=0)
    tickets = st.SupTickets(network, 8, 4, 2, (0.001, 0.005))
    network.before_step()  # and nothing comes of it
    assert optimizer.param_groups[0]["lr"] == tickets.lr != 0.05
    for x, y in batches((6,), 4, count=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        network.before_step()
        optimizer.step()
        network.after_step()
        assert optimizer.param_groups[0]["lr"] == 0.05
    assert tickets.collected == [4, 8]


def test_two_networks_with_cycles_share_an_optimizer():
    a, b = mlp(), mlp()
    optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    for model in (a, b):
        st.SupTickets(st.sparsify(model, st.SET(0.5), optimizer, seed=0), 8, 2, 2, (0.001, 0.005))
    for x, y in batches((6,), 4, count=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(a(x) + b(x), y).backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == 0.1


# ---- layers that rest ----


class Resting(nn.Module):
    """Has a layer that no loss has reached yet."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.rests = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x):
        return self.used(x)


@pytest.mark.parametrize("method", [st.SNFS, st.RigL, st.SET, st.GraNet, st.DSR])
def test_cycles_explore_what_has_been_trained(method):
    model = Resting()
    optimizer = sgd(model)
    early = {"prune_end": 2} if method is st.GraNet else {}
    network = st.sparsify(model, method(0.5, interval=2, **early), optimizer, seed=0)
    tickets = st.SupTickets(network, 8, 2, 2, (0.001, 0.005))
    before = network.weights["used"].positions.clone()
    for x, y in batches((9,), 4, count=8):
        train_step(model, optimizer, (x, y))
    assert tickets.explored == [5, 7] and not torch.equal(network.weights["used"].positions, before)
    network.check()


@pytest.mark.parametrize("method", [st.GraNet, st.GMP])
def test_gradual_pruning_goes_as_far_as_frozen_layers_let_it(method):
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    optimizer = sgd(model)
    network = st.sparsify(model, method(0.9, interval=2, prune_end=8), optimizer, seed=0)
    frozen = network.weights["0"].nonzero
    model[0].requires_grad_(False)
    with pytest.warns(RuntimeWarning, match="frozen keep their connections") as told:
        for batch in batches((9,), 5, count=6):
            train_step(model, optimizer, batch)
    assert len([one for one in told if "frozen" in str(one.message)]) == 1
    assert network.weights["0"].nonzero == frozen and network.weights["1"].nonzero == 1
    model[0].requires_grad_(True)
    for batch in batches((9,), 5, count=2):
        train_step(model, optimizer, batch)
    assert network.nonzero == round(0.1 * 162)


def test_granet_collects_no_gradient_before_it_begins():
    method = st.GraNet(0.9, interval=2, prune_start=10, prune_end=20)
    assert [step for step in range(1, 15) if method.needs_gradient(step)] == [10, 12, 14]


# ---- what is asked of the user's functions, and of the optimizer ----


def test_scores_of_a_users_criterion_are_left_alone():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.SNFS(0.5, interval=100), optimizer, seed=0)
    for batch in batches((6,), 4):
        train_step(model, optimizer, batch)
    before = {name: weight.momentum.clone() for name, weight in network.weights.items()}
    own = Criterion("own", "", lambda weight, generator: weight.momentum)
    network.explore(0.3, "magnitude", own)
    kept = {name: weight.values.detach().reshape(-1) for name, weight in network.weights.items()}
    values = copy.deepcopy(kept)
    network.global_counts(20, Criterion("own", "", lambda weight, _: kept[weight.name]))
    assert all(torch.equal(weight.momentum, before[name]) for name, weight in network.weights.items())
    assert all(torch.equal(kept[name], value) for name, value in values.items())


def test_the_optimizers_initial_state_is_that_of_its_rate_and_kept_once():
    """Rprop's steps begin at the rate."""
    model = mlp()
    optimizer = torch.optim.Rprop(model.parameters(), lr=0.01)
    network = st.sparsify(model, st.SET(0.5), optimizer, seed=0)
    train_step(model, optimizer, batches((6,), 4)[0])
    for rate in (0.01, 0.02, 0.03, 0.02):
        optimizer.param_groups[0]["lr"] = rate
        old = network.weights["0"].rows().clone()
        network.explore(0.5)
        weight = network.weights["0"]
        new = ~torch.isin(weight.rows(), old)
        sizes = optimizer.state[weight.values]["step_size"].reshape(-1)[new]
        assert new.any() and torch.allclose(sizes, torch.tensor(rate))
    assert len(network.state._fills) == 1


def test_snip_says_so_if_there_are_fewer_batches():
    data = batches((6,), 4, count=1)
    with pytest.warns(RuntimeWarning, match="SNIP's data gave 1 of 5 batches"):
        st.sparsify(mlp(), st.SNIP(0.5, data=data, loss=nn.functional.cross_entropy, batches=5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.sparsify(mlp(), st.SNIP(0.5, data=data, loss=nn.functional.cross_entropy))


def test_snip_leaves_gradients_of_other_parameters():
    model = mlp()
    model[0].bias.grad = torch.ones(model[0].bias.shape)
    st.sparsify(model, st.SNIP(0.5, data=batches((6,), 4), loss=nn.functional.cross_entropy))
    assert bool((model[0].bias.grad == 1).all())


def test_a_transposed_tensor_is_not_taken_for_a_tied_one():
    tensor = torch.arange(1.0, 10.0).reshape(3, 3)
    mixed = st.superpose([{"a": tensor, "b": tensor.T, "c": tensor}], sparsity=0.0)
    assert (
        torch.equal(mixed["b"], tensor.T)
        and torch.equal(mixed["a"], tensor)
        and torch.equal(mixed["c"], tensor)
    )


def test_a_loader_that_is_not_used_is_mentioned():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = sgd(model)
    tickets = st.SupTickets(st.sparsify(model, st.SET(0.5), optimizer, seed=0), 4, 2, 2, (0.001, 0.005))
    for batch in batches((6,), 4, count=4):
        train_step(model, optimizer, batch)
    with pytest.warns(RuntimeWarning, match="the loader is not used"):
        tickets.ticket(batches((6,), 4))


def test_the_name_of_a_module_takes_its_convolutions_and_linear_layers():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.fc = nn.Embedding(20, 8), nn.Linear(8, 8)

    model = nn.ModuleDict({"enc": Encoder(), "dec": nn.Linear(8, 20)})
    assert list(st.sparsify(copy.deepcopy(model), st.Static(0.5), include="enc").layers) == ["enc.fc"]
    named = st.sparsify(copy.deepcopy(model), st.Static(0.5), include=["enc.words", "dec"])
    assert sorted(named.layers) == ["dec", "enc.words"]


@pytest.mark.parametrize("when", ["each", "end"])
def test_the_summary_tells_the_count_of_the_ticket(when):
    """Before it is pruned once at the end, the average holds the union of the tickets."""
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.SET(0.6), optimizer, seed=0)
    tickets = st.SupTickets(network, 8, 4, 2, (0.001, 0.05), prune_when=when)
    for batch in batches((6,), 4, count=8):
        train_step(model, optimizer, batch)
    found = tickets.ticket().state_dict()
    alive = sum(int((found[f"{name}.weight"] != 0).sum()) for name in network.layers)
    assert tickets.summary()["nonzero"] == alive == network.nonzero


# ---- layers that are unfrozen, gradients that do not come from backward() ----


@pytest.mark.parametrize("layers", [(0, 2), (2,)])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_layers_that_are_unfrozen_before_an_exploration_take_part_in_it(at, layers):
    """Whenever that is, up to the step itself: an epoch may begin there."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.5, interval=4), optimizer, exclude="4", seed=0)
    before = {name: weight.positions.clone() for name, weight in network.weights.items()}
    for step, batch in enumerate(batches((6,), 4, count=8), start=1):
        for layer in layers:
            model[layer].requires_grad_(step >= at)
        train_step(model, optimizer, batch)
        if step == 4 and at <= 4:
            assert all(not torch.equal(weight.positions, before[n]) for n, weight in network.weights.items())
    network.check()


def test_a_layer_that_is_unfrozen_too_late_is_told():
    """A compiled model, or one whose parts are called one by one, does not notice."""
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.5, interval=2), optimizer, seed=0)
    before = network.weights["2"].positions.clone()
    with pytest.warns(RuntimeWarning, match="a layer was unfrozen when the step had begun"):
        for step, (x, y) in enumerate(batches((6,), 4, count=2), start=1):
            model[2].requires_grad_(step == 2)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model[2](model[1](model[0](x))), y).backward()
            optimizer.step()
    assert torch.equal(network.weights["2"].positions, before)
    network.check()


@pytest.mark.parametrize("how", ["inputs", "grad"])
def test_gradients_of_the_living_connections_alone_are_told(how):
    model = mlp()
    optimizer = sgd(model)
    st.sparsify(model, st.RigL(0.5, interval=2), optimizer, seed=0)
    parameters = list(model.parameters())

    def step(x, y) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if how == "inputs":
            loss.backward(inputs=parameters)
        else:
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = gradient
        optimizer.step()

    first, second = batches((6,), 4, count=2)
    step(*first)
    with pytest.raises(st.SparsityError, match="autograd.grad compute that of the living ones alone"):
        step(*second)


# ---- what methods of one's own may ask for ----


def test_positions_that_a_criterion_excludes_come_last_and_none_comes_twice():
    """Growth in the first quarter of the columns; where that is full, elsewhere."""

    def score(weight, generator):
        scores = torch.rand(weight.shape, generator=generator)
        scores[:, weight.shape[1] // 4 :] = -torch.inf
        return weight.flatten(scores)

    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 4))
    optimizer = sgd(model)
    network = st.sparsify(model, st.SET(0.5, interval=2), optimizer, seed=0)
    network.method.grow = Criterion("mine", "", score)
    for batch in batches((6,), 4, count=12):
        train_step(model, optimizer, batch)
        for weight in network.weights.values():
            assert len(weight.positions.unique()) == weight.nonzero
    network.check()
    network.load_state_dict(network.state_dict())


def test_connections_do_not_move_between_layers_if_one_of_them_was_not_used():
    model = nn.ModuleDict({"a": nn.Linear(20, 20), "b": nn.Linear(20, 20)})
    network = st.sparsify(model, st.RigL(0.5), seed=0)
    network.request_gradient()
    model["b"](torch.randn(4, 20)).square().mean().backward()
    before = network.nonzero
    assert network.rewire({"a": 150, "b": 200}, {"a": 150, "b": 250}, grow="gradient")
    assert network.nonzero == before and network.weights["a"].nonzero == 150  # which needs no gradient
    with pytest.warns(RuntimeWarning, match="have no gradient at an exploration: it was skipped"):
        assert not network.rewire({"a": 150, "b": 200}, {"a": 200, "b": 200}, grow="gradient")
    assert network.nonzero == before


@pytest.mark.parametrize("criteria", [(), ("random", "random")])
@pytest.mark.parametrize("own", range(1, 7))
def test_who_explores_alone_disturbs_no_update_of_the_method(own, criteria):
    """Whether the method needs the gradient of the same step, of the next one, or of neither."""
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.8, interval=3), optimizer, seed=0)
    for step, batch in enumerate(batches((6,), 4, count=9), 1):
        if step == own:
            network.request_gradient()
        train_step(model, optimizer, batch)
        if step == own:
            assert network.explore(0.3, *criteria)
        assert network.collection.active == (step % 3 == 2)
    network.check()


def test_a_method_that_releases_takes_nothing_from_the_user():
    class Releasing(st.RigL):
        def update(self, network, step):
            super().update(network, step)
            if self.due(step):
                network.release_gradient()

    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, Releasing(0.8, interval=2), optimizer, seed=0)
    network.request_gradient()
    for batch in batches((6,), 4, count=6):
        train_step(model, optimizer, batch)
    assert network.collection.active and network.explore(0.3)


def test_a_method_that_asks_for_itself_is_done_when_it_explores():
    class Once(st.Static):
        changes = True

        def update(self, network, step):
            if step == 3:
                network.request_gradient()
            if step == 5:
                assert network.explore(0.1, "magnitude", "gradient")

    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, Once(0.8), optimizer, seed=0)
    collecting = []
    for batch in batches((6,), 4, count=8):
        train_step(model, optimizer, batch)
        collecting.append(network.collection.active)
    assert collecting == [False, False, True, True, False, False, False, False]


def test_another_optimizer_asks_anew():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.8, interval=2), optimizer, seed=0)
    network.request_gradient()
    train_step(model, optimizer, batches((6,), 4)[0])
    network.detach()
    assert not network.collection.active
    network.attach(optimizer)
    for batch in batches((6,), 4, count=3):
        train_step(model, optimizer, batch)
    assert network.step == 4


def test_a_gradient_that_is_released_is_collected_on_for_the_method():
    model = mlp()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.8, interval=2), optimizer, seed=0)
    first, second = batches((6,), 4, count=2)
    network.request_gradient()
    train_step(model, optimizer, first)
    network.release_gradient()
    train_step(model, optimizer, second)
    assert not network.collection.active
    network.request_gradient()
    assert network.collection.active
    network.release_gradient()
    assert not network.collection.active


def test_what_a_method_remembers_is_of_one_network():
    @dataclass
    class Ages(st.RigL):
        seen: dict[str, int] = field(default_factory=dict)

        def update(self, network, step):
            self.seen["steps"] = self.seen.get("steps", 0) + 1

    method = Ages(0.5)
    networks = []
    for _ in range(2):
        model = mlp()
        optimizer = sgd(model)
        networks.append(st.sparsify(model, method, optimizer, seed=0))
        for batch in batches((6,), 4, count=3):
            train_step(model, optimizer, batch)
    assert [network.method.seen for network in networks] == [{"steps": 3}] * 2 and method.seen == {}
