"""How work is dealt out: order, processes, threads, GPUs; and which revision results name."""

import os
import shutil
import signal
import subprocess
import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from suptickets.errors import SparsityError, TrainingError
from suptickets.experiments import EXPERIMENTS, provenance, runner
from suptickets.experiments.plan import Mode, plan, wanted
from suptickets.experiments.runner import Runner, numbered_gpus
from suptickets.experiments.work import Grow
from suptickets.training import jobs as together

SOURCE = Path(__file__).parent.parent / "src"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def grows(out, name="vgg16", where="method=rigl,data=cifar10"):
    tasks = plan(wanted(EXPERIMENTS[name].cells(where), 2), Mode())
    return [Grow(Mode(), str(out), None, "", task) for task in tasks]


# ---- order ----


def test_what_has_begun_comes_first_then_what_takes_longest(tmp_path):
    short, long = grows(tmp_path), grows(tmp_path, "wrn28-10")
    works = [*short, *long]
    assert Runner(tmp_path, jobs=3)._sorted(works) == [*long, *short]
    assert Runner(tmp_path, jobs=1)._sorted(works) == works  # seed by seed: tables fill evenly
    begun = short[3].folder(short[3].task.branches[1].settings).checkpoint
    begun.parent.mkdir(parents=True)
    begun.touch()
    assert Runner(tmp_path, jobs=3)._sorted(works)[:2] == [short[3], long[0]]
    assert Runner(tmp_path, jobs=1)._sorted(works)[:2] == [short[3], short[0]]


def test_all_that_failed_is_told_and_nothing_of_it_kept(tmp_path, monkeypatch, capsys):
    """An error would keep the network that it left, on a GPU too, while the next branch trains."""
    alive, left, said = [], weakref.WeakSet(), iter(["the disk is full", "the loss is not finite"])

    def broken(self, branch, pause):
        alive.append(len(left))
        network = torch.nn.Linear(1, 1)
        left.add(network)
        raise OSError(next(said, "the disk is full"))

    monkeypatch.setattr(Grow, "_branch", broken)
    with pytest.raises(TrainingError, match="^the disk is full; the loss is not finite$"):
        grows(tmp_path, "cycle-length", "method=rigl,sparsity=0.95")[0].do(lambda: None)
    assert alive == [0] * 4 and capsys.readouterr().err.count("Traceback") == 4


# ---- processes ----


def test_three_at_a_time_on_a_gpu_and_one_elsewhere(tmp_path, gpu, monkeypatch):
    assert Runner(tmp_path).jobs == 3 and Runner(tmp_path, jobs=5).jobs == 5
    assert Runner(tmp_path, "debug").jobs == Runner(tmp_path, "slurm").jobs == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Runner(tmp_path).jobs == 1


@pytest.mark.parametrize(("jobs", "threads"), [(1, None), (2, "4"), (3, "2"), (20, "1")])
def test_processes_share_gpu_and_threads(tmp_path, monkeypatch, jobs, threads):
    @contextmanager
    def mps():
        yield {"CUDA_MPS_PIPE_DIRECTORY": "here"}

    monkeypatch.setattr(together, "shared_gpu", mps)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    before = dict(os.environ)
    with Runner(tmp_path, jobs=jobs)._sharing():
        assert os.environ.get("OMP_NUM_THREADS") == threads
        assert ("CUDA_MPS_PIPE_DIRECTORY" in os.environ) == (jobs > 1)
    assert dict(os.environ) == before
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with Runner(tmp_path, jobs=jobs)._sharing():
        assert os.environ["OMP_NUM_THREADS"] == "7"


def test_what_is_started_does_not_hear_the_runners_ctrl_c():
    """It would kill who writes a checkpoint; the runner hears it, and tells them."""
    code = "import signal; print(signal.getsignal(signal.SIGINT).name)"
    before = signal.getsignal(signal.SIGINT)
    with runner._deaf():
        heard = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert heard.stdout == "SIG_IGN\n" and signal.getsignal(signal.SIGINT) is before


def test_processes_take_turns_on_the_gpus(tmp_path, gpu, monkeypatch):
    @dataclass(frozen=True)
    class Look:
        """Stands for a job: tells which GPU it may use."""

        runner: str = ""

        def __call__(self):
            return os.environ["CUDA_VISIBLE_DEVICES"]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    many = Runner(tmp_path, jobs=3)
    with many._executor() as executor:
        started = [many._start(executor, Look(), slot) for slot in range(3)]
        assert [job.result() for job in started] == ["3", "1", "3"]


def test_gpus_are_known_by_number(gpu, monkeypatch):
    assert numbered_gpus() == [0, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert numbered_gpus() == [3, 1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(SparsityError, match="CUDA_VISIBLE_DEVICES=GPU-8932f937 names no numbers"):
        numbered_gpus()


def test_what_git_is_to_ignore_stays_as_it_was(tmp_path):
    Runner(tmp_path / "a")._make()
    assert (tmp_path / "a" / ".gitignore").read_text() == "runs/\n"
    (tmp_path / "a" / ".gitignore").write_text("mine\n")
    Runner(tmp_path / "a")._make()
    assert (tmp_path / "a" / ".gitignore").read_text() == "mine\n"


# ---- the revision ----

TOLD = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def asked(monkeypatch):
    """What results would name, asked anew."""
    monkeypatch.delenv("SUPTICKETS_REVISION", raising=False)
    yield lambda: (provenance.revision.cache_clear(), provenance.revision())[1]
    provenance.revision.cache_clear()


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with a library and results in it."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    package = tmp_path / "src" / "library"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "results.jsonl").write_text("1\n")
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(provenance, "PACKAGE", package)
    head = ["git", "-C", str(tmp_path), "rev-parse", "HEAD"]
    return package, subprocess.run(head, check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_names_its_revision(checkout, asked, monkeypatch):
    """Git knows better than the variable; the library's own files make it dirty, results do not."""
    package, head = checkout
    monkeypatch.setenv("SUPTICKETS_REVISION", TOLD)
    assert len(head) == 40 and asked() == head
    (package.parents[1] / "results.jsonl").write_text("1\n2\n")
    (package.parents[1] / "new.jsonl").write_text("1\n")
    assert asked() == head
    (package / "new.py").write_text("")
    assert asked() == f"{head}-dirty"
    (package / "new.py").unlink()
    (package / "__init__.py").write_text("changed = True\n")
    assert asked() == f"{head}-dirty"


@pytest.mark.parametrize("why", ["no git", "not tracked"])
def test_where_git_cannot_tell_the_variable_does(checkout, asked, monkeypatch, tmp_path, why):
    if why == "no git":
        monkeypatch.setenv("PATH", "")
    else:
        (tmp_path / "copy").mkdir()
        monkeypatch.setattr(provenance, "PACKAGE", tmp_path / "copy")
    assert asked() == "unknown"
    for told in (TOLD, f"{TOLD}-dirty", f" {TOLD}\n"):
        monkeypatch.setenv("SUPTICKETS_REVISION", told)
        assert asked() == told.strip()
    for told in ("main", TOLD[1:], f"{TOLD}-clean"):
        monkeypatch.setenv("SUPTICKETS_REVISION", told)
        with pytest.raises(SparsityError, match="must be what `git rev-parse HEAD` prints"):
            asked()


def test_a_library_that_is_not_installed_names_its_revision(checkout, tmp_path):
    """`PYTHONPATH=src python -m suptickets`, from anywhere."""
    shutil.copytree(SOURCE / "suptickets", tmp_path / "src" / "suptickets", ignore=lambda *_: ["__pycache__"])
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    for words in (["add", "."], [*who, "commit", "-q", "-m", "second"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    code = "import suptickets.experiments.provenance as p; print(p.PACKAGE, p.revision())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    told = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=environment, check=True, capture_output=True, text=True
    )
    head = ["git", "-C", str(tmp_path), "rev-parse", "HEAD"]
    revision = subprocess.run(head, check=True, capture_output=True, text=True).stdout
    assert told.stdout == f"{tmp_path / 'src' / 'suptickets'} {revision}"


def test_a_slurm_that_does_not_answer():
    from submitit.core.utils import FailedJobError

    class Executor:
        def submit(self, work):
            raise FailedJobError("sbatch: a long story\nsbatch: error: Unable to contact slurm controller")

    with pytest.raises(SparsityError, match="Slurm does not take the job: sbatch: error: Unable to contact"):
        runner._submitted(Executor(), None)
