"""What Sup-tickets is compared with: ensembles, networks with several members, distillation."""

from suptickets.baselines.batch_ensemble import BatchEnsemble
from suptickets.baselines.distillation import Distillation
from suptickets.baselines.ensemble import Ensemble, Members, as_one_batch
from suptickets.baselines.tree_net import TreeNet

__all__ = ["BatchEnsemble", "Distillation", "Ensemble", "Members", "TreeNet", "as_one_batch"]
