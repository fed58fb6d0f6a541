"""The processes of a run: one, or those that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from suptickets.errors import SparsityError


@dataclass(frozen=True)
class Processes:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and prints."""
        return self.rank == 0

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add up over processes, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def any(self, value: bool) -> bool:
        """Whether it holds in any process."""
        flag = torch.tensor(float(value), device=self.device)
        self.sum([flag])
        return bool(flag > 0)

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            dist.barrier()


def connect(device: str = "auto") -> Processes:
    """Join the process group that torchrun prepared (nccl on GPUs, gloo elsewhere), or be alone."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    chosen = _device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return Processes(rank, world, chosen)


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SparsityError(f"unknown device {name!r}: use cpu, cuda or auto") from error
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = local_rank if device.index is None else device.index
        if index >= count:
            raise SparsityError(
                f"there is no device {name} number {index} here ({count} GPUs): use --device cpu"
            )
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise SparsityError(f"the device {name} is not supported: use cpu, cuda or auto")
    return device
