"""The store: append-only lines that survive several writers, kills and merges."""

import contextlib
import errno
import fcntl
import json
import multiprocessing
import resource

import pytest

from suptickets.errors import SparsityError
from suptickets.experiments import EXPERIMENTS
from suptickets.experiments.numbers import ours
from suptickets.experiments.plan import Mode, Reading
from suptickets.experiments.results import write_pages
from suptickets.experiments.store import Results, Store, only_mode
from suptickets.training.files import held

CELLS = EXPERIMENTS["vgg16"].cells("method=rigl,data=cifar10")


def record(cell=CELLS[0], seed=1, accuracy=0.9, scale=1.0, separate=False, changes=None, **more):
    mode = {"scale": scale, "separate": separate, "changes": changes or {}}
    return {
        "cell": Reading.of(cell.settings()).key,
        "seed": seed,
        **mode,
        "measures": {"accuracy": accuracy},
    } | more


def test_what_is_added_is_read(tmp_path):
    store = Store(tmp_path / "results")
    assert store.read() == []
    added = [record(seed=seed, accuracy=seed / 10) for seed in (1, 2, 3)]
    for one in added:
        store.add(one)
    assert store.read() == added and store.damaged == []
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["cifar10-vgg16.jsonl"]
    mean, deviation, runs = ours(CELLS[0], Results(store.read(), Mode()))
    assert (mean, deviation, runs) == (pytest.approx(0.2), pytest.approx(0.1), 3)


@contextlib.contextmanager
def files_of_at_most(size):
    """As on a disk that fills up: a write takes what has room, and says how much that was."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_result_that_the_disk_has_no_room_for_is_told_and_leaves_no_part(tmp_path):
    store = Store(tmp_path)
    store.add(record(seed=1))
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    with files_of_at_most(len(before) + 100), pytest.raises(SparsityError, match=r"\(No space left"):
        store.add(record(seed=2))
    assert file.read_bytes() == before
    store.add(record(seed=3))
    assert [one["seed"] for one in store.read()] == [1, 3] and not store.damaged


def test_a_file_system_without_locks_keeps_results_too(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    store = Store(tmp_path / "results")
    store.add(record())
    assert store.read() == [record()]
    with held(tmp_path / "lock") as mine:
        assert mine


@pytest.mark.parametrize("damage", ['{"cell": {"da', "{}", "[1]", '{"cell": 1, "seed"}', "\x00\x00"])
def test_a_damaged_last_line_is_skipped_told_and_left(tmp_path, damage):
    store = Store(tmp_path)
    store.add(record(seed=1))
    file = tmp_path / "cifar10-vgg16.jsonl"
    file.write_text(file.read_text() + damage)
    assert [one["seed"] for one in store.read()] == [1]
    assert store.damaged == [f"{file}, line 2"]
    store.add(record(seed=2))
    assert [one["seed"] for one in store.read()] == [1, 2] and damage in file.read_text()


@pytest.mark.parametrize(
    "change",
    [
        *({"cell": odd} for odd in (3, {}, {"data": "cifar10"}, {**record()["cell"], "method": []})),
        *(
            {"seed": "1"},
            {"scale": "1"},
            {"separate": 0},
            {"changes": []},
            {"seconds": "1"},
            {"settings": []},
        ),
        *({"measures": odd} for odd in (3, [], {"accuracy": "0.9"}, {"nll": []}, {"diversity": 3})),
        *({"measures": {"tickets": odd}} for odd in (3, [3], [{}], [{"accuracy": "x"}])),
        *({"measures": {"layers": odd}} for odd in (3, [3], {})),
    ],
    ids=str,
)
def test_a_line_that_is_json_and_no_result_is_damaged_too(tmp_path, change):
    store = Store(tmp_path)
    store.add(record(seed=1))
    file = tmp_path / "cifar10-vgg16.jsonl"
    file.write_text(file.read_text() + json.dumps(record(seed=2) | change) + "\n")
    assert [one["seed"] for one in store.read()] == [1]
    assert store.damaged == [f"{file}, line 2"]


def test_what_a_result_need_not_have_may_be_null(tmp_path):
    nothing = dict.fromkeys(("accuracy", "nll", "tickets", "diversity", "layers", "start"))
    Store(tmp_path).add(one := record(measures=nothing, settings=None, seconds=None))
    assert Store(tmp_path).read() == [one]
    write_pages(tmp_path, ["vgg16"], format="md")


def add_many(folder, seed):
    for n in range(50):
        Store(folder).add(record(seed=1000 * seed + n, padding="x" * 5000))


def test_several_writers_do_not_disturb_each_other(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_many, args=(tmp_path, seed)) for seed in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    store = Store(tmp_path)
    seeds = [one["seed"] for one in store.read()]
    assert sorted(seeds) == [1000 * s + n for s in range(4) for n in range(50)] and store.damaged == []


def test_two_stores_are_merged_by_joining_their_files(tmp_path):
    for name, seeds in (("a", (1, 2)), ("b", (2, 3))):
        for seed in seeds:
            Store(tmp_path / name).add(record(seed=seed, accuracy=0.5))
    both = [(tmp_path / name / "cifar10-vgg16.jsonl").read_text() for name in "ab"]
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "cifar10-vgg16.jsonl").write_text("".join(both))
    assert ours(CELLS[0], Results(Store(tmp_path / "c").read(), Mode())).runs == 3


@pytest.mark.parametrize("other", [{"scale": 0.1}, {"separate": True}, {"changes": {"model": "mlp"}}])
def test_results_of_different_modes_are_never_mixed(tmp_path, other):
    store = Store(tmp_path)
    store.add(record(accuracy=0.9))
    store.add(record(accuracy=0.1, seed=2, **other))
    records = store.read()
    assert ours(CELLS[0], Results(records, Mode())) == (0.9, None, 1)
    way_out = "give each trial" if "changes" in other else "say which"
    with pytest.raises(SparsityError, match=rf"do not go into one table \(.*at scale.*;.*\): {way_out}"):
        only_mode(records)
    if "changes" in other:  # no option of `report` asks for them
        assert "90.00" in write_pages(tmp_path, format="md")[0].read_text()
        return
    with pytest.raises(SparsityError, match="say which with --scale, --separate or --no-separate") as refused:
        write_pages(tmp_path)
    assert "\n" not in str(refused.value)


def test_pages_of_one_mode_say_which_it_is(tmp_path):
    Store(tmp_path).add(record())
    Store(tmp_path).add(record(scale=0.1))
    Store(tmp_path).add(record(separate=True))
    with pytest.raises(SparsityError, match="say which"):
        write_pages(tmp_path, scale=1.0)
    (file,) = write_pages(tmp_path, scale=0.1, out=tmp_path / "out", format="html", names=["vgg16"])
    assert "A trial (forked at scale 0.1)" in file.read_text()
    (file,) = write_pages(tmp_path, scale=1.0, separate=True, names=["vgg16"])
    assert "Separate: every cell has runs of its own" in file.read_text()
    with pytest.raises(SparsityError, match="no results yet"):
        write_pages(tmp_path, scale=0.5)


def test_a_lock_is_held_by_one(tmp_path):
    path = tmp_path / "runs" / "a.lock"
    with held(path) as first, held(path) as second:
        assert (first, second) == (True, False)
    with held(path) as again:
        assert again


def test_lines_are_plain_json(tmp_path):
    Store(tmp_path).add(record(accuracy=0.25))
    (line,) = (tmp_path / "cifar10-vgg16.jsonl").read_text().splitlines()
    assert json.loads(line)["measures"] == {"accuracy": 0.25}
