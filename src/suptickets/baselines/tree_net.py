"""TreeNet (Lee et al., "Why M heads are better than one", 2015): a shared trunk, several heads.

Where the trunk ends is free. Lee et al. try several depths: the more is shared, the cheaper is a head and the
more alike are the heads. Here the heads hold the last third of the layers, counted along the chain of the
network, where a residual block is one link. Why: at one end, without a trunk, it is an ensemble at full
price; at the other, with only the last layer apart, the heads hardly differ; and what the first layers learn
is what all networks learn. The last third is also where both networks of the diversity experiment have their
last stage: VGG-16 splits before its fifth block (of fifteen layers, three convolutions and two linear layers
are a head), Wide ResNet-28-10 before its third stage (of fourteen links, four blocks and the linear layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from suptickets.baselines.ensemble import Members
from suptickets.errors import SparsityError, choice
from suptickets.layers import ELIGIBLE
from suptickets.models.shape import linked


@runtime_checkable
class Chained(Protocol):
    """A module that can give itself as a chain of modules."""

    def chain(self) -> nn.Sequential:
        """Its own modules, one after the other."""


class TreeNet(Members):
    """One trunk, with the heads of several networks on it.

    The loss is the mean of the heads' losses (`as_one_batch`), each on the whole batch; the prediction is the
    mean of their probabilities. With one network it is that network.

    Args:
        networks: freshly built networks of one architecture, one for each head, so that the heads start
            differently; the trunk is that of the first. They are taken apart, not copied.
        split: name of the first module of the heads, in `chain(network)`; the last third by default.
    """

    def __init__(self, networks: Sequence[nn.Module], split: str | None = None) -> None:
        """See the class."""
        super().__init__()
        chains = [chain(network) for network in networks]
        _check(networks, chains)
        first = _first_of_head(chains[0], split)
        self.trunk = chains[0][:first]
        self.heads = nn.ModuleList(links[first:] for links in chains)

    @property
    def size(self) -> int:
        """How many heads there are."""
        return len(self.heads)

    def members(self, x: Tensor) -> Tensor:
        """The logits of each head; each gets its own copy, as it may begin with an in-place operation."""
        shared = self.trunk(x)
        return torch.stack([head(shared.clone()) for head in self.heads])


def chain(network: nn.Module) -> nn.Sequential:
    """The network's own modules as a sequence of links: what comes after a link sees only its output.

    The network may be any `nn.Sequential`, or any module with a method `chain()`, such as those models of
    this library whose blocks are not a sequence already.
    """
    if isinstance(network, Chained):
        return network.chain()
    if isinstance(network, nn.Sequential) and type(network).forward is nn.Sequential.forward:
        return linked(network._modules)
    raise SparsityError(
        f"{type(network).__name__} is no chain of modules: make it an nn.Sequential of its blocks, or give "
        "it a method chain() that returns one"
    )


def _first_of_head(links: nn.Sequential, split: str | None) -> int:
    """The place of `split`; by default, that of the first layer or block of the last third."""
    names = list(links._modules)
    if split is not None:
        return names.index(choice("module to split at", split, names))
    layers = [i for i, link in enumerate(links) if any(isinstance(m, ELIGIBLE) for m in link.modules())]
    if not layers:
        raise SparsityError("there is no convolution or linear layer to split at: name a module with split")
    return layers[-max(round(len(layers) / 3), 1)]


def _check(networks: Sequence[nn.Module], chains: Sequence[nn.Sequential]) -> None:
    if not networks:
        raise SparsityError("a TreeNet needs at least one network")
    if len({id(network) for network in networks}) < len(networks):
        raise SparsityError("the heads of a TreeNet start differently: build a network for each of them")
    shapes = [{name: tensor.shape for name, tensor in links.state_dict().items()} for links in chains]
    if any(other != shapes[0] for other in shapes):
        raise SparsityError("the networks of a TreeNet must be of one architecture")
