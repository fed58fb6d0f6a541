"""A model, an optimizer and a batch: what the measurements train."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from suptickets import Method, SparseNetwork, sparsify
from suptickets.models import MODELS, build_model


class Trainer:
    """Trains on one random batch with SGD and momentum; sparse if there is a method."""

    network: SparseNetwork | None = None

    def __init__(self, model: str, method: Method | None = None, *, batch: int = 128) -> None:
        torch.manual_seed(0)
        size = MODELS[model].size
        self.x = torch.randn(batch, 3, size, size)
        self.y = torch.randint(10, (batch,))
        self.model = build_model(model, classes=10)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
        if method is not None:
            self.network = sparsify(self.model, method, self.optimizer, seed=0)

    def step(self) -> None:
        """Forward, backward, optimizer."""
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.x), self.y).backward()
        self.optimizer.step()
