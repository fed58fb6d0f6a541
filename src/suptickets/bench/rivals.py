"""What one would use instead of this library, each in the loop that its users write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor
from torch.backends import cudnn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.data import DataLoader, Dataset

from suptickets.bench.contenders import BATCH, EAGER, NEVER, RATE, random_masks
from suptickets.bench.explore import Masked
from suptickets.bench.turns import Contender, Options
from suptickets.data.base import ArrayData
from suptickets.layers import ELIGIBLE
from suptickets.training.build import make_model

Loader = DataLoader[tuple[Tensor, int]]
WORKERS = 2  # workers of the published code's loader for CIFAR-100, whose memory is not pinned


class Rival:
    """A model with masks, SGD, and one batch; on a GPU in bf16 and channels_last, where it can.

    Args:
        model: its name.
        data: where the batch comes from; made before anything is measured.
        options: device and sparsity.
        interval: steps between two explorations, for those that count them.
    """

    float32: ClassVar[bool] = False
    row_major: ClassVar[bool] = False
    note: ClassVar[str | None] = None  # about its exploration
    optimizer: torch.optim.Optimizer

    def __init__(self, model: str, data: ArrayData, options: Options, interval: int = NEVER) -> None:
        torch.manual_seed(0)
        self.options, self.interval, self.bf16 = options, interval, options.cuda and not self.float32
        self.model = make_model(model, data).to(options.device)
        if self.bf16 and not self.row_major:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.layers = {name: m for name, m in self.model.named_modules() if isinstance(m, ELIGIBLE)}
        self.weights = [module.weight for module in self.layers.values()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9, weight_decay=5e-4)
        self.x, self.y = next(data.train_batches(BATCH, 1, 0, device=options.device))
        self.prepare()

    def prepare(self) -> None:
        """Make it sparse."""
        raise NotImplementedError

    def train(self, x: Tensor, y: Tensor) -> None:
        """Forward, backward, optimizer."""
        self.optimizer.zero_grad()
        with torch.autocast(self.options.device.type, torch.bfloat16, enabled=self.bf16):
            logits = self.model(x)
        F.cross_entropy(logits.float(), y).backward()
        self.optimizer.step()

    def step(self) -> None:
        """One step of the loop."""
        self.train(self.x, self.y)

    def before(self) -> None:
        """What comes before an exploration: the step whose gradient decides."""
        self.step()

    def explore(self) -> None:
        """Change the connections."""
        raise NotImplementedError

    def stepping(self) -> Contender:
        """A step, as a contender."""
        return Contender(lambda: self.step, EAGER if self.options.cuda else 1)

    def exploring(self) -> Contender:
        """An exploration, as a contender."""

        def prepare() -> Callable[[], object]:
            self.before()
            return self.explore

        return Contender(prepare)


class AoPruning(Rival):
    """`torch.ao.pruning`: masks as parametrizations, drawn anew from magnitudes; nothing is ever grown.

    Its own sparsifiers take linear layers only, so the masks are filled here.
    """

    note = "prunes only: it has no growth"

    def prepare(self) -> None:
        """A parametrization for each weight."""
        pruning = import_module("torch.ao.pruning")
        self.masks = random_masks(self.weights, self.options.sparsity)
        self.living = [int(mask.sum()) for mask in self.masks]
        for module, mask in zip(self.layers.values(), self.masks, strict=True):
            register_parametrization(module, "weight", pruning.FakeSparsity(mask))

    @torch.no_grad()
    def explore(self) -> None:
        """Draw the masks anew from the present magnitudes."""
        for weight, mask, living in zip(self.weights, self.masks, self.living, strict=True):
            strongest = weight.abs().flatten().topk(living).indices
            mask.copy_(torch.zeros_like(weight).flatten().index_fill_(0, strongest, 1).view(weight.shape))


class Sparsimony(Rival):
    """`sparsimony`: RigL with ERK, masks as parametrizations that keep a dense gradient.

    Version 0.1.0 takes no weights that are channels_last.
    """

    row_major = True

    def prepare(self) -> None:
        """Use its documented parts; arguments are positional, because their names differ between versions."""
        parts = (f"sparsimony.{name}" for name in ("schedulers.base", "distributions.base", "dst.rigl"))
        schedulers, distributions, rigl = map(import_module, parts)
        schedule = schedulers.ConstantScheduler(RATE, NEVER, self.interval)
        self.sparsifier = rigl.RigL(
            schedule, distributions.ERKDistribution(), self.optimizer, sparsity=self.options.sparsity
        )
        self.sparsifier.prepare(self.model, [{"tensor_fqn": f"{name}.weight"} for name in self.layers])

    def step(self) -> None:
        """Its own step follows the optimizer's."""
        super().step()
        self.sparsifier.step()

    def before(self) -> None:
        """With an interval of 2: a step after which it collects, and one whose gradient is collected."""
        self.step()
        self.train(self.x, self.y)

    def explore(self) -> None:
        """The second call of its step explores."""
        self.sparsifier.step()


class Published(Rival):
    """The published way: masks multiplied into weights and momentum, numbers read back at every step.

    Its other habits are kept too: deterministic cuDNN, a scheduler of its own for the rate of exploration, an
    evaluation at the end of every epoch.
    """

    float32 = True

    def prepare(self) -> None:
        """Masks beside the weights."""
        masks = random_masks(self.weights, self.options.sparsity)
        self.masks = dict(zip((f"{name}.weight" for name in self.layers), masks, strict=True))
        stand_in = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)
        self.rate = torch.optim.lr_scheduler.CosineAnnealingLR(stand_in, NEVER)
        stand_in.step()
        self.apply()

    @torch.no_grad()
    def apply(self) -> None:
        """Multiply weights and momentum by the masks, one layer after the other."""
        for weight, mask in self.masked():
            weight.data = weight.data * mask
            state = self.optimizer.state[weight]
            if "momentum_buffer" in state:
                state["momentum_buffer"] = state["momentum_buffer"] * mask

    def masked(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Weights and their masks, looked up by name each time."""
        for name, weight in self.model.named_parameters():
            if name in self.masks:
                yield weight, self.masks[name]

    def train(self, x: Tensor, y: Tensor) -> None:
        """A step that waits for the device twice: for the loss, and for the number of right predictions."""
        with cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            self.optimizer.zero_grad()
            logits = self.model(x)
            loss = F.cross_entropy(logits, y)
            self.loss, self.right = loss.item(), (logits.argmax(1) == y).sum().item()
            loss.backward()
            self.optimizer.step()
        self.apply()
        self.rate.step()

    @torch.no_grad()
    def explore(self) -> None:
        """Sort weights to prune, sort gradients to grow."""
        for weight, mask in self.masked():
            assert weight.grad is not None
            momentum = self.optimizer.state[weight]["momentum_buffer"]
            Masked(weight.data, mask, weight.grad, momentum).explore(RATE)

    def epoch(self, train: Loader, test: Loader) -> None:
        """All batches of one loader, and an evaluation on those of the other."""
        self.model.train()
        for x, y in train:
            self.train(x.to(self.options.device), y.to(self.options.device))
        self.model.eval()
        with torch.no_grad(), cudnn.flags(enabled=True, benchmark=True, deterministic=True):
            for x, y in test:
                self.evaluate(x.to(self.options.device), y.to(self.options.device))

    def evaluate(self, x: Tensor, y: Tensor) -> None:
        """Evaluate a batch; this waits for the device twice, too."""
        logits = self.model(x)
        self.loss = F.cross_entropy(logits, y, reduction="sum").item()
        self.right = (logits.argmax(1) == y).sum().item()


class Transformed(Dataset[tuple[Tensor, int]]):
    """Images one by one: padded, cropped and mirrored on the CPU (if `augment`ed), and normalised.

    torchvision's transforms do this, as in the published code; without it, the functions that they call do.
    """

    def __init__(self, data: ArrayData, *, augment: bool = True) -> None:
        x, y = (data.train_x, data.train_y) if augment else (data.test_x, data.test_y)
        self.images, self.labels = x.cpu().permute(0, 2, 3, 1).contiguous().numpy(), y.tolist()
        self.mean, self.std, self.augment = data.mean, data.std, augment
        self.padding, self.size = data.padding, data.shape[-1]
        theirs = self._torchvision()
        self.transform, self.by = theirs or self._by_hand, "torchvision" if theirs else "no torchvision"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]

    def _torchvision(self) -> Callable[[Image.Image], Tensor] | None:
        try:
            t = import_module("torchvision.transforms")
        except Exception:  # a torchvision that does not fit the torch beside it fails in other ways
            return None
        augmenting = [t.RandomCrop(self.size, padding=self.padding), t.RandomHorizontalFlip()]
        transform: Callable[[Image.Image], Tensor] = t.Compose(
            [*(augmenting if self.augment else []), t.ToTensor(), t.Normalize(self.mean, self.std)]
        )
        return transform

    def _by_hand(self, image: Image.Image) -> Tensor:
        image = self._augmented(image) if self.augment else image
        return self._normalised(torch.from_numpy(np.array(image)))

    def _augmented(self, image: Image.Image) -> Image.Image:
        image = ImageOps.expand(image, self.padding)
        top, left = (int(torch.randint(2 * self.padding + 1, (1,)).item()) for _ in range(2))
        image = image.crop((left, top, left + self.size, top + self.size))
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(1) < 0.5 else image

    def _normalised(self, pixels: Tensor) -> Tensor:
        pixels = pixels.permute(2, 0, 1).contiguous().to(torch.get_default_dtype()).div(255).clone()
        mean, std = (torch.as_tensor(value, dtype=pixels.dtype) for value in (self.mean, self.std))
        assert not (std == 0).any()
        return pixels.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))

    def loader(self) -> Loader:
        """Batches, with the settings of the published code on CIFAR-100; what is augmented is shuffled."""
        generator = torch.Generator().manual_seed(0)
        return DataLoader(self, BATCH, shuffle=self.augment, num_workers=WORKERS, generator=generator)
