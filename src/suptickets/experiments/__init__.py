"""The paper's experiments: its tables and figures as data, the runner that computes them, the store."""

from suptickets.experiments.cells import EXPERIMENTS, MEASURES, Cell, Experiment, Number, experiment, select

__all__ = ["EXPERIMENTS", "MEASURES", "Cell", "Experiment", "Number", "experiment", "select"]
