"""Every method with every optimizer: exact counts, state that follows, loops that stay as they were."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Stream,
    assigned,
    batches,
    counts,
    dense_weights,
    largest_remainder,
    living,
    mlp,
    per_position,
    sgd,
    tiny_net,
    top,
    train_step,
    values,
    verify,
)
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import nn

import suptickets as st

DATA = batches()
INTERVAL, STEPS = 20, 200


def loss_of(model):
    x, y = DATA[0]
    F.cross_entropy(model(x), y).backward()


# name -> (the method at some sparsity, its interval and length)
METHODS = {
    "dense": lambda s, i, n: st.Dense(),
    "small-dense": lambda s, i, n: st.SmallDense(s),
    "static": lambda s, i, n: st.Static(s),
    "snip": lambda s, i, n: st.SNIP(s, backward=loss_of),
    "set": lambda s, i, n: st.SET(s, interval=i, rate=0.3),
    "set-signed": lambda s, i, n: st.SET(s, interval=i, rate=0.3, pruning="signed"),
    "rigl": lambda s, i, n: st.RigL(s, interval=i, rate=0.3),
    "rigl-cosine": lambda s, i, n: st.RigL(s, interval=i, decay="cosine", total_steps=n, stop=0.75),
    "granet": lambda s, i, n: st.GraNet(s, interval=i, prune_end=n * 3 // 4, initial_sparsity=min(0.5, s)),
    "granet-dense": lambda s, i, n: st.GraNet(s, interval=i, prune_end=n * 3 // 4, initial_sparsity=0),
    "gmp": lambda s, i, n: st.GMP(s, interval=i, prune_start=i, prune_end=n * 3 // 4),
    "snfs": lambda s, i, n: st.SNFS(s, interval=i, rate=0.3),
    "dsr": lambda s, i, n: st.DSR(s, interval=i, threshold=0.02),
}
FIXED = ("static", "set", "set-signed", "rigl", "rigl-cosine")

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=5e-4),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=1e-4, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.001, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.02, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.001),
}


def expected_total(name, sparsity, size, step, interval, steps):
    """Living connections after `step`, from the definition of each method."""
    if name in ("dense", "small-dense"):
        return size
    if name not in ("granet", "granet-dense", "gmp"):
        return round((1 - sparsity) * size)
    first = {"granet": min(0.5, sparsity)}.get(name, 0.0)
    start = interval if name == "gmp" else 0
    end, update = steps * 3 // 4, step - step % interval
    progress = min(max((update - start) / (end - start), 0), 1)
    return round((1 - (sparsity + (first - sparsity) * (1 - progress) ** 3)) * size)


@pytest.mark.parametrize(
    "optimizer_name",
    [
        name if name in ("sgd", "adam", "rprop") else pytest.param(name, marks=pytest.mark.slow)
        for name in OPTIMIZERS
    ],
)
@pytest.mark.parametrize("name", METHODS)
def test_counts_stay_exact_over_200_steps(name, optimizer_name):
    model = tiny_net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    network = st.sparsify(model, METHODS[name](0.8, INTERVAL, STEPS), optimizer, seed=1)
    shapes = [layer.shape for layer in network.layers.values()]
    fixed = dict(zip(network.layers, assigned(shapes, 0.8), strict=True))
    size = network.parameters_total
    assert size == 660
    verify(network, optimizer)
    start, losses = living(model), []
    for step in range(1, STEPS + 1):
        losses.append(train_step(model, optimizer, DATA[0]))  # one batch: Rprop wants no other
        assert network.nonzero == expected_total(name, 0.8, size, step, INTERVAL, STEPS), step
        if step % INTERVAL == 0:
            verify(network, optimizer)
            assert name not in FIXED or counts(model) == fixed
    assert network.step == STEPS
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0] / 2
    moved = {n: not torch.equal(rows, living(model)[n]) for n, rows in start.items()}
    assert any(moved.values()) == (name not in ("dense", "small-dense", "static", "snip"))


def test_expected_total_by_hand():
    """The cubic schedule of the matrix above, once with numbers: 0.8 + (0.5 - 0.8) * (1 - 20/150)^3."""
    assert expected_total("granet", 0.8, 660, 39, 20, 200) == round((0.2 + 0.3 * (13 / 15) ** 3) * 660)
    assert expected_total("gmp", 0.8, 660, 20, 20, 200) == 660
    assert expected_total("gmp", 0.8, 660, 160, 20, 200) == 132


@pytest.mark.parametrize(
    ("method", "step", "rate"),
    [
        (st.RigL(0.8, interval=5, rate=0.3), 1000, 0.3),
        (st.RigL(0.8, interval=5, rate=0.4, decay="cosine", total_steps=40), 20, 0.2),
        (st.RigL(0.8, interval=5, rate=0.4, decay="cosine", total_steps=40), 40, 0.0),
        (st.RigL(0.8, interval=5, rate=0.4, decay="cosine", total_steps=40, stop=0.5), 10, 0.2),
    ],
)
def test_rate_of_exploration(method, step, rate):
    assert method.rate_at(step) == pytest.approx(rate, abs=1e-12)


@pytest.mark.parametrize("steps", [100, 200, 700])
def test_a_stop_is_the_fraction_as_it_is_written(steps):
    """As floats 0.29 * 100 is below 29."""
    for hundredths in range(1, 101):
        method = st.RigL(0.5, interval=1, total_steps=steps, stop=hundredths / 100)
        assert method.last == hundredths * steps // 100
        assert method.due(method.last) and not method.due(method.last + 1)


@pytest.mark.parametrize(("stop", "last"), [(1.0, 30), (0.5, 15), (0.3, 5)])
def test_nothing_changes_after_the_stop(stop, last):
    model = mlp()
    optimizer = sgd(model)
    st.sparsify(model, st.SET(0.7, interval=5, total_steps=30, stop=stop), optimizer, seed=0)
    changes, before = [], living(model)
    for step in range(1, 41):
        train_step(model, optimizer, batches((6,), 4, 1)[0])
        after = living(model)
        changes += [step] if any(not torch.equal(after[n], before[n]) for n in after) else []
        before = after
    assert changes == list(range(5, last + 1, 5))


# ---- many shapes ----


@some.composite
def layers(draw):
    """A layer of any eligible kind, and an input for it."""
    kind = draw(
        some.sampled_from(
            (
                *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
                *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
            )
        )
    )
    if kind is nn.Linear:
        width = draw(some.integers(2, 9))
        return nn.Linear(width, draw(some.integers(1, 9))), torch.randn(4, width)
    groups = draw(some.integers(1, 3))
    channels, out = groups * draw(some.integers(1, 3)), groups * draw(some.integers(1, 3))
    dims = int(kind.__name__[-2])
    layer = kind(channels, out, draw(some.integers(1, 3)), groups=groups)
    return layer, torch.randn(4, channels, *[draw(some.integers(3, 4)) for _ in range(dims)])


@settings(max_examples=300)
@given(
    layers(),
    some.sampled_from([n for n in METHODS if n != "snip"]),
    some.floats(0, 0.99),
    some.sampled_from(["erk", "er", "uniform"]),
    some.integers(0, 2**32),
)
def test_counts_are_exact_for_many_shapes(drawn, name, sparsity, distribution, seed):
    layer, x = drawn
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten())
    model.append(nn.Linear(model(x).shape[1], 3))
    method = METHODS[name](sparsity, 2, 8)
    method.distribution = distribution
    optimizer = sgd(model)
    shapes = [module.weight.shape for module in (model[0], model[3])]
    first = assigned(shapes, method.initial, distribution)
    last = round((1 - sparsity) * sum(map(math.prod, shapes)))
    if (0 in first or last < len(shapes)) and not isinstance(method, st.Dense):
        with pytest.raises(st.SparsityError, match=r"lose all .* at most 0\.\d+"):
            st.sparsify(model, method, optimizer, seed=seed)
        return
    network = st.sparsify(model, method, optimizer, seed=seed)
    assert isinstance(method, st.Dense) or list(counts(model).values()) == first
    size = network.parameters_total
    for step in range(1, 9):
        train_step(model, optimizer, (x, torch.arange(4) % 3))
        assert network.nonzero == expected_total(name, sparsity, size, step, 2, 8)
        assert isinstance(method, st.Dense) or 0 not in counts(model).values()
        assert name not in FIXED or list(counts(model).values()) == first
        verify(network, optimizer)


# ---- the state of the optimizer ----


NEW_STATE = [  # optimizer, key, what a new connection gets
    ("sgd", "momentum_buffer", 0.0),
    ("adam", "exp_avg", 0.0),
    ("adam", "exp_avg_sq", 0.0),
    ("adam", "max_exp_avg_sq", 0.0),
    ("adamw", "exp_avg_sq", 0.0),
    ("rmsprop", "square_avg", 0.0),
    ("rmsprop", "momentum_buffer", 0.0),
    ("rmsprop", "grad_avg", 0.0),
    ("adagrad", "sum", 0.1),
    ("nadam", "exp_avg", 0.0),
    ("rprop", "prev", 0.0),
    ("rprop", "step_size", 0.001),
]


@pytest.mark.parametrize(("optimizer_name", "key", "fill"), NEW_STATE)
def test_state_follows_the_connections(optimizer_name, key, fill):
    model = tiny_net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    network = st.sparsify(model, st.SET(0.7, interval=1000), optimizer, seed=0)
    for batch in DATA * 2:
        train_step(model, optimizer, batch)
    before, before_values = per_position(model, optimizer, key), dense_weights(model)
    scalars = [
        {k: float(v) for k, v in s.items() if not isinstance(v, torch.Tensor) or v.dim() == 0}
        for s in optimizer.state.values()
    ]
    network.explore(0.5)
    after, new = per_position(model, optimizer, key), 0
    for name, state in after.items():
        for row, value in state.items():
            kept = row in before[name]
            new += not kept
            assert value == pytest.approx(before[name][row] if kept else fill, rel=1e-6, abs=0)
            old = float(before_values[name].reshape(-1)[row]) if kept else 0.0
            assert float(dense_weights(model)[name].reshape(-1)[row]) == old
    assert new > 20
    assert any(v != pytest.approx(fill) for s in before.values() for v in s.values())
    assert scalars == [
        {k: float(v) for k, v in s.items() if not isinstance(v, torch.Tensor) or v.dim() == 0}
        for s in optimizer.state.values()
    ]


class Logged(torch.optim.SGD):
    """Writes down what it does, in a list of its own."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.log = []

    def step(self, closure=None):
        self.log.append(len(self.param_groups[0]["params"]))
        return super().step(closure)


def test_an_optimizer_of_ones_own_sees_its_own_steps_alone():
    """The initial state of what grows is read off another."""
    model = mlp()
    optimizer = Logged(model.parameters())
    st.sparsify(model, st.SET(0.5, interval=2), optimizer, seed=0)
    for _ in range(4):
        train_step(model, optimizer, batches((6,), 4, 1)[0])
    assert optimizer.log == [6] * 4


class FromOne(torch.optim.Optimizer):
    """RMSprop whose average begins at one, as TensorFlow's does; made in the first step, or before it.

    It counts its steps, also in its state, as an optimizer may.
    """

    def __init__(self, parameters, early):
        super().__init__(parameters, {"lr": 0.01})
        self.state["steps"] = 0
        for parameter in self.param_groups[0]["params"] if early else ():
            self.state[parameter]["square_avg"] = torch.ones_like(parameter)

    def step(self, closure=None):
        self.state["steps"] += 1
        for parameter in self.param_groups[0]["params"]:
            average = self.state[parameter].setdefault("square_avg", torch.ones_like(parameter))
            average.mul_(0.9).add_(parameter.grad**2, alpha=0.1)
            parameter.data.sub_(0.01 * parameter.grad / average.sqrt())


@pytest.mark.parametrize("early", [False, True])
def test_new_connections_start_as_after_a_first_step_without_a_gradient(early):
    model = mlp()
    optimizer = FromOne(model.parameters(), early)
    network = st.sparsify(model, st.SET(0.5, interval=1000), optimizer, seed=0)
    for batch in batches((6,), 4, 3):
        train_step(model, optimizer, batch)
    before = living(model)["0"].tolist()
    network.explore(0.5)
    state = per_position(model, optimizer, "square_avg")["0"]
    assert {round(state[row], 6) for row in state if row not in before} == {0.9}
    assert all(state[row] < 0.9 for row in state if row in before)


class Scaled(torch.optim.SGD):
    """Its state is memory first, and numbers only then."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "scale" not in state:
                state["scale"] = torch.empty_like(parameter)
                state["count"] = torch.empty_like(parameter, dtype=torch.int32)
                state["scale"].fill_(0.25)
                state["count"].fill_(7)
            parameter.data.sub_(state["scale"] * parameter.grad)


def test_memory_without_numbers_is_no_initial_state():
    model = mlp()
    optimizer = Scaled(model.parameters(), lr=0.1)
    network = st.sparsify(model, st.SET(0.5, interval=2), optimizer, seed=0)
    for batch in batches((6,), 4, 8):
        train_step(model, optimizer, batch)
    for weight in network.weights.values():
        state = optimizer.state[weight.values]
        assert state["scale"].unique().tolist() == [0.25] and state["count"].unique().tolist() == [7]
    assert not torch.are_deterministic_algorithms_enabled()


def test_new_rprop_connections_start_at_the_rate_of_now():
    model = mlp()
    optimizer = torch.optim.Rprop(model.parameters(), 0.001)
    network = st.sparsify(model, st.SET(0.5, interval=1000), optimizer, seed=0)
    train_step(model, optimizer, batches((6,), 4, 1)[0])
    optimizer.param_groups[0]["lr"] = 0.007
    before = living(model)["0"].tolist()
    network.explore(0.5)
    state = per_position(model, optimizer, "step_size")["0"]
    new = [state[row] for row in state if row not in before]
    assert new and new == pytest.approx([0.007] * len(new))


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("name", ["rigl", "granet", "snfs"])
def test_optimizer_built_before_and_after_are_the_same(name, optimizer_name):
    def train(early):
        torch.manual_seed(0)
        model, build = tiny_net(), OPTIMIZERS[optimizer_name]
        optimizer = build(model.parameters()) if early else None
        network = st.sparsify(model, METHODS[name](0.8, 3, 12), optimizer, seed=0)
        if not early:
            optimizer = build(model.parameters())
            network.attach(optimizer)
        for step in range(12):
            train_step(model, optimizer, DATA[step % 3])
        verify(network, optimizer)
        return model.state_dict()

    one, other = train(True), train(False)
    assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("optimizer_name", "key"),
    [("sgd", "momentum_buffer"), ("adam", "exp_avg"), ("adagrad", "sum"), ("rprop", "step_size")],
)
def test_state_of_dense_steps_is_carried_over(optimizer_name, key, memory_format):
    model = tiny_net().to(memory_format=memory_format)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for batch in DATA:
        train_step(model, optimizer, batch)
    dense = {n: p.detach().clone() for n, p in model.named_parameters()}
    state = {n: optimizer.state[p][key].clone() for n, p in model.named_parameters()}
    network = st.sparsify(model, st.RigL(0.8, interval=2), optimizer, seed=0)
    verify(network, optimizer)
    for name, rows in living(model).items():
        here = optimizer.state[values(model)[name]][key]
        assert torch.equal(here.flatten(), state[f"{name}.weight"].reshape(-1)[rows.long()])
        assert torch.equal(
            values(model)[name].detach().flatten(), dense[f"{name}.weight"].reshape(-1)[rows.long()]
        )
    for batch in DATA:
        train_step(model, optimizer, batch)
    verify(network, optimizer)


# ---- driving ----


def trajectory(drive, name="rigl"):
    """Train for 20 steps; `drive(network, optimizer)` makes one step."""
    torch.manual_seed(0)
    model = tiny_net()
    optimizer = sgd(model)
    network = st.sparsify(model, METHODS[name](0.8, 4, 20), optimizer, seed=0)
    for step in range(20):
        x, y = DATA[step % 3]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        drive(network, optimizer)
    verify(network, optimizer)
    assert network.step == 20
    return model.state_dict()


def by_hand(network, optimizer):
    network.before_step()
    optimizer.step()
    network.after_step()


def by_hooks_and_by_hand(network, optimizer):
    (by_hand if network.step % 2 else lambda n, o: o.step())(network, optimizer)


@pytest.mark.parametrize("drive", [by_hand, by_hooks_and_by_hand])
@pytest.mark.parametrize("name", ["rigl", "granet", "snfs", "dsr"])
def test_explicit_driving_equals_hooks(name, drive):
    hooks, explicit = trajectory(lambda n, o: o.step(), name), trajectory(drive, name)
    assert all(torch.equal(hooks[key], explicit[key]) for key in hooks)


def test_an_error_in_an_explicit_step_leaves_the_hooks_working():
    model = tiny_net()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.8, interval=1), optimizer, seed=0)
    network.before_step()
    optimizer.step()
    with pytest.raises(st.SparsityError, match="backward"):
        network.after_step()
    steps = network.step
    train_step(model, optimizer, DATA[0])
    assert network.step == steps + 1


# ---- randomness ----


@pytest.mark.parametrize("name", ["static", "snip", "set", "rigl", "granet", "snfs", "dsr"])
def test_same_seed_same_positions_and_the_global_stream_is_left_alone(name):
    def run(seed):
        torch.manual_seed(3)
        model = tiny_net()
        optimizer = sgd(model)
        state = torch.get_rng_state()
        network = st.sparsify(model, METHODS[name](0.8, 3, 9), optimizer, seed=seed)
        for step in range(9):
            train_step(model, optimizer, DATA[step % 3])
        assert network.step == 9
        assert torch.equal(torch.get_rng_state(), state)
        return model.state_dict()

    one, same, other = run(5), run(5), run(6)
    assert all(torch.equal(one[key], same[key]) for key in one)
    differs = any(one[key].shape != other[key].shape or not torch.equal(one[key], other[key]) for key in one)
    assert differs == (name != "snip")


def test_the_default_seed_is_torchs():
    def draw(seed, given):
        torch.manual_seed(seed)
        model = mlp()
        st.sparsify(model, st.Static(0.8), seed=given)
        return living(model)["2"].tolist()

    assert draw(1, None) == draw(1, 1) != draw(2, None)


def test_snip_leaves_the_random_stream_alone_when_the_model_draws():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    state = torch.get_rng_state()
    st.sparsify(model, st.SNIP(0.5, data=batches((6,), 4), loss=F.cross_entropy))
    assert torch.equal(torch.get_rng_state(), state)


# ---- SNIP ----


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("sparsity", [0.3, 0.8, 0.95])
def test_snip_keeps_the_most_sensitive_of_the_whole_network(sparsity, number):
    model = tiny_net()
    dense = {n: p.detach().clone() for n, p in model.named_parameters()}
    for x, y in DATA[:number]:
        F.cross_entropy(model(x), y).backward()
    scores = {n: (p * p.grad).detach().abs() for n, p in model.named_parameters() if p.dim() > 1}
    model.zero_grad()
    model[1].reset_running_stats()
    model[1].running_mean.fill_(0.25)
    everything = [(float(s), n, i) for n, score in scores.items() for i, s in enumerate(score.flatten())]
    best = sorted(everything, reverse=True)[: round((1 - sparsity) * len(everything))]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = st.sparsify(
            model, st.SNIP(sparsity, data=DATA, loss=F.cross_entropy, batches=number), sgd(model)
        )
    for name, rows in living(model).items():
        assert rows.tolist() == sorted(i for _, n, i in best if n == f"{name}.weight")
        expected = dense[f"{name}.weight"].reshape(-1)[rows.long()]
        assert torch.equal(values(model)[name].detach().flatten(), expected)
    assert network.nonzero == round((1 - sparsity) * 660)
    assert model[1].num_batches_tracked == 0 and (model[1].running_mean == 0.25).all()
    assert all(p.grad is None for p in model.parameters())
    network.check()


def test_snip_says_when_a_layer_loses_everything_and_the_network_still_trains():
    model = mlp()
    with torch.no_grad():
        model[2].weight.mul_(1e-6)  # small w here, and small g in the layer before
    optimizer = sgd(model)
    method = st.SNIP(0.9, data=batches((6,), 4), loss=F.cross_entropy)
    with pytest.warns(RuntimeWarning, match="no connection in 0, 2$") as caught:
        network = st.sparsify(model, method, optimizer)
    assert caught[0].filename == __file__
    assert counts(model) == {"0": 0, "2": 0, "4": 23}  # 0.1 * 232
    losses = [train_step(model, optimizer, batches((6,), 4)[step % 3]) for step in range(60)]
    assert sum(losses[-3:]) < sum(losses[:3])
    verify(network, optimizer)


def test_snip_says_when_a_layer_keeps_few():
    """Fewer than it has channels, on the side with fewer of them; exactly as many are enough."""
    for kept in (1, 9, 10):

        def backward(model, kept=kept):
            for name, layer in model.named_children():
                if isinstance(layer, nn.Linear):
                    share = torch.full((layer.in_features, layer.out_features), 0.5)  # of |w x g|
                    if name == "2":
                        share = (torch.arange(share.numel()) < kept).view_as(share).float()
                    weight = layer(torch.eye(layer.in_features)) - layer.bias
                    (weight * share / weight.detach()).sum().backward()

        model = mlp()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            st.sparsify(model, st.SNIP(0.8, backward=backward))
        assert counts(model)["2"] == kept
        told = [str(one.message) for one in caught if "channels in 2" in str(one.message)]
        assert [f"SNIP left fewer connections than channels in 2 ({kept})" in line for line in told] == (
            [True] if kept < 10 else []
        )


# ---- counts that move between layers ----


def dense_gradients(network, batch):
    """Gradients of a plain copy: every position has one."""
    plain = network.densify()
    F.cross_entropy(plain(batch[0]), batch[1]).backward()
    return {name: plain.get_submodule(name).weight.grad.flatten() for name in network.layers}


def test_snfs_redistributes_by_mean_momentum_and_grows_by_momentum():
    model = tiny_net()
    optimizer = sgd(model)
    network = st.sparsify(model, st.SNFS(0.8, interval=4, rate=0.4, momentum=0.9), optimizer, seed=0)
    momentum = dict.fromkeys(network.layers, 0)
    for step in range(1, 13):
        for name, gradient in dense_gradients(network, DATA[step % 3]).items():
            momentum[name] = 0.9 * momentum[name] + gradient
        before = living(model)
        model.zero_grad()
        x, y = DATA[step % 3]
        F.cross_entropy(model(x), y).backward()
        network.before_step()
        optimizer.step()
        stepped = dense_weights(model)
        network.after_step()
        if step % 4:
            assert all(torch.equal(before[n], rows) for n, rows in living(model).items())
            continue
        kept, shares, room = {}, [], []
        for name, rows in before.items():
            alive = rows.tolist()
            keep = len(alive) - int(0.4 * len(alive) + 0.5)
            kept[name] = top(stepped[name].reshape(-1).abs(), keep, alive)
            shares.append(float(momentum[name][rows.long()].abs().mean()))
            room.append(network.layers[name].size - keep)
        freed = network.nonzero - sum(map(len, kept.values()))
        for (name, alive), number in zip(kept.items(), largest_remainder(freed, shares, room), strict=True):
            dead = sorted(set(range(network.layers[name].size)) - set(alive))
            grown = top(momentum[name].abs(), number, dead)
            assert living(model)[name].tolist() == sorted(alive + grown), (step, name)
        assert network.nonzero == 132
        verify(network, optimizer)
    assert counts(model) != dict(
        zip(counts(model), assigned([w.shape for w in network.layers.values()], 0.8), strict=True)
    )


@pytest.mark.parametrize("threshold", [0.0005, 0.02, 0.05])  # prunes too few, about right, too many
def test_dsr_redistributes_by_survivors_and_adapts_its_threshold(threshold):
    model = tiny_net()
    optimizer = sgd(model)
    method = st.DSR(0.8, interval=1000, rate=0.2, threshold=threshold, tolerance=0.1)
    network = st.sparsify(model, method, optimizer, seed=11)
    stream = Stream(11)
    for layer in network.layers.values():
        stream.draw(layer.size)  # the first connections
    thresholds = []
    for step in range(1, 7):
        train_step(model, optimizer, DATA[step % 3])
        before, weights = living(model), dense_weights(model)
        network.method.update(network, 1000)
        kept = {}
        for name, rows in before.items():
            magnitude = weights[name].reshape(-1).abs()
            above = sum(float(magnitude[row]) >= threshold for row in rows)
            kept[name] = top(magnitude, max(above, 1), rows.tolist())
        freed = 132 - sum(map(len, kept.values()))
        room = [network.layers[name].size - len(alive) for name, alive in kept.items()]
        grown = largest_remainder(freed, [len(alive) for alive in kept.values()], room)
        for (name, alive), number in zip(kept.items(), grown, strict=True):
            chosen = []
            if number:
                size = network.layers[name].size
                chosen = top(stream.draw(size), number, sorted(set(range(size)) - set(alive)))
            assert living(model)[name].tolist() == sorted(alive + chosen), (step, name)
        if freed < 0.9 * 0.2 * 132:
            threshold *= 2
        elif freed > 1.1 * 0.2 * 132:
            threshold /= 2
        thresholds.append(threshold)
        assert network.nonzero == 132
        verify(network, optimizer)
    assert network.method.state_dict(network)["threshold"] == threshold
    assert len(set(thresholds)) > 1


def test_dsr_keeps_one_connection_in_every_layer():
    """A threshold above every weight prunes all but the largest of each layer: 26 + 30 + 10 - 3 free."""
    model = mlp()
    network = st.sparsify(model, st.DSR(0.7, interval=1, threshold=1e3), sgd(model), seed=0)
    before, weights = network.nonzero, dense_weights(model)
    network.method.update(network, 1)
    assert network.nonzero == before == round(0.3 * 232)
    for name, weight in weights.items():
        largest = int(weight.reshape(-1).abs().argmax())
        assert largest in living(model)[name].tolist()
    verify(network)


def test_dsr_learns_no_threshold_from_layers_that_are_frozen():
    model = mlp()
    network = st.sparsify(model, st.DSR(0.7, interval=1, threshold=0.01), sgd(model), seed=0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for step in range(1, 9):
        network.method.update(network, step)
    assert network.method.state_dict(network)["threshold"] == 0.01


# ---- dense and small-dense ----


def test_dense_leaves_the_model_as_it_is():
    model = tiny_net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    network = st.sparsify(model, st.Dense(), sgd(model))
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert type(model[0]) is nn.Conv2d and network.sparsity == 0 and network.nonzero == 660


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.97])
def test_small_dense_is_the_widest_network_that_fits(sparsity):
    """Hidden width h costs 20 h + h + 10 h + 10 = 31 h + 10 parameters; h = 100 is the full network."""

    def build(width):
        hidden = int(100 * width)
        if hidden == 0:
            raise ValueError("no channels")
        return nn.Sequential(nn.Linear(20, hidden), nn.Linear(hidden, 10))

    narrow = st.SmallDense(sparsity).narrow(build)
    widest = max(h for h in range(101) if 31 * h + 10 <= (1 - sparsity) * 3110)
    assert narrow[0].out_features == widest
    assert st.sparsify(narrow, st.SmallDense(sparsity), sgd(narrow)).nonzero == 30 * widest


@pytest.mark.parametrize("method", [st.GraNet, st.GMP])
def test_a_training_that_ends_before_the_sparsity_is_reached_is_refused(method):
    with pytest.raises(st.SparsityError, match=f"{method.name} reaches its sparsity after 44000 steps"):
        st.sparsify(mlp(), method(0.9, total_steps=100))
    with pytest.raises(st.SparsityError, match="after 1000 steps"):
        st.sparsify(mlp(), method(0.9, prune_end=50, total_steps=100))
    st.sparsify(mlp(), method(0.6, interval=10, prune_end=95, total_steps=100, initial_sparsity=0.1))
    st.sparsify(
        mlp(), method(0.5, prune_end=50, total_steps=100, initial_sparsity=0.5)
    )  # it is there already
