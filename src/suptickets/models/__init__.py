"""The models; `MODELS` has them by name. Each can be narrowed to any width, for Small-Dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from suptickets.errors import SparsityError, choice
from suptickets.models.resnet import resnet50, resnet50_imagenet
from suptickets.models.small import lenet5, mlp
from suptickets.models.vgg import vgg16, vgg_small
from suptickets.models.wide_resnet import wrn28_10


class Builder(Protocol):
    """Makes a model for so many classes, and square images of so many channels and pixels a side."""

    def __call__(self, classes: int, channels: int = ..., size: int = ..., width: float = ...) -> nn.Module:
        """`width` multiplies the channels of every layer between the image and the classes."""


@dataclass(frozen=True)
class ModelEntry:
    """A model that can be built by name.

    Attributes:
        name: what it is called.
        build: the function that makes it.
        summary: one line about it.
        size: the image size that it is made for; others work too.
    """

    name: str
    build: Builder
    summary: str
    size: int = 32


MODELS: dict[str, ModelEntry] = {
    entry.name: entry
    for entry in (
        ModelEntry("vgg16", vgg16, "VGG-16 with batch norm and one hidden linear layer, for CIFAR"),
        ModelEntry("resnet50", resnet50, "ResNet-50 with the stem for CIFAR"),
        ModelEntry("wrn28-10", wrn28_10, "Wide ResNet-28-10, for CIFAR"),
        ModelEntry("resnet50-imagenet", resnet50_imagenet, "the standard ResNet-50, for ImageNet", 224),
        ModelEntry("mlp", mlp, "two hidden linear layers (LeNet-300-100), for a CPU", 28),
        ModelEntry("lenet5", lenet5, "two convolutions and two hidden linear layers, for a CPU"),
        ModelEntry("vgg-small", vgg_small, "six convolutions with batch norm, for a CPU"),
    )
}


def build_model(
    name: str, classes: int, channels: int = 3, size: int | None = None, width: float = 1.0
) -> nn.Module:
    """Build the model of that name; `size` is by default the one that it is made for."""
    entry = MODELS[choice("model", name, MODELS)]
    size = entry.size if size is None else size
    for option, value in (("classes", classes), ("channels", channels), ("size", size)):
        if value < 1:
            raise SparsityError(f"{option} must be at least 1, not {value}")
    return entry.build(classes, channels, size, width)


__all__ = [
    *("MODELS", "Builder", "ModelEntry", "build_model"),
    *("lenet5", "mlp", "resnet50", "resnet50_imagenet", "vgg16", "vgg_small", "wrn28_10"),
]
