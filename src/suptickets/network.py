"""The sparse network: exact counts; prune, grow, explore; what the optimizer's steps set off.

Everything that changes connections goes through `SparseNetwork.rewire`: prune each layer to a count, grow it
to another. Values, optimizer state and gradients follow; a connection that is pruned and grown again in one
go keeps them, a new one starts at 0 with the optimizer's own initial state.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from suptickets.booster import Booster
from suptickets.collection import Collection
from suptickets.criteria import Criterion, grow_criterion, prune_criterion, strongest
from suptickets.errors import SparsityError, fraction, whole
from suptickets.layers import LayerSparsity
from suptickets.optimizer_state import OptimizerState
from suptickets.plain import Link, densified
from suptickets.ranks import Ranks
from suptickets.rewiring import Change, check_counts, rewire
from suptickets.saved import FORMAT, check_state, keys, weight_problems
from suptickets.steps import Steps
from suptickets.weight import SparseWeight

if TYPE_CHECKING:
    from suptickets.methods.base import Method


Layer = SparseWeight | LayerSparsity
APART = (
    "there are several processes, and each chooses its own connections: if they train one network together, "
    "wrap the model in DistributedDataParallel"
)
UNATTACHED = (
    "no optimizer is attached, so connections will not change: sparsify(model, method, optimizer), or "
    "network.attach(optimizer)"
)


class SparseNetwork:
    """A model whose weights are stored as living connections, and the method that chooses these."""

    def __init__(
        self, model: nn.Module, method: Method, layers: Mapping[str, Layer], generator: torch.Generator
    ) -> None:
        """Not to be called directly: use `suptickets.sparsify`."""
        self.model = model
        self.method = method
        self.layers = dict(layers)
        self.weights = {name: layer for name, layer in layers.items() if isinstance(layer, SparseWeight)}
        self.generator = generator
        self.step = 0
        self.changes = 0  # rises whenever connections may have changed
        self.state: OptimizerState | None = None
        self.booster: Booster | None = None
        self.ranks = Ranks(model, self.weights.values())
        self.collection = Collection(self.weights.values(), self.ranks)
        self.steps = Steps(self._begin, self._complete, self._end, self._broken)
        self._holders: set[str] = set()  # who has asked for the gradient: the user, the method
        self._updating = False
        self._warned = set[str]()
        self._links = [
            model.register_forward_pre_hook(Link(self._before_forward)),
            model.register_load_state_dict_pre_hook(Link(self._before_load)),
            *(module.register_load_state_dict_post_hook(Link(self._after_load)) for module in self._owners()),
        ]

    def _owners(self) -> set[nn.Module]:
        """The modules that have sparse weights: each may be loaded by itself."""
        return {module for weight in self.weights.values() for module, _ in weight.owners}

    # ---- counts ----

    @property
    def parameters_total(self) -> int:
        """Number of possible connections of the layers."""
        return sum(layer.size for layer in self.layers.values())

    @property
    def nonzero(self) -> int:
        """Number of living connections."""
        return sum(layer.nonzero for layer in self.layers.values())

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer that is attached."""
        return None if self.state is None else self.state.optimizer

    @property
    def changing(self) -> dict[str, SparseWeight]:
        """The sparse weights whose connections change: neither frozen nor kept dense."""
        kept = self.method.kept_dense([*self.weights])
        return {n: w for n, w in self.weights.items() if w.values.requires_grad and n not in kept}

    @property
    def density(self) -> float:
        """Share of the connections that are alive."""
        return self.nonzero / self.parameters_total

    @property
    def sparsity(self) -> float:
        """One minus the density."""
        return 1 - self.density

    def __repr__(self) -> str:
        """One line: method, layers, counts."""
        counts = f"{self.nonzero:,} of {self.parameters_total:,} connections in {len(self.layers)} layers"
        return f"SparseNetwork({self.method.name}, {counts}: {self.sparsity:.2%} sparse)"

    # ---- changing connections ----

    def explore(
        self, rate: float, prune: str | Criterion | None = None, grow: str | Criterion | None = None
    ) -> bool:
        """Prune the share `rate` of each layer and grow as many (Eqs. 1 and 2); False if it was skipped.

        The criteria are the method's own unless given. The exploration is skipped, with a warning, when it
        needs gradients that are not finite.
        """
        fraction("rate", rate, one=True)
        counts = {name: w.nonzero for name, w in self.changing.items() if w.nonzero < w.size}
        kept = {name: count - int(rate * count + 0.5) for name, count in counts.items()}
        done = self.rewire(kept, counts, prune, grow)
        if self._who in self._holders:
            self.release_gradient()
        return done

    def prune(self, counts: Mapping[str, int], by: str | Criterion | None = None) -> bool:
        """Prune the named layers to these counts."""
        return self.rewire(counts, counts, prune=by)

    def grow(self, counts: Mapping[str, int], by: str | Criterion | None = None) -> bool:
        """Grow the named layers to these counts."""
        known = counts if isinstance(counts, Mapping) else {}
        living = {name: self.weights[name].nonzero if name in self.weights else 0 for name in known}
        return self.rewire(living, counts, grow=by)

    @torch.inference_mode(False)
    @torch.no_grad()
    def rewire(
        self,
        kept: Mapping[str, int],
        final: Mapping[str, int],
        prune: str | Criterion | None = None,
        grow: str | Criterion | None = None,
    ) -> bool:
        """Prune each layer to its `kept` count, then grow it to its `final` one; False if it was skipped."""
        check_counts(self.weights, kept, final)
        pruning = prune_criterion(prune or self.method.prune)
        growing = grow_criterion(grow or self.method.grow)
        changes = [Change(self.weights[name], kept[name], final[name]) for name in kept]
        changes = [c for c in changes if not c.kept == c.final == c.weight.nonzero]
        needing = [c for c in changes if c.needs_gradient(pruning, growing)]
        if needing and not self.gradients_ready():
            return False
        if self.step and self.ranks.apart:
            self.warn(APART)
        left = [c for c in needing if c.weight.gradient is None]  # the step did not use these layers
        if growing.name == "momentum" and self.method.observes:
            left += [c for c in changes if c.final > c.kept and c.weight.momentum is None]
        if any(c.final != c.weight.nonzero for c in left):
            return self._skip("layers whose counts were to change have no gradient")
        self.changes += 1
        rewire([c for c in changes if c not in left], pruning, growing, self.generator, self.state)
        return True

    @torch.no_grad()
    def global_counts(
        self, total: int, by: str | Criterion = "magnitude", *, at_least: int = 1
    ) -> dict[str, int]:
        """Connections per layer if the `total` best of the whole network live, `at_least` that many in each.

        Layers that are frozen or kept dense keep their connections.
        """
        criterion, changing = prune_criterion(by), self.changing
        total, at_least = whole("total", total, 0), whole("at_least", at_least, 0)
        total -= sum(weight.nonzero for name, weight in self.weights.items() if name not in changing)
        if total < at_least * len(changing) or not changing:
            raise SparsityError("layers that are frozen or kept dense leave no connections for the others")
        scores = [criterion.scores(weight, self.generator) for weight in changing.values()]
        for score in scores:
            score[strongest(score, min(at_least, len(score)))] = torch.inf
        sizes = torch.tensor([len(score) for score in scores], device="cpu")
        layer = torch.repeat_interleave(torch.arange(len(scores), device="cpu"), sizes)
        chosen = strongest(torch.cat(scores), min(total, int(sizes.sum())))
        counts = torch.bincount(layer[chosen.cpu()], minlength=len(scores)).tolist()
        return dict(zip(changing, counts, strict=True))

    # ---- the gradient of all positions ----

    def request_gradient(self) -> None:
        """Collect the gradient of all positions from the next forward pass on, for `explore` to use."""
        self._holders.add(self._who)
        self.collection.start()

    def release_gradient(self) -> None:
        """Forget the gradient of all positions; go on collecting only if the next step needs it."""
        self._holders.discard(self._who)
        self.prepare()

    @property
    def _who(self) -> str:
        """Who is at work: what the user has asked for outlasts the method's explorations, and the reverse."""
        return "method" if self._updating else "user"

    def gradients_ready(self) -> bool:
        """Whether the gradient of all positions is there and finite."""
        if not self.collection.settle(self.optimizer):
            return self._skip(self.collection.nothing(self.optimizer, self.step))
        if self.collection.late:
            self.warn("a layer was unfrozen when the step had begun: this exploration leaves it as it is")
        if all(weight.slot is not None for weight in self.changing.values()):
            return True  # the step is done, and what is not finite is in the weights: the loss will show it
        return self.gradients_finite() or self._skip("gradients are not finite")

    def _skip(self, why: str) -> bool:
        self.warn(f"{why} at an exploration: it was skipped")
        return False

    def warn(self, message: str) -> None:
        """Warn, but only once with each message."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def gradients_finite(self) -> bool:
        """Whether the gradients of all positions that are there are finite."""
        gradients = self.collection.settle(self.optimizer)
        if not gradients or bool(torch.stack(torch._foreach_norm(gradients)).isfinite().all()):
            return True
        return all(bool(g.isfinite().all()) for g in gradients)  # a norm may overflow where no number does

    def prepare(self) -> None:
        """Ask for the gradient of all positions if the next step needs it, and only then."""
        if self._holders and self.collection.wanted:  # go on: what was collected is theirs until they explore
            return
        step, booster, method = self.step + 1, self.booster, self.method
        needed = bool(self._holders) or method.observes
        needed |= method.needs_gradient(step) and not self._held_off(step)
        needed |= booster is not None and booster.needs_gradient(step)
        self.collection.start() if needed else self.collection.stop()

    def _held_off(self, step: int) -> bool:
        return self.booster is not None and self.booster.holds(step)

    def _before_forward(self, *_: Any) -> None:
        if dist.is_available() and dist.is_initialized() and self.ranks.meet(self.generator, self.step):
            self.changes += 1
        if torch.compiler.is_compiling():  # dynamo adds no guard for what follows
            return
        waiting = self.state is None and (self.method.changes or self.booster is not None)
        if waiting and self.model.training and torch.is_grad_enabled():
            self.warn(UNATTACHED)
        if self.collection.wanted:
            self.collection.join()

    # ---- steps of the optimizer ----

    def attach(self, optimizer: Optimizer, *, hooks: bool = True) -> None:
        """Follow this optimizer: its state moves with the connections, its steps set off what is due.

        Without `hooks`, only calls of `before_step` and `after_step` do that: for loops in which the
        optimizer's step is part of a graph.
        """
        state = OptimizerState(optimizer, self.weights.values())
        if self.state is not None:
            self.state.leave()
            state.loaded = self.state.loaded and self.state.optimizer is optimizer
        self.state = state
        self.steps.follow(optimizer, hooks=hooks)
        self.prepare()

    def detach(self) -> None:
        """Let go of the model and the optimizer: connections stay as they are from now on."""
        self.steps.leave()
        for handle in self._links:
            handle.remove()
        if self.state is not None:
            self.state.leave()
        self._holders.clear()
        self.collection.stop()
        self.ranks.leave(self.model)

    def before_step(self) -> None:
        """Call this before the optimizer's step, in a loop that drives the network itself."""
        if self.state is None and self.weights:
            raise SparsityError("no optimizer is attached: call network.attach(optimizer)")
        self.steps.before()

    def after_step(self) -> None:
        """Call this after the optimizer's step, in a loop that drives the network itself."""
        self.steps.after()

    def _begin(self) -> None:
        if self.state is not None:
            self.state.begin(self.weights.values())
        self.collection.begin()
        if self.booster is not None:
            self.booster.before_step()

    def _complete(self) -> None:
        self.collection.settle(self.optimizer)

    def _broken(self) -> None:
        """The step has raised or was skipped: it does not count."""
        self.collection.discard()
        self.collection.skipped = True
        if self.booster is not None:
            self.booster.put_back()

    def _end(self) -> None:
        self.step += 1
        self._updating = True
        try:
            self.method.observe(self)
            if not self._held_off(self.step):
                self.method.update(self, self.step)
            if self.booster is not None:
                self.booster.after_step()
        finally:
            if self.booster is not None:
                self.booster.put_back()  # not before: the state of what has grown may depend on the rate
            self._updating = False
            self.prepare()

    # ---- copies, files, checks ----

    def densify(self) -> nn.Module:
        """A plain copy of the model: the original classes, dense weights with exact zeros."""
        return densified(self.model)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer: tensors and plain values, fit for `torch.load(weights_only=True)`."""
        return {
            "format": FORMAT,
            "model": self.model.state_dict(),
            **keys(self.model),
            "step": self.step,
            "generator": self.generator.get_state(),
            "method": {"name": self.method.name, "state": self.method.state_dict(self)},
        }

    @torch.inference_mode(False)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; other counts are fine: values are resized, optimizer state starts anew.

        Optimizer state that was loaded since the last step stays, so the two can be loaded in any order.
        """
        check_state(self, state)
        self.method.load_state_dict(self, state["method"]["state"])
        self.model.load_state_dict(state["model"])
        self.step = int(state["step"])
        self.generator.set_state(state["generator"].cpu())
        self._holders.clear()
        self.prepare()

    def _before_load(self, model: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Refuse a state of other weights before anything of it is loaded."""
        problems = list(weight_problems(model, state, prefix))
        if problems:
            others = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise SparsityError(problems[0] + others)

    def _after_load(self, *_: Any) -> None:
        """Optimizer state of other connections is started anew, unless it has just been loaded too."""
        self.changes += 1
        moved = [weight for weight in self.weights.values() if weight.moved]
        for weight in moved:
            weight.moved = False
        if self.state is None:
            return
        for weight in moved:
            if not self.state.loaded or self.state.problem(weight) is not None:
                self.state.optimizer.state.pop(weight.values, None)
            weight.values.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model that holds its network has None instead; alone, it would follow no optimizer."""
        if id(self.model) not in memo:
            raise SparsityError("copy the model, or sparsify another and load network.state_dict() into it")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SparsityError("save network.state_dict(), or the model: a network cannot be copied or pickled")

    def check(self) -> None:
        """Verify counts, positions, optimizer and ranks; raises one error that lists all that is wrong."""
        problems = list(self._problems())
        if problems:
            raise SparsityError("; ".join(problems))

    def _problems(self) -> Iterable[str]:
        parts = {id(module) for module in self.model.modules()}
        for weight in self.weights.values():
            problem = weight.problem(weight.values, weight.rows())
            yield from [] if problem is None else [problem]
            if not any(id(module) in parts for module, _ in weight.owners):
                yield f"{weight.name} was taken out of the model: change the model first, then sparsify it"
        if self.state is not None:
            yield from self.state.problems(self.weights.values())
        elif self.weights:
            yield "no optimizer is attached: call network.attach(optimizer)"
        if not self.ranks.agree():
            yield "the ranks hold different connections or values"
