"""ResNet-50 (He et al., 2016) for ImageNet and, with another stem, for CIFAR.

The stride is on the 3x3 convolution, and modules are called as is usual (`conv1`, `layer1.0.conv2`,
`layer4.2.downsample.0`, `fc`), so that published weights of the ImageNet network load.
"""

from __future__ import annotations

from torch import Tensor, nn

from suptickets.models.shape import linked, narrowed

_PLANES = (64, 128, 256, 512)  # channels inside the blocks of each stage
_EXPANSION = 4  # times as many channels leave a block


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a 1x1 convolution; the input is added to their result."""

    def __init__(self, inputs: int, planes: int, stride: int) -> None:
        super().__init__()
        outputs = _EXPANSION * planes
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = nn.Conv2d(planes, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """The input, or its projection, plus what the three convolutions make of it."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        out: Tensor = self.relu(self.bn3(self.conv3(y)) + shortcut)
        return out


class ResNet(nn.Module):
    """A first convolution, four stages of bottlenecks, the average over the image, a linear layer.

    Args:
        conv1: the first convolution.
        maxpool: what follows that convolution, its batch norm and its activation.
        classes: number of classes.
        width: factor for every number of channels.
        bias: whether the linear layer has one.
    """

    def __init__(self, conv1: nn.Conv2d, maxpool: nn.Module, classes: int, width: float, bias: bool) -> None:
        super().__init__()
        inputs = conv1.out_channels
        self.conv1 = conv1
        self.bn1 = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = maxpool
        p1, p2, p3, p4 = (narrowed(planes, width) for planes in _PLANES)
        self.layer1 = _stage(inputs, p1, blocks=3, stride=1)
        self.layer2 = _stage(_EXPANSION * p1, p2, blocks=4, stride=2)
        self.layer3 = _stage(_EXPANSION * p2, p3, blocks=6, stride=2)
        self.layer4 = _stage(_EXPANSION * p3, p4, blocks=3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(_EXPANSION * p4, classes, bias=bias)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits

    def chain(self) -> nn.Sequential:
        """The network as a chain: its blocks, and what comes before and after them (for TreeNet)."""
        stem = {name: getattr(self, name) for name in ("conv1", "bn1", "relu", "maxpool")}
        stages = {f"layer{n}": getattr(self, f"layer{n}") for n in (1, 2, 3, 4)}
        blocks = {f"{name}_{i}": block for name, stage in stages.items() for i, block in enumerate(stage)}
        return linked(stem, blocks, {"avgpool": self.avgpool, "flatten": nn.Flatten(), "fc": self.fc})


def _stage(inputs: int, planes: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(inputs, planes, stride)
    others = [Bottleneck(_EXPANSION * planes, planes, 1) for _ in range(blocks - 1)]
    return nn.Sequential(first, *others)


def initialise(model: nn.Module) -> None:
    """Initialise convolutions such that the variance of gradients is kept (He et al., 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet50(classes: int, channels: int = 3, size: int = 32, width: float = 1.0) -> ResNet:
    """ResNet-50 with a 3x3 first convolution, no max pool and no bias, for CIFAR; images of any size."""
    conv1 = nn.Conv2d(channels, narrowed(64, width), 3, padding=1, bias=False)
    return ResNet(conv1, nn.Identity(), classes, width, bias=False)


def resnet50_imagenet(classes: int, channels: int = 3, size: int = 224, width: float = 1.0) -> ResNet:
    """The standard ResNet-50; images of any size."""
    conv1 = nn.Conv2d(channels, narrowed(64, width), 7, stride=2, padding=3, bias=False)
    return ResNet(conv1, nn.MaxPool2d(3, stride=2, padding=1), classes, width, bias=True)
