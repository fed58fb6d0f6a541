"""Handwritten digits (Alpaydin and Kaynak, 1998): 1,797 grey images, 8 x 8, that come with scikit-learn."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from suptickets.data.base import ArrayData
from suptickets.errors import SparsityError

MEAN, STD = 0.3058, 0.3761  # of the training images


def load_digits(data_dir: Path | None = None) -> ArrayData:
    """The digits, 1,437 to train on and 360 to test on; nothing is read from `data_dir`, or augmented.

    The split is fixed: of the images sorted by class, and within a class as they come, the first of every
    five is for testing, so that each class has its share. Values from 0 to 16 become bytes, rounded.
    """
    rows = np.loadtxt(_embedded(), delimiter=",")
    pixels, labels = rows[:, :-1], rows[:, -1].astype(np.int64)
    by_class = np.argsort(labels, kind="stable")
    images = torch.from_numpy(np.rint(pixels * (255 / 16)).astype(np.uint8)[by_class]).view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels[by_class])
    test = torch.arange(len(targets)) % 5 == 0
    return ArrayData(
        name="digits",
        classes=10,
        train_x=images[~test],
        train_y=targets[~test],
        test_x=images[test],
        test_y=targets[test],
        mean=(MEAN,),
        std=(STD,),
    )


def _embedded() -> Path:
    """The file that scikit-learn reads: importing it for that would take a second."""
    sklearn = find_spec("sklearn")
    for folder in (sklearn and sklearn.submodule_search_locations) or ():
        if (path := Path(folder, "datasets", "data", "digits.csv.gz")).is_file():
            return path
    raise SparsityError("the digits come with scikit-learn, and are not there: pip install scikit-learn")
