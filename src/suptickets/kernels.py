"""Two kernels for a GPU: torch's own gather and scatter take several times as long on a million positions.

Imported only where there is a GPU, with the Triton that comes with torch there; elsewhere torch does the
same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512  # of 128 to 2048, the fastest for both


@triton.jit
def _take(gradient, positions, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < n
    tl.store(out + i, tl.load(gradient + tl.load(positions + i, there, 0), there), there)


@triton.jit
def _sgd(values, buffer, gradient, dense, positions, rate, momentum, decay, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < n
    value = tl.load(values + i, there)
    moving = (
        tl.load(buffer + i, there) * momentum + tl.load(gradient + i, there).to(tl.float32) + decay * value
    )
    value -= tl.load(rate) * moving
    tl.store(values + i, value, there)
    tl.store(buffer + i, moving, there)
    tl.store(dense + tl.load(positions + i, there, 0), value.to(dense.dtype.element_ty), there)


def take(gradient: Tensor, positions: Tensor, out: Tensor) -> None:
    """`out = gradient[positions]`."""
    n = len(positions)
    if n == 0:
        return
    with torch.cuda.device(out.device):
        _take[(triton.cdiv(n, BLOCK),)](gradient, positions, out, n, BLOCK=BLOCK)


def sgd(
    values: Tensor,
    buffer: Tensor,
    gradient: Tensor,
    dense: Tensor,
    positions: Tensor,
    rate: Tensor,
    momentum: float,
    decay: float,
) -> None:
    """One step of SGD for float32 values, written to their positions in `dense`."""
    n = len(values)
    with torch.cuda.device(values.device):
        _sgd[(triton.cdiv(n, BLOCK),)](
            values, buffer, gradient, dense, positions, rate, momentum, decay, n, BLOCK=BLOCK
        )
