"""Two real processes (torchrun, gloo): all ranks hold the same connections and the same values.

`distributed_worker.py` runs all scenarios in one go; the tests look at what it wrote.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_worker import (
    METHODS,
    OPTIONS,
    RANKS,
    batch,
    build,
    contents,
    mlp,
    train,
    train_accumulating,
    whole_batch,
)

import suptickets as st

LIMIT = 100  # seconds for all scenarios together, so that a hang fails and does not block
WORKER = Path(__file__).with_name("distributed_worker.py")


class Results:
    """What each rank wrote about each scenario."""

    def __init__(self, folder: Path) -> None:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        with open(folder / "log", "w") as log:
            launched = subprocess.Popen(
                [sys.executable, *command, str(WORKER), str(folder)],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            try:
                launched.wait(LIMIT)
            except subprocess.TimeoutExpired:
                launched.terminate()  # which ends the workers too
                launched.wait()
        self.log = (folder / "log").read_text()
        files = [folder / f"{rank}.json" for rank in range(RANKS)]
        self.ranks = [json.loads(file.read_text()) if file.exists() else {} for file in files]

    def of(self, scenario: str) -> list[dict[str, Any]]:
        """What the scenario came to on each rank."""
        lost = {"raised": "nothing", "message": "it hung, or the process ended", "where": self.log[-2000:]}
        return [rank.get(scenario, lost) for rank in self.ranks]

    def returned(self, scenario: str) -> list[Any]:
        """What the scenario returned on each rank; fails if it raised, hung, or ended the process."""
        for result in self.of(scenario):
            if "raised" in result:
                pytest.fail(f"{result['raised']}: {result['message']}\n{result['where']}", pytrace=False)
        return [result["returned"] for result in self.of(scenario)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("ranks"))


def alone(method: str, model: torch.nn.Module, loop: Any = train, **options: Any) -> dict[str, Any]:
    """The same training in this process, with the whole batches."""
    network, optimizer = build(METHODS[method](0), model)
    counts = loop(network, optimizer, whole_batch, **options)
    return {"counts": counts, **contents(network, optimizer)}


def seeded_mlp(bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return mlp(bias)


def assert_follows(ranks: list[dict[str, Any]], single: dict[str, Any]) -> None:
    for found in ranks:
        assert found["positions"] == single["positions"]
        assert found["parameters"].keys() == single["parameters"].keys()
        for name, parameter in single["parameters"].items():
            assert found["parameters"][name] == pytest.approx(parameter, rel=0, abs=1e-9), name
        for one, other in zip(found["momentum"], single["momentum"], strict=True):
            assert one == pytest.approx(other, rel=0, abs=1e-9)


def test_backward_passes_within_another(results: Results) -> None:
    """Reentrant checkpoints accumulate into a shared layer while others are averaged."""
    assert max(results.returned("checkpointed")) < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_ranks_agree_though_each_starts_elsewhere_and_sees_other_data(results: Results, method: str) -> None:
    first, second = results.returned(f"method {method}")
    for what in ("first", "counts", "positions", "parameters", "momentum"):
        assert first[what] == second[what], what


def test_ranks_agree_on_a_layer_that_was_frozen_at_first(results: Results) -> None:
    first, second = results.returned("thawed")
    assert first == second


@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("dense", "gmp")])
def test_ranks_did_not_agree_before_and_did_explore(results: Results, method: str) -> None:
    """So that the test above says something."""
    first, second = results.returned(f"method {method}")
    assert first["before"] != second["before"]
    assert (first["first"] != first["positions"]) == (method not in ("static", "snip"))


@pytest.mark.parametrize("method", [name for name in METHODS if name != "snip"])
def test_two_ranks_with_half_a_batch_follow_one_process_with_the_whole(results: Results, method: str) -> None:
    assert_follows(results.returned(f"halves {method}"), alone(method, seeded_mlp()))


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_wrapper(results: Results, option: str) -> None:
    assert_follows(results.returned(f"option {option}"), alone("rigl", seeded_mlp()))


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_compiled(results: Results, where: str) -> None:
    """DistributedDataParallel(torch.compile(model)), and the other way round."""
    assert_follows(results.returned(f"compiled {where}"), alone("rigl", seeded_mlp()))


def test_a_model_without_any_dense_parameter(results: Results) -> None:
    """DistributedDataParallel refuses it by itself, for it has nothing to do; the docs say so."""
    assert all(
        "requires a gradient" in result["message"] or result["raised"] for result in results.of("no bias")
    )


@pytest.mark.parametrize("scenario", ["accumulation", "accumulation closure"])
def test_granet_shrinks_with_no_sync_accumulation_and_clipping(results: Results, scenario: str) -> None:
    single = alone("granet", seeded_mlp(), train_accumulating)
    ranks = results.returned(scenario)
    assert_follows(ranks, single)
    assert all(found["counts"] == single["counts"] for found in ranks)
    assert single["counts"][0] > single["counts"][2] > single["counts"][5] > single["counts"][-1] == 80


def test_nothing_is_sent_inside_no_sync(results: Results) -> None:
    """One number per living connection for two backward passes, and four times the dense gradient."""
    for found in results.returned("accumulation"):
        living = [400, *found["counts"][:-1]]
        assert found["sent"] == sum(living) + 4 * 800


def test_a_step_sends_one_number_per_living_connection_and_dense_parameter(results: Results) -> None:
    for rank in results.returned("traffic"):
        *quiet, exploring, smaller = rank["steps"]
        assert all(step["sent"] == step["living"] for step in (*quiet, smaller))
        assert exploring["sent"] == exploring["living"] + rank["dense"]
        assert smaller["living"] < exploring["living"] < rank["dense"]


def test_all_ranks_skip_a_step_that_overflows_on_one(results: Results) -> None:
    first, second = results.returned("overflow")
    assert first == second
    assert first["step"] == 11


@pytest.mark.parametrize("scenario", ["outer", "late"])
def test_a_wrapper_that_does_not_know_the_sparse_weights_is_refused(results: Results, scenario: str) -> None:
    for result in results.of(scenario):
        assert result["raised"] == st.SparsityError.__name__, result
        assert "DistributedDataParallel must wrap the sparse model itself" in result["message"]
        assert "\n" not in result["message"]


def test_ranks_that_run_out_of_batches_are_refused(results: Results) -> None:
    for result in results.of("joined"):
        assert result["raised"] == st.SparsityError.__name__, result
        assert result["message"] == "join() is not supported: give every rank as many batches"


def test_without_a_wrapper_nothing_is_averaged(results: Results) -> None:
    for rank, found in enumerate(results.returned("no wrapper")):
        network, optimizer = build(METHODS["rigl"](0), seeded_mlp())
        train(network, optimizer, lambda step, rank=rank: batch(rank, step))
        (told,) = found.pop("told")
        assert "wrap the model in DistributedDataParallel" in told
        assert found == {"sent": 0, **contents(network, optimizer)}


@pytest.mark.parametrize("what", ["values", "positions"])
def test_check_tells_when_ranks_differ(results: Results, what: str) -> None:
    for result in results.of(f"differing {what}"):
        assert result["raised"] == st.SparsityError.__name__, result
        assert result["message"] == "the ranks hold different connections or values"


def test_a_copy_of_a_sparse_model_is_averaged_too(results: Results) -> None:
    """A copy has no network; its values are then parameters like any other, of a size that stays."""
    first, second = results.returned("copied")
    assert first == second


def test_unused_parameters_are_refused_in_one_line(results: Results) -> None:
    """A layer that only some ranks use would be averaged with another."""
    for result in results.of("unused"):
        assert result["raised"] == st.SparsityError.__name__, result
        assert "find_unused_parameters" in result["message"] and "\n" not in result["message"]
    assert_follows(results.returned("unused dense"), alone("dense", seeded_mlp()))
