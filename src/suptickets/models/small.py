"""Small models that suit a CPU: two of LeCun et al. (1998), with today's activations."""

from __future__ import annotations

from torch import nn

from suptickets.models.shape import check_size, linked, narrowed


def mlp(classes: int, channels: int = 3, size: int = 32, width: float = 1.0) -> nn.Sequential:
    """LeNet-300-100: two hidden linear layers; images of any size."""
    first, second = narrowed(300, width), narrowed(100, width)
    return linked(
        {
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(channels * size**2, first),
            "relu1": nn.ReLU(inplace=True),
            "fc2": nn.Linear(first, second),
            "relu2": nn.ReLU(inplace=True),
            "fc3": nn.Linear(second, classes),
        }
    )


def lenet5(classes: int, channels: int = 3, size: int = 32, width: float = 1.0) -> nn.Sequential:
    """LeNet-5: two 5x5 convolutions, two hidden linear layers; images from 4x4 on.

    Images below 32x32 are padded before the first convolution (so 28x28 ones give the same network), those
    below 28x28 before the second too. Initialised by He et al. (2015): without batch norm, what torch's own
    initialisation leaves of the signal dies in sparse layers.
    """
    check_size("lenet5", size, 4)
    c1, c2, f1, f2 = (narrowed(n, width) for n in (6, 16, 120, 84))
    padding = [2 * (size < 32), 2 * (size < 28)]
    pooled = ((size + 2 * padding[0] - 4) // 2 + 2 * padding[1] - 4) // 2
    model = linked(
        {
            "conv1": nn.Conv2d(channels, c1, 5, padding=padding[0]),
            "relu1": nn.ReLU(inplace=True),
            "pool1": nn.MaxPool2d(2),
            "conv2": nn.Conv2d(c1, c2, 5, padding=padding[1]),
            "relu2": nn.ReLU(inplace=True),
            "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(c2 * pooled**2, f1),
            "relu3": nn.ReLU(inplace=True),
            "fc2": nn.Linear(f1, f2),
            "relu4": nn.ReLU(inplace=True),
            "fc3": nn.Linear(f2, classes),
        }
    )
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model
