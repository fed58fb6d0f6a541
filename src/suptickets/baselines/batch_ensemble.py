"""BatchEnsemble (Wen et al., ICLR 2020): members that share each weight, up to a factor of rank one.

Member m has the weights W * (s_m r_m^T), never built: (x * r_m) goes through the shared layer, and what comes
out is multiplied by s_m. The batch holds the samples of all members at once. In training it is divided among
them, so that a step costs as much as with the plain network and a member sees its share of the data; in a
prediction it is repeated for each member. One rule fits both, so no layer has to be told which member a
sample belongs to: sample i of n belongs to member floor(i * members / n).

Each member has its own batch norm, over its own samples, as the authors' layers have it (edward2's
`ensemble_batchnorm`): members with other signs have other statistics, and a divided batch normalised as a
whole hardly trains. The authors' later Wide ResNet (uncertainty-baselines) shares batch norm, but repeats the
batch in training too and makes it smaller by as much: a step costs the same, an epoch has more of them.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from suptickets.baselines.ensemble import Members
from suptickets.errors import SparsityError, whole
from suptickets.layers import ELIGIBLE


class BatchEnsemble(Members):
    """A network whose convolutions and linear layers have factors and biases for each member.

    Args:
        network: the plain network; its layers are replaced, in place, by `RankOne` ones that hold them, and
            its batch norms by one for each member.
        members: how many there are.
        seed: seed of the factors, which start as random signs.
    """

    def __init__(self, network: nn.Module, members: int, seed: int = 0) -> None:
        """See the class."""
        super().__init__()
        _refuse(network)
        self.count = whole("members", members)
        self.network = network
        generator = torch.Generator().manual_seed(whole("seed", seed, 0))
        made: dict[nn.Module | None, nn.Module] = {}
        for parent in list(self.modules()):
            for name, layer in parent._modules.items():
                if isinstance(layer, ELIGIBLE) and layer not in made:
                    made[layer] = RankOne(layer, members, generator)
                elif isinstance(layer, _BatchNorm) and layer not in made:
                    made[layer] = MemberNorm(layer, members)
                parent._modules[name] = made.get(layer, layer)

    @property
    def size(self) -> int:
        """How many members there are."""
        return self.count

    def members(self, x: Tensor) -> Tensor:
        """The logits of each member for all samples."""
        logits: Tensor = self.network(x.repeat(self.count, *[1] * (x.dim() - 1)))
        apart: Tensor = logits.unflatten(0, (self.count, x.shape[0]))
        return apart

    def forward(self, x: Tensor) -> Tensor:
        """Training: the logits of each sample's member. Evaluation: log-probabilities of the mean."""
        logits: Tensor = self.network(x) if self.training else super().forward(x)
        return logits

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: no decay of the factors, as in the authors' implementation."""
        layers = [module for module in self.modules() if isinstance(module, RankOne)]
        factors = {id(factor): factor for layer in layers for factor in (layer.r, layer.s)}
        others = [parameter for parameter in self.parameters() if id(parameter) not in factors]
        return [
            {"params": others, "weight_decay": weight_decay},
            {"params": list(factors.values()), "weight_decay": 0.0},
        ]


class RankOne(nn.Module):
    """A layer with one weight for all members, and factors of input and output and a bias for each."""

    def __init__(self, layer: nn.Module, members: int, generator: torch.Generator) -> None:
        """`layer` gives its weight, and its bias to each member; `generator` draws the signs."""
        super().__init__()
        self.layer = layer
        linear, weight, bias = isinstance(layer, nn.Linear), layer.get_parameter("weight"), layer.bias
        self.channels = -1 if linear else 1  # the dimension that the factors scale
        inputs, outputs = ("in_features", "out_features") if linear else ("in_channels", "out_channels")
        self.r = nn.Parameter(_signs(members, getattr(layer, inputs), generator).to(weight))
        self.s = nn.Parameter(_signs(members, getattr(layer, outputs), generator).to(weight))
        self.bias = nn.Parameter(bias.detach().repeat(members, 1)) if isinstance(bias, Tensor) else None
        layer.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """(x * r) W * s + b, with the factors of each sample's member."""
        member = torch.arange(x.shape[0], device=x.device) * len(self.r) // x.shape[0]
        y: Tensor = self.layer(x * self._spread(self.r[member], x))
        y = y * self._spread(self.s[member], y)
        return y if self.bias is None else y + self._spread(self.bias[member], y)

    def _spread(self, factors: Tensor, like: Tensor) -> Tensor:
        """A row of factors for each sample, in the shape and dtype that multiplies `like`."""
        shape = [like.shape[0], *[1] * (like.dim() - 1)]
        shape[self.channels] = factors.shape[1]
        return factors.view(shape).to(like.dtype)


class MemberNorm(nn.Module):
    """A batch norm for each member: scale, shift and statistics over its own samples."""

    def __init__(self, norm: nn.Module, members: int) -> None:
        """All members begin with a copy of `norm`."""
        super().__init__()
        self.norms = nn.ModuleList(copy.deepcopy(norm) for _ in range(members))

    def forward(self, x: Tensor) -> Tensor:
        """Each sample normalised by its member."""
        members = len(self.norms)
        begins = [-(-m * x.shape[0] // members) for m in range(members + 1)]
        shares = x.split([end - begin for begin, end in pairwise(begins)])
        if self.training and any(share[:, 0].numel() == 1 for share in shares):
            raise SparsityError(
                f"a batch of {len(x)} leaves one of {members} members a single value to normalise: use fewer "
                "members, or batches with two samples or more for each"
            )
        normal = [norm(share) for norm, share in zip(self.norms, shares, strict=True) if share.shape[0]]
        return torch.cat(normal) if normal else x


def _signs(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(2, (rows, columns), generator=generator) * 2 - 1


def _refuse(network: nn.Module) -> None:
    """Refuse weights that would get no factors: all members would share them silently."""
    layers = [module for module in network.modules() if isinstance(module, ELIGIBLE)]
    known = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    others = [n for n, p in network.named_parameters() if p.dim() >= 2 and id(p) not in known]
    if others or not layers:
        found = f"{others[0]} is no weight of these" if others else "the network has none"
        raise SparsityError(f"BatchEnsemble has factors for convolutions and linear layers: {found}")
