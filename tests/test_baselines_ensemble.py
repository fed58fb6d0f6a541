"""A prediction ensemble predicts with the mean of its members' probabilities."""

import pytest
import torch
import torch.nn.functional as F
from helpers import batches, sgd, tiny_net, train_step

import suptickets as st
from suptickets import SparsityError
from suptickets.baselines import Ensemble, as_one_batch
from suptickets.measure.predictions import Tally


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_prediction_is_the_mean_of_probabilities(count):
    networks = [tiny_net().eval() for _ in range(count)]
    x, _ = batches()[0]
    predicted = Ensemble(networks)(x).exp()
    for i in range(len(x)):
        probabilities = [F.softmax(network(x[i : i + 1]).double(), dim=1)[0].detach() for network in networks]
        expected = [sum(float(p[c]) for p in probabilities) / count for c in range(5)]
        assert predicted[i].tolist() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_batch_by_batch_it_is_scored_like_any_network():
    networks = [tiny_net() for _ in range(3)]
    ensemble, tally, right, nll = Ensemble(networks), Tally(), 0, 0.0
    data = [batches(size=6)[0], batches(size=2)[1], batches(size=5)[2]]
    for x, y in data:
        tally.add(ensemble(x), y)
        mean = sum(F.softmax(network(x), dim=1) for network in networks) / 3
        right += int((mean.argmax(1) == y).sum())
        nll -= float(mean[range(len(y)), y].log().sum())
    assert tally.scores().accuracy == right / 13
    assert tally.scores().nll == pytest.approx(nll / 13, rel=1e-5)


def test_it_predicts_from_the_start_and_leaves_batch_norm_alone():
    networks = [tiny_net() for _ in range(2)]
    assert all(network.training for network in networks)
    before = [{k: v.clone() for k, v in network.state_dict().items()} for network in networks]
    assert Ensemble(networks)(batches()[0][0]).shape == (6, 5)
    for network, state in zip(networks, before, strict=True):
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())


def test_all_members_as_one_batch_have_the_mean_of_their_losses():
    logits, y = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True), torch.randint(5, (7,))
    expected = sum(F.cross_entropy(member, y) for member in logits) / 3
    loss = F.cross_entropy(*as_one_batch(logits, y))
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    given, wanted = (torch.autograd.grad(one, logits)[0] for one in (loss, expected))
    assert torch.allclose(given, wanted, rtol=1e-12)


def test_logits_of_a_plain_network_stay():
    logits, y = torch.randn(7, 5), torch.randint(5, (7,))
    assert as_one_batch(logits, y)[0] is logits and as_one_batch(logits, y)[1] is y


def test_the_tickets_of_a_run_predict_together():
    model = tiny_net()
    optimizer = sgd(model)
    network = st.sparsify(model, st.RigL(0.8), optimizer, seed=1)
    tickets = st.SupTickets(network, 12, cycle_steps=4, cycles=3, lr=(0.01, 0.1), keep=True)
    for step in range(12):
        train_step(model, optimizer, batches()[step % 3])
    ensemble, (x, _) = Ensemble(tickets.tickets), batches()[0]
    mean = sum(F.softmax(ticket.eval()(x), dim=1) for ticket in tickets.tickets) / 3
    assert torch.allclose(ensemble(x).exp().float(), mean, atol=1e-6)
    assert st.flops(ensemble, x).dense == 3 * st.flops(tiny_net(), x).dense


def test_an_ensemble_of_nobody_is_refused():
    with pytest.raises(SparsityError, match="at least one network"):
        Ensemble([])
