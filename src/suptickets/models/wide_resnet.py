"""Wide ResNet-28-10 (Zagoruyko and Komodakis, 2016), without dropout."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from suptickets.models.resnet import initialise
from suptickets.models.shape import linked, narrowed

_STEM = 16
_STAGES = ((160, 1), (320, 2), (640, 2))  # channels, stride of the first block
_BLOCKS = 4  # per stage, of two convolutions each: with the stem and three projections, 28


class WideBlock(nn.Module):
    """Two 3x3 convolutions, each after batch norm and activation; the input is added to their result."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The input, or the projection of its activation, plus what the convolutions make of it."""
        active = F.relu(self.bn1(x))
        y: Tensor = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return y + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """A first convolution, three stages of wide blocks, the average over the image, a linear layer."""

    def __init__(self, classes: int, channels: int, width: float) -> None:
        super().__init__()
        inputs = narrowed(_STEM, width)
        self.conv1 = nn.Conv2d(channels, inputs, 3, padding=1, bias=False)
        self.blocks = nn.Sequential()
        for stage, (outputs, stride) in enumerate(_STAGES, 1):
            outputs = narrowed(outputs, width)
            for block in range(_BLOCKS):
                name = f"block{stage}_{block + 1}"
                self.blocks.add_module(name, WideBlock(inputs, outputs, stride if block == 0 else 1))
                inputs = outputs
        self.bn = nn.BatchNorm2d(inputs)
        self.fc = nn.Linear(inputs, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = F.relu(self.bn(self.blocks(self.conv1(x))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits

    def chain(self) -> nn.Sequential:
        """The network as a chain: its blocks, and what comes before and after them (for TreeNet)."""
        last = {"bn": self.bn, "relu": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten()}
        return linked({"conv1": self.conv1}, self.blocks._modules, last, {"fc": self.fc})


def wrn28_10(classes: int, channels: int = 3, size: int = 32, width: float = 1.0) -> WideResNet:
    """Twenty-eight layers, ten times as wide as the first ResNets for CIFAR; images of any size."""
    return WideResNet(classes, channels, width)
