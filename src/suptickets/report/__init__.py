"""Reports: one self-contained HTML page, tables for papers, plots for papers."""

from suptickets.report.cells import CellResult, Ours, Paper, best_among, better_than
from suptickets.report.experiment import experiment_page
from suptickets.report.figures import FIGURES
from suptickets.report.run_page import run_page
from suptickets.report.runs import read_runs
from suptickets.report.stored import stored_runs
from suptickets.report.write import FORMATS, write_book, write_page, write_report

__all__ = [
    "FIGURES",
    "FORMATS",
    "CellResult",
    "Ours",
    "Paper",
    "best_among",
    "better_than",
    "experiment_page",
    "read_runs",
    "run_page",
    "stored_runs",
    "write_book",
    "write_page",
    "write_report",
]
