"""The contenders: dense training, masks, and ours, all of them as `suptickets train` would run them."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor

from suptickets.bench.turns import Contender, Options
from suptickets.data.base import ArrayData
from suptickets.distribution import counts
from suptickets.layers import ELIGIBLE
from suptickets.models import MODELS
from suptickets.training.fast import FastStep
from suptickets.training.feed import Resident
from suptickets.training.parts import TOO_LATE, Parts
from suptickets.training.plain import PlainStep
from suptickets.training.processes import connect
from suptickets.training.settings import resolve

BATCH = 128
REPLAYS = 200  # steps in one measurement of a captured graph
EAGER = 20  # steps in one measurement of an eager step on a GPU
RATE = 0.5  # share of the connections that an exploration changes, as in the paper
NEVER = 10**9  # steps between two explorations, where none is wanted
VARIANTS = ("dense", "masks", "ours")


def noise(images: int, options: Options, shape: tuple[int, int, int] = (3, 32, 32)) -> ArrayData:
    """Random bytes on the device, of CIFAR's shape unless told otherwise, augmented as CIFAR-100 is."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (images, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(100, (images,), generator=generator)
    half = (0.5,) * shape[0]
    test = x[:BATCH], y[:BATCH]
    return ArrayData("noise", 100, x, y, *test, half, half, 4, "zeros", flip=True).to(options.device)


def images_of(model: str) -> tuple[int, int, int]:
    """The shape of the images that a model is made for."""
    size = MODELS[model].size if model in MODELS else 32
    return 3, size, size


def batches(model: str, options: Options) -> ArrayData:
    """Noise of the size that a model is made for: as many whole batches as one measurement takes."""
    return noise(BATCH * (REPLAYS if options.cuda else 2), options, images_of(model))


class Run:
    """A network in training on noise, by the product's own step.

    Args:
        model: its name.
        method: `dense`, `static` or `rigl`: which connections live.
        data: whole batches, on the device.
        options: device and sparsity.
        fast: whether to take the fast step, or else the plain one.
        compile: whether the fast step is compiled.
        settings: those that differ from the paper's recipe.
    """

    def __init__(
        self,
        model: str,
        method: str,
        data: ArrayData,
        options: Options,
        *,
        fast: bool,
        compile: bool = True,
        **settings: Any,
    ) -> None:
        given = {"data": "cifar100", "model": model, "method": method, "sparsity": options.sparsity}
        calm = {"lr": 0.001, "interval": NEVER}  # on noise, a higher rate may end in infinite losses
        processes = connect(str(options.device))
        with warnings.catch_warnings():
            for meant in (".* it does not explore before them", f".*{TOO_LATE}"):
                warnings.filterwarnings("ignore", meant)
            self.parts = Parts(resolve({**given, **calm, **settings}), data, processes)
        self.network, self.options = self.parts.network, options
        self.stepper = FastStep(self.parts, compile=compile) if fast else PlainStep(self.parts)
        self.masks: list[Tensor] = []
        self._steps = chain.from_iterable(self.stepper.epoch(epoch, 0) for epoch in count())

    def data_set(self) -> list[Tensor]:
        """The tensors of the data on the device, which are the same for all contenders."""
        data = self.parts.data
        assert isinstance(data, ArrayData)
        return [data.train_x, data.train_y, data.test_x, data.test_y]

    def step(self) -> None:
        """Do the next step, whatever it takes."""
        self._rewind()
        next(self._steps)

    def epoch(self) -> None:
        """Do the next epoch, as in a run."""
        for _ in self.stepper.epoch(self.network.step // self.parts.steps, 0):
            pass

    def _rewind(self) -> None:
        """Go back to the first batch: a replayed graph goes through the epoch on its own."""
        if isinstance(self.stepper, FastStep):
            assert isinstance(self.stepper.feed, Resident)
            self.stepper.index.zero_()
            self.stepper.feed.place.zero_()

    def contender(self, replays: int = REPLAYS) -> Contender:
        """A step as it is repeated thousands of times: on a GPU, the captured graph of a fast one."""
        if not isinstance(self.stepper, FastStep) or not self.options.cuda:
            return Contender(lambda: self.step, EAGER if self.options.cuda else 1)
        while (BATCH, False) not in self.stepper.graphs:
            self.step()
        graph = self.stepper.graphs[BATCH, False]

        def prepare() -> Callable[[], object]:
            self._rewind()
            replay: Callable[[], object] = graph.replay
            return replay

        return Contender(prepare, replays)

    def exploration(self) -> Contender:
        """Prune half of the connections, grow as many by the gradient of the step before."""

        def prepare() -> Callable[[], object]:
            self.network.request_gradient()
            self.step()
            return self.explore

        return Contender(prepare)

    def explore(self) -> None:
        """Explore, and let the fast step take what changed."""
        self.network.explore(RATE)
        kept = self.stepper.kept if isinstance(self.stepper, FastStep) else None
        if kept is not None and kept.stale:
            kept.take()

    @torch.no_grad()
    def mask(self) -> None:
        """Do what most libraries do: multiply dense weights by masks after each step of the optimizer."""
        weights = [m.weight for m in self.parts.model.modules() if isinstance(m, ELIGIBLE)]
        self.masks = random_masks(weights, self.options.sparsity)
        stepper = self.stepper
        optimizer = stepper.rest if isinstance(stepper, FastStep) else self.parts.optimizer
        assert optimizer is not None

        @torch.no_grad()
        def multiply(*_: object) -> None:
            torch._foreach_mul_(weights, self.masks)

        optimizer.register_step_post_hook(multiply)


def random_masks(weights: Sequence[Tensor], sparsity: float) -> list[Tensor]:
    """Ones at random positions, as many as ERK gives to each, in the weights' own dtype and layout."""
    living = counts([weight.shape for weight in weights], sparsity, "erk")
    generator, masks = torch.Generator().manual_seed(0), []
    for weight, ones in zip(weights, living, strict=True):
        flat = torch.zeros(weight.numel())
        flat[torch.randperm(len(flat), generator=generator)[:ones]] = 1
        masks.append(torch.zeros_like(weight, requires_grad=False).copy_(flat.view(weight.shape)))
    return masks


def variant(name: str, model: str, data: ArrayData, options: Options, *, fast: bool) -> Run:
    """One of `VARIANTS`, ready to take steps."""
    run = Run(model, "static" if name == "ours" else "dense", data, options, fast=fast, booster="none")
    if name == "masks":
        run.mask()
    return run


def try_out(model: str, options: Options) -> None:
    """Build a model as it is going to be measured: what is wrong with it, or with the sparsity, is raised."""
    data = noise(BATCH, options, images_of(model))
    Run(model, "static", data, options, fast=False, booster="none")


def tidy(options: Options) -> None:
    """Give back the memory of contenders that are gone."""
    torch.compiler.reset()
    gc.collect()
    if options.cuda:
        torch.cuda.empty_cache()
