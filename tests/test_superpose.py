"""Superposing tickets from anywhere, against slow and obvious computations over dense tensors."""

import copy
import json
import os
import pickle
import warnings
import weakref

import pytest
import torch
from helpers import refused
from hypothesis import given
from hypothesis import strategies as some
from safetensors.torch import save_file
from torch import nn

import suptickets as st
from suptickets.batch_norm import recompute
from suptickets.connections import Connections, Joined, Ticket
from suptickets.superpose import Superposition

RULES = ("cia", "caa", "cima")
SHAPES = {"a.weight": (6, 8), "b.weight": (4, 3, 2, 2), "c.weight": (5, 4)}  # 116 connections


# ---- tickets, and what superposing them means, over dense tensors ----


def make(overlap, number, seed=0, shapes=None):
    """`number` plain state dicts whose living positions coincide fully, partly, not at all or at random.

    All values are different, in float64, so that no tie decides; each ticket has a bias too.
    """
    stream = torch.Generator().manual_seed(seed)
    tickets = [{"a.bias": torch.randn(6, generator=stream, dtype=torch.float64)} for _ in range(number)]
    for key, shape in (shapes or SHAPES).items():
        size = torch.Size(shape).numel()
        order, count = torch.randperm(size, generator=stream), size // (number + 1)
        for k, ticket in enumerate(tickets):
            start = {"fully": 0, "partly": k * (count // 2), "not at all": k * count}.get(overlap)
            rows = torch.randperm(size, generator=stream) if start is None else order[start:]
            flat = torch.zeros(size, dtype=torch.float64)
            flat[rows[:count]] = torch.randn(count, generator=stream, dtype=torch.float64)
            ticket[key] = flat.view(shape)
    return tickets


some_tickets = some.builds(
    make,
    some.sampled_from(["fully", "partly", "not at all", "at random"]),
    some.integers(1, 5),
    some.integers(0, 2**32),
)


def weights(state):
    return {key: value for key, value in state.items() if value.dim() > 1}


def batch_average(tickets, rule, beta):
    """The rules as they are defined, all tickets at once, nothing pruned."""
    average = {}
    for key in tickets[0]:
        stack = torch.stack([ticket[key] for ticket in tickets])
        if rule == "cima":
            factors = [1.0] + [1 - beta] * (len(tickets) - 1)  # ticket 1 is where it starts
            powers = [beta ** (len(tickets) - 1 - k) for k in range(len(tickets))]
            average[key] = sum(f * p * t for f, p, t in zip(factors, powers, stack, strict=True))
        elif rule == "caa" and stack[0].dim() > 1:
            average[key] = stack.sum(0) / (stack != 0).sum(0).clamp(min=1)
        else:
            average[key] = stack.sum(0) / len(tickets)
    return average


def largest(state, prune, count):
    """Positions that live if the `count` largest magnitudes do, in total or (a dict) of each weight."""
    everything = [(abs(v), key, i) for key, w in state.items() for i, v in enumerate(w.flatten().tolist())]
    everything.sort(reverse=True)
    if prune == "global":
        return {(key, i) for _, key, i in everything[:count]}
    return {
        (key, i) for name in state for _, key, i in [e for e in everything if e[1] == name][: count[name]]
    }


def pruned(state, prune, count):
    kept = largest(weights(state), prune, count)
    result = dict(state)
    for key, weight in weights(state).items():
        mask = torch.tensor([(key, i) in kept for i in range(weight.numel())]).view(weight.shape)
        result[key] = weight * mask
    return result


def running_average(tickets, rule, beta, prune, count):
    """Eq. 4 word for word: average with the new ticket, prune, and so on."""
    average = pruned(tickets[0], prune, count)
    times = {key: (w != 0).double() for key, w in weights(average).items()}
    for t, ticket in enumerate(tickets[1:], 2):
        for key, new in ticket.items():
            old = average[key]
            if rule == "cima":
                average[key] = beta * old + (1 - beta) * new
            elif rule == "caa" and key in times:
                together = times[key] + (new != 0)
                average[key] = (old * times[key] + new) / together.clamp(min=1)
                times[key] = together
            else:
                average[key] = ((t - 1) * old + new) / t
        average = pruned(average, prune, count)
        for key in times:  # a counter goes with its connection
            times[key] = times[key] * (average[key] != 0)
    return average


def assert_same(ours, expected):
    assert set(ours) == set(expected)
    for key, value in expected.items():
        assert ours[key].shape == value.shape
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-13)
        assert torch.equal(ours[key] != 0, value != 0), key  # the same connections live


def alive(state):
    return {key: int(weight.count_nonzero()) for key, weight in weights(state).items()}


def quietly(*args, **options):
    """`superpose` where an average with fewer non-zeros than the target is expected."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the average has")
        return st.superpose(*args, **options)


# ---- the rules ----


@pytest.mark.parametrize("when", ["each", "end"])
@pytest.mark.parametrize("rule", RULES)
@given(tickets=some_tickets, beta=some.sampled_from([0.1, 0.5, 0.8, 0.95]))
def test_without_pruning_the_running_form_is_the_batch_form(rule, when, tickets, beta):
    """Sparsity 0 leaves nothing to prune, so that only the rule is at work."""
    ours = quietly(tickets, rule, beta=beta, sparsity=0.0, prune_when=when)
    assert_same(ours, batch_average(tickets, rule, beta))


@pytest.mark.parametrize("prune", ["global", "layer"])
@pytest.mark.parametrize("rule", RULES)
@given(tickets=some_tickets, beta=some.sampled_from([0.2, 0.5, 0.8]))
def test_pruned_at_the_end_it_is_the_batch_form_pruned_once(rule, prune, tickets, beta):
    count = alive(tickets[0])
    ours = st.superpose(tickets, rule, beta=beta, prune=prune, prune_when="end")
    total = sum(count.values()) if prune == "global" else count
    assert_same(ours, pruned(batch_average(tickets, rule, beta), prune, total))


@pytest.mark.parametrize("prune", ["global", "layer"])
@pytest.mark.parametrize("rule", RULES)
@given(tickets=some_tickets, beta=some.sampled_from([0.2, 0.5, 0.8]))
def test_pruned_after_each_ticket_it_is_equation_4(rule, prune, tickets, beta):
    count = alive(tickets[0])
    ours = st.superpose(tickets, rule, beta=beta, prune=prune)
    total = sum(count.values()) if prune == "global" else count
    assert_same(ours, running_average(tickets, rule, beta, prune, total))


@pytest.mark.parametrize("rule", RULES)
@given(tickets=some_tickets, sparsity=some.sampled_from([0.9, 0.95]))
def test_the_first_ticket_is_pruned_too_if_it_has_more_than_the_sparsity_leaves(rule, tickets, sparsity):
    ours = st.superpose(tickets, rule, sparsity=sparsity)
    assert_same(ours, running_average(tickets, rule, 0.8, "global", round((1 - sparsity) * 116)))


@given(tickets=some_tickets, sparsity=some.floats(0.3, 0.98))
def test_the_count_follows_the_sparsity(tickets, sparsity):
    """Of 116 connections, as many as are left; never more than there are."""
    ours = quietly(tickets, sparsity=sparsity, prune_when="end")
    union = int(sum((w != 0).sum() for w in weights(batch_average(tickets, "cia", 0)).values()))
    assert sum(alive(ours).values()) == min(round((1 - sparsity) * 116), union)


@pytest.mark.parametrize("rule", RULES)
def test_one_ticket_is_itself(rule):
    (ticket,) = make("at random", 1)
    assert_same(st.superpose([ticket], rule), ticket)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("when", ["each", "end"])
def test_the_same_ticket_again_changes_nothing(rule, when):
    """CIMA too, because it starts at ticket 1 and not at zero."""
    (ticket,) = make("at random", 1)
    assert_same(st.superpose([ticket] * 4, rule, prune_when=when), ticket)


def test_cima_starts_at_ticket_1():
    first, second = {"w": torch.tensor([[8.0, 0.0]])}, {"w": torch.tensor([[0.0, 4.0]])}
    ours = quietly([first, second], "cima", beta=0.75, sparsity=0.0)
    assert ours["w"].tolist() == [[6.0, 1.0]]  # from zero it would be [[1.5, 1.0]]


@pytest.mark.parametrize("rule", RULES)
def test_a_few_numbers_by_hand(rule):
    tickets = [{"w": torch.tensor([row])} for row in ([4.0, 0, 2, 0], [0.0, 6, 4, 0], [2.0, 0, 6, 0])]
    expected = {"cia": [2, 2, 4, 0], "caa": [3, 6, 4, 0], "cima": [2, 1.5, 4.5, 0]}[rule]
    assert quietly(tickets, rule, beta=0.5, sparsity=0.0)["w"].tolist() == [expected]


def test_caa_counts_anew_for_a_connection_that_was_pruned_and_comes_back():
    """One connection lives at a time: 4, then 10 beats it, then 12 at the first place beats 10.

    With its old counter it would be 12 / 2, with its old value (4 + 12) / 2, and 10 would stay.
    """
    tickets = [{"w": torch.tensor([row])} for row in ([4.0, 0.0], [0.0, 10.0], [12.0, 0.0])]
    assert st.superpose(tickets[:2], "caa")["w"].tolist() == [[0.0, 10.0]]
    assert st.superpose(tickets, "caa")["w"].tolist() == [[12.0, 0.0]]
    assert st.superpose(tickets + tickets[2:], "caa")["w"].tolist() == [[12.0, 0.0]]


# ---- order ----


@pytest.mark.parametrize("rule", ["cia", "caa"])
@given(tickets=some_tickets, seed=some.integers(0, 100))
def test_without_pruning_in_between_order_does_not_matter(rule, tickets, seed):
    order = torch.randperm(len(tickets), generator=torch.Generator().manual_seed(seed)).tolist()
    shuffled = [tickets[k] for k in order]
    assert_same(st.superpose(shuffled, rule, prune_when="end"), st.superpose(tickets, rule, prune_when="end"))


def test_order_matters_for_cima():
    one, other = make("fully", 2)
    forth, back = st.superpose([one, other], "cima"), st.superpose([other, one], "cima")
    assert not torch.allclose(forth["a.weight"], back["a.weight"])


def test_order_matters_when_pruned_after_each_ticket():
    """3 goes when it meets 4, and is missing when 3 comes once more."""
    tickets = [{"w": torch.tensor([row])} for row in ([3.0, 0.0], [0.0, 4.0], [3.0, 0.0])]
    assert st.superpose(tickets, "cia")["w"].tolist() == [[0.0, pytest.approx(4 / 3)]]
    first, second, third = tickets
    assert st.superpose([first, third, second], "cia")["w"].tolist() == [[2.0, 0.0]]
    for order in ([first, second, third], [first, third, second]):
        assert st.superpose(order, "cia", prune_when="end")["w"].tolist() == [[2.0, 0.0]]


# ---- exact counts ----


@pytest.mark.parametrize("prune", ["global", "layer"])
@pytest.mark.parametrize("when", ["each", "end"])
@pytest.mark.parametrize("rule", RULES)
@given(number=some.integers(2, 4), seed=some.integers(0, 2**32), values=some.integers(1, 2))
def test_counts_are_exact_with_ties(rule, prune, when, number, seed, values):
    """All values are 1, or 1 and 2: a threshold would keep too many or too few."""
    stream = torch.Generator().manual_seed(seed)
    tickets = []
    for _ in range(number):
        ticket = {}
        for key, shape in SHAPES.items():
            size = torch.Size(shape).numel()
            flat = torch.zeros(size)
            chosen = torch.randperm(size, generator=stream)[: size // 3]
            flat[chosen] = torch.randint(1, values + 1, (len(chosen),), generator=stream).float()
            ticket[key] = flat.view(shape)
        tickets.append(ticket)
    ours = st.superpose(tickets, rule, prune=prune, prune_when=when)
    counts = {"a.weight": 16, "b.weight": 16, "c.weight": 6}
    assert sum(alive(ours).values()) == 38
    if prune == "layer":
        assert alive(ours) == counts


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("prune", ["global", "layer"])
def test_counts_are_exact_when_all_weights_are_equal(prune, sparsity):
    """Per layer, a total is shared in proportion to the first ticket's counts: by the largest remainder."""
    tickets = [{key: torch.ones(shape) for key, shape in SHAPES.items()} for _ in range(3)]
    ours = alive(st.superpose(tickets, sparsity=sparsity, prune=prune))
    assert sum(ours.values()) == round((1 - sparsity) * 116)
    if prune == "layer":
        shares = {0.0: [48, 48, 20], 0.5: [24, 24, 10], 0.9: [5, 5, 2], 0.99: [1, 0, 0]}
        assert list(ours.values()) == shares[sparsity]


@pytest.mark.parametrize("rule", ["cia", "caa"])
def test_an_average_with_too_few_non_zeros_keeps_them_and_says_so(rule):
    one = {"w": torch.tensor([[1.0, 2.0, 0.0, 0.0]]), "v": torch.tensor([[5.0, 0.0]])}
    other = {"w": torch.tensor([[-1.0, 0.0, 4.0, 0.0]]), "v": torch.tensor([[-5.0, 0.0]])}
    with pytest.warns(RuntimeWarning, match="the average has 2 non-zero.*fewer than its target of 3"):
        ours = st.superpose([one, other], rule)
    half = 2 if rule == "cia" else 1
    assert ours["w"].tolist() == [[0.0, 2 / half, 4 / half, 0.0]]
    assert ours["v"].tolist() == [[0.0, 0.0]]


def test_no_warning_without_need():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        st.superpose(make("not at all", 3))


# ---- everything that is not sparse ----


def with_everything(seed):
    """A small network in float64 with a convolution, batch norms and counters; all of it random."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6)
    ).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    for layer in (model[1], model[5]):
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.1, 4)
        layer.num_batches_tracked.fill_(10 * seed + 3)
    return model


@pytest.mark.parametrize("rule", RULES)
def test_the_rest_is_averaged_and_batch_norm_by_means_and_standard_deviations(rule):
    states = [with_everything(seed).state_dict() for seed in range(3)]
    ours = st.superpose(states, rule, beta=0.7)
    factors = [0.49, 0.21, 0.3] if rule == "cima" else [1 / 3] * 3
    for key in states[0]:
        values = [state[key] for state in states]
        if key.endswith("num_batches_tracked"):
            assert ours[key].dtype == torch.int64 and int(ours[key]) == 23
        elif key.endswith("running_var"):
            deviation = sum(f * v.sqrt() for f, v in zip(factors, values, strict=True))
            torch.testing.assert_close(ours[key], deviation**2)
        elif values[0].dim() == 1:
            torch.testing.assert_close(ours[key], sum(f * v for f, v in zip(factors, values, strict=True)))
    with_everything(0).load_state_dict(ours)  # strict: the same names and shapes


def test_layers_names_the_weights_that_are_sparse():
    """All others are averaged and keep their zeros where the average has them."""
    tickets = make("at random", 3)
    ours = st.superpose(tickets, layers=["a.weight"], sparsity=0.75)
    assert alive(ours)["a.weight"] == 12  # of 48
    for key in ("b.weight", "c.weight"):
        torch.testing.assert_close(ours[key], sum(t[key] for t in tickets) / 3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtypes_stay(dtype, rule):
    tickets = [{k: v.to(dtype) for k, v in t.items()} for t in make("partly", 3)]
    ours = st.superpose(tickets, rule)
    assert {value.dtype for value in ours.values()} == {dtype}
    assert sum(alive(ours).values()) == sum(alive(tickets[0]).values())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("when", ["each", "end"])
def test_the_tickets_and_the_random_state_are_left_alone(rule, when):
    tickets = [with_everything(seed).state_dict() for seed in range(3)]
    before, stream = copy.deepcopy(tickets), torch.get_rng_state()
    ours = st.superpose(tickets, rule, prune_when=when)
    for value in ours.values():
        value.zero_()
    for ticket, copied in zip(tickets, before, strict=True):
        assert all(torch.equal(ticket[key], copied[key]) for key in copied)
    assert torch.equal(torch.get_rng_state(), stream)


# ---- tickets from anywhere ----


def sparse_network(seed, model=None, **options):
    model = with_everything(seed) if model is None else model
    return st.sparsify(model, st.Static(0.6), seed=seed, **options)


def test_states_of_sparse_networks():
    networks = [sparse_network(seed) for seed in range(3)]
    ours = st.superpose([network.state_dict() for network in networks], "caa")
    assert_same(ours, st.superpose([network.densify().state_dict() for network in networks], "caa"))
    assert sum(alive(ours).values()) == networks[0].nonzero


def test_positions_do_not_depend_on_the_memory_layout():
    plain = [sparse_network(seed).state_dict() for seed in range(2)]
    last = [
        sparse_network(seed, with_everything(seed).to(memory_format=torch.channels_last)) for seed in range(2)
    ]
    assert_same(st.superpose([network.state_dict() for network in last]), st.superpose(plain))


@pytest.mark.parametrize("sparse_first", [True, False])
@pytest.mark.parametrize("exclude", [None, "4"])
def test_both_kinds_of_state_together(exclude, sparse_first):
    """A layer that one network leaves dense must not be taken for a sparse one in the other's plain state."""
    networks = [sparse_network(seed, exclude=exclude) for seed in range(2)]
    plain = [network.densify().state_dict() for network in networks]
    mixed = [networks[0].state_dict(), plain[1]] if sparse_first else [plain[0], networks[1].state_dict()]
    layers = list(networks[0].state_dict()["shapes"])
    assert_same(st.superpose(mixed, layers=layers), st.superpose(plain, layers=layers))


@pytest.mark.parametrize("sparse_first", [True, False])
def test_both_kinds_of_state_that_disagree_on_what_is_sparse(sparse_first):
    """Without `layers`, the weight left dense is sparse in the plain state: done right, or refused."""
    networks = [sparse_network(seed, exclude="4") for seed in range(2)]
    states = [networks[0].state_dict(), networks[1].densify().state_dict()]
    try:
        ours = st.superpose(states if sparse_first else states[::-1])
    except st.SparsityError as error:
        assert "4.weight" in str(error) and "\n" not in str(error)
    else:
        both = networks[0].densify().state_dict()["4.weight"] + states[1]["4.weight"]
        torch.testing.assert_close(ours["4.weight"], both / 2)


def test_files(tmp_path):
    tickets = make("partly", 4)
    save_file(tickets[0], tmp_path / "zero.safetensors")
    torch.save(tickets[1], tmp_path / "one.pt")
    torch.save(tickets[2], tmp_path / "two.pth", _use_new_zipfile_serialization=False)
    files = [tmp_path / "zero.safetensors", str(tmp_path / "one.pt"), tmp_path / "two.pth", tickets[3]]
    assert_same(st.superpose(files), st.superpose(tickets))


def test_files_of_sparse_networks(tmp_path):
    networks = [sparse_network(seed) for seed in range(2)]
    for k, network in enumerate(networks):
        torch.save(network.state_dict(), tmp_path / f"{k}.pt")
    ours = st.superpose([tmp_path / "0.pt", tmp_path / "1.pt"])
    assert_same(ours, st.superpose([network.state_dict() for network in networks]))


@pytest.mark.parametrize("rule", RULES)
def test_tickets_are_taken_one_at_a_time(rule):
    """At most two are alive at any time: the newest, and the one before while the newest is made."""
    living, most = weakref.WeakSet(), []

    class Weight(torch.Tensor):
        """A tensor that can be counted."""

    def stream():
        for ticket in make("partly", 6):
            key = "a.weight"
            ticket = {key: ticket[key].as_subclass(Weight)}
            living.add(ticket[key])
            most.append(len(living))
            yield ticket
            del ticket

    ours = st.superpose(stream(), rule)
    assert len(most) == 6 and max(most) <= 2
    assert_same(
        {"a.weight": ours["a.weight"].as_subclass(torch.Tensor)},
        st.superpose([{"a.weight": t["a.weight"]} for t in make("partly", 6)], rule),
    )


def test_files_are_read_one_at_a_time(tmp_path, monkeypatch):
    """When a file has been read, the weights of those before it are gone."""
    living, most, load = weakref.WeakSet(), [], torch.load

    def count(*args, **options):
        state = load(*args, **options)
        living.add(state["a.weight"])
        most.append(len(living))
        return state

    monkeypatch.setattr(torch, "load", count)
    for k, ticket in enumerate(make("partly", 4)):
        torch.save(ticket, tmp_path / f"{k}.pt")
    st.superpose(tmp_path / f"{k}.pt" for k in range(4))
    assert len(most) == 4 and max(most) == 1


def tied(seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"up": nn.Linear(5, 7, bias=False), "down": nn.Linear(5, 7, bias=False)}).double()
    model["down"].weight = model["up"].weight
    return model


@pytest.mark.parametrize("prune", ["global", "layer"])
def test_tied_weights_of_sparse_networks(prune):
    networks = [st.sparsify(tied(seed), st.Static(0.6), seed=seed) for seed in range(3)]
    ours = st.superpose([network.state_dict() for network in networks], prune=prune)
    assert set(ours) == {"up.weight", "down.weight"}
    assert torch.equal(ours["up.weight"], ours["down.weight"])
    assert int(ours["up.weight"].count_nonzero()) == networks[0].nonzero == 14
    once = [{"up.weight": network.densify().state_dict()["up.weight"]} for network in networks]
    assert torch.equal(ours["up.weight"], st.superpose(once, prune=prune)["up.weight"])


@pytest.mark.parametrize("sparsity", [0.5, 0.7, 0.9])
def test_tied_weights_of_plain_models_stay_tied(sparsity):
    """Both names get the same connections, of 35 as many as the sparsity leaves (17.5, 10.5, 3.5: either)."""
    ours = st.superpose([tied(seed).state_dict() for seed in range(3)], sparsity=sparsity)
    assert torch.equal(ours["up.weight"], ours["down.weight"])
    assert abs(int(ours["up.weight"].count_nonzero()) - (1 - sparsity) * 35) <= 0.5


def test_a_checkpoint_around_the_state_dict_is_refused():
    """It holds no weights at its top: superposing it would return the last one as it is."""
    states = [{"model": with_everything(seed).state_dict(), "epoch": 3} for seed in range(2)]
    with refused("model"):
        st.superpose(states)


# ---- batch norm by a pass over data ----


def expected_statistics(model, batches):
    """Per batch-norm layer: mean and variance of its inputs, batch by batch, weighted by the batch's size."""
    model, statistics = copy.deepcopy(model).train(), {}

    def note(layer, inputs):
        x = inputs[0].transpose(0, 1).flatten(1)
        mean = x.mean(1)
        variance = ((x - mean[:, None]) ** 2).sum(1) / (x.shape[1] - 1)
        statistics.setdefault(layer, []).append((mean, variance))

    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.register_forward_pre_hook(note)
    for x in batches:
        model(x)
    sizes = [len(x) for x in batches]
    return [
        [sum(n * s[k] for n, s in zip(sizes, seen, strict=True)) / sum(sizes) for k in (0, 1)]
        for seen in statistics.values()
    ]


@pytest.mark.parametrize("sizes", [(5, 5, 5), (2, 3, 11), (9,), (11, 3, 2)])
def test_recomputed_statistics_weigh_batches_by_size(sizes):
    model = with_everything(1)
    batches = [torch.randn(n, 2, 4, 4, dtype=torch.float64) * n for n in sizes]
    expected = expected_statistics(model, batches)
    recompute(model, [(x, torch.zeros(len(x))) for x in batches])
    for layer, (mean, variance) in zip((model[1], model[5]), expected, strict=True):
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_var, variance)


def test_empty_batches_count_for_nothing():
    batches = [torch.randn(n, 2, 4, 4, dtype=torch.float64) for n in (0, 4, 0, 3, 0)]
    models = [with_everything(1) for _ in range(2)]
    recompute(models[0], batches)
    recompute(models[1], [x for x in batches if len(x)])
    assert all(torch.equal(a, b) for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True))
    for nothing in ([], batches[:1]):
        with refused("the loader gave no batch of inputs"):
            recompute(models[0], nothing)
    with refused("the loader must give tensors", "a scalar"):
        recompute(models[0], batches[0].new_ones(3))
    with refused("the loader must give tensors", "not str"):
        recompute(models[0], [batches[1] * 7, "nothing"])
    assert all(torch.equal(a, b) for a, b in zip(models[0].buffers(), models[1].buffers(), strict=True))


def test_recomputing_takes_batches_with_and_without_labels():
    batches = [torch.randn(4, 2, 4, 4, dtype=torch.float64) for _ in range(3)]
    models = [with_everything(1) for _ in range(4)]
    recompute(models[0], batches)
    recompute(models[1], [(x, None) for x in batches])
    recompute(models[2], ([x, None] for x in batches))
    recompute(models[3], [{"input": x} for x in batches])
    for model in models[1:]:
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), models[0].buffers(), strict=True))


def test_recomputing_touches_nothing_but_the_statistics():
    model = nn.Sequential(with_everything(1), nn.Dropout(0.5), nn.BatchNorm1d(6).double())
    model.eval()
    model[0][1].train()  # modes may differ
    model[0][1].momentum, model[0][5].momentum = 0.3, None
    modes = [module.training for module in model.modules()]
    parameters = [p.detach().clone() for p in model.parameters()]
    stream = torch.get_rng_state()
    recompute(
        model, [torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=torch.Generator()) for n in (4, 3)]
    )
    assert torch.equal(torch.get_rng_state(), stream)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(p, before) for p, before in zip(model.parameters(), parameters, strict=True))
    assert model[0][1].num_batches_tracked == model[0][5].num_batches_tracked == 13
    assert (model[0][1].momentum, model[0][5].momentum, model[2].momentum) == (0.3, None, 0.1)
    assert not any(p.grad is not None for p in model.parameters())


# ---- the running average itself ----


@pytest.mark.parametrize("rule", RULES)
def test_the_running_average_keeps_nothing_of_a_ticket(rule):
    """What is added may be changed or freed afterwards."""
    states = [sparse_network(seed).state_dict() for seed in range(3)]
    kept, careless = Superposition(rule), Superposition(rule)
    for state in states:
        kept.add(Ticket.of(state["model"], state["shapes"]))
    for state in states:
        careless.add(Ticket.of(state["model"], state["shapes"]))
        for value in state["model"].values():
            value.zero_()
    assert_same(careless.result().state_dict(), kept.result().state_dict())


def test_asking_for_the_result_in_between_changes_nothing():
    tickets = [Ticket.of_dense(ticket, SHAPES) for ticket in make("partly", 4)]
    asked, left = Superposition("caa", prune_when="end"), Superposition("caa", prune_when="end")
    for ticket in tickets:
        asked.add(ticket)
        for value in asked.result().state_dict().values():
            value.zero_()
        left.add(ticket)
    assert_same(asked.result().state_dict(), left.result().state_dict())


# ---- bad input ----


@pytest.mark.parametrize("empty", [[], (), iter([])])
def test_an_empty_list_is_refused(empty):
    with refused("no tickets", "empty"):
        st.superpose(empty)


def test_a_result_of_no_ticket_is_refused():
    with refused("no ticket"):
        Superposition().result()


def test_tickets_of_different_shapes_or_names_are_listed():
    one, other = make("partly", 2)
    other["a.weight"] = torch.ones(8, 6, dtype=torch.float64)
    other["a.bias"] = torch.ones(3, dtype=torch.float64)
    other["d.weight"] = other.pop("c.weight")
    with refused(
        "a.weight (6x8 and 8x6)",
        "a.bias (6 and 3)",
        "c.weight (5x4 and missing)",
        "d.weight (missing and 5x4)",
    ):
        st.superpose([one, other])


def test_nothing_is_listed_that_fits():
    one, other = make("partly", 2)
    del other["a.bias"]
    with pytest.raises(st.SparsityError) as error:
        st.superpose([one, other])
    assert "a.bias (6 and missing)" in str(error.value) and "weight" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        ({"rule": "cyma"}, ("rule 'cyma'", "did you mean 'cima'")),
        ({"rule": "cima", "beta": 0.0}, ("beta must be above 0 and below 1",)),
        ({"rule": "cima", "beta": 1.0}, ("beta must be above 0 and below 1",)),
        ({"rule": "cima", "beta": -0.1}, ("beta must be above 0",)),
        ({"rule": "cima", "beta": float("nan")}, ("beta must be above 0",)),
        ({"rule": "cima", "beta": 80}, ("beta is a fraction", "0.8")),
        ({"rule": "cima", "beta": None}, ("beta must be a number",)),
        ({"sparsity": 95}, ("sparsity is a fraction", "0.95")),
        ({"sparsity": -0.1}, ("sparsity",)),
        ({"prune": "layers"}, ("prune 'layers'", "did you mean 'layer'")),
        ({"prune_when": "ends"}, ("prune_when 'ends'", "did you mean 'end'")),
        ({"layers": ["a.weight", "e.weight", "f.weight"]}, ("e.weight, f.weight",)),
        ({"layers": 5}, ("layers", "names of weights", "5")),
        ({"layers": [5]}, ("layers", "names of weights", "[5]")),
        ({"layers": []}, ("layers", "names of weights")),
    ],
)
def test_bad_options_are_refused(options, fragments):
    with refused(*fragments):
        st.superpose(make("partly", 2), **options)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    ("key", "value"),
    [("b.weight", NAN), ("a.bias", NAN), ("n.running_var", NAN), ("n.running_var", -1.0)],
)
def test_a_ticket_that_has_no_average_is_named(rule, number, key, value):
    tickets = [{**ticket, "n.running_var": torch.ones(3)} for ticket in make("partly", 3)]
    tickets[number - 1][key] = tickets[number - 1][key].clone()
    tickets[number - 1][key].view(-1)[1] = value
    with refused(f"ticket {number} has", f"in {key}:", "leave it out"):
        st.superpose(tickets, rule)


def test_an_average_that_refuses_a_ticket_goes_on_without_it():
    one, bad, other = (Ticket.of_dense(ticket, SHAPES) for ticket in make("partly", 3))
    bad.sparse["c.weight"].values[0] = NAN
    ours, expected = Superposition(), Superposition()
    for ticket in (one, other):
        expected.add(ticket)
        ours.add(ticket)
        with refused(f"ticket {ours.count + 1} has", "c.weight"):
            ours.add(bad)
    assert_same(ours.result().state_dict(), expected.result().state_dict())


def test_a_diverged_network_is_no_ticket():
    network = sparse_network(0)
    tickets = st.SupTickets(network, 8, 2, 2, (0.001, 0.005))
    tickets.collect()
    next(iter(network.weights.values())).values.data[0] = NAN
    with refused("ticket 2 has NaN", "0.weight"):
        tickets.collect()
    assert len(tickets.collected) == tickets.superposition.count == 1


@pytest.mark.parametrize("rule", RULES)
def test_infinities_that_all_tickets_have_are_averaged(rule):
    """Those of an attention mask; and numbers whose squares are too large are numbers."""
    mask = torch.full((3, 3), -INF, dtype=torch.float64).triu(1)
    tickets = [{**ticket, "mask": mask, "large": torch.full((2,), 3e38)} for ticket in make("partly", 3)]
    ours = st.superpose(tickets, rule, layers=list(SHAPES))
    assert torch.equal(ours["mask"], mask)
    torch.testing.assert_close(ours["large"], tickets[0]["large"])
    assert torch.equal(st.superpose(tickets, rule, sparsity=0.0)["mask"], mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_half_precision_is_rounded_once(rule, dtype):
    """As if the tickets had been in double precision; batch-norm variances too."""
    tickets = [{**one, "bn.running_var": one["a.bias"].abs() + 1} for one in make("partly", 12)]
    halves = [{key: value.to(dtype) for key, value in one.items()} for one in tickets]
    exact = st.superpose([{k: v.double() for k, v in one.items()} for one in halves], rule, prune_when="end")
    ours = st.superpose(halves, rule, prune_when="end")
    for key, value in exact.items():
        assert ours[key].dtype == dtype
        torch.testing.assert_close(ours[key].double(), value, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("rule", RULES)
def test_what_all_tickets_have_their_average_has(rule, dtype):
    """A frozen backbone, or a table of whole numbers that is kept as floats."""
    one = {key: value.to(dtype) for key, value in make("partly", 1)[0].items()} | {
        "table": torch.arange(20.0)
    }
    one["bn.running_var"] = torch.rand(999, generator=torch.Generator().manual_seed(0)).to(dtype)
    for key, value in st.superpose([one] * 12, rule).items():
        assert value.dtype == one[key].dtype and torch.equal(value, one[key])


def test_buffers_of_a_model_may_be_anything():
    """What layers do not own is averaged as it was given: not a number, or of another layout."""
    eye = torch.eye(4, dtype=torch.float64)
    others = {"best": torch.tensor(NAN), "graph": eye.to_sparse(), "rows": eye.to_sparse_csr()}
    ours = st.superpose([{**ticket, **others} for ticket in make("partly", 3)])
    assert ours["best"].isnan()
    for key in ("graph", "rows"):
        torch.testing.assert_close(ours[key].to_dense(), eye, rtol=1e-15, atol=0)


def test_tickets_of_different_types_are_listed():
    """Floating-point numbers of different precision take the highest."""
    one, other = make("partly", 2)
    other["a.weight"] = other["a.weight"].float()
    for tickets in ([one, other], [other, one]):
        assert st.superpose(tickets)["a.weight"].dtype == torch.float64
    one |= {"c": torch.tensor(1), "d": torch.ones(2), "e": torch.tensor(1, dtype=torch.int32)}
    other |= {"c": torch.tensor(1.0), "d": torch.ones(2, dtype=torch.complex64), "e": torch.tensor(2)}
    for tickets in ([one, other], [other, one]):
        with refused("types or devices", "c (", "integer", "d (", "complex on cpu"):
            st.superpose(tickets)
    del one["c"], one["d"], other["c"], other["d"]
    assert int(st.superpose([one, other])["e"]) == 2


def test_tickets_on_different_devices_are_listed():
    one, other = (Ticket.of_dense(ticket, SHAPES) for ticket in make("partly", 2))
    superposition = Superposition()
    superposition.add(one)
    with refused("types or devices", "a.weight (floating-point on cpu and floating-point on meta)"):
        superposition.add(other.to(torch.device("meta")))


STRANGE = {
    "meta": lambda tensor: tensor.to("meta"),
    "float8": lambda tensor: tensor.to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("key", ["a.weight", "a.bias"])
@pytest.mark.parametrize("name", STRANGE)
def test_tensors_without_numbers_to_compute_with_are_refused(name, key):
    (ticket,) = make("partly", 1)
    ticket[key] = STRANGE[name](ticket[key])
    with refused("cannot be averaged", f"{key} (", name):
        st.superpose([ticket])


def test_layers_may_be_named_by_their_modules():
    tickets = make("partly", 2)
    named, expected = (st.superpose(tickets, layers=[name], sparsity=0.5) for name in ("a", "a.weight"))
    assert all(torch.equal(named[key], expected[key]) for key in expected)
    with refused("a ticket has no zz"):
        st.superpose(tickets, layers=["a", "zz"])


def test_files_tell_which_weights_were_sparse(tmp_path):
    """What was left dense is averaged and not pruned; a tied weight is in such a file twice."""
    torch.manual_seed(0)
    tickets = [{key: torch.randn(6, 5) for key in ("a.weight", "tied", "left")} for _ in range(3)]
    for n, ticket in enumerate(tickets):
        ticket["a.weight"][torch.rand(6, 5) < 0.6] = 0
        ticket["tied"] = ticket["a.weight"].clone()
        about = {"suptickets": json.dumps({"living": {"a": 12}})}
        save_file(ticket, tmp_path / f"{n}.safetensors", about if n == 0 else None)
    files = [tmp_path / f"{n}.safetensors" for n in range(3)]
    found = st.superpose(files)
    torch.testing.assert_close(found["left"], sum(ticket["left"] for ticket in tickets) / 3)
    assert torch.equal(found["a.weight"], found["tied"])
    assert found["a.weight"].count_nonzero() == tickets[0]["a.weight"].count_nonzero()
    expected, named = st.superpose(tickets, layers=["a", "tied"]), st.superpose(files, layers=["a"])
    assert all(torch.equal(found[k], expected[k]) and torch.equal(named[k], expected[k]) for k in expected)


def test_a_file_that_tells_of_other_weights_is_read_as_any_other(tmp_path):
    tickets = make("partly", 2)
    for n, ticket in enumerate(tickets):
        about = {"suptickets": json.dumps({"living": {"a": 12, "wrapped.b": 3}})}
        save_file(ticket, tmp_path / f"{n}.safetensors", about)
    found = st.superpose([tmp_path / f"{n}.safetensors" for n in range(2)])
    expected = st.superpose(tickets)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("value", [torch.ones(3, 3, dtype=torch.int64), torch.ones(3, 3) > 0, 3, None])
def test_layers_must_name_numbers(value):
    with refused("layers", "floating-point", "not z"):
        st.superpose([{**ticket, "z": value} for ticket in make("partly", 2)], layers=["a.weight", "z"])
    with refused("layers", "dense tensors", "not z"):
        st.superpose([{**make("partly", 1)[0], "z": torch.eye(3).to_sparse()}], layers=["z"])


@pytest.mark.parametrize("value", [torch.ones(3, dtype=torch.int64), 1.0, None])
def test_a_variance_that_is_no_number_is_kept_as_it_is(value):
    ours = st.superpose([{**ticket, "n.running_var": value} for ticket in make("partly", 2)])
    assert ours["n.running_var"] is value or torch.equal(ours["n.running_var"], value)


def test_states_that_are_not_tensors_are_refused():
    one, other = make("partly", 2)
    with refused("c (scalar and no tensor)"):
        st.superpose([{**one, "c": torch.tensor(1.0)}, {**other, "c": 1.0}])
    with refused("no weights", "under 0"):
        st.superpose([{0: one}])


POSITIONS = "0.weight_connections.positions"
DAMAGED = {
    "model": {"model": None},
    "shapes": {"shapes": [3, 4]},
    "another": {"shapes": {"another": [3, 4]}},
    "0.weight": {"shapes": {"0.weight": "no shape"}},
    "aliases": {"aliases": {"a": "b"}},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_states_of_networks_are_refused(name):
    with refused("damaged", name):
        st.superpose([{**sparse_network(0).state_dict(), **DAMAGED[name]}])


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows + 10**6,
        lambda rows: rows - 10**6,
        lambda rows: rows.flip(0),
        lambda rows: rows * 0,
        lambda rows: rows[1:],
        lambda rows: rows.float(),
        lambda rows: None,
    ],
)
def test_damaged_positions_are_refused(change):
    state = sparse_network(0).state_dict()
    with refused("damaged", "0.weight"):
        st.superpose([{**state, "model": {**state["model"], POSITIONS: change(state["model"][POSITIONS])}}])


class Malicious:
    """A pickle that would leave a file behind if anything ran it."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("new", [True, False])
def test_a_file_with_a_malicious_pickle_is_refused_and_not_run(tmp_path, new):
    path = tmp_path / "ticket.pt"
    torch.save({"w": Malicious(tmp_path / "harm")}, path, _use_new_zipfile_serialization=new)
    with refused("cannot read a ticket", "ticket.pt"):
        st.superpose([path])
    assert not (tmp_path / "harm").exists()


def test_a_plain_pickle_is_refused_and_not_run(tmp_path):
    (tmp_path / "ticket.pt").write_bytes(pickle.dumps({"w": Malicious(tmp_path / "harm")}))
    with refused("cannot read a ticket"):
        st.superpose([tmp_path / "ticket.pt"])
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("name", ["ticket.pt", "ticket.safetensors"])
@pytest.mark.parametrize("content", [b"", b"no ticket", b"\x80\x02."])
def test_files_that_are_no_tickets_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with refused("cannot read a ticket", name):
        st.superpose([tmp_path / name])


def test_a_truncated_file_is_refused(tmp_path):
    for name, save in (("whole.safetensors", save_file), ("whole.pt", torch.save)):
        save(make("partly", 1)[0], tmp_path / name)
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with refused("cannot read a ticket", name):
            st.superpose([tmp_path / name])


@pytest.mark.parametrize("path", ["missing.pt", "missing.safetensors", "."])
def test_missing_files_and_folders_are_refused(tmp_path, path):
    with refused("cannot read a ticket"):
        st.superpose([tmp_path / path])


def test_a_file_that_holds_no_state_dict_is_refused(tmp_path):
    torch.save(torch.ones(3), tmp_path / "tensor.pt")
    with refused("cannot read a ticket", "no state dict"):
        st.superpose([tmp_path / "tensor.pt"])


def test_networks_that_store_nothing_sparse_are_pruned_like_plain_ones():
    torch.manual_seed(0)
    states = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
        states.append(
            st.sparsify(model, st.Dense(), torch.optim.SGD(model.parameters(), lr=0.1)).state_dict()
        )
    found = st.superpose(states, sparsity=0.9)
    assert sum(int((found[key] != 0).sum()) for key in ("0.weight", "1.weight")) == 30
    plain = st.superpose([state["model"] for state in states], sparsity=0.9)
    assert found.keys() == plain.keys() and all(torch.equal(found[key], plain[key]) for key in plain)


def test_connections_of_large_weights_are_numbered_in_64_bits():
    rows = torch.tensor([0, 7, 2_499_999_999])
    ticket = Ticket(
        {name: torch.Size((50_000, 50_000)) for name in "ab"},
        {name: Connections(rows.clone(), torch.arange(1.0, 4.0)) for name in "ab"},
        {},
    )
    joined = Joined.of(ticket, ["a", "b"])
    assert joined.rows.tolist() == [0, 7, 2_499_999_999, 2_500_000_000, 2_500_000_007, 4_999_999_999]
    assert all(torch.equal(part.rows.long(), rows) for part in joined.parted().values())


@pytest.mark.parametrize("name", ["a.weight", "norm.bias", "norm.running_mean", "rnn.weight_ih_l0"])
def test_a_ticket_with_infinities_is_refused(name):
    one, other = make("partly", 2)
    for ticket in (one, other):
        ticket.setdefault(name, torch.ones(3, 2 if "rnn" in name else 1, dtype=torch.float64))
    other[name] = other[name].clone()
    other[name].view(-1)[0] = INF
    with pytest.raises(st.SparsityError, match=f"ticket 2 has NaN, infinities .* in {name}: "):
        st.superpose([one, other])


def test_all_names_of_a_tied_weight_are_given_or_none():
    """Else one of them would not be pruned, and be the one that is loaded."""
    tickets = [{**ticket, "head.weight": ticket["a.weight"]} for ticket in make("partly", 3)]
    with refused("head.weight and a.weight are one tensor"):
        st.superpose(tickets, layers=["a.weight", "b.weight"])
    ours = st.superpose(tickets, layers=["a.weight", "b.weight", "head.weight"])
    assert torch.equal(ours["head.weight"], ours["a.weight"])
    bits = [{**ticket, "bits": ticket["a.weight"].view(torch.int64)} for ticket in make("partly", 3)]
    assert st.superpose(bits, layers=list(SHAPES))["bits"].dtype == torch.int64


def test_masks_of_other_layouts_may_have_any_name():
    tickets = [{**ticket, "rel_bias": torch.eye(4).to_sparse()} for ticket in make("partly", 2)]
    assert st.superpose(tickets, layers=list(SHAPES))["rel_bias"].is_sparse


@pytest.mark.parametrize("key", ["lstm.bias_hh_l0", "attention.in_proj_bias"])
def test_biases_of_any_name_must_be_numbers(key):
    tickets = [{**ticket, key: torch.ones(3)} for ticket in make("partly", 2)]
    tickets[1][key] = torch.tensor([1.0, NAN, 1.0])
    with refused("ticket 2", key):
        st.superpose(tickets)


def test_caa_counts_no_further_than_it_can():
    superposition = Superposition("caa")
    superposition.add(Ticket.of_dense(make("partly", 1)[0], list(SHAPES)))
    superposition.count = 32767
    with refused("caa counts up to 32767 tickets"):
        superposition.add(Ticket.of_dense(make("partly", 1)[0], list(SHAPES)))
