"""Against a reference that knows nothing of the library: dense tensors, masks, and its own optimizers."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Stream, assigned, batches, living, mlp, tiny_net, top, values
from torch import nn

import suptickets as st

SEED, INTERVAL, RATE, STEPS, END = 23, 4, 0.4, 30, 20
LR, MOMENTUM, DECAY, BETAS, EPS = 0.05, 0.9, 1e-3, (0.9, 0.99), 1e-8
STATE = {"sgd": {"momentum_buffer": "m"}, "adam": {"exp_avg": "m", "exp_avg_sq": "v"}}


class Reference:
    """A plain model; a mask per sparse weight; m and v per parameter; prune and grow by plain sorting."""

    def __init__(self, model, method, optimizer, sparsity):
        self.model, self.method, self.optimizer, self.sparsity = model, method, optimizer, sparsity
        self.parameters = dict(model.named_parameters())
        self.m = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        self.v = {n: torch.zeros_like(p) for n, p in self.parameters.items()}
        self.mask = {n: torch.ones_like(p, dtype=torch.bool) for n, p in self.parameters.items()}
        self.sparse = [n for n, p in self.parameters.items() if p.dim() >= 2]
        self.size = sum(self.parameters[n].numel() for n in self.sparse)
        self.stream, self.t, self.regrown = Stream(SEED), 0, 0
        first = 0.5 if method == "granet" else sparsity
        shapes = [self.parameters[n].shape for n in self.sparse]
        for name, count in zip(self.sparse, assigned(shapes, first), strict=True):
            if count < self.mask[name].numel():
                self.live(name, top(self.stream.draw(self.mask[name].numel()), count))

    def alive(self, name):
        return self.mask[name].flatten().nonzero().flatten().tolist()

    @torch.no_grad()
    def live(self, name, rows):
        """Only `rows` live; what does not live has no value and no state."""
        mask = torch.zeros(self.mask[name].numel(), dtype=torch.bool)
        mask[rows] = True
        self.mask[name] = mask.view(self.mask[name].shape)
        for tensor in (self.parameters[name], self.m[name], self.v[name]):
            tensor.mul_(self.mask[name])

    @torch.no_grad()
    def step(self, clip):
        """One step of SGD with momentum, or of Adam, on what lives; then prune and grow."""
        self.t += 1
        dense = {n: p.grad.clone() for n, p in self.parameters.items()}
        gradients = {n: g * self.mask[n] for n, g in dense.items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
        factor = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        for name, p in self.parameters.items():
            g, m, v = gradients[name] * factor + DECAY * p, self.m[name], self.v[name]
            if self.optimizer == "sgd":
                m.copy_(MOMENTUM * m + g if self.t > 1 else g)
                p -= LR * m
            else:
                m.copy_(BETAS[0] * m + (1 - BETAS[0]) * g)
                v.copy_(BETAS[1] * v + (1 - BETAS[1]) * g * g)
                unbiased = m / (1 - BETAS[0] ** self.t), v / (1 - BETAS[1] ** self.t)
                p -= LR * unbiased[0] / (unbiased[1].sqrt() + EPS) * self.mask[name]
        if self.t % INTERVAL == 0 and self.method != "static":
            if self.method == "granet":
                self.prune()
            self.explore(dense)

    def prune(self):
        """GraNet: to the cubic schedule, globally by magnitude, but no layer loses its last connection."""
        left = max(1 - self.t / END, 0) ** 3
        total = round((1 - (self.sparsity + (0.5 - self.sparsity) * left)) * self.size)
        magnitude = {n: self.parameters[n].abs().flatten().tolist() for n in self.sparse}
        for name in self.sparse:
            magnitude[name][magnitude[name].index(max(magnitude[name]))] = math.inf
        living_ = [(magnitude[n][row], n, row) for n in self.sparse for row in self.alive(n)]
        best = sorted(living_, reverse=True)[:total]
        for name in self.sparse:
            self.live(name, [row for _, n, row in best if n == name])

    def explore(self, gradient):
        """The smallest magnitudes go; the largest gradients, or random ones, come, as many."""
        for name in self.sparse:
            alive, size = self.alive(name), self.mask[name].numel()
            number = int(RATE * len(alive) + 0.5)
            if len(alive) == size or number == 0:
                continue
            weakest_first = sorted(alive, key=lambda row, name=name: abs(float(self.value(name, row))))
            kept = weakest_first[number:]
            dead = sorted(set(range(size)) - set(kept))
            scores = self.stream.draw(size) if self.method == "set" else gradient[name].abs().flatten()
            grown = top(scores, number, dead)
            self.regrown += len(set(grown) & set(weakest_first[:number]))
            self.live(name, sorted(kept + grown))

    def value(self, name, row):
        return self.parameters[name].reshape(-1)[row]


def library(model, method, optimizer, sparsity):
    """The same from the library."""
    options = {"interval": INTERVAL, "rate": RATE}
    build = {
        "static": lambda: st.Static(sparsity),
        "set": lambda: st.SET(sparsity, **options),
        "rigl": lambda: st.RigL(sparsity, **options),
        "granet": lambda: st.GraNet(sparsity, prune_end=END, **options),
    }[method]
    if optimizer == "sgd":
        opt = torch.optim.SGD(model.parameters(), LR, momentum=MOMENTUM, weight_decay=DECAY)
    else:
        opt = torch.optim.Adam(model.parameters(), LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
    return st.sparsify(model, build(), opt, seed=SEED), opt


def compare(reference, model, optimizer):
    """Weights, buffers, positions and state, to 1e-10."""
    close = {"rtol": 0, "atol": 1e-10}
    for name, rows in living(model).items():
        key = f"{name}.weight"
        assert rows.tolist() == reference.alive(key), (reference.t, name)
        dense = model.get_submodule(name).weight.detach()
        torch.testing.assert_close(dense, reference.parameters[key].detach(), check_stride=False, **close)
        state = optimizer.state[values(model)[name]]
        for theirs, ours in STATE[reference.optimizer].items():
            expected = getattr(reference, ours)[key].reshape(-1)[rows.long()]
            torch.testing.assert_close(state[theirs].flatten(), expected, **close)
    for name, p in model.named_parameters():
        if name not in reference.sparse:
            torch.testing.assert_close(p, reference.parameters[name], **close)
            for theirs, ours in STATE[reference.optimizer].items():
                torch.testing.assert_close(
                    optimizer.state[p][theirs], getattr(reference, ours)[name], **close
                )
    plain = dict(reference.model.named_buffers())
    for name, buffer in model.named_buffers():
        if not name.endswith("positions"):
            torch.testing.assert_close(buffer, plain[name], **close)


MODELS = {
    "conv": (tiny_net, (3, 8, 8), 5),
    "mlp": (mlp, (6,), 4),
    # the first layer is so small that ERK keeps it dense
    "dense-layer": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 40)), (2,), 40),
}
CASES = [
    (model, method, optimizer, variant)
    for model in MODELS
    for method in ("static", "set", "rigl", "granet")
    for optimizer in ("sgd", "adam")
    for variant in ("plain", "accumulate", "clip", "channels_last", "channels_last-late")
    if model == "conv" or not variant.startswith("channels")
    if model != "dense-layer" or variant == "plain"
]


@pytest.mark.parametrize(("model_name", "method", "optimizer_name", "variant"), CASES)
def test_equals_dense_tensors_with_masks(model_name, method, optimizer_name, variant):
    build, shape, classes = MODELS[model_name]
    sparsity = 0.55 if model_name == "dense-layer" else 0.75
    model = build().double()
    reference = Reference(copy.deepcopy(model), method, optimizer_name, sparsity)
    if variant == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    network, optimizer = library(model, method, optimizer_name, sparsity)
    if variant == "channels_last-late":
        model.to(memory_format=torch.channels_last)
    if variant.startswith("channels_last"):
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    data, repeats = batches(shape, classes, 4, dtype=torch.float64), 2 if variant == "accumulate" else 1
    for step in range(STEPS):
        for net in (model, reference.model):
            net.zero_grad()
            for i in range(repeats):
                x, y = data[(step * repeats + i) % len(data)]
                F.cross_entropy(net(x), y).backward()
        if variant == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        reference.step(clip=0.1 if variant == "clip" else None)
        compare(reference, model, optimizer)
    network.check()
    explorations = STEPS // INTERVAL
    assert explorations == 7 and network.step == STEPS
    assert method in ("static", "set") or reference.regrown > 0
    if model_name == "dense-layer":
        assert reference.mask["0.weight"].all() == (method != "granet")
    if method == "granet":
        assert network.nonzero == round((1 - sparsity) * reference.size)


def test_the_reference_tells_methods_apart():
    """RigL's reference does not agree with SET from the library, so agreement above means something."""
    model = mlp().double()
    reference = Reference(copy.deepcopy(model), "rigl", "sgd", 0.75)
    _, optimizer = library(model, "set", "sgd", 0.75)
    x, y = batches((6,), 4, 1, dtype=torch.float64)[0]
    with pytest.raises(AssertionError):
        for _ in range(INTERVAL):
            for net in (model, reference.model):
                net.zero_grad()
                F.cross_entropy(net(x), y).backward()
            optimizer.step()
            reference.step(clip=None)
            compare(reference, model, optimizer)
    assert reference.t == INTERVAL
