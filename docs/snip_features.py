"""How many of ResNet-50's 2,048 features SNIP leaves in reach of the image: six seeds, nothing is trained.

    python docs/snip_features.py DIR

DIR has CIFAR-100; ten minutes on two cores. Initialised as here (the seeds of `suptickets train`), as in the
published SNIP (Xavier), and as in the published ResNet-50 (PyTorch's default).
"""

import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import suptickets as st
from suptickets.data import load_data
from suptickets.models.resnet import ResNet, resnet50

INITIALISATIONS: dict[str, Callable[[nn.Module], object]] = {
    "ours": lambda layer: None,
    "Xavier": lambda layer: nn.init.xavier_normal_(layer.weight),
    "PyTorch's": lambda layer: layer.reset_parameters(),
}


def reached(conv: nn.Module, inputs: Tensor) -> Tensor:
    """The output channels with a connection to one of these input channels."""
    return (conv.weight.ne(0).flatten(2).any(2) & inputs).any(1)


def features(model: ResNet) -> int:
    """The features in front of the classifier that depend on the image."""
    alive = reached(model.conv1, torch.ones(3, dtype=torch.bool))
    for stage in (model.layer1, model.layer2, model.layer3, model.layer4):
        for block in stage:
            inside = reached(block.conv3, reached(block.conv2, reached(block.conv1, alive)))
            alive = inside | (alive if block.downsample is None else reached(block.downsample[0], alive))
    return int(alive.sum())


def pruned(data: object, seed: int, sparsity: float, initialise: Callable[[nn.Module], object]) -> ResNet:
    """The network that `suptickets train --method snip --seed SEED` begins with, if initialised alike."""
    torch.manual_seed(seed)
    model = resnet50(100)
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            initialise(layer)
    batches = data.train_batches(128, seed, 0)
    network = st.sparsify(model, st.SNIP(sparsity, data=batches, loss=cross_entropy), seed=seed)
    return network.densify()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # layers that SNIP leaves empty
    data = load_data("cifar100", sys.argv[1])
    for sparsity in (0.95, 0.9):
        for name, initialise in INITIALISATIONS.items():
            counts = [features(pruned(data, seed, sparsity, initialise)) for seed in range(1, 7)]
            print(f"{sparsity:.0%} sparse, initialised as {name}: {counts}", flush=True)
