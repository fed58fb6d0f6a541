"""The fast step: data, forward, backward and optimizer compiled, captured as one CUDA graph, and replayed.

Dense weights are kept between steps (`suptickets.kept`), so nothing that is compiled or captured depends on
which connections live. There is one graph per batch size (the last batch of an epoch is smaller), and another
for the steps that collect the gradient of all positions. The learning rates of an epoch and the sums of loss
and accuracy are on the device: within an epoch nothing is read back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from suptickets.kept import KeptWeights, sgd
from suptickets.training.feed import feed
from suptickets.training.meter import Meter
from suptickets.training.parts import Parts

WARM_UP = 2  # eager runs before a capture: they compile, and let cuDNN choose its algorithms


_starting: list[Thread] = []


def start_compiler(device: torch.device) -> None:
    """Load the compiler, which takes seconds, while data are read and the model is built."""

    def compile_something() -> None:
        torch.compile(torch.neg)(torch.zeros(1, device=device))

    _starting.append(Thread(target=compile_something, daemon=True))
    _starting[-1].start()


class FastStep:
    """Does the steps of a run on one device; the same arithmetic as `PlainStep`, up to rounding."""

    def __init__(self, parts: Parts, *, compile: bool) -> None:
        """Take over the network and the optimizer, as they are now."""
        self.parts, self.cuda = parts, parts.processes.device.type == "cuda"
        device = parts.processes.device
        self.rates = torch.zeros(parts.steps, dtype=parts.dtype, device=device)
        self.lr = torch.zeros(1, dtype=parts.dtype, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.kept = self._kept()
        self.rest = self._rest()
        parts.network.attach(parts.optimizer, hooks=False)
        self.feed = feed(parts)
        self.forward: Callable[[int], tuple[Tensor, Tensor]] = self._forward
        if compile:
            while _starting:
                _starting.pop().join()
            torch.compiler.reset()  # what earlier runs of this process have left counts against a limit
            options: Any = {"combo_kernels": True} if self.cuda else None
            self.forward = torch.compile(self._forward, dynamic=False, options=options)
        self.graphs: dict[tuple[int, bool], Any] = {}
        self.captures = 0
        self.runs: Counter[tuple[int, bool]] = Counter()
        if self.cuda:
            torch.backends.cudnn.benchmark = True
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def _kept(self) -> KeptWeights | None:
        parts = self.parts
        if parts.settings.momentum:
            for group in parts.optimizer.param_groups:
                for parameter in group["params"]:
                    state = parts.optimizer.state[parameter]
                    if state.get("momentum_buffer") is None:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
        bf16 = parts.precision == "bf16"
        weights = KeptWeights.suitable(parts.network.weights.values(), cast=bf16)
        dtype = torch.bfloat16 if bf16 else parts.dtype
        return KeptWeights(weights, parts.optimizer, dtype) if weights else None

    def _rest(self) -> torch.optim.Optimizer | None:
        """The same optimizer, with the same state, for the parameters that are not kept."""
        parts, s = self.parts, self.parts.settings
        kept = {id(weight.values) for weight in self.kept.weights} if self.kept else set()
        rest = [p for p in parts.model.parameters() if id(p) not in kept and p.requires_grad]
        if not rest:
            return None
        optimizer = torch.optim.SGD(
            rest, lr=self.lr[0], momentum=s.momentum, weight_decay=s.weight_decay, fused=True
        )
        for parameter in rest:
            optimizer.state[parameter] = parts.optimizer.state[parameter]
        return optimizer

    # ---- a step ----

    def epoch(self, epoch: int, done: int) -> Iterator[None]:
        """Do the steps of an epoch, from step `done` on, one at each iteration."""
        first = epoch * self.parts.steps + 1
        rates = [self._rate(step) for step in range(first, first + self.parts.steps)]
        self.rates.copy_(torch.tensor(rates, dtype=self.rates.dtype))
        self.index.fill_(done)
        for size in self.feed.epoch(epoch, done):
            self.step(size)
            yield

    def _rate(self, step: int) -> float:
        tickets = self.parts.tickets
        cyclic = None if tickets is None else tickets.rate_at(step)
        return self.parts.rate(step) if cyclic is None else cyclic

    def step(self, size: int) -> None:
        """One step, and what it sets off."""
        parts, network = self.parts, self.parts.network
        for group in parts.optimizer.param_groups:
            group["lr"] = parts.rate(network.step + 1)
        parts.count()
        network.before_step()
        self._run(size)
        network.after_step()
        if self.kept is not None and self.kept.stale and self.kept.take():
            self.graphs.clear()
            self.runs.clear()

    def _run(self, size: int) -> None:
        """Replay the step's graph; the first times run it as it is, the next captures it."""
        key = size, any(w.collector is not None for w in self.parts.network.weights.values())
        if self.cuda and key not in self.graphs and self.runs[key] >= WARM_UP:
            self.graphs[key] = graph = torch.cuda.CUDAGraph()
            self.captures += 1
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                self._body(size)
        if key in self.graphs:
            self.graphs[key].replay()
        else:
            self.runs[key] += 1
            with self._aside():
                self._body(size)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On the stream of the captures, as CUDA asks of what is captured later."""
        if not self.cuda:
            yield
            return
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            yield
        main.wait_stream(self.stream)

    def _body(self, size: int) -> None:
        """All that a step computes. A last batch is not worth compiling for: it comes once an epoch."""
        if self.kept is not None:
            self.kept.begin()
        if self.rest is not None:
            self.rest.zero_grad()
        forward = self.forward if size == self.parts.settings.batch_size else self._forward
        loss, sums = forward(size)
        loss.backward()
        with torch.no_grad():
            self._update(sums, size)

    def _forward(self, size: int) -> tuple[Tensor, Tensor]:
        """The loss, and what the meter is to add."""
        x, y = self.feed.batch(size)
        loss, logits = self.parts.loss(x, y)
        return loss, Meter.summed(loss.detach(), logits.detach(), y)

    def _update(self, sums: Tensor, size: int) -> None:
        s = self.parts.settings
        torch.index_select(self.rates, 0, self.index, out=self.lr)
        if self.kept is not None:
            sgd(self.kept, self.lr, s.momentum, s.weight_decay)
        if self.rest is not None:
            self.rest.step()
        self.parts.meter.sums += sums
        self.index += 1
        self.feed.advance(size)

    def close(self) -> None:
        """Give the network and the optimizer back."""
        self.graphs.clear()
        if self.kept is not None:
            self.kept.release()
        self.parts.network.attach(self.parts.optimizer)
