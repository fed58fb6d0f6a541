"""VGG-16 for small images, and a small sister of it for a CPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suptickets.models.shape import check_size, linked, narrowed

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
_SMALL = ((32, 32), (64, 64), (128, 128))
_CHANNELS = 8  # tensor cores want a multiple of it


class VGG(nn.Module):
    """Blocks of 3x3 convolutions with batch norm, a max pool after each, and one hidden linear layer.

    `features.conv3_2` is the second convolution of the third block, as in the literature. If an
    image is larger than the model is made for, what the last pool leaves of it is averaged.
    """

    def __init__(self, blocks: Sequence[Sequence[int]], classes: int, channels: int, width: float) -> None:
        super().__init__()
        narrow = [[narrowed(outputs, width) for outputs in block] for block in blocks]
        last = narrow[-1][-1]
        self.features = _features(narrow, channels)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = _classifier(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        logits: Tensor = self.classifier(self.pool(self.features(x)).flatten(1))
        return logits

    def chain(self) -> nn.Sequential:
        """The network as a chain of `Features`, where convolution and batch norm save work (for TreeNet)."""
        between = {"pool": self.pool, "flatten": nn.Flatten()}
        links = linked(self.features._modules, between, self.classifier._modules)
        return Features(OrderedDict(links.named_children()))


class Features(nn.Sequential):
    """Convolutions with batch norm; in training a bias costs no pass over the images.

    A batch norm takes the mean away, and with it the bias of the convolution before it: in training the bias
    changes no output, its gradient is 0, and all it does is to move the running mean. So only that is done.
    """

    #: Asked of the compiler: a batch norm, which reads five tensors, is to be fused into the pool after it.
    inductor_options: ClassVar[dict[str, int]] = {"realize_reads_threshold": 5}

    def forward(self, x: Tensor) -> Tensor:
        """Images to features."""
        bias: Tensor | None = None
        for layer, following in pairwise([*self, None]):
            if bias is not None:
                x, bias = _normalised(layer, x, bias), None
            elif isinstance(layer, nn.Conv2d) and _cancels(layer, following):
                x, bias = _convolved(layer, x), layer.bias
            elif isinstance(layer, nn.MaxPool2d) and _compiled(x) and _halves(layer, x):
                x = MaxOfFour.apply(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-untyped-call]
            else:
                x = layer(x)
        return x


class MaxOfFour(torch.autograd.Function):
    """A max pool of images of even sides, channels last, which a compiler fuses into what is around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """The greatest of each four, and which of them it is: the first, if several are."""
        four = torch.stack([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])
        ctx.save_for_backward(four.argmax(0).to(torch.int8))
        return four.amax(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Give each gradient to one of the four; rows and columns are split into pairs."""
        (which,) = ctx.saved_tensors
        place = torch.arange(4, dtype=torch.int8, device=which.device).view(2, 1, 2, 1)
        spread = torch.where(which[:, :, None, :, None] == place, gradient[:, :, None, :, None], 0)
        return spread.flatten(3, 4).flatten(1, 2)


def _halves(pool: nn.MaxPool2d, x: Tensor) -> bool:
    """Whether a pool takes the greatest of each four, no pixel is left over, and no hook watches."""
    shape = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode, pool.return_indices
    even = x.shape[-1] % 2 == x.shape[-2] % 2 == 0
    usual = type(pool) is nn.MaxPool2d and shape == (2, 2, 0, 1, False, False)
    return even and usual and not _watched(pool)


def _watched(*modules: nn.Module) -> bool:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in modules for kind in kinds)


def _cancels(conv: nn.Conv2d, norm: nn.Module | None) -> bool:
    """Whether a batch norm is about to take the convolution's bias away, and no hook watches."""
    if type(norm) is not nn.BatchNorm2d or conv.bias is None or type(conv).forward is not nn.Conv2d.forward:
        return False
    known = norm.affine and norm.running_mean is not None and norm.momentum not in (None, 1)
    return norm.training and known and not _watched(conv, norm)


def _convolved(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """`conv(x)` without the bias; where a compiler makes that cheap, in a form that suits tensor cores.

    Images, whose gradient nobody wants, become one matrix product; other inputs get channels of zeros.
    """
    weight, missing = conv.weight, -x.shape[1] % _CHANNELS
    if missing and _compiled(x) and _usual(conv):
        if not x.requires_grad:
            return _multiplied(weight, x)
        more = (0, 0, 0, 0, 0, missing)
        x, weight = F.pad(x, more), F.pad(weight, more)
    convolved: Tensor = conv._conv_forward(x, weight, None)
    return convolved


def _usual(conv: nn.Conv2d) -> bool:
    """Whether this is one of VGG's own convolutions: nobody put another in its place."""
    shape = conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.groups, conv.padding_mode
    return shape == ((3, 3), (1, 1), (1, 1), (1, 1), 1, "zeros")


def _multiplied(weight: Tensor, x: Tensor) -> Tensor:
    """The 3x3 convolution as a matrix product with all patches."""
    patches = F.unfold(x, 3, padding=1).transpose(1, 2)
    missing = (0, -patches.shape[2] % _CHANNELS)
    product = F.linear(F.pad(patches, missing), F.pad(weight.flatten(1), missing))
    return product.view(len(x), *x.shape[2:], len(weight)).permute(0, 3, 1, 2)


def _compiled(x: Tensor) -> bool:
    return x.is_cuda and torch.compiler.is_compiling()


def _normalised(norm: nn.Module, x: Tensor, bias: Tensor) -> Tensor:
    """`norm(x + bias)`, running statistics and the bias's gradient of 0 included."""
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.momentum is not None
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    mean, new = norm.running_mean, norm.momentum
    mean.data.add_(bias.detach(), alpha=new / (1 - new))  # of which batch_norm leaves 1 - new
    shift = norm.bias + 0 * bias
    return F.batch_norm(x, mean, norm.running_var, norm.weight, shift, True, new, norm.eps)


def _features(blocks: Sequence[Sequence[int]], inputs: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, block in enumerate(blocks, 1):
        for j, outputs in enumerate(block, 1):
            layers[f"conv{i}_{j}"] = nn.Conv2d(inputs, outputs, 3, padding=1)
            layers[f"bn{i}_{j}"] = nn.BatchNorm2d(outputs)
            if j == len(block):  # the same as after the ReLU, which has a quarter left to do
                layers[f"pool{i}"] = nn.MaxPool2d(2)
            layers[f"relu{i}_{j}"] = nn.ReLU(inplace=True)
            inputs = outputs
    return Features(layers)


def _classifier(hidden: int, classes: int) -> nn.Sequential:
    return linked(
        {
            "fc1": nn.Linear(hidden, hidden),
            "relu": nn.ReLU(inplace=True),
            "bn": nn.BatchNorm1d(hidden),
            "fc2": nn.Linear(hidden, classes),
        }
    )


def vgg16(classes: int, channels: int = 3, size: int = 32, width: float = 1.0) -> VGG:
    """Thirteen convolutions and one hidden linear layer of 512, as in the paper's published code."""
    check_size("vgg16", size, 2 ** len(_VGG16))
    return VGG(_VGG16, classes, channels, width)


def vgg_small(classes: int, channels: int = 3, size: int = 32, width: float = 1.0) -> VGG:
    """Six convolutions of 32 to 128 channels and a hidden linear layer of 128; images from 8x8 on."""
    check_size("vgg-small", size, 2 ** len(_SMALL))
    return VGG(_SMALL, classes, channels, width)
