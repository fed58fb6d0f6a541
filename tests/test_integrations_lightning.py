"""Lightning's Trainer: what it trains is, to the bit, what a plain loop trains; checkpoints; refusals."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_state
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import suptickets as st

torch_compile = torch.compile
lightning = pytest.importorskip("lightning.pytorch")
torch.compile = torch_compile  # Lightning has wrapped it, for all tests of this process
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning", "ignore::FutureWarning", "ignore:the training took:RuntimeWarning"
)

from lightning.pytorch.callbacks import (  # noqa: E402
    BatchSizeFinder,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner  # noqa: E402

from suptickets.integrations.lightning import SparseTraining  # noqa: E402

EPOCHS, BATCHES, BATCH = 8, 6, 16
CYCLES: dict[str, Any] = {"cycles": 2, "cycle_epochs": 2, "lr": (0.01, 0.05), "seed": 3}


def rigl() -> st.Method:
    return st.RigL(0.8, interval=5)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))


def batches() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCHES * BATCH, 20, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), batch_size=BATCH)


def built(module: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A scheduler that drops the rate before the cycles and in them, each time from the last rate."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = built(self)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], _: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, 0))
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


class Watch(lightning.Callback):
    """What there is at the end of each epoch; stops after `last` of them."""

    def __init__(self, sparse: SparseTraining, last: int = EPOCHS) -> None:
        self.sparse, self.last = sparse, last
        self.nonzero: list[int] = []
        self.rates: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.sparse.network.check()
        self.nonzero.append(self.sparse.network.nonzero)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        trainer.should_stop = trainer.current_epoch + 1 == self.last


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"max_epochs": EPOCHS, "enable_checkpointing": False, "accelerator": "cpu", **quiet, **options}
    return lightning.Trainer(callbacks=list(callbacks), **options)


def by_trainer(kind: type = Classifier, **options: Any) -> tuple[SparseTraining, Watch]:
    sparse = SparseTraining(rigl(), **CYCLES)
    watch = Watch(sparse)
    trainer(sparse, watch, **options).fit(kind(), batches())
    return sparse, watch


def by_hand(accumulate: int = 1, clip: float = 0.0, bf16: bool = False) -> st.SupTickets:
    model = network()
    optimizer, scheduler = built(model)
    sparse = st.sparsify(model, rigl(), optimizer, seed=3)
    steps = -(-BATCHES // accumulate)
    tickets = st.SupTickets(sparse, EPOCHS * steps, 2 * steps, 2, (0.01, 0.05))
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(batches(), start=1):
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = cross_entropy(model(x), y)
            (loss / accumulate).backward()
            if i % accumulate == 0 or i == BATCHES:
                if clip:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return tickets


# ---- the same training ----


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, {}),
        ({"accumulate_grad_batches": 4}, {"accumulate": 4}),
        ({"gradient_clip_val": 0.1}, {"clip": 0.1}),
        ({"precision": "bf16-mixed"}, {"bf16": True}),
    ],
)
def test_the_trainer_trains_what_a_plain_loop_does(options: dict[str, Any], plain: dict[str, Any]) -> None:
    (sparse, _), tickets = by_trainer(**options), by_hand(**plain)
    assert sparse.tickets is not None and sparse.tickets.summary() == tickets.summary()
    assert len(tickets.collected) == 2 and tickets.collected[-1] == tickets.total_steps
    ticket = sparse.ticket()
    assert isinstance(ticket, Classifier) and same_state(ticket.net, tickets.ticket())


STEPS: dict[str, Any] = {"cycles": 2, "cycle_steps": 2 * BATCHES, "lr": (0.01, 0.05), "seed": 3}


class Twice(Manual):
    def training_step(self, batch: list[Tensor], _: int) -> None:
        super().training_step(batch, 0)
        super().training_step(batch, 0)


def test_manual_optimization() -> None:
    sparse = SparseTraining(rigl(), total_steps=EPOCHS * BATCHES, **STEPS)
    trainer(sparse).fit(Manual(), batches())
    assert same_state(sparse.ticket().net, by_hand().ticket())
    twice = SparseTraining(rigl(), total_steps=2 * EPOCHS * BATCHES, **STEPS)
    trainer(twice).fit(Twice(), batches())
    assert twice.tickets.collected == [84, 96]


def test_accumulation_that_changes() -> None:
    """4 epochs of 6 steps, then 4 of 3."""
    sparse = SparseTraining(rigl(), total_steps=36, **{**STEPS, "cycle_steps": 6})
    trainer(sparse, GradientAccumulationScheduler({4: 2})).fit(Classifier(), batches())
    assert sparse.network.step == 36 and sparse.tickets.collected == [30, 36]


class Skips(Classifier):
    """The last batches of each epoch."""

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == 5 else None


@pytest.mark.parametrize(
    ("kind", "last", "total", "message"),
    [
        (Classifier, 3, None, "took 18 steps, and 48 were planned: there is no ticket.*network.densify"),
        (
            Classifier,
            7,
            None,
            r"took 42 steps, and 48 .* 1 of 2 tickets, the last of step 36 .if the trainer",
        ),
        (Skips, 8, None, "took 40 steps, and 48 were planned"),
        (Manual, 8, 40, "took 48 steps, and 40 were planned: .* 2 of 2 tickets, the last of step 40"),
    ],
)
def test_one_warning_if_the_training_ends_elsewhere(kind: Any, last: int, total: Any, message: str) -> None:
    sparse = SparseTraining(rigl(), total_steps=total, **STEPS)
    with pytest.warns(RuntimeWarning, match=message):
        trainer(sparse, Watch(sparse, last)).fit(kind(), batches())
    if last == 3:
        with pytest.raises(st.SparsityError, match=message):
            sparse.ticket()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (st.GMP(0.9), "gmp reaches its sparsity after 44000 steps, and the training has 12: .*prune_end"),
        (st.GraNet(0.9, prune_end=12, interval=5), "after 15 steps"),
        (st.RigL(0.9, interval=2, decay="cosine", total_steps=20), "total_steps=20, .* has 12: give it"),
    ],
)
def test_methods_that_would_not_come_to_their_end(method: st.Method, message: str) -> None:
    with pytest.raises(st.SparsityError, match=message):
        trainer(SparseTraining(method), max_epochs=2).fit(Classifier(), batches())


def test_there_is_no_ticket_before_the_training() -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    with pytest.raises(st.SparsityError, match="do not fit"):
        trainer(sparse, max_epochs=1).fit(Classifier(), batches())
    with pytest.raises(st.SparsityError, match="has not begun: train first"):
        sparse.ticket()


def test_counts_rates_and_logs_of_every_epoch() -> None:
    """The scheduler goes on as if there were no cycles."""
    sparse, watch = by_trainer()
    assert watch.nonzero == [round(0.2 * (20 * 64 + 64 * 4))] * EPOCHS
    assert watch.rates == [0.1] + [0.05] * 3 + [0.025] * 4  # of the next epoch
    assert [logged["sparsity"] for logged in watch.logged] == pytest.approx([sparse.network.sparsity] * 8)
    assert ["cycle_lr" in logged for logged in watch.logged] == [False] * 4 + [True] * 4
    assert watch.logged[-1]["cycle_lr"] == pytest.approx(0.01)


def test_the_ticket_is_a_plain_module() -> None:
    sparse, _ = by_trainer()
    ticket = sparse.ticket()
    assert type(ticket) is Classifier and [type(m) for m in ticket.net] == [type(m) for m in network()]
    assert ticket.state_dict().keys() == Classifier().state_dict().keys()
    zeros = sum(int((m.weight == 0).sum()) for m in ticket.net if isinstance(m, nn.Linear))
    assert zeros == sparse.network.parameters_total - sparse.network.nonzero
    before = ticket.net[0].weight.count_nonzero()
    trainer(max_epochs=1).fit(ticket, batches())  # and it can be trained, without the library
    assert ticket.net[0].weight.count_nonzero() > 2 * before


class Predicts(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def predict_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self(batch[0])


def test_the_ticket_of_a_compiled_module_computes_with_its_own_weights() -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(sparse).fit(torch.compile(Predicts(), backend="eager"), batches())
    ticket, plain = sparse.ticket(), Predicts()
    plain.load_state_dict(ticket.state_dict())
    assert not {"forward", "training_step", "predict_step"} & vars(ticket).keys()
    assert ticket._compiler_ctx is None
    assert same_state(ticket.net, by_hand().ticket())
    one, other = (torch.cat(trainer().predict(module, batches())) for module in (ticket, plain))
    assert torch.equal(one, other)


def test_without_cycles_the_ticket_is_the_network() -> None:
    sparse = SparseTraining(st.SET(0.9, interval=4), include="net.0")
    module = Classifier()
    fitted = trainer(sparse, max_epochs=-1, max_steps=7)  # of which the method need not know
    fitted.fit(module, batches())
    assert list(sparse.network.layers) == ["net.0"] and sparse.network.step == 7
    assert torch.equal(sparse.ticket().net[0].weight, module.net[0].weight)


# ---- checkpoints ----


@pytest.mark.parametrize("epochs", [3, 5, 7])
@pytest.mark.parametrize("method", [rigl, lambda: st.SNFS(0.8, interval=5)], ids=["rigl", "snfs"])
def test_a_run_that_was_stopped_goes_on_to_the_bit(method: Any, epochs: int, tmp_path: Path) -> None:
    """Before the cycles, between them, in the middle of one."""
    whole, first, second = (SparseTraining(method(), keep=True, **CYCLES) for _ in range(3))
    modules = Classifier(), Classifier(), Classifier()
    trainer(whole).fit(modules[0], batches())
    stopped = trainer(first, Watch(first, last=epochs))
    stopped.fit(modules[1], batches())
    stopped.save_checkpoint(tmp_path / "a.ckpt")
    nn.init.zeros_(modules[2].net[0].bias)  # everything comes from the checkpoint
    trainer(second).fit(modules[2], batches(), ckpt_path=tmp_path / "a.ckpt")
    assert first.network.step == epochs * BATCHES and second.network.step == EPOCHS * BATCHES
    assert same_state(modules[2], modules[0]) and same_state(second.ticket(), whole.ticket())
    assert second.tickets.summary() == whole.tickets.summary()
    assert all(map(same_state, second.tickets.tickets, whole.tickets.tickets))


def test_a_checkpoint_holds_the_model_once(tmp_path: Path) -> None:
    sparse, _ = by_trainer()
    state = sparse.state_dict()
    assert "model" not in state["network"] and state["network"]["step"] == EPOCHS * BATCHES


OTHERS: list[tuple[st.Method, dict[str, Any], str]] = [
    (rigl(), {**CYCLES, "cycles": 1}, r"other settings \(cycles: 2 -> 1\): give the same"),
    (rigl(), {"seed": 3}, "a training with other cycles"),
    (rigl(), {**CYCLES, "lr": [0.01, 0.06]}, r"\(lr: \(0.01, 0.05\) -> \(0.01, 0.06\)\)"),
    (rigl(), {**CYCLES, "rate": 0.4}, r"\(rate: 0.5 -> 0.4\)"),
    (rigl(), {**CYCLES, "schedule": lambda t, low, high: low}, r"\(schedule: triangle -> .*lambda"),
    (st.RigL(0.9, interval=4), CYCLES, r"\(method.interval: 5 -> 4, method.sparsity: 0.8 -> 0.9\)"),
    (st.SET(0.8, interval=5), CYCLES, r"\(method: rigl -> set, "),
]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    stopped = trainer(sparse, Watch(sparse, last=2))
    stopped.fit(Classifier(), batches())
    stopped.save_checkpoint(tmp_path / "a.ckpt")
    for method, other, message in OTHERS:
        with pytest.raises(st.SparsityError, match=message) as raised:
            sparse = SparseTraining(method, **other)
            trainer(sparse).fit(Classifier(), batches(), ckpt_path=tmp_path / "a.ckpt")
        assert "\n" not in str(raised.value)
    with pytest.raises(
        st.SparsityError, match=r"\(total_steps: 48 -> 54\): .* as many epochs, or begin anew"
    ):
        longer = trainer(SparseTraining(rigl(), **CYCLES), max_epochs=9)
        longer.fit(Classifier(), batches(), ckpt_path=tmp_path / "a.ckpt")
    saved = torch.load(tmp_path / "a.ckpt")
    torch.save({**saved, "callbacks": {}}, tmp_path / "b.ckpt")
    with pytest.raises(st.SparsityError, match="without this callback"):
        trainer(SparseTraining(rigl(), **CYCLES)).fit(Classifier(), batches(), ckpt_path=tmp_path / "b.ckpt")


# ---- refusals, in one line ----


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        while True:
            yield torch.randn(20), torch.tensor(1)


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 3)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cycles": 2, "lr": (0.1, 0.2)}, "one of cycle_epochs and cycle_steps"),
        ({"cycles": 2, "lr": (0.1, 0.2), "cycle_steps": 2, "cycle_epochs": 1}, "one of cycle_epochs"),
        ({"cycles": 2, "cycle_steps": 2}, r"lr=\(low, high\)"),
        ({"cycles": -1}, "cycles must be a whole number"),
        ({"cycle_steps": 2}, "without cycles"),
        ({"rule": "cia"}, "without cycles"),
        ({**CYCLES, "rules": "cia"}, "no setting 'rules': there are lr, rate, rule"),
        ({**CYCLES, "rule": "xx"}, "unknown rule 'xx'"),
        ({**CYCLES, "lr": 0.1}, r"lr must be \(low, high\)"),
        ({**CYCLES, "lr": (0.2, 0.1)}, r"lr must be \(low, high\)"),
        ({**CYCLES, "cycle_epochs": -1}, "cycle_epochs must be a number above 0, not -1"),
        ({**CYCLES, "cycle_epochs": "1"}, "cycle_epochs must be a number above 0, not '1'"),
        ({**STEPS, "cycle_steps": 1}, "cycle_steps must be a whole number, at least 2"),
        ({**CYCLES, "seed": -1}, "seed must be a whole number"),
        ({**CYCLES, "total_steps": 0}, "total_steps must be a whole number"),
        ({"method": "rigl"}, "expected a method such as .* not 'rigl'"),
        ({"method": st.RigL}, "expected a method such as"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(st.SparsityError, match=message) as raised:
        SparseTraining(**{"method": rigl(), **settings})
    assert "\n" not in str(raised.value)


def test_settings_are_checked_without_a_trace() -> None:
    """All that can be given is accepted, and the random state stays."""
    before = torch.get_rng_state()
    SparseTraining(rigl(), **CYCLES, batch_norm="recompute", criteria=("magnitude", "momentum"), keep=True)
    SparseTraining(rigl(), **STEPS, include_start=True, schedule="fge", explore_at="end", prune_when="end")
    assert torch.equal(before, torch.get_rng_state())


class Locked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_a_model_that_cannot_be_copied_is_refused_before_the_training() -> None:
    with pytest.raises(st.SparsityError, match=r"could not copy this model.*cannot pickle '_thread.lock'"):
        trainer(SparseTraining(rigl())).fit(Locked(), batches())


def test_trainings_that_cannot_be() -> None:
    def refused(message: str, module: Any, loader: Any, settings: Any = CYCLES, **options: Any) -> None:
        with pytest.raises(Exception, match=message) as raised:
            trainer(SparseTraining(rigl(), **settings), **options).fit(module, loader)
        assert "SparsityError" in f"{raised.type.__name__} {raised.value}"  # of a process that was forked

    endless = DataLoader(Endless(), batch_size=4)
    steps = {"cycles": 2, "cycle_steps": 3, "lr": (0.1, 0.2)}
    refused("has no end", Classifier(), batches(), max_epochs=-1)
    refused("has no end", Classifier(), endless)
    refused("give cycle_steps", Classifier(), endless, max_steps=20)
    refused("2 cycles of 12 steps do not fit", Classifier(), batches(), max_epochs=3)
    refused("manual optimization: give total_steps and cycle_steps", Manual(), batches())
    refused("give cycle_steps", Manual(), batches(), {**CYCLES, "total_steps": 48})
    refused("one optimizer is needed, and there are 2", TwoOptimizers(), batches())
    refused("strategy='ddp', no spawn", Classifier(), batches(), strategy="ddp_fork")
    with pytest.raises(st.SparsityError, match="GradientAccumulationScheduler: give total_steps"):
        accumulate = GradientAccumulationScheduler({4: 2})
        trainer(SparseTraining(rigl(), **CYCLES), accumulate).fit(Classifier(), batches())
    with pytest.raises(st.SparsityError, match="give this callback to a trainer"):
        SparseTraining(rigl()).ticket()
    trained = Classifier()
    sparse = SparseTraining(rigl(), **steps)
    trainer(sparse, max_epochs=-1, max_steps=20).fit(trained, endless)
    assert sparse.tickets.collected == [17, 20]
    refused("this model has had a trainer: build a new one", trained, batches())


class Adjustable(Classifier):
    lr = batch_size = 1

    def train_dataloader(self) -> Any:
        return batches()


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (StochasticWeightAveraging(0.1), "StochasticWeightAveraging would average"),
        (EMAWeightAveraging(), "WeightAveraging would average"),
        (LearningRateFinder(), "LearningRateFinder needs .*a Trainer without this callback"),
        (BatchSizeFinder(), "BatchSizeFinder needs .*a Trainer without this callback"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_callbacks_that_cannot_be(callback: Any, message: str, first: bool) -> None:
    callbacks = [callback, SparseTraining(rigl())]
    with pytest.raises(st.SparsityError, match=message):
        trainer(*callbacks[:: 1 if first else -1]).fit(Adjustable())


@pytest.mark.parametrize("name", ["lr_find", "scale_batch_size"])
def test_the_tuner_needs_a_trainer_of_its_own(name: str, tmp_path: Path) -> None:
    tuned = trainer(SparseTraining(rigl()), default_root_dir=tmp_path)
    with pytest.raises(st.SparsityError, match="tune with a Trainer without this callback"):
        getattr(Tuner(tuned), name)(Adjustable())


class Late(Classifier):
    def setup(self, stage: str) -> None:
        self.head = nn.Linear(4, 4)


class Empty(Classifier):
    def __init__(self) -> None:
        lightning.LightningModule.__init__(self)

    def configure_model(self) -> None:
        self.net = network()


class NoOptimizer(Classifier):
    def configure_optimizers(self) -> None:
        return None


class NoLoss(Classifier):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:  # type: ignore[override]
        return None if index == 4 else super().training_step(batch, index)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Late, "head was built after the model became sparse: build layers in __init__"),
        (Empty, "no layers yet: build layers in __init__"),
        (NoOptimizer, "one optimizer is needed, and there are 0"),
        (NoLoss, "step 5 needs the gradient .*skip no batch there"),
    ],
)
def test_modules_that_cannot_be(kind: type, message: str) -> None:
    with pytest.raises(st.SparsityError, match=message):
        trainer(SparseTraining(rigl())).fit(kind(), batches())


def test_a_trial_leaves_the_cycles_out() -> None:
    sparse, method = SparseTraining(rigl(), **CYCLES), st.GMP(0.9)
    with pytest.warns(RuntimeWarning, match="fast_dev_run is too short for cycles"):
        trainer(sparse, fast_dev_run=2).fit(Classifier(), batches())
    assert sparse.network.step == 2 and type(sparse.ticket()) is Classifier
    trainer(SparseTraining(method), fast_dev_run=True).fit(Classifier(), batches())
    trainer(sparse).fit(Classifier(), batches())  # and the callback can be used
    assert len(sparse.tickets.collected) == 2


def test_without_lightning_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "suptickets.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(ImportError, match=r"^Lightning is needed: pip install 'suptickets\[lightning\]'$"):
        importlib.import_module("suptickets.integrations.lightning")


def test_the_example_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "integrations.md").read_text()
    (code,) = re.findall(r"^```python\n(import lightning.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert type(names["ticket"]) is names["Digits"] and len(names["sparse"].tickets.collected) == 3


# ---- two processes ----


def worker(folder: Path) -> None:
    sparse = SparseTraining(rigl(), **{**CYCLES, "seed": None})
    fitted = trainer(sparse, strategy="ddp", devices=2, gradient_clip_val=0.1, accumulate_grad_batches=2)
    fitted.fit(Classifier(), batches())
    sparse.network.check()
    rank = fitted.global_rank
    torch.save({"ticket": sparse.ticket().state_dict(), **sparse.tickets.summary()}, folder / f"{rank}.pt")


@pytest.mark.slow  # the other trainer's is not
def test_two_processes_hold_the_same_ticket(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, __file__, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    tensors = one.pop("ticket"), other.pop("ticket")
    assert all(torch.equal(tensors[0][key], tensors[1][key]) for key in tensors[0])
    assert one == other and one["collected"] == [12, 16]  # 3 batches of a rank are 2 steps


def test_statistics_cannot_be_recomputed_without_a_forward() -> None:
    """That is said before the training, not after it."""
    sparse = SparseTraining(rigl(), **CYCLES, batch_norm="recompute")
    with pytest.raises(st.SparsityError, match=r"has no forward\(\): write one"):
        trainer(sparse).fit(Classifier(), batches())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    worker(Path(sys.argv[1]))


def test_a_training_of_so_many_steps_knows_its_epochs() -> None:
    """Though Lightning has not looked at the data yet."""
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(sparse, max_epochs=-1, max_steps=7 * BATCHES).fit(Classifier(), batches())
    assert sparse.tickets is not None and sparse.tickets.cycle_steps == 2 * BATCHES
    assert sparse.tickets.collected == [5 * BATCHES, 7 * BATCHES]
