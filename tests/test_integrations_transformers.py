"""Hugging Face's Trainer: what it trains is, to the bit, what a plain loop trains; checkpoints; refusals."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import same_state
from torch import nn

import suptickets as st

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore:the training took:RuntimeWarning")

from suptickets.integrations.transformers import SparseTraining  # noqa: E402

EPOCHS, BATCHES, BATCH = 4, 6, 8
CYCLES: dict[str, Any] = {"cycles": 2, "cycle_epochs": 1, "lr": (1e-4, 1e-3), "seed": 3}
TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 8,
}


@pytest.fixture(autouse=True, scope="module")
def little_garbage() -> Iterator[None]:
    """The Trainer collects it several times in a training: leave out what the imports have made."""
    gc.freeze()
    yield
    gc.unfreeze()


def rigl() -> st.Method:
    return st.RigL(0.8, interval=4)


def bert(kind: str = "BertForSequenceClassification", dropout: float = 0.0) -> Any:
    torch.manual_seed(1)
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return getattr(transformers, kind)(transformers.BertConfig(**TINY, **rates))


def samples(masked: bool = False) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    tokens = torch.randint(40, (BATCHES * BATCH, 6))
    return [{"input_ids": row, "labels": row if masked else row[0] % 2} for row in tokens]


class InOrder(transformers.Trainer):
    """A plain loop can give the same batches, and the same mean of their losses."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.model_accepts_loss_kwargs = False

    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Watch(transformers.TrainerCallback):
    """What there is at the end of each epoch; stops after `last` steps."""

    def __init__(self, sparse: SparseTraining, last: int = 10**6) -> None:
        self.sparse, self.last, self.nonzero = sparse, last, list[int]()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.sparse.network.check()
        self.nonzero.append(self.sparse.network.nonzero)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == self.last


def trainer(
    folder: Path, model: Any, *callbacks: Any, data: Any = None, kind: Any = InOrder, **options: Any
) -> Any:
    settings: dict[str, Any] = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 1e-2,
        "weight_decay": 0.01,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
    }
    model_init = options.pop("model_init", None)
    optimizers = options.pop("optimizers", (None, None))
    return kind(
        model,
        transformers.TrainingArguments(str(folder), **{**settings, **options}),
        train_dataset=samples() if data is None else data,
        callbacks=list(callbacks),
        model_init=model_init,
        optimizers=optimizers,
    )


def decayed(model: nn.Module) -> torch.optim.Optimizer:
    """The Trainer's groups: no decay for biases and layer norms, by their names."""
    plain = ("bias", "LayerNorm")
    groups = [
        {"params": [p for n, p in model.named_parameters() if any(w in n for w in plain) == rest]}
        for rest in (False, True)
    ]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.01, 0.0  # type: ignore[assignment]
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def by_hand(
    model: Any, data: Any, accumulate: int = 1, clip: float = 0.0, bf16: bool = False
) -> st.SupTickets:
    model.train()
    optimizer = decayed(model)
    steps = -(-BATCHES // accumulate)
    total = EPOCHS * steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    network = st.sparsify(model, rigl(), optimizer, seed=3)
    tickets = st.SupTickets(network, total, steps, 2, (1e-4, 1e-3))
    groups = torch.arange(BATCHES).split(accumulate)
    for group in groups * EPOCHS:  # the last of an epoch may be smaller, and its mean is taken all the same
        for i in group:
            batch = data[i * BATCH :][:BATCH]
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                loss = model(**{key: torch.stack([one[key] for one in batch]) for key in batch[0]}).loss
            (loss / len(group)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return tickets


# ---- the same training ----


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 4}, {"accumulate": 4}),
        ({"max_grad_norm": 0.1}, {"clip": 0.1}),
        ({"bf16": True}, {"bf16": True}),
    ],
)
def test_the_trainer_trains_what_a_plain_loop_does(options: Any, plain: Any, tmp_path: Path) -> None:
    """With the Trainer's own optimizer, decay groups and scheduler."""
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(tmp_path, bert(), sparse, **options).train()
    tickets = by_hand(bert(), samples(), **plain)
    assert sparse.tickets is not None and sparse.tickets.summary() == tickets.summary()
    assert len(tickets.collected) == 2 and tickets.collected[-1] == tickets.total_steps
    assert same_state(sparse.ticket(), tickets.ticket())


def test_an_optimizer_that_is_given(tmp_path: Path) -> None:
    model, sparse = bert(), SparseTraining(rigl(), **CYCLES)
    trainer(tmp_path, model, sparse, optimizers=(decayed(model), None)).train()
    assert same_state(sparse.ticket(), by_hand(bert(), samples()).ticket())


def test_counts_and_logs(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    watch = Watch(sparse)
    trained = trainer(tmp_path, bert(), sparse, watch, logging_strategy="epoch")
    trained.train()
    assert watch.nonzero == [round(0.2 * sparse.network.parameters_total)] * EPOCHS
    logs = [logs for logs in trained.state.log_history if "loss" in logs]
    assert [one["sparsity"] for one in logs] == [sparse.network.sparsity] * EPOCHS
    assert [one.get("cycle_lr") for one in logs] == [None, None, 1e-4, 1e-4]


def test_without_cycles_the_ticket_is_the_network(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), exclude="classifier")
    trained = trainer(tmp_path, bert(), sparse, max_steps=5)
    trained.train()
    assert "classifier" not in sparse.network.layers and sparse.network.step == 5
    weight = "bert.pooler.dense"
    assert torch.equal(
        sparse.ticket().get_submodule(weight).weight, trained.model.get_submodule(weight).weight
    )


def by_accelerate(folder: Path, first: int, last: int) -> st.SupTickets:
    """The steps from `first` to `last`; saves, and goes on from what was saved."""
    accelerator = accelerate.Accelerator(cpu=True)
    model, total = bert(), EPOCHS * BATCHES
    optimizer = decayed(model.train())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    network = st.sparsify(model, rigl(), optimizer, seed=3)
    tickets = st.SupTickets(network, total, BATCHES, 2, (1e-4, 1e-3))
    loader = torch.utils.data.DataLoader(samples() * EPOCHS, BATCH)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.register_for_checkpointing(network, tickets)
    if first:
        accelerator.load_state(folder)
    for batch in list(loader)[first:last]:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(folder)
    return tickets


def test_accelerate_needs_no_callback(tmp_path: Path) -> None:
    """Sparsify, then prepare; checkpoints too."""
    whole, plain = by_accelerate(tmp_path, 0, 24).ticket(), by_hand(bert(), samples()).ticket()
    by_accelerate(tmp_path, 0, 20)
    assert same_state(whole, plain) and same_state(by_accelerate(tmp_path, 20, 24).ticket(), plain)


# ---- the ticket ----


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForMaskedLM"])
def test_the_ticket_is_a_plain_model_that_from_pretrained_reads(kind: str, tmp_path: Path) -> None:
    """With tied embeddings too, which stay tied."""
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(tmp_path, bert(kind), sparse, data=samples("Masked" in kind)).train()
    ticket = sparse.ticket()
    assert type(ticket) is getattr(transformers, kind)
    assert ticket.state_dict().keys() == bert(kind).state_dict().keys()
    layers = [ticket.get_submodule(name).weight for name in sparse.network.layers]
    assert sum(int((weight == 0).sum()) for weight in layers) == round(0.8 * sparse.network.parameters_total)
    ticket.save_pretrained(tmp_path / "ticket")
    again = type(ticket).from_pretrained(tmp_path / "ticket")
    assert same_state(again, ticket)
    if "Masked" in kind:
        assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight


def test_the_ticket_of_a_training_in_bf16_computes_as_a_plain_model(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(tmp_path, bert(), sparse, bf16=True).train()
    ticket, plain = sparse.ticket().eval(), bert().eval()
    plain.load_state_dict(ticket.state_dict())
    assert not {"forward", "_original_forward"} & vars(ticket).keys()
    tokens = torch.stack([one["input_ids"] for one in samples()])
    assert torch.equal(ticket(tokens).logits, plain(tokens).logits)


# ---- checkpoints ----


@pytest.mark.parametrize(
    ("kind", "step"),
    [("BertForSequenceClassification", 5), ("BertForSequenceClassification", 12), ("BertForMaskedLM", 15)],
)
def test_a_run_that_was_stopped_goes_on_to_the_bit(kind: str, step: int, tmp_path: Path) -> None:
    """Before the cycles, where they begin, in the middle of one; with the Trainer's own order of the data."""
    whole, first, second = (SparseTraining(rigl(), keep=True, **CYCLES) for _ in range(3))
    models, data = [bert(kind, dropout=0.1) for _ in range(3)], samples("Masked" in kind)
    options = {"data": data, "kind": transformers.Trainer}
    trainer(tmp_path, models[0], whole, **options).train()
    trainer(tmp_path, models[1], first, Watch(first, last=step), **options).train()
    nn.init.zeros_(models[2].bert.embeddings.position_embeddings.weight)  # all comes from the checkpoint
    trainer(tmp_path, models[2], second, **options).train(resume_from_checkpoint=True)
    assert first.network.step == step and second.network.step == EPOCHS * BATCHES
    assert same_state(models[2], models[0]) and same_state(second.ticket(), whole.ticket())
    assert second.tickets.summary() == whole.tickets.summary()
    assert all(map(same_state, second.tickets.tickets, whole.tickets.tickets))


def test_a_checkpoint_elsewhere_must_be_named(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    checkpoint = there / "checkpoint-15"
    for method in (st.Dense, rigl):
        for folder, rate in ((here, 1e-2), (there, 2e-2)):
            sparse = SparseTraining(method(), **CYCLES)
            trainer(folder, bert(), sparse, Watch(sparse, last=15), learning_rate=rate).train()
        with pytest.raises(st.SparsityError, match="is not of the checkpoint that was loaded.*resume_from"):
            other = trainer(here, bert(), SparseTraining(method(), **CYCLES))
            other.train(resume_from_checkpoint=str(checkpoint))
    shutil.rmtree(here)
    with pytest.raises(st.SparsityError, match=r"no suptickets\.pt .*, or is not .*checkpoint-15"):
        trainer(here, bert(), SparseTraining(rigl(), **CYCLES)).train(resume_from_checkpoint=str(checkpoint))
    sparse = SparseTraining(rigl(), **CYCLES)
    resumed = trainer(here, bert(), sparse, resume_from_checkpoint=str(checkpoint))
    resumed.train(resume_from_checkpoint=resumed.args.resume_from_checkpoint)
    assert sparse.tickets is not None and sparse.tickets.collected == [18, 24]


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(tmp_path, bert(), sparse, Watch(sparse, last=5)).train()
    for other, options, message in (
        (SparseTraining(st.RigL(0.5, interval=4), **CYCLES), {}, r"\(method.sparsity: 0.8 -> 0.5\)"),
        (SparseTraining(rigl(), **CYCLES), {"num_train_epochs": 5}, r"\(total_steps: 24 -> 30\)"),
    ):
        with pytest.raises(st.SparsityError, match=message):
            trainer(tmp_path, bert(), other, **options).train(resume_from_checkpoint=True)


def test_a_file_that_was_not_written_to_its_end(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(tmp_path, bert(), sparse, Watch(sparse, last=5)).train()
    files = tmp_path / "checkpoint-5"
    assert not list(files.glob("*.part"))
    for size in (100, 0):
        with (files / "suptickets.pt").open("r+b") as file:
            file.truncate(size)
        with pytest.raises(
            st.SparsityError, match=r"is damaged \(.*\): take an earlier checkpoint"
        ) as raised:
            trainer(tmp_path, bert(), SparseTraining(rigl(), **CYCLES)).train(resume_from_checkpoint=True)
        assert "\n" not in str(raised.value)


# ---- refusals, in one line; batches that are too large ----


def test_trainings_that_cannot_be(tmp_path: Path) -> None:
    def refused(message: str, model: Any = None, settings: Any = CYCLES, **options: Any) -> None:
        sparse = SparseTraining(rigl(), **settings)
        given = bert() if model is None and "model_init" not in options else model
        with pytest.raises(st.SparsityError, match=message) as raised:
            trainer(tmp_path, given, sparse, **options).train()
        assert "\n" not in str(raised.value)

    refused("2 cycles of 6 steps do not fit", num_train_epochs=1)
    if hasattr(transformers.TrainingArguments, "enable_jit_checkpoint"):
        refused("enable_jit_checkpoint saves without telling", enable_jit_checkpoint=True)
    refused("no model_init", model_init=lambda: bert())
    trained = trainer(tmp_path, bert(), SparseTraining(rigl(), **CYCLES))
    trained.train()
    with pytest.raises(st.SparsityError, match="has been trained: make a new Trainer"):
        trained.train()
    refused("this model has had a trainer: build a new one", trained.model)
    late = trainer(tmp_path, bert())
    late.add_callback(SparseTraining(rigl(), **CYCLES))
    with pytest.raises(st.SparsityError, match=r"to Trainer\(\.\.\.\) itself"):
        late.train()


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(samples())


def test_trainings_that_end_early_or_have_not_begun(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    trained = trainer(tmp_path, bert(), sparse, Watch(sparse, last=5))
    with pytest.raises(st.SparsityError, match="has not begun: train first"):
        sparse.ticket()
    with pytest.warns(RuntimeWarning, match="took 5 steps, and 24 were planned: there is no ticket"):
        trained.train()
    with pytest.raises(st.SparsityError, match=r"sparse\.network\.densify\(\) is the network as it is"):
        sparse.ticket()
    with pytest.raises(st.SparsityError, match="gmp reaches its sparsity after 44000 steps"):
        trainer(tmp_path, bert(), SparseTraining(st.GMP(0.9))).train()


def test_data_without_a_length_has_cycles_of_steps(tmp_path: Path) -> None:
    with pytest.raises(st.SparsityError, match="give cycle_steps"):
        sparse = SparseTraining(rigl(), **CYCLES)
        trainer(tmp_path, bert(), sparse, data=Stream(), kind=transformers.Trainer, max_steps=10).train()
    sparse = SparseTraining(rigl(), cycles=2, cycle_steps=3, lr=(1e-4, 1e-3))
    trainer(tmp_path, bert(), sparse, data=Stream(), kind=transformers.Trainer, max_steps=10).train()
    assert sparse.tickets is not None and sparse.tickets.collected == [7, 10]


class TooLarge(InOrder):
    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        if len(inputs["labels"]) == BATCH:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *args)


def test_smaller_batches_after_the_first_did_not_fit(tmp_path: Path) -> None:
    sparse = SparseTraining(rigl(), **CYCLES)
    trainer(tmp_path, bert(), sparse, kind=TooLarge, auto_find_batch_size=True).train()
    assert sparse.tickets is not None and len(sparse.tickets.collected) == 2


class TooLargeLater(TooLarge):
    steps = 0

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.steps += 1
        kind = TooLarge if self.steps == 3 else InOrder
        return kind.training_step(self, model, inputs, *args)


def test_batches_that_did_not_fit_after_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(st.SparsityError, match="auto_find_batch_size came too late: set the size"):
        sparse = SparseTraining(rigl(), **CYCLES)
        trainer(tmp_path, bert(), sparse, kind=TooLargeLater, auto_find_batch_size=True).train()


@pytest.mark.parametrize(
    ("world", "gpus", "unused", "kind", "message"),
    [
        (1, 2, None, "NO", "DataParallel is not supported"),
        (2, 1, None, "MULTI_GPU", "ddp_find_unused_parameters=False"),
        (2, 1, False, "FSDP", "FSDP is not supported"),
        (1, 1, None, "DEEPSPEED", "DEEPSPEED is not supported"),
    ],
)
def test_machines_that_cannot_be(world: int, gpus: int, unused: Any, kind: str, message: str) -> None:
    class Arguments:
        distributed_state = accelerate.PartialState(cpu=True)
        world_size, n_gpu, ddp_find_unused_parameters = world, gpus, unused

    class State:
        distributed_type = accelerate.DistributedType(kind)

    Arguments.distributed_state = State()
    with pytest.raises(st.SparsityError, match=message):
        SparseTraining(rigl()).on_init_end(Arguments(), None, None, model=bert())  # type: ignore[arg-type]


def test_without_transformers_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "suptickets.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ImportError, match=r"^transformers is needed: pip install 'suptickets\[transformers\]'$"
    ):
        importlib.import_module("suptickets.integrations.transformers")


def test_the_example_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "docs" / "integrations.md").read_text()
    (code,) = re.findall(r"^```python\n(import torch.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    ticket = type(names["trainer"].model).from_pretrained("ticket")
    assert same_state(ticket, names["sparse"].ticket()) and len(names["sparse"].tickets.collected) == 3


# ---- two processes ----


def worker(folder: Path) -> None:
    """Stopped in the second cycle, and gone on."""
    options = {
        "ddp_find_unused_parameters": False,
        "gradient_accumulation_steps": 2,
        "kind": transformers.Trainer,
    }
    first, sparse = (SparseTraining(rigl(), **{**CYCLES, "seed": None}) for _ in range(2))
    trainer(folder, bert(), first, Watch(first, last=7), **options).train()
    trained = trainer(folder, bert(), sparse, **options)
    trained.train(resume_from_checkpoint=True)
    sparse.network.check()
    rank = trained.args.process_index
    torch.save({"ticket": sparse.ticket().state_dict(), **sparse.tickets.summary()}, folder / f"{rank}.pt")


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
    assert one == other and one["collected"] == [6, 8]  # 3 batches of a rank are 2 steps


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
