"""The memory of one training step over that of the dense one; the data set on the device is not counted.

On a GPU: the peak of what is allocated during a step (an eager one, or the capture of a fast one), in a fresh
process for each contender, so that nothing of another is left over. On a CPU: the bytes of all that a step
holds, each storage once.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from suptickets.bench.contenders import BATCH, VARIANTS, Run, images_of, noise, tidy, variant
from suptickets.bench.turns import Options, Row, judged
from suptickets.training.fast import WARM_UP
from suptickets.training.processes import connect

COLLECTING = "ours, collecting the gradient of all positions"
CPU = "parameters, positions, buffers, optimizer state, gradients, masks, tensors saved for the backward pass"
GPU = "all that is allocated at the peak of a step: the same, what comes and goes, workspaces"
REQUIRED = {"vgg16": {"ratio_to_dense": 0.65}}


def run(options: Options) -> list[Row]:
    """Mebibytes of each, eager and (on a GPU) fast, and their ratio to what dense training takes."""
    modes = (False, True) if options.cuda else (False,)
    return [row for model in options.models for fast in modes for row in measure(model, options, fast=fast)]


def measure(model: str, options: Options, *, fast: bool) -> list[Row]:
    """All contenders of one model."""
    mode, taken = "fast" if fast else "eager", {}
    for name in (*VARIANTS, COLLECTING):
        options.say(f"{model}, {mode}: {name}")
        taken[name] = _apart(model, name, options, fast) if options.cuda else held(_run(model, name, options))
    rows: list[Row] = [
        {
            "model": model,
            "mode": mode,
            "variant": name,
            "mebibytes": count / 2**20,
            "ratio_to_dense": count / taken["dense"],
            "counted": GPU if options.cuda else CPU,
        }
        for name, count in taken.items()
    ]
    judges = {"ours": options.limits(model, REQUIRED)} if fast else {}
    return [judged(row, judges.get(row["variant"])) for row in rows]


def _run(model: str, name: str, options: Options, *, fast: bool = False) -> Run:
    tidy(options)
    data = noise(4 * BATCH, options, images_of(model))
    run = variant(name.split(",")[0], model, data, options, fast=fast)
    if name == COLLECTING:
        run.network.request_gradient()
    return run


# ---- on a GPU ----


def _apart(model: str, name: str, options: Options, fast: bool) -> int:
    """`peak` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(peak, model, name, options, fast).result()


def peak(model: str, name: str, options: Options, fast: bool) -> int:
    """The most that was allocated at any time of a step, without the data set."""
    connect(str(options.device))
    run = _run(model, name, options, fast=fast)
    for _ in range(WARM_UP):  # compiles, lets cuDNN choose, makes the optimizer's state
        run.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - nbytes(run.data_set())


# ---- on a CPU ----


def held(run: Run) -> int:
    """Bytes of all that an eager step holds at once, when its backward pass begins, and of its gradients."""
    run.step()
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        run.step()
    return nbytes([*saved, *_lasting(run)])


def _lasting(run: Run) -> list[Tensor]:
    """Parameters, positions, statistics, gradients, optimizer state and masks."""
    model = run.parts.model
    state = [v for s in run.parts.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    gradients = [p.grad for p in model.parameters()] + [w.gradient for w in run.network.weights.values()]
    there = [gradient for gradient in gradients if gradient is not None]
    return [*model.parameters(), *model.buffers(), *state, *there, *run.masks]


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of tensors, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
