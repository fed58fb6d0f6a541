"""Predictions on a CPU: a sparse network by our kernels against the same one computed densely.

Weights and connections are random, as many as ERK gives to each layer: no kernel asks what they mean.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from suptickets.bench.contenders import images_of, noise, random_masks, tidy
from suptickets.bench.turns import (
    SPARSITY,
    Contender,
    Limits,
    Options,
    Row,
    Times,
    judged,
    ratio,
    take_turns,
)
from suptickets.deploy import accelerate
from suptickets.errors import reason
from suptickets.layers import ELIGIBLE
from suptickets.training.build import make_model

Run = Callable[[], object]

MODELS = ("vgg16", "resnet50")
REPEATS = {1: 20, 16: 3}  # batch sizes, and calls in one measurement
REST = 0.05  # seconds: the threads of the contender before may spin for a while
REQUIRED = {1: {"vgg16": 3.0, "resnet50": 1.7}, 16: {"vgg16": 4.9, "resnet50": 4.4}}
NOT_SLOWER = 0.8  # the sparsity from which on no dense network may be faster


def run(options: Options) -> list[Row]:
    """Milliseconds of a batch by each contender, and how many times as fast as the fastest dense ours is."""
    models = MODELS if options.model is None else (options.model,)
    return [measure(model, batch, options) for model in models for batch in REPEATS]


def measure(model: str, batch: int, options: Options) -> Row:
    """One model, one batch size."""
    tidy(options)
    network = sparse_network(model, options)
    x = torch.randn(batch, *images_of(model), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        runs = {"ours": _ours(network, x), **dense(network, x, options)}
        times = take_turns({name: _rested(run, REPEATS[batch]) for name, run in runs.items()}, options)
    row = {"model": model, "sparsity": options.sparsity, "batch": batch, **compared(times)}
    return judged(row, at_least=_limits(row))


@torch.no_grad()
def sparse_network(model: str, options: Options) -> nn.Module:
    """A plain network with random zeros."""
    network = make_model(model, noise(1, options, images_of(model))).eval()
    weights = [module.weight for module in network.modules() if isinstance(module, ELIGIBLE)]
    for weight, mask in zip(weights, random_masks(weights, options.sparsity), strict=True):
        weight.mul_(mask)
    return network


def dense(network: nn.Module, x: Tensor, options: Options) -> dict[str, Run]:
    """The contenders against ours: torch in both memory layouts, and others that are available."""
    last = copy.deepcopy(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = x.contiguous(memory_format=torch.channels_last)
    runs: dict[str, Run] = {"torch": lambda: network(x), "channels_last": lambda: last(images)}
    if options.compile:
        compiled = torch.compile(network)
        runs["compiled"] = lambda: compiled(x)
    try:
        runs["onnxruntime"] = onnxruntime(network, x)
    except Exception as error:
        options.say(f"onnxruntime does not take part: {reason(error)}")
    return runs


def _ours(network: nn.Module, x: Tensor) -> Run:
    accelerated = accelerate(network, x)
    return lambda: accelerated(x)


def onnxruntime(network: nn.Module, x: Tensor) -> Run:
    """The network in ONNX Runtime, with as many threads as torch."""
    ort: Any = import_module("onnxruntime")
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = torch.get_num_threads()
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = f"{folder}/network.onnx"
        torch.onnx.export(network, (x,), path, dynamo=False)
        session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: x.numpy()}
    return lambda: session.run(None, given)


def _rested(run: Run, repeats: int) -> Contender:
    def prepare() -> Run:
        time.sleep(REST)
        run()
        return run

    return Contender(prepare, repeats)


def compared(times: Times) -> Row:
    """Milliseconds of each, of torch in its better layout, and the ratio of the fastest dense to ours."""
    others = {name: median(values) for name, values in times.items() if name != "ours"}
    fastest = min(others, key=lambda name: others[name])
    return {
        "threads": torch.get_num_threads(),
        "torch_milliseconds": min(others["torch"], others["channels_last"]),
        "compiled_milliseconds": others.get("compiled"),
        "onnxruntime_milliseconds": others.get("onnxruntime"),
        "milliseconds": median(times["ours"]),
        "speedup": ratio(times[fastest], times["ours"]),
    }


def _limits(row: Row) -> Limits:
    """At 95 %, what DeepSparse 1.8.0 reached on two threads; else, from 80 % on, never slower than dense."""
    stated = REQUIRED[row["batch"]].get(row["model"])
    if stated is None or row["sparsity"] < NOT_SLOWER:
        return {}
    return {"speedup": stated if row["sparsity"] == SPARSITY else 1.0}
