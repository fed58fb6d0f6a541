"""From stored bytes to what a network sees: crop, flip, normalise, a whole batch at a time.

Functions of tensors, with no randomness of their own and no value read back from a device: they do the same
on a CPU and on a GPU, and can be compiled or captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

PADDING_MODES = ("reflect", "zeros")


def crop(images: Tensor, dy: Tensor, dx: Tensor, flips: Tensor, padding: int, mode: str) -> Tensor:
    """Each image, padded on all sides, cut to its old size at row `dy` and column `dx`, then mirrored or not.

    `mode` "reflect" mirrors the image at its border pixels (as in the published CIFAR-10 recipe), "zeros"
    pads with black (CIFAR-100). One gather: reflection is a matter of indices, and needs no padded copy.
    """
    _, channels, height, width = images.shape
    x = torch.arange(width, device=images.device)
    rows = torch.arange(height, device=images.device) + dy[:, None]
    columns = torch.where(flips[:, None], width - 1 - x, x) + dx[:, None]
    if mode == "reflect":
        rows, columns = _reflected(rows - padding, height), _reflected(columns - padding, width)
    else:
        images = F.pad(images, [padding] * 4)
    places = (rows[:, :, None] * images.shape[3] + columns[:, None, :]).flatten(1)
    places = places[:, None].expand(-1, channels, -1)
    return images.flatten(2).gather(2, places).view(-1, channels, height, width)


def _reflected(places: Tensor, size: int) -> Tensor:
    """Places beyond either end, folded back over the end: -1 is 1, `size` is `size - 2`."""
    return (size - 1) - ((size - 1) - places.abs()).abs()


class Normalise:
    """Bytes to numbers of mean 0 and deviation 1: x / 255, less the mean, over the deviation, by channel.

    Computed in float32 at least and rounded once to `dtype`, alike on all devices.
    """

    def __init__(
        self, mean: Sequence[float], std: Sequence[float], device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.dtype, work = dtype, torch.promote_types(dtype, torch.float32)
        scaled = torch.tensor([mean, std], dtype=torch.float64).mul(255).to(device, work)
        self.mean, self.std = scaled[..., None, None]

    def __call__(self, images: Tensor) -> Tensor:
        """A new tensor; the bytes stay as they are."""
        return torch.sub(images, self.mean).div_(self.std).to(self.dtype)
