"""The fast step: data, forward, backward and optimizer compiled, captured as one CUDA graph, and replayed.

Dense weights are kept between steps (`suptickets.kept`), so nothing that is compiled or captured depends on
which connections live. There is one graph per batch size (the last batch of an epoch is smaller), and another
for the steps that collect the gradient of all positions. The learning rates of an epoch and the sums of loss
and accuracy are on the device: within an epoch nothing is read back, except by methods whose counts depend on
values (GraNet, GMP, SNFS, DSR, where they prune), by superposing, and by checkpoints.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.kept import KeptWeights, sgd
from suptickets.training.feed import feed
from suptickets.training.meter import Meter
from suptickets.training.parts import Parts

KINDS = 6  # kinds of run to keep compiled code for: the compiler gives up at 8
WARM_UP = 2  # eager runs before a capture: they compile, and let cuDNN choose its algorithms


_compiled: set[tuple[object, ...]] = set()  # the kinds of run that this process has compiled for


def load_compiler() -> None:
    """Load the compiler, which takes seconds, while data are read and the model is built.

    It is only loaded: compiling would move the random state of the model that is being built.
    """

    def load() -> None:
        for module in ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.codegen.triton"):
            with suppress(Exception):  # also those of an import that is cut short when the process ends
                import_module(module)

    Thread(target=load, daemon=True).start()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Do not collect garbage: among the many objects of a compiler, that takes a tenth of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _comparing_kernels(wanted: bool) -> Iterator[None]:
    """Let cuDNN compare its kernels for new convolutions only if `wanted`, and if it does so at all."""
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.benchmark
    cudnn.benchmark = before and wanted
    try:
        yield
    finally:
        cudnn.benchmark = before


def inductor_options(model: nn.Module) -> dict[str, Any]:
    """The compiler's options for a GPU; parts of a model may add their own, in an attribute of this name."""
    asked = [getattr(module, "inductor_options", {}) for module in model.modules()]
    return {"combo_kernels": True, **{name: value for own in asked for name, value in own.items()}}


class FastStep:
    """Does the steps of a run on one device; the same arithmetic as `PlainStep`, up to rounding."""

    def __init__(self, parts: Parts, *, compile: bool) -> None:
        """Take over the network and the optimizer, as they are now."""
        self.parts, self.cuda = parts, parts.processes.device.type == "cuda"
        device = parts.processes.device
        dtype = torch.float32 if self.cuda else parts.dtype  # which fused optimizers take
        self.rates = torch.zeros(parts.steps, dtype=dtype, device=device)
        self.lr = torch.zeros(1, dtype=dtype, device=device)
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self.kept = self._kept()
        self.decay = self._decay()
        self.rest = self._rest()
        parts.network.attach(parts.optimizer, hooks=False)
        self.graphs: dict[tuple[int, bool], Any] = {}
        self.runs: Counter[tuple[int, bool]] = Counter()
        self.captures = 0
        self._link()
        self._loaded = parts.optimizer.register_load_state_dict_post_hook(self._link)
        self.feed = feed(parts)
        self.forward: Callable[[int], Tensor] = self._forward
        if compile:
            self._make_room()
            options: Any = inductor_options(parts.model) if self.cuda else None
            self.forward = torch.compile(self._forward, dynamic=False, options=options)
        if self.cuda:
            self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def _make_room(self) -> None:
        """Note the run's kind, for which code is compiled once; forget all before a new one too many."""
        s, parts = self.parts.settings, self.parts
        small = s.sparsity if s.method == "small-dense" else None
        kind: tuple[Any, ...] = (s.model, s.data, s.booster, s.members, s.batch_size, s.label_smoothing)
        keys = () if self.kept is None else tuple(slot.key for slot in self.kept.slots)
        kind += (small, parts.precision, parts.distillation is None, keys)
        if kind not in _compiled and len(_compiled) >= KINDS:
            torch.compiler.reset()
            _compiled.clear()
        _compiled.add(kind)

    @staticmethod
    def suits(parts: Parts) -> bool:
        """Whether all weights can be kept dense between steps: one process, one weight decay, one dtype."""
        network, bf16 = parts.network, parts.precision == "bf16"
        trained = [w for w in network.weights.values() if w.values.requires_grad]
        decays = set() if network.state is None else {network.state.decay[w.name] for w in trained}
        kept = KeptWeights.suitable(trained, cast=bf16)
        return parts.processes.world == 1 and len(decays) <= 1 and len(kept) == len(trained)

    def _kept(self) -> KeptWeights | None:
        parts, bf16 = self.parts, self.parts.precision == "bf16"
        weights = KeptWeights.suitable(parts.network.weights.values(), cast=bf16)
        dtype = torch.bfloat16 if bf16 else parts.dtype
        return KeptWeights(weights, parts.optimizer, dtype) if weights else None

    def _decay(self) -> float:
        """The weight decay of the kept weights."""
        state = self.parts.network.state
        return 0.0 if state is None or self.kept is None else state.decay[self.kept.weights[0].name]

    def _rest(self) -> torch.optim.Optimizer | None:
        """The same optimizer, in the same groups, for the parameters that are not kept."""
        kept = {id(weight.values) for weight in self.kept.weights} if self.kept else set()
        groups = []
        for group in self.parts.optimizer.param_groups:
            own = [p for p in group["params"] if id(p) not in kept and p.requires_grad]
            groups += [{"params": own, "weight_decay": group["weight_decay"]}] if own else []
        momentum = self.parts.settings.momentum
        return torch.optim.SGD(groups, lr=self.lr[0], momentum=momentum, fused=True) if groups else None

    def _link(self, *_: object) -> None:
        """Let `rest` share the optimizer's state, and forget what was captured with another state."""
        own = self.parts.optimizer.state
        groups = [] if self.rest is None else self.rest.param_groups
        for parameter in [p for group in groups for p in group["params"]]:
            if self.parts.settings.momentum and own[parameter].get("momentum_buffer") is None:
                own[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            self.rest.state[parameter] = own[parameter]  # type: ignore[union-attr]
        for slot in () if self.kept is None else self.kept.slots:
            slot.stale = True
        self._forget()

    def _forget(self) -> None:
        self.graphs.clear()
        self.runs.clear()

    # ---- a step ----

    def epoch(self, epoch: int, done: int) -> Iterator[None]:
        """Do the steps of an epoch, from step `done` on, one at each iteration."""
        first = epoch * self.parts.steps + 1
        rates = [self.parts.rate_at(step) for step in range(first, first + self.parts.steps)]
        self.rates.copy_(torch.tensor(rates, dtype=self.rates.dtype))
        self.index.fill_(done)
        for size in self.feed.epoch(epoch, done):
            self.step(size)
            yield

    def step(self, size: int) -> None:
        """Do one step, and what the network does before and after it."""
        parts, network = self.parts, self.parts.network
        parts.begin_step()
        network.before_step()
        self._refresh()
        self._run(size)
        network.after_step()
        self._refresh()

    def _refresh(self) -> None:
        """Bring connections that have changed into the dense tensors."""
        if self.kept is not None and self.kept.stale and self.kept.take():
            self._forget()

    def _run(self, size: int) -> None:
        """Replay the step's graph; the first calls run the step directly, and the next one captures it."""
        key = size, self.parts.network.collection.active
        if self.cuda and key not in self.graphs and self.runs[key] >= WARM_UP:
            self.graphs[key] = graph = torch.cuda.CUDAGraph()
            self.captures += 1
            with torch.cuda.graph(
                graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
            ):
                self._body(size)
        if key in self.graphs:
            self.graphs[key].replay()
            if self.kept is not None:
                self.kept.replayed()
        else:
            self.runs[key] += 1
            with _no_garbage_collection(), self._aside():
                self._body(size)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Work on the stream of the captures, as CUDA requires for what is captured later."""
        if not self.cuda:
            yield
            return
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            yield
        main.wait_stream(self.stream)

    def _body(self, size: int) -> None:
        """All that a step computes. Only whole batches are worth compiling and comparing kernels for."""
        full = size == min(self.parts.settings.batch_size, self.parts.data.train_size)
        forward = self.forward if full else self._forward
        if self.kept is not None:
            self.kept.begin()
        if self.rest is not None:
            self.rest.zero_grad()
        with _comparing_kernels(full):
            forward(size).backward()
        if self.kept is not None:
            sgd(self.kept, self.lr, self.parts.settings.momentum, self.decay)
        if self.rest is not None:
            self.rest.step()

    def _forward(self, size: int) -> Tensor:
        """The loss. All counting is done here too, where it is compiled into few kernels."""
        x, y = self.feed.batch(size)
        loss, logits = self.parts.loss(x, y)
        with torch.no_grad():
            self.parts.meter.sums += Meter.summed(loss, logits, y)
            self.lr.copy_(self.rates.index_select(0, self.index))
            self.index += 1
            self.feed.advance(size)
        return loss

    def close(self) -> None:
        """Give the network and the optimizer back."""
        self._forget()
        self._loaded.remove()
        if self.kept is not None:
            self.kept.release()
        self.parts.network.attach(self.parts.optimizer)
