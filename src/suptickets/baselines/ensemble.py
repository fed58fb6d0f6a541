"""Several predictors as one: the mean of their probabilities.

A prediction ensemble runs whole networks (the cheap tickets of a run, or dense networks of several seeds).
`TreeNet` and `BatchEnsemble` are one network with several members. All of them are modules that give
log-probabilities in evaluation mode, so whatever evaluates a network evaluates them, batch by batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from suptickets.errors import SparsityError
from suptickets.measure import diversity


class Members(nn.Module):
    """A network with several members; in evaluation mode it predicts with the mean of their probabilities."""

    @property
    def size(self) -> int:
        """How many members there are."""
        raise NotImplementedError

    def members(self, x: Tensor) -> Tensor:
        """The logits of each member: (members, batch, classes)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Training: the logits of each member. Evaluation: log-probabilities, (batch, classes)."""
        logits = self.members(x)
        return logits if self.training else diversity.ensemble(logits.unbind())


class Ensemble(Members):
    """A prediction ensemble of networks that are trained already; it is in evaluation mode when built."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        """The `networks` are used as they are, not copied."""
        super().__init__()
        if not networks:
            raise SparsityError("an ensemble needs at least one network")
        self.networks = nn.ModuleList(networks)
        self.eval()

    @property
    def size(self) -> int:
        """How many networks there are."""
        return len(self.networks)

    def members(self, x: Tensor) -> Tensor:
        """The logits of each network."""
        return torch.stack([network(x) for network in self.networks])


def as_one_batch(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of all members, and the labels of each, as those of one batch.

    The mean loss over that batch is the mean of the members' losses, and has its gradients. Logits of a plain
    network, (batch, classes), come back as they are.
    """
    if logits.dim() == labels.dim() + 1:
        return logits, labels
    return logits.flatten(0, 1), labels.repeat(len(logits))
