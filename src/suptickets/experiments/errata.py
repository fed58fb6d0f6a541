"""Where the paper is known to be wrong about an experiment, in short; docs/errata.md tells all of it."""

from __future__ import annotations

from suptickets.report.document import Note

UNPRINTED = ("figures", "The paper only draws this: its source has no numbers to compare with.")
# By experiment: the anchor in docs/errata.md, and a sentence.
_SAID = {
    "averaging": UNPRINTED,
    "batch-norm": (
        "wide-resnet",
        "Wide ResNet with SET and Sup-tickets on CIFAR-10 at 80 % is 95.92 here and 95.93 in Table 9.",
    ),
    "diversity": (
        "diversity",
        "The text finds tickets as diverse as BatchEnsemble's members or more; in KL they are less.",
    ),
    "granet-vs-dense": ("granet-dense", "Of the 16 bold cells 15 are better than dense and one is a tie."),
    "imagenet": (
        "imagenet-flops",
        "Dense training is 3.14e18 FLOPs, not 3.2e18; the shares of SET and SNIP follow no one rule.",
    ),
    "large-lr": ("large-lr", "The text says that the average falls to 10 to 30 %; the table has 31.74."),
    "layer-sparsity": (
        "the-layer-table-resnet-50-imagenet-90-",
        "The FLOPs of four layers are wrong, and overall and backbone sparsity do not follow from the rows.",
    ),
    "resnet50": (
        "cases",
        "The text counts 63 of 66 better cells of dynamic methods; 12 of the 63 are SNIP's and ERK's.",
    ),
    "schedule": ("eq-3", "By Eq. 3 the first step of a cycle is already above the lowest rate."),
    "significance": (
        "runs",
        "The p-values are those of 14 against 14 runs, not 15; 1.02e-2 is none that the test can give.",
    ),
    "swa": (
        "dense-flops",
        "The unit of the training FLOPs should be 9.735e16, not 9.74e18; at 95, 90 and 80 % ERK takes 0.114, "
        "0.225 and 0.385 of it, not 0.11, 0.18 and 0.30.",
    ),
    "ticket-count-extended": (
        "ticket-count",
        "The row of three tickets is the setting of the main tables, which print other numbers for it.",
    ),
    "ticket-count-fixed": UNPRINTED,
    "uncertainty": UNPRINTED,
    "variance": (
        "variance",
        "What it calls variance is the population deviation; its third pair of criteria is its second.",
    ),
    "vgg16": (
        "gains",
        "The text finds the largest gains here; ResNet-50 with SNIP gains 24.31 points.",
    ),
    "wrn28-10": (
        "wide-resnet",
        "SET with Sup-tickets on CIFAR-10 at 80 % is 95.93 here and 95.92 in the table of batch norm.",
    ),
}
ERRATA = {name: Note(text, f"errata.md#{anchor}") for name, (anchor, text) in _SAID.items()}
