"""The processes of a run: one, or those that torchrun started."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suptickets.errors import SparsityError
from suptickets.weight import POSITIONS

T = TypeVar("T")
GRACE = 3.0  # seconds that a failing process leaves the first to say why
WORKSPACE = ":4096:1:16:8"  # of cuBLAS: 4 MiB instead of 32 are enough for classifiers, and results repeat


@dataclass(frozen=True)
class Processes:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def program(self) -> str:
        """The beginning of a command line that starts as many processes."""
        if self.world == 1:
            return "suptickets"
        machines, here = (os.environ.get(f"{name}_WORLD_SIZE") for name in ("GROUP", "LOCAL"))
        several = f"--nnodes {machines} " if machines not in (None, "1") else ""
        return f"torchrun {several}--nproc-per-node {here or self.world} -m suptickets"

    def sum(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors up over all processes, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def most(self, value: int) -> int:
        """The largest value that any process has."""
        if self.world == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor, which is on the CPU, of each process."""
        if self.world == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(gathered, tensor)
        return gathered

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers: batch-norm statistics differ unless they are synced."""
        if self.world > 1:
            for name, buffer in model.named_buffers():
                if not name.endswith(POSITIONS):  # these are the same everywhere
                    dist.broadcast(buffer, 0)

    def first(self, action: Callable[[], T]) -> T:
        """Let the first process do something; all processes get its result, or its error."""
        if self.world == 1:
            return action()
        outcome: list[Any] = [None, None]
        if self.main:
            try:
                outcome[0] = action()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, 0, device=torch.device("cpu"))
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result


def is_main() -> bool:
    """Whether this process is alone, or the first."""
    return os.environ.get("RANK", "0") == "0"


def first_alone(device: str, action: Callable[[], T]) -> T:
    """What the first process does before there is a run; the others may have no such files.

    No device is chosen yet: the files may say which.
    """
    return Processes(*_join(device), torch.device("cpu")).first(action)


def connect(device: str = "auto") -> Processes:
    """Join the process group that torchrun prepared (nccl on GPUs, gloo elsewhere), or be alone."""
    joined = _join(device)  # first, so that a process whose device is not there can say so
    return Processes(*joined, _device(device, int(os.environ.get("LOCAL_RANK", 0))))


def _join(device: str) -> tuple[int, int]:
    """Join the group, if there is one; returns this process's rank, and how many there are."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        gpus = device != "cpu" and torch.cuda.is_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    return rank, world


def disconnect() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def speaks(message: str) -> bool:
    """Whether this process should print the message: it is alone, or the first that has to.

    Processes that are not connected may be on several machines: the first on each prints it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0"
    try:
        said: int = dist.distributed_c10d._get_default_store().add(f"said: {message}", 1)
    except RuntimeError:
        return is_main()
    return said == 1


def deserted(error: BaseException) -> bool:
    """Whether an error only says that another process has ended, which tells its own reason."""
    together = dist.is_available() and dist.is_initialized() and isinstance(error, RuntimeError)
    return together and any(word in str(error) for word in ("by peer", "gloo", "NCCL"))


def leave(status: int) -> NoReturn:
    """End the program. Threads of a process group may outlive it, and Python would abort when they wake.

    Of several, one that fails gives the first the time to say why: torchrun stops it when any has ended.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        time.sleep(0 if is_main() or not status else GRACE)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


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
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
        torch.backends.cudnn.benchmark = True  # set first: choices made without it stay for the process
        torch.backends.cudnn.benchmark_limit = 0  # all kernels: a step of VGG-16 is 3 % faster than with 10
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise SparsityError(f"the device {name} is not supported: use cpu, cuda or auto")
    return device
