"""Several predictors on the same data: the scores of each, how different they are, and their ensemble."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from suptickets.measure.diversity import Diversity, ensemble
from suptickets.measure.predictions import Tally


class Panel:
    """Running sums over batches; a single predictor has no diversity, and is its own ensemble."""

    def __init__(self, predictors: int, device: torch.device | str = "cpu") -> None:
        """Nothing counted yet."""
        self.each = [Tally(device) for _ in range(predictors)]
        self.diversity = Diversity(predictors, device) if predictors > 1 else None
        self.ensemble = Tally(device)

    def add(self, logits: Sequence[Tensor], labels: Tensor) -> None:
        """Count a batch, given the logits of each predictor for it."""
        for tally, own in zip(self.each, logits, strict=True):
            tally.add(own, labels)
        if self.diversity is not None:
            self.diversity.add(logits)
        self.ensemble.add(ensemble(logits), labels)

    def tensors(self) -> list[Tensor]:
        """All sums, for adding up over processes."""
        tallies = [tensor for tally in (*self.each, self.ensemble) for tensor in tally.tensors()]
        return tallies + ([] if self.diversity is None else self.diversity.tensors())

    def difference(self) -> dict[str, float] | None:
        """Disagreement and KL, for JSON; None for a single predictor."""
        return None if self.diversity is None else self.diversity.scores().as_dict()


def details(tally: Tally) -> dict[str, Any]:
    """What is reported of predictions besides their scores, for JSON."""
    return {"top5": tally.top5(), "reliability": [one.as_dict() for one in tally.reliability()]}
