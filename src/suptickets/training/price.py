"""`flops`: what a prediction and a training cost, before anything is trained.

Network, method and cycles are built as `train` builds them, and the ratios are those that it writes into
`summary.json`: exactly, where the distribution decides how many connections a layer has; approximately, where
the weights do (SNIP, GraNet, GMP, SNFS, DSR). Both are relative to the plain dense network of full width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from suptickets.data import ArrayData, Data
from suptickets.errors import SparsityError, fraction, reason
from suptickets.measure.cost import Shapes, TrainingFlops, training_flops
from suptickets.measure.flops import Flops, flops
from suptickets.methods import DSR, SNFS, SNIP, GraNet, Method, Static
from suptickets.network import SparseNetwork
from suptickets.randomness import fork_random
from suptickets.sparsify import sparsify
from suptickets.tickets import epochs_to_steps
from suptickets.training import build
from suptickets.training.boosters import PREDICTION_ENSEMBLES
from suptickets.training.settings import Settings

#: Images to train on, classes, and the shape of an image.
SIZES = {
    "digits": (1_437, 10, (1, 8, 8)),
    "fashion-mnist": (60_000, 10, (1, 28, 28)),
    "cifar10": (50_000, 10, (3, 32, 32)),
    "cifar100": (50_000, 100, (3, 32, 32)),
    "imagenet": (1_281_167, 1000, (3, 224, 224)),
}
MOST_CLASSES = 10**12
LARGEST = 10**6  # pixels a side, so that the bytes of all images can be counted in 64 bits
#: Methods whose final layers depend on the weights.
BY_WEIGHTS = (SNIP, GraNet, SNFS, DSR)


def price(
    settings: Settings, *, classes: int | None = None, size: int | None = None, final: float | None = None
) -> dict[str, Any]:
    """FLOPs of a prediction and of a training with these settings.

    Args:
        settings: of the training; the data, no file of which is read, decide what an image is like.
        classes: number of classes, if not that of the data.
        size: pixels a side of an image, if not those of the data.
        final: forward cost of a trained network as a share of the dense one, where the weights decide it.
    """
    data = images(settings.data, classes, size)
    build.check_model(settings.model)
    method = build.method(settings, data.steps(settings.batch_size), lambda _: None)
    if final is not None and not isinstance(method, BY_WEIGHTS):
        raise SparsityError(
            f"--final is for methods whose final layers depend on the weights: not for {settings.method}"
        )
    network, counted = _counted(settings, data, method)
    known = counted.ratio if final is None else fraction("--final", final, one=True)
    relative = build.relative(settings, data, counted.dense)
    networks = settings.cycles if settings.booster in PREDICTION_ENSEMBLES else 1
    plain, ratio = round(counted.dense / relative), known * relative * networks
    trained = _trained(settings, data, network, counted, final) * relative
    dense = 3 * plain * settings.epochs * data.train_size
    return {
        "model": settings.model,
        "parameters": network.parameters_total,
        "nonzero": network.nonzero,
        "networks": networks,
        "forward_flops_dense": plain,
        "forward_flops": round(plain * ratio),
        "ratio": ratio,
        "epochs": settings.epochs,
        "training_flops_dense": dense,
        "training_flops": round(dense * trained),
        "training_ratio": trained,
        "layers": list(_layers(network, counted, known=final is None)),
        "notes": list(_notes(settings, method, final)),
    }


def images(name: str, classes: int | None, size: int | None) -> Data:
    """As many images as the data have, of the same shape, but with nothing in them."""
    count, usual, (channels, *sides) = SIZES[name]
    for option, value, most in (("classes", classes, MOST_CLASSES), ("size", size, LARGEST)):
        if value is not None and value < 1:
            raise SparsityError(f"--{option} must be at least 1, not {value}")
        if value is not None and value > most:
            raise SparsityError(f"--{option} must be at most {most:,}")
    sides = sides if size is None else [size, size]
    pixels = torch.empty(count, channels, *sides, dtype=torch.uint8, device="meta")
    labels = torch.empty(count, dtype=torch.int64, device="meta")
    ones = (1.0,) * channels
    return ArrayData(name, classes or usual, pixels, labels, pixels, labels, ones, ones)


def _counted(settings: Settings, data: Data, method: Method) -> tuple[SparseNetwork, Flops]:
    """The network at its final sparsity, spread as the distribution says, and its FLOPs."""
    try:
        with fork_random():
            model = build.model(settings, data)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise SparsityError(f"{settings.model} does not fit into the memory: {reason(error)}") from error
    if ":" in settings.model:
        build.check_fit(model, data, torch.float32)
    ended = Static(settings.sparsity, distribution=settings.distribution) if method.sparse else method
    network = sparsify(model, ended, seed=settings.seed)
    alive = {name: layer.nonzero / layer.size for name, layer in network.layers.items() if layer.size}
    return network, flops(model, torch.zeros(1, *data.shape)).living(alive)


def _trained(
    settings: Settings, data: Data, network: SparseNetwork, forward: Flops, final: float | None
) -> float:
    """The cost, as a share of a dense training of as many epochs; BatchEnsemble's members share a batch.

    With distillation it is the student's, that of the run that makes its teachers, and a pass of each teacher
    at every step.
    """
    shapes = {name: layer.shape for name, layer in network.layers.items()}
    steps, samples = data.steps(settings.batch_size), data.train_size
    share = run_flops(settings, forward, shapes, steps, samples, final).ratio
    if settings.booster == "distillation":
        first = replace(settings, booster="sup-tickets", keep_tickets=True)
        taught = settings.cycles * (forward.ratio if final is None else final) / 3
        share += run_flops(first, forward, shapes, steps, samples, final).ratio + taught
    return share / settings.members if settings.booster == "batch-ensemble" else share


def run_flops(
    settings: Settings, forward: Flops, shapes: Shapes, steps: int, samples: int, final: float | None = None
) -> TrainingFlops:
    """FLOPs of a run whose epochs have so many steps and samples; SNIP's batch is not run."""
    cycles = {"cycles": settings.cycles, "cycle_steps": epochs_to_steps(settings.cycle_epochs, steps)}
    return training_flops(
        forward,
        shapes,
        build.method(settings, steps, lambda _: None),
        settings.epochs * steps,
        settings.epochs * samples,
        **(cycles if settings.cyclic else {}),
        explore_at=settings.explore_at if settings.explore_rate else "never",
        final=final,
    )


def _layers(network: SparseNetwork, counted: Flops, *, known: bool) -> Iterator[dict[str, Any]]:
    """Each layer with its connections and FLOPs; None for what only a trained network knows."""
    for name, layer in network.layers.items():
        living = {
            "nonzero": layer.nonzero,
            "sparsity": layer.sparsity,
            "flops": counted.layers[name].dense,
            "sparse_flops": counted.layers[name].sparse,
            "dense": layer.nonzero == layer.size,
        }
        unknown = {} if known else dict.fromkeys(("nonzero", "sparsity", "sparse_flops", "dense"))
        yield {"name": name, "shape": list(layer.shape), **living, **unknown}


def _notes(settings: Settings, method: Method, final: float | None) -> Iterator[str]:
    """What the numbers are relative to, and how well they are known."""
    yield (
        f"ratios are to the plain dense network of full width; training_ratio to one dense training of it, "
        f"of {settings.epochs} epochs"
    )
    if settings.booster == "distillation":
        yield "training: the student's, that of the run that makes its teachers, and the teachers' passes"
    if settings.booster in PREDICTION_ENSEMBLES:
        yield f"a prediction runs {settings.cycles} networks; parameters, nonzero and layers are those of one"
    if isinstance(method, BY_WEIGHTS) and final is None:
        yield (
            f"{settings.method}: the weights decide where layers end; they are taken to end at "
            f"{settings.distribution}, unless --final tells what a trained network costs"
        )
    if settings.booster == "sup-tickets" and method.sparse:
        yield (
            "the superposed ticket is pruned over all layers at once, and costs more or less than a "
            "ticket: these numbers are a ticket's"
        )
