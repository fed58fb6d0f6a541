"""What the operations of a traced network do, seen as it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from suptickets.errors import SparsityError, reason

IMAGES = (2, 3)  # in the batches that the network is watched with: not 1, a size that may mean anything
SOMETIMES = {  # what shares memory with its input or not, as layouts, types and numbers of images are
    *("contiguous", "reshape", "reshape_as", "flatten", "ravel", "sum_to_size"),
    *("to", "type", "type_as", "float"),
}


def watch(graph: GraphModule, example: Tensor) -> None:
    """Run a network with images of its own, which it may change; see `Watched`."""
    for images in IMAGES:
        try:
            with torch.inference_mode(False), torch.no_grad():
                Watched(graph, images).run(example[:1].expand(images, *example.shape[1:]).clone())
        except Exception as error:
            text = f"the network does not take {images} images like the example: {reason(error)}"
            raise SparsityError(text) from error


class Watched(Interpreter):
    """Runs a network, and notes in `meta` of each node what it does.

    `image` is the shape of what it makes of one image, empty if that is not float32 numbers for each image,
    `tensor` tells results apart, `memory` is where their tensors lie, and `changed` what it changes in place.
    """

    def __init__(self, graph: GraphModule, images: int) -> None:
        super().__init__(graph, garbage_collect_values=False)  # or one may lie where another was
        self.images, self.origin = images, dict[int, int]()

    def run_node(self, node: Node) -> Any:
        """Run a node, and look at what it does."""
        before = {one: _versions(self.env[one]) for one in node.all_input_nodes}
        made = super().run_node(node)
        image = self._image(made)
        node.meta["image"] = image if node.meta.setdefault("image", image) == image else ()
        node.meta["memory"] = self._memory(node, made)
        changed = (one.meta["memory"] for one, old in before.items() if _versions(self.env[one]) != old)
        node.meta["changed"], node.meta["tensor"] = set[int]().union(*changed), id(made)
        return made

    def _image(self, made: Any) -> tuple[int, ...]:
        if not isinstance(made, Tensor) or made.dtype != torch.float32 or made.dim() not in (2, 4):
            return ()
        return tuple(made.shape[1:]) if len(made) == self.images else ()

    def _memory(self, node: Node, made: Any) -> set[int]:
        """The storages of all tensors; a copy that may be none counts as what it was made of."""
        storages = {one.untyped_storage()._cdata for one in _tensors(made)}
        given = set[int]().union(*(one.meta["memory"] for one in node.all_input_nodes[:1]))
        if name_of(node) in SOMETIMES or type(self.submodules.get(str(node.target))) is nn.Flatten:
            copies = storages - given - self.origin.keys()
            self.origin.update({one: min(given, default=one) for one in copies})
        return {self.origin.get(one, one) for one in storages}


def _tensors(made: Any) -> list[Tensor]:
    return [one for one in tree_leaves(made) if isinstance(one, Tensor) and one.layout == torch.strided]


def _versions(made: Any) -> list[int]:
    """How often tensors were changed; those of an inference mode do not count."""
    return [0 if one.is_inference() else one._version for one in _tensors(made)]


def name_of(node: Node) -> str:
    """The name of the method or function that a node calls."""
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
