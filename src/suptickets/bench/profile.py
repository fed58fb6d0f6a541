"""Where the time of a training step goes, by kind of kernel, and the floor: what no step could go below.

The floor of a convolution or a linear layer is the longer of two: its dense FLOPs at the rate of a large
matrix product, and its bytes at the rate of a large copy, both measured in the same run. Bytes are those of
input, output and weight, each moved once in the forward pass and in each of the two backward passes: as if
all that comes between two such layers were done on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from suptickets.bench.contenders import Run, batches, tidy
from suptickets.bench.turns import Contender, Options, Row, judged, take_turns
from suptickets.layers import ELIGIBLE
from suptickets.measure.flops import flops

KINDS = {  # the first that matches the name of a kernel (on a CPU: of an operation)
    "ours: gather, SGD and scatter": r"^_take$|^_sgd$|suptickets|index_copy|aten::(index|scatter|gather)",
    "convolution, forward": r"fprop|aten::(mkldnn|thnn)_conv|aten::_slow_conv2d_forward",
    "convolution, input gradient": r"dgrad",
    "convolution, weight gradient": r"wgrad|convolve_common_engine",
    "convolution, both gradients": r"aten::(convolution_backward|_slow_conv2d_backward)",
    "linear": r"nvjet|gemm|cutlass|aten::(addmm|mm|linear)",
    "cuDNN: paddings and workspaces": r"cudnn|Padding",
    "batch norm, activations, pooling, loss": r"triton_|batch_norm|threshold|relu|clamp|pool|softmax|nll",
    "optimizer of dense parameters": r"multi_tensor_apply|fused_sgd",
}
REST = "rest"
TIMES = 20  # steps that are profiled
LARGE = {"cpu": 1024, "cuda": 8192}  # side of the matrices


def run(options: Options) -> list[Row]:
    """Microseconds of a step by kind, and the floor."""
    return [row for model in options.models for row in measure(model, options)]


def measure(model: str, options: Options) -> list[Row]:
    """One model: fast on a GPU, eager on a CPU."""
    tidy(options)
    options.say(f"{model}: making a step ready")
    run = Run(model, "static", batches(model, options), options, fast=options.cuda, booster="none")
    contender = run.contender(TIMES)
    whole = 1000 * median(take_turns({"step": contender}, options)["step"])
    kinds = by_kind(_kernels(contender, options))
    spent: list[tuple[str, float | None, float]] = [(kind, *both) for kind, both in kinds.items()]
    between = whole - sum(time for _, _, time in spent)
    spent += [("between kernels", None, between)] if options.cuda else []
    bounds = floor(run, Rates.measured(options))
    rows = [*spent, ("step", None, whole), *((f"floor: {name}", None, t) for name, t in bounds.items())]
    return [
        judged({"model": model, "kind": k, "kernels": n, "microseconds": t, "share_of_step": t / whole})
        for k, n, t in rows
    ]


def _kernels(contender: Contender, options: Options) -> list[tuple[str, float, float]]:
    """Name, number and microseconds of all kernels of a step."""
    activity = ProfilerActivity.CUDA if options.cuda else ProfilerActivity.CPU
    work = contender.prepare()
    with profile(activities=[activity]) as seen:
        for _ in range(TIMES):
            work()
        if options.cuda:
            torch.cuda.synchronize(options.device)
    times = [(e.key, e.count, _own_time(e, options)) for e in seen.key_averages()]
    return [(name, count / TIMES, time / TIMES) for name, count, time in times if time > 0]


def _own_time(event: object, options: Options) -> float:
    return float(getattr(event, "self_device_time_total" if options.cuda else "self_cpu_time_total"))


def by_kind(kernels: list[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    """Number and microseconds of each kind that is there, the longest first."""
    sums: dict[str, tuple[float, float]] = {}
    for name, count, time in kernels:
        kind = next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), REST)
        before = sums.get(kind, (0.0, 0.0))
        sums[kind] = before[0] + count, before[1] + time
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))


# ---- the floor ----


@dataclass(frozen=True)
class Rates:
    """What the device does in a microsecond: FLOPs of a large matrix product, bytes of a large copy."""

    flops: float
    bytes: float

    @classmethod
    def measured(cls, options: Options) -> Rates:
        """The rates of this device, in the precision of a training step."""
        side, dtype = LARGE[options.device.type], torch.bfloat16 if options.cuda else torch.float32
        a, b, c = (torch.ones(side, side, dtype=dtype, device=options.device) for _ in range(3))
        times = take_turns(
            {
                "product": Contender(lambda: _product(a, b, c), 10),
                "copy": Contender(lambda: _copy(a, c), 10),
            },
            options,
        )
        moved = 2 * a.numel() * a.element_size()
        return cls(2 * side**3 / (1000 * median(times["product"])), moved / (1000 * median(times["copy"])))


def _product(a: Tensor, b: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: torch.mm(a, b, out=out)


def _copy(a: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: out.copy_(a)


def floor(run: Run, rates: Rates) -> dict[str, float]:
    """Microseconds of a step: by its arithmetic alone, by its bytes alone, and layer by layer by both."""
    arithmetic, traffic = [], []
    moved = _moved(run)
    for name, layer in flops(run.parts.model, _images(run)[:1]).layers.items():
        arithmetic.append(3 * run.parts.settings.batch_size * layer.dense / rates.flops)
        traffic.append(3 * moved[name] / rates.bytes)
    both = sum(map(max, arithmetic, traffic))
    return {"arithmetic": sum(arithmetic), "bytes": sum(traffic), "both, layer by layer": both}


def _moved(run: Run) -> dict[str, int]:
    """Bytes of input, output and dense weight of each layer."""
    found: dict[str, int] = {}
    size = 2 if run.parts.precision == "bf16" else 4

    def note(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        found[name] = size * (inputs[0].numel() + output.numel() + weight.numel())

    modules = [(name, m) for name, m in run.parts.model.named_modules() if isinstance(m, ELIGIBLE)]
    hooks = [
        module.register_forward_hook(lambda m, x, y, name=name: note(name, m, x, y))
        for name, module in modules
    ]
    with torch.no_grad(), run.parts.autocast():
        run.parts.model(_images(run))
    for hook in hooks:
        hook.remove()
    return found


def _images(run: Run) -> Tensor:
    shape = (run.parts.settings.batch_size, *run.parts.data.shape)
    return torch.zeros(shape, dtype=run.parts.dtype, device=run.options.device)
