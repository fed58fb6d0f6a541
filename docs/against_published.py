"""RigL and GraNet beside the published code, on a small network in double precision: the same, to the bit?

    git clone https://github.com/luuyin/Sup-tickets published && python docs/against_published.py published

Both train the same model on the same batches, from the same weights and connections; after every change of
connections all weights are compared. The published code has to be told to do without a GPU; GraNet is also
run with its three roundings made exact: it drops the last connection of each pruning, rounds the number to
keep down, and leaves out the last pruning. (ELU instead of ReLU: where gradients are 0, the published code
may grow what is alive already.)
"""

import argparse
import contextlib
import copy
import io
import sys
import types
from pathlib import Path

import torch
from torch import nn

import suptickets as st
from suptickets.models.vgg import vgg_small

STEPS, INTERVAL, EPOCH, PRUNE_EPOCHS = 120, 10, 10, 8
EXACT = {
    "(torch.abs(weight)) > acceptable_score": "(torch.abs(weight)) >= acceptable_score",
    "= int(len(all_scores) * (1 - curr_prune_rate))": "= round(len(all_scores) * (1 - curr_prune_rate))",
    "curr_prune_iter <= final_iter - 1": "curr_prune_iter <= final_iter",
}


def published(folder: Path, exact: bool) -> types.ModuleType:
    """Its module `core`."""
    text = (folder / "CIFAR/sparselearning/core.py").read_text()
    for old, new in EXACT.items() if exact else ():
        assert old in text, f"not the published code: it has no {old!r}"
        text = text.replace(old, new)
    module = types.ModuleType("core")
    exec(compile(text, "core.py", "exec"), module.__dict__)
    return module


def masked(core: types.ModuleType, method: str, model: nn.Module, twin: nn.Module) -> object:
    """The published code's optimizer, with the connections of `twin`."""
    optimizer = sgd(model)
    given = {"sparse_init": "ERK", "fix": False, "update_frequency": INTERVAL, "decay_schedule": "constant"}
    given |= {"prune_rate": 0.5, "method": method, "init_prune_epoch": 0, "final_prune_epoch": PRUNE_EPOCHS}
    given |= {"multiplier": 1, "init_density": 0.5, "final_density": 0.1}
    masking = core.Masking(
        optimizer,
        0.5,
        prune_rate_decay=core.CosineDecay(0.5, STEPS),
        growth_mode="gradient",
        args=argparse.Namespace(**given),
        train_loader=range(EPOCH),
    )
    masking.modules.append(model)
    alive = {name: weight != 0 for name, weight in twin.named_parameters() if weight.dim() in (2, 4)}
    masking.masks.update({name: mask.double() for name, mask in alive.items()})
    masking.apply_mask()
    return masking


def sgd(model: nn.Module) -> torch.optim.SGD:
    """The recipe's, at a smaller rate."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


def small_model() -> nn.Module:
    """Always the same one."""
    torch.manual_seed(0)
    model = vgg_small(10, 3, 16).double()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.ELU())
    return model


def compare(core: types.ModuleType, method: str, sparse: st.Method) -> list[tuple[int, int, float]]:
    """After each change of connections: both counts, and the greatest difference of a weight."""
    theirs = small_model()
    ours = copy.deepcopy(theirs)
    optimizer, found = sgd(ours), []
    network = st.sparsify(ours, sparse, optimizer, seed=0)
    masking = masked(core, method, theirs, network.densify())
    for step in range(1, STEPS + 1):
        x, y = torch.randn(32, 3, 16, 16).double(), torch.randint(10, (32,))
        for model, stepper, held in ((theirs, masking, masking.optimizer), (ours, optimizer, optimizer)):
            held.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            stepper.step()
        if step % INTERVAL == 0:
            masking.masks.update({name: mask.double() for name, mask in masking.masks.items()})
            plain = dict(network.densify().named_parameters())
            far = max((plain[name] - weight).abs().max().item() for name, weight in theirs.named_parameters())
            found.append((sum(int(mask.sum()) for mask in masking.masks.values()), network.nonzero, far))
    return found


def main() -> None:
    """Print a comparison for each method."""
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    granet = {"initial_sparsity": 0.5, "prune_end": PRUNE_EPOCHS * EPOCH}
    cases = {
        "RigL": ("DST", False, st.RigL(0.9, interval=INTERVAL)),
        "GraNet": ("GraNet", False, st.GraNet(0.9, interval=INTERVAL, **granet)),
        "GraNet, roundings made exact": ("GraNet", True, st.GraNet(0.9, interval=INTERVAL, **granet)),
    }
    for name, (method, exact, sparse) in cases.items():
        with contextlib.redirect_stdout(io.StringIO()):
            found = compare(published(Path(sys.argv[1]), exact), method, sparse)
        counts = ", ".join(f"{theirs:,} / {ours:,}" for theirs, ours, _ in (found[0], found[-1]))
        print(f"{name}: connections published / ours {counts} (first, last of {len(found)} changes);")
        print(f"  greatest difference of a weight {max(far for _, _, far in found):g}")


if __name__ == "__main__":
    main()
