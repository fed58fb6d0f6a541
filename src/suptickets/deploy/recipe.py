"""From a traced network to a list of steps; what follows a convolution is done as its result is written."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn
from torch.fx import GraphModule, Node

from suptickets.deploy.operations import emit, module_of, shape
from suptickets.deploy.steps import Planes, Pool, Sparse, Step


@dataclass(eq=False)
class Recipe:
    """The steps of a part of a network, for one image of the example's size.

    Attributes:
        inputs: the planes that it is given.
        outputs: the planes that it makes.
        takes: the shapes of the inputs, without the number of images.
        makes: the shapes of the outputs, likewise.
        steps: what is done, in this order.
        single: whether the output is a tensor rather than a tuple of them.
    """

    inputs: list[Planes] = field(default_factory=list)
    outputs: list[Planes] = field(default_factory=list)
    takes: list[tuple[int, ...]] = field(default_factory=list)
    makes: list[tuple[int, ...]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    single: bool = True


class Writer:
    """Writes the recipe of a part whose nodes are all known."""

    def __init__(self, part: GraphModule) -> None:
        self.recipe, self.made = Recipe(), dict[Node, Planes]()
        self.modules = dict(part.named_modules())
        for node in part.graph.nodes:
            self._write(node)
        self._drop_unused()
        _frame(self.recipe.steps)

    def _write(self, node: Node) -> None:
        recipe = self.recipe
        if node.op == "placeholder":
            self.made[node] = Planes(*shape(node))
            recipe.inputs.append(self.made[node])
            recipe.takes.append(shape(node))
        elif node.op == "output":
            (given,) = node.args
            recipe.single = isinstance(given, Node)
            for made in node.all_input_nodes:
                recipe.outputs.append(self.made[made])
                recipe.makes.append(shape(made))
        elif not self._joined(node):
            self._append(node)

    def _append(self, node: Node) -> None:
        self.made[node] = Planes(*shape(node))
        made = self.made
        if isinstance(module_of(node, self.modules), nn.Linear):
            made = {source: self._unflattened(source) for source in node.all_input_nodes}
        self.recipe.steps += emit(node, self.modules, made, self.made[node])

    def _unflattened(self, source: Node) -> Planes:
        """What a linear layer can read instead of a flattened copy: it counts its inputs pixel by pixel."""
        step = self._maker(source)
        flattened = step is not None and isinstance(module_of(source, self.modules), nn.Flatten)
        return step.x if step is not None and flattened else self.made[source]

    def _maker(self, node: Node) -> Step | None:
        return next((step for step in reversed(self.recipe.steps) if step.y is self.made[node]), None)

    def _joined(self, node: Node) -> bool:
        """Let the step that made a node's input do the node's work too; returns whether it can."""
        if isinstance(module_of(node, self.modules), nn.ReLU):
            return self._activated(node, node.all_input_nodes[0])
        sources = [source for source in node.args if isinstance(source, Node)]
        return len(sources) == 2 and self._added(node, *sources)

    def _activated(self, node: Node, source: Node) -> bool:
        step = self._maker(source)
        if not isinstance(step, Sparse | Pool) or len(source.users) > 1:
            return False
        if isinstance(step, Pool) and step.mean:
            return False
        step.relu, self.made[node] = True, self.made[source]
        return True

    def _added(self, node: Node, one: Node, other: Node) -> bool:
        """Let the later of two steps add what the other made; returns whether it can."""
        order = [self.recipe.steps.index(step) if (step := self._maker(n)) else -1 for n in (one, other)]
        late, early = (one, other) if order[0] > order[1] else (other, one)
        step = self._maker(late)
        if not isinstance(step, Sparse) or step.relu or step.residual or len(late.users) > 1 or late is early:
            return False
        step.residual, self.made[node] = self.made[early], self.made[late]
        return True

    def _drop_unused(self) -> None:
        needed, kept = set(self.recipe.outputs), list[Step]()
        for step in reversed(self.recipe.steps):
            if step.y in needed:
                needed.update(step.reads())
                kept.insert(0, step)
        self.recipe.steps = kept


def _frame(steps: list[Step]) -> None:
    """Choose the length of rows: it must be the same in all planes that a sparse step reads and writes."""
    before: list[int] = []
    planes = list({plane: None for step in steps for plane in (*step.reads(), step.y)})
    while before != (now := [size for plane in planes for size in (plane.pad, plane.columns)]):
        before = now
        for plane in planes:
            plane.columns = max(plane.columns, plane.width + plane.pad)
        for step in steps:
            if isinstance(step, Sparse):
                _align(step)


def _align(step: Sparse) -> None:
    if step.y.height > 1:
        step.x.columns = step.y.columns = max(step.x.columns, step.y.columns)
    if step.residual:
        step.residual.columns = step.y.columns = max(step.residual.columns, step.y.columns)
        step.residual.pad = step.y.pad = max(step.residual.pad, step.y.pad)
