"""Real processes for tests of `suptickets train`.

As a module, it offers a model that signals its own process at a given training step (`--model
train_worker:dying`). As a program, it is a server that has imported everything: each line of JSON on stdin
(`arguments`, `environment`, `log`, `ranks`) forks that many processes that run the command line, and is
answered by their exit statuses.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

DIE = "SUPTICKETS_TEST_DIE"  # "rank:step:signal", the step counted in this process; -step: tested after it


class Dying(nn.Module):
    """Passes on what it gets; at the given step it signals its process, in the middle of the step."""

    seen = 0

    def forward(self, x):
        if DIE in os.environ:
            rank, step, number = (int(part) for part in os.environ[DIE].split(":"))
            Dying.seen += self.training and bool(x.any())  # the model is tried with zeros first
            now = Dying.seen if self.training else -Dying.seen
            if now == step and int(os.environ.get("RANK", 0)) == rank:
                os.kill(os.getpid(), number)
        return x


class Noisy(nn.Module):
    """Draws from Python's generator and from NumPy's, while it trains."""

    def forward(self, x):
        return x * (0.9 + 0.1 * random.random() + 0.01 * np.random.randn()) if self.training else x


def dying(classes: int, channels: int, size: int, width: float = 1.0) -> nn.Module:
    """With dropout and other noise, so that the global generators matter."""
    hidden = round(24 * width)
    convolution = nn.Conv2d(channels, hidden, 3, padding=1)
    first = (Dying(), convolution, nn.BatchNorm2d(hidden), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*first, nn.Dropout(0.2), Noisy(), nn.Linear(4 * hidden, classes))


class Idle(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self, classes: int, channels: int, size: int) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(channels * size**2, classes), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x.flatten(1))


class Server:
    """Starts the program below, and asks it to run command lines."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__], env=environment, text=True, **pipes)

    def run(self, *arguments: Any, log: Path, ranks: int = 1, die: str | None = None) -> list[int]:
        """The exit status of each process (minus the signal that killed it); output goes to `log`."""
        environment = {} if die is None else {DIE: die}
        names = [str(argument) for argument in arguments]
        request = {"arguments": names, "environment": environment, "log": str(log), "ranks": ranks}
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer: list[int] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    import torch._dynamo  # which optimizers import when they are first built

    import suptickets.cli
    import suptickets.data

    suptickets.data.load_data("digits")  # imports scikit-learn
    suptickets.cli.write_run_page = lambda run: None  # imports matplotlib
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = [child(request, rank, port) for rank in range(request["ranks"])]
        print(json.dumps(wait(children)), flush=True)


def child(request: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1), os.dup2(log, 2), os.close(0)
    world = {"RANK": rank, "WORLD_SIZE": request["ranks"], "LOCAL_RANK": rank}
    os.environ.update({key: str(value) for key, value in world.items()} if request["ranks"] > 1 else {})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **request["environment"])
    status = 1
    try:
        from suptickets.cli import main

        status = main(request["arguments"])
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(status)


def wait(children: list[int]) -> list[int]:
    """As torchrun does: when one is killed, the others are."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(children):
        pid, status = os.wait()
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if statuses[pid] < 0:
            for other in set(children) - set(statuses):
                os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in children]


if __name__ == "__main__":
    serve()
