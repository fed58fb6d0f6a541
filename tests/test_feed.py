"""What a step is given: the same batches from data on the device as from a loader; and what it adds up."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.nn.functional import cross_entropy

from suptickets.data.base import ArrayData
from suptickets.training import feed as module
from suptickets.training.feed import Feed, Resident, Sent, feed
from suptickets.training.meter import LATER, Meter
from suptickets.training.processes import Processes

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Batch = tuple[Tensor, Tensor]


def made(count: int = 50, padding: int = 2, mode: str = "reflect", flip: bool = True) -> ArrayData:
    """Random images of 6 x 7 pixels; the label of each is its place."""
    x = torch.randint(256, (count, 3, 6, 7), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    y, mean, std = torch.arange(count), (0.2, 0.5, 0.7), (0.3, 0.2, 0.4)
    return ArrayData("made", count, x, y, x[:1], y[:1], mean, std, padding, mode, flip)


def parts(
    data: Any,
    batch_size: int = 8,
    seed: int = 3,
    dtype: torch.dtype = torch.float64,
    device: torch.device = CPU,
) -> Any:
    """What a feed wants to know of a run."""
    settings = SimpleNamespace(batch_size=batch_size, seed=seed)
    return SimpleNamespace(settings=settings, dtype=dtype, data=data, processes=Processes(0, 1, device))


def epoch(source: Feed, number: int, done: int = 0) -> list[Batch]:
    """Copies of the batches of an epoch, as a step sees them."""
    found = []
    for size in source.epoch(number, done):
        x, y = source.batch(size)
        found.append((x.clone(), y.clone()))
        source.advance(size)
    return found


def assert_same(ours: list[Batch], theirs: list[Batch]) -> None:
    assert [len(y) for _, y in ours] == [len(y) for _, y in theirs]
    for (x, y), (a, b) in zip(ours, theirs, strict=True):
        assert x.dtype == a.dtype and torch.equal(x, a.to(x.device)) and torch.equal(y, b.to(y.device))


FEEDS = [Resident, Sent]


# ---- the same batches ----


@pytest.mark.parametrize("kind", FEEDS)
@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.parametrize(("padding", "flip"), [(2, True), (3, False), (0, True), (0, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_feed_gives_what_the_plain_path_gets(
    kind: Any, mode: str, padding: int, flip: bool, dtype: torch.dtype
) -> None:
    """Bit for bit, in whichever order epochs are asked for."""
    data = made(mode=mode, padding=padding, flip=flip)
    source = kind(data, parts(data, dtype=dtype))
    for number in (0, 1, 2, 7, 2, 0):
        assert_same(epoch(source, number), [*data.train_batches(8, 3, number, dtype=dtype)])


@pytest.mark.parametrize("kind", FEEDS)
def test_resuming_in_the_middle_of_an_epoch(kind: Any) -> None:
    data = made()
    whole = epoch(kind(data, parts(data)), 4)
    for done in range(7):
        source = kind(data, parts(data))
        assert_same(epoch(source, 4, done), whole[done:])
        assert_same(epoch(source, 5), [*data.train_batches(8, 3, 5, dtype=torch.float64)])


@pytest.mark.parametrize("kind", FEEDS)
@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(8, [8] * 6 + [2]), (25, [25, 25]), (49, [49, 1]), (50, [50]), (64, [50])]
)
def test_every_sample_once_and_the_last_batch_with_its_own_size(
    kind: Any, batch_size: int, sizes: list[int]
) -> None:
    data = made()
    source = kind(data, parts(data, batch_size))
    for number in range(2):
        found = epoch(source, number)
        assert [len(x) for x, _ in found] == sizes
        assert sorted(torch.cat([y for _, y in found]).tolist()) == [*range(50)]


def test_seeds_and_epochs_differ() -> None:
    data = made()
    seen = [epoch(Resident(data, parts(data, seed=s)), number)[0][0] for s in (0, 1) for number in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


def test_batches_are_always_in_the_same_place() -> None:
    """What was captured reads the same tensors in every epoch; nothing of the data is changed."""
    data = made()
    before = data.train_x.clone()
    resident, sent = Resident(data, parts(data)), Sent(data, parts(data))

    def places() -> list[int]:
        kept = (*resident.plan, resident.place, sent.x, sent.y)
        return [tensor.data_ptr() for tensor in kept]

    first = places()
    for number in range(3):
        epoch(resident, number)
        for size in sent.epoch(number, 0):
            x, y = sent.batch(size)
            assert (x.data_ptr(), y.data_ptr()) == (sent.x.data_ptr(), sent.y.data_ptr())
        assert places() == first
    assert torch.equal(data.train_x, before)


def test_data_on_the_device_are_used_there(monkeypatch: pytest.MonkeyPatch) -> None:
    data = made()
    assert isinstance(feed(parts(data)), Resident)
    monkeypatch.setattr(module, "Sent", lambda data, parts: "sent")
    assert feed(parts(data, device=torch.device("meta"))) == "sent"
    assert feed(parts(SimpleNamespace(train_x=data.train_x))) == "sent"


# ---- the distribution of crops and flips ----


def moves(images: Tensor, original: Tensor, padding: int, mode: str) -> list[tuple[int, int, bool]]:
    """Which row, column and mirroring each image shows, found by comparing with all of them."""
    numpy_mode: Any = {"reflect": "reflect", "zeros": "constant"}[mode]
    pad = np.pad(original.numpy(), [(0, 0), (padding, padding), (padding, padding)], mode=numpy_mode)
    _, height, width = original.shape
    span = range(2 * padding + 1)
    cuts = {(y, x): pad[:, y : y + height, x : x + width] for y in span for x in span}
    views = {(*k, f): cut[:, :, ::-1] if f else cut for k, cut in cuts.items() for f in (False, True)}
    found = {view.tobytes(): key for key, view in views.items()}
    assert len(found) == len(views)
    return [found[image.numpy().tobytes()] for image in images]


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
def test_both_paths_move_images_alike_and_evenly(mode: str) -> None:
    """One image, shown 5,000 times: its crops and flips, read off the pixels, borders included."""
    data = made(1, padding=2, mode=mode)
    image = data.train_x[0]
    many = ArrayData(
        "many", 1, image.expand(5000, -1, -1, -1), torch.zeros(5000).long(), data.test_x, data.test_y,
        (0.0,) * 3, (1 / 255,) * 3, 2, mode, True,
    )  # fmt: skip
    about = parts(many, 512)
    plain = torch.cat([x for x, _ in many.train_batches(512, 3, 0, dtype=torch.float64)])
    counted = []
    for pixels in (plain, *(torch.cat([x for x, _ in epoch(kind(many, about), 0)]) for kind in FEEDS)):
        seen = moves(pixels.round().to(torch.uint8), image, 2, mode)
        counts = Counter(seen)
        assert len(counts) == 5 * 5 * 2
        assert chisquare(list(counts.values())).pvalue > 0.01
        for axis in range(3):
            assert chisquare(list(Counter(key[axis] for key in seen).values())).pvalue > 0.01
        counted.append(seen)
    assert counted[0] == counted[1] == counted[2]


# ---- sums of loss and accuracy ----


def steps(sizes: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Loss, logits and labels of steps with these many samples."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        logits, y = torch.randn(size, 5, generator=generator), torch.randint(5, (size,), generator=generator)
        found.append((cross_entropy(logits.double(), y), logits, y))
    return found


def by_hand(seen: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Summed loss, right predictions, finite losses, in Python."""
    losses = [(float(loss), len(y)) for loss, _, y in seen]
    right = sum(
        int(max(range(5), key=lambda i, row=row: float(row[i])) == int(label))
        for _, logits, y in seen
        for row, label in zip(logits, y, strict=True)
    )
    total = 0.0
    for loss, n in losses:  # sum() of Python 3.12 is more exact than adding one by one
        total += loss * n
    return torch.tensor(
        [total, right, sum(abs(loss) < float("inf") for loss, _ in losses)], dtype=torch.float64
    )


@pytest.mark.parametrize("count", [1, LATER - 1, LATER, LATER + 1, 3 * LATER + 5])
def test_sums_do_not_depend_on_how_steps_are_counted(count: int) -> None:
    """Together or one by one, read often or once, added by the step itself, loaded in between."""
    seen = steps([7] * (count - 1) + [3])
    together, often, itself, resumed = (Meter() for _ in range(4))
    for loss, logits, y in seen:
        together.add(loss, logits, y)
        often.add(loss, logits, y)
        often.values()
        itself.sums += Meter.summed(loss, logits, y)
        resumed.add(loss, logits, y)
        values, resumed = resumed.values(), Meter()
        resumed.load(values)
    expected = by_hand(seen)
    for meter in (together, often, itself, resumed):
        assert torch.equal(meter.values(), expected)


def test_what_was_read_stays_and_a_new_epoch_begins_at_zero() -> None:
    meter, sums = Meter(), None
    for loss, logits, y in steps([4, 4]):
        meter.add(loss, logits, y)
        sums = meter.sums
    first = meter.values()
    kept = first.clone()
    meter.add(*steps([4], 1)[0])
    meter.values()
    assert torch.equal(first, kept)
    meter.add(*steps([4], 2)[0])
    meter.reset()
    assert meter.values().tolist() == [0, 0, 0] and meter.sums is sums
    meter.add(*steps([4], 3)[0])
    meter.load(first)
    assert torch.equal(meter.values(), first) and meter.sums is sums


def test_losses_that_are_not_finite_are_not_counted() -> None:
    factors = 1, float("inf"), float("nan")
    seen = [(loss * factor, x, y) for (loss, x, y), factor in zip(steps([2] * 3), factors, strict=True)]
    meter, itself = Meter(), Meter()
    for loss, logits, y in seen:
        meter.add(loss, logits, y)
        itself.sums += Meter.summed(loss, logits, y)
    assert meter.values()[2] == itself.values()[2] == 1


def test_steps_hold_on_to_no_graph() -> None:
    meter = Meter()
    logits = torch.randn(4, 5, requires_grad=True)
    y = torch.arange(4)
    meter.add(cross_entropy(logits, y), logits, y)
    assert all(not t.requires_grad for entry in meter._waiting for t in entry)


# ---- a GPU ----


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.gpu
@needs_gpu
def test_a_gpu_is_given_what_a_cpu_is(mode: str) -> None:
    data, device = made(mode=mode), torch.device("cuda", 0)
    expected = [*data.train_batches(8, 3, 1, dtype=torch.float32)]
    for source, kind in ((data.to(device), Resident), (data, Sent)):
        given = feed(about := parts(source, dtype=torch.float32, device=device))
        assert type(given) is kind
        assert_same(epoch(given, 1), expected)
        assert_same(epoch(feed(about), 1, 3), expected[3:])


@pytest.mark.gpu
@needs_gpu
def test_a_captured_batch_is_a_new_one_at_every_replay() -> None:
    """One graph for the full batches, one for the last; epochs and resuming change what they read."""
    data, device = made(), torch.device("cuda", 0)
    source = Resident(data.to(device), parts(data, dtype=torch.float32, device=device))
    graphs: dict[int, tuple[Any, Batch]] = {}
    for number, done in ((0, 0), (1, 0), (4, 2)):
        found = []
        for size in source.epoch(number, done):
            if size not in graphs:
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    batch = source.batch(size)
                    source.advance(size)
                graphs[size] = graph, batch
            graphs[size][0].replay()
            found.append(tuple(tensor.clone() for tensor in graphs[size][1]))
        assert_same(found, [*data.train_batches(8, 3, number)][done:])
    assert sorted(graphs) == [2, 8]
