"""Knowledge distillation (Hinton et al., 2015) from several tickets into one sparse student.

The paper trains a student, sparse by the same method, for a whole run; three tickets teach it, and each soft
loss weighs as much as the hard one. So the loss is the mean of the hard loss and of one soft loss for each
teacher. A mean, not a sum, as Hinton et al. take a weighted average.

A soft loss is the Kullback-Leibler divergence from the teacher's probabilities to the student's, both at
temperature T. It differs from Hinton's cross entropy by the teacher's entropy, which no gradient sees, and is
0 for a student that agrees. Where logits are small beside T its gradients shrink like 1/T^2, so it is
multiplied by T^2, as Hinton et al. say is needed beside a hard loss. Where teachers are sure of themselves
its gradients are up to T times those of the hard loss, and a rate that suits the hard loss alone may be too
high. The paper gives no temperature; 4 is our choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax

from suptickets.errors import SparsityError

TEMPERATURE = 4.0


class Distillation:
    """A loss `(logits, x, y)`: what the student says of `x`, against labels and teachers.

    Args:
        teachers: trained networks, on the student's device; they are put into evaluation mode.
        temperature: divides all logits of the soft losses.
        hard: the loss against the labels, a mean over the samples.
    """

    def __init__(
        self,
        teachers: Sequence[nn.Module],
        temperature: float = TEMPERATURE,
        hard: Callable[[Tensor, Tensor], Tensor] = cross_entropy,
    ) -> None:
        """See the class."""
        if not teachers:
            raise SparsityError("distillation needs at least one teacher")
        if not isinstance(temperature, int | float) or not 0 < temperature < float("inf"):
            raise SparsityError(f"temperature must be above 0, not {temperature!r}")
        self.teachers = [teacher.eval() for teacher in teachers]
        self.temperature, self.hard = float(temperature), hard

    def __call__(self, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The mean of the hard loss and of the soft loss from each teacher."""
        with torch.no_grad():
            taught = [self._softened(teacher(x)) for teacher in self.teachers]
        learnt = self._softened(logits)
        soft = [self.temperature**2 * _divergence(learnt, teacher) for teacher in taught]
        return torch.stack([self.hard(logits, y), *soft]).mean()

    def _softened(self, logits: Tensor) -> Tensor:
        """Log-probabilities at the temperature, in float32 at least."""
        half = logits.dtype in (torch.bfloat16, torch.float16)
        return log_softmax((logits.float() if half else logits) / self.temperature, dim=1)


def _divergence(learnt: Tensor, taught: Tensor) -> Tensor:
    """The mean over the samples; 0 if there are none."""
    total = kl_div(learnt, taught, reduction="sum", log_target=True)
    return total / max(len(learnt), 1)
