"""The published archives: read as they are, refused when they are damaged or want to run something."""

import functools
import gzip
import io
import os
import pickle
import subprocess
import tarfile
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
import torch
from make_data import (
    cifar_archive,
    cifar_content,
    cifar_folder,
    fashion_mnist_files,
    idx,
    python2_pickle,
    with_checksum,
)

from suptickets.data import fashion_mnist, load_data
from suptickets.data.archives import Archive, data_folder
from suptickets.data.cifar import CIFAR10, CIFAR100, load_cifar
from suptickets.data.fashion_mnist import load_fashion_mnist
from suptickets.data.pickles import read_pickle
from suptickets.errors import SparsityError


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Tests that download do so from a file."""
    opened = urllib.request.urlopen

    def local(url, **options):
        if not url.startswith("file:"):
            raise urllib.error.URLError("no network")
        return opened(url, **options)

    monkeypatch.setattr(urllib.request, "urlopen", local)


def refused(load, *arguments) -> str:
    """The message with which `load` refuses; one line."""
    with pytest.raises(SparsityError) as caught:
        load(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def matches(data, source, contents) -> bool:
    train = [contents[name] for name in source.train_files]
    test = contents[source.test_file]
    key = source.labels.encode()
    return (
        np.array_equal(
            data.train_x.numpy().reshape(data.train_size, -1), np.concatenate([c[b"data"] for c in train])
        )
        and data.train_y.tolist() == [label for c in train for label in c[key]]
        and np.array_equal(data.test_x.numpy().reshape(data.test_size, -1), test[b"data"])
        and data.test_y.tolist() == test[key]
    )


# ---- CIFAR ----


@pytest.mark.parametrize("source", [CIFAR10, CIFAR100], ids=lambda s: s.name)
def test_cifar_is_read_from_its_folder_from_above_and_from_the_archive(tmp_path, source):
    packed, contents = cifar_archive(tmp_path, source)
    for where in (tmp_path, tmp_path / source.folder, tmp_path / "packed"):
        data = load_cifar(packed, where)
        assert matches(data, source, contents)
    assert data.train_x.shape[1:] == (3, 32, 32) and data.classes == source.classes
    assert data.train_y.dtype == torch.int64 and data.padding == 4 and data.flip
    assert data.padding_mode == ("reflect" if source is CIFAR10 else "zeros")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["packed", source.folder, source.archive.name]
    )


def test_a_renamed_cifar_folder_is_recognised_by_its_files(tmp_path):
    contents = cifar_folder(tmp_path)
    (tmp_path / CIFAR10.folder).rename(tmp_path / "mine")
    assert matches(load_cifar(CIFAR10, tmp_path / "mine"), CIFAR10, contents)


@pytest.mark.parametrize("protocol", [3, 4])
def test_files_saved_again_by_python_3_are_read(tmp_path, protocol):
    content = cifar_content(CIFAR10, 5, np.random.default_rng(0))
    content = {key.decode(): value for key, value in content.items()} | {
        "data": np.asfortranarray(content[b"data"])
    }
    (tmp_path / "file").write_bytes(pickle.dumps(content, protocol))
    assert np.array_equal(read_pickle(tmp_path / "file")["data"], content["data"])


def test_a_missing_file_is_named(tmp_path):
    cifar_folder(tmp_path)
    (tmp_path / CIFAR10.folder / "data_batch_3").unlink()
    assert "data_batch_3 is missing" in refused(load_cifar, CIFAR10, tmp_path)


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    cifar_folder(tmp_path)
    path = tmp_path / CIFAR10.folder / "data_batch_2"
    path.write_bytes(path.read_bytes()[:keep])
    assert str(path) in refused(load_cifar, CIFAR10, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {b"data": np.zeros((20, 3072), np.int64)},
        {b"data": np.zeros((20, 3071), np.uint8)},
        {b"data": np.zeros((19, 3072), np.uint8)},
        {b"data": b"bytes"},
        {b"labels": [10] * 20},
        {b"labels": [0.5] * 20},
        {b"labels": [b"0"] * 20},
        {b"labels": None},
        {b"labels": [[0], [1, 2]] * 10},
    ],
    ids=repr,
)
def test_a_file_of_something_else_is_refused(tmp_path, change):
    content = cifar_folder(tmp_path)["test_batch"] | change
    path = tmp_path / CIFAR10.folder / "test_batch"
    path.write_bytes(python2_pickle(content))
    assert str(path) in refused(load_cifar, CIFAR10, tmp_path)


def test_a_pickle_of_no_dictionary_is_refused(tmp_path):
    (tmp_path / "list").write_bytes(pickle.dumps([1, 2]))
    assert "list" in refused(read_pickle, tmp_path / "list")


# ---- pickles that want more ----


class Call:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


CALLS = {
    "os.system": (os.system, "touch {marker}"),
    "subprocess": (subprocess.check_call, ["touch", "{marker}"]),
    "eval": (eval, "open('{marker}', 'w')"),
    "exec": (exec, "open('{marker}', 'w')"),
    "open": (open, "{marker}", "w"),
    "getattr": (getattr, "text", "upper"),
    "partial": (functools.partial, print),
    "numpy.zeros": (np.zeros, 3),
    "numpy.save": (np.save, "{marker}", 3),
    "numpy.fromfile": (np.fromfile, "{marker}"),
}


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", CALLS)
def test_a_pickle_that_calls_anything_is_refused_and_nothing_runs(tmp_path, name, protocol):
    marker = str(tmp_path / "marker")
    function, *arguments = CALLS[name]

    def placed(value):
        return value.format(marker=marker) if isinstance(value, str) else value

    arguments = [list(map(placed, a)) if isinstance(a, list) else placed(a) for a in arguments]
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": Call(function, *arguments)}, protocol))
    assert "asks for" in refused(read_pickle, path)
    assert list(tmp_path.iterdir()) == [path]


RAW = {
    "objects over bytes": b"cnumpy\nndarray\n(I1\ntcnumpy\ndtype\n(VO\ntRVabcdefgh\ntR.",
    "array of objects": b"cnumpy\ndtype\n(VO\ntR.",
    "attributes of an admitted name": b"cnumpy\ndtype\n(N}(V__init__\nNutb.",
    "state for an admitted name": b"cnumpy\nndarray\n}Vvalues\nI1\nsb.",
    "attribute of a module": b"\x80\x04\x8c\x05numpy\x8c\x0fdtype.__class__\x93.",
    "old instance": b"(Vls\nios\nsystem\n.",
    "persistent id": b"Pwhatever\n.",
    "extension": b"\x82\x01.",
    "bottomless": b"(" * 100 + b".",
}


@pytest.mark.parametrize("name", RAW)
def test_tricks_with_the_admitted_names_are_refused(tmp_path, name):
    path = tmp_path / "trick"
    path.write_bytes(b"}Vdata\n" + RAW[name][:-1] + b"s.")
    assert str(path) in refused(read_pickle, path)
    test_files_saved_again_by_python_3_are_read(tmp_path, 4)


# ---- archives ----


def test_a_wrong_checksum_is_refused(tmp_path):
    cifar_archive(tmp_path)
    assert "checksum" in refused(load_cifar, CIFAR10, tmp_path)
    assert not (tmp_path / CIFAR10.folder).exists()


def tar(path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@pytest.mark.parametrize(
    "bad",
    [
        member("../escaped"),
        member(f"{CIFAR10.folder}/../../escaped"),
        member(f"{CIFAR10.folder}/../escaped"),
        member("/tmp/suptickets-escaped"),
        member("elsewhere/file"),
        member(f"{CIFAR10.folder}-py/file"),
        member(f"{CIFAR10.folder}/link", tarfile.SYMTYPE, "/etc/passwd"),
        member(f"{CIFAR10.folder}/link", tarfile.SYMTYPE, "data_batch_1"),
        member(f"{CIFAR10.folder}/link", tarfile.LNKTYPE, f"{CIFAR10.folder}/data_batch_1"),
        member(f"{CIFAR10.folder}/pipe", tarfile.FIFOTYPE),
        member(f"{CIFAR10.folder}/device", tarfile.CHRTYPE),
    ],
    ids=lambda m: f"{m.name}-{m.type.decode()}",
)
def test_paths_that_escape_links_and_devices_are_refused_and_nothing_is_left(tmp_path, bad):
    where = tmp_path / "deep" / "data"
    where.mkdir(parents=True)
    path = where / CIFAR10.archive.name
    tar(path, (member(f"{CIFAR10.folder}/data_batch_1"), b"good"), (bad, b""))
    assert repr(bad.name) in refused(load_cifar, with_checksum(CIFAR10, path), where)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path]
    assert list(where.iterdir()) == [path] and not os.path.exists("/tmp/suptickets-escaped")


@pytest.mark.parametrize("keep", [0, 10, 1000, -10])
def test_a_truncated_archive_is_refused_and_nothing_is_left(tmp_path, keep):
    source, _ = cifar_archive(tmp_path)
    path = tmp_path / CIFAR10.archive.name
    path.write_bytes(path.read_bytes()[:keep])
    assert "checksum" in refused(load_cifar, source, tmp_path)
    assert "damaged" in refused(load_cifar, with_checksum(source, path), tmp_path)
    assert not (tmp_path / CIFAR10.folder).exists() and not list(tmp_path.glob("*.part"))


def test_an_archive_of_something_else_is_refused(tmp_path):
    path = tmp_path / CIFAR10.archive.name
    tar(path)
    assert CIFAR10.folder in refused(load_cifar, with_checksum(CIFAR10, path), tmp_path)


# ---- downloads ----


def published(tmp_path, checksum: str | None = None):
    """CIFAR-10 as if it were published in a folder of this machine."""
    source, contents = cifar_archive(tmp_path)
    url = (tmp_path / source.archive.name).as_uri()
    return replace(source, archive=Archive(url, checksum or source.archive.checksum)), contents


def test_what_is_not_there_is_downloaded_once_with_progress(tmp_path, capsys):
    source, contents = published(tmp_path)
    where = tmp_path / "new" / "folder"
    assert matches(load_cifar(source, where), source, contents)
    told = capsys.readouterr()
    assert not told.out and told.err.splitlines()[-1].startswith(source.archive.name) and "100 %" in told.err
    assert sorted(p.name for p in where.iterdir()) == sorted([source.folder, source.archive.name])
    (tmp_path / source.archive.name).unlink()
    assert matches(load_cifar(source, where), source, contents)


def test_a_download_with_a_wrong_checksum_leaves_nothing(tmp_path):
    source, _ = published(tmp_path, "md5:" + "0" * 32)
    before = sorted(tmp_path.iterdir())
    assert "checksum" in refused(load_cifar, source, tmp_path / "new" / "folder")
    assert sorted(tmp_path.iterdir()) == before


def test_an_interrupted_download_leaves_nothing(tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    source, _ = published(tmp_path)
    monkeypatch.setattr("suptickets.data.archives._copy", stop)
    (tmp_path / "mine").mkdir()
    before = sorted(tmp_path.iterdir())
    for where in ("mine", "new"):
        with pytest.raises(KeyboardInterrupt):
            load_cifar(source, tmp_path / where)
    assert sorted(tmp_path.iterdir()) == before and list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "fashion-mnist"])
def test_a_mistyped_folder_is_not_left_behind_when_nothing_comes(tmp_path, name):
    assert "no network" in refused(load_data, name, tmp_path / "no" / "pe")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, file", [("cifar10", "cifar-10-python.tar.gz"), ("cifar100", "cifar-100-python.tar.gz")]
)
def test_without_a_network_the_message_says_what_to_put_where(tmp_path, name, file):
    message = refused(load_data, name, tmp_path)
    assert "no network" in message and f"https://www.cs.toronto.edu/~kriz/{file}" in message
    assert file in message and f"into {tmp_path}" in message and "or the folder cifar-10" in message


def test_without_a_folder_the_users_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder(None) == tmp_path / "suptickets"
    cifar_folder(tmp_path / "suptickets")
    assert load_data("cifar10").train_size == 100


def test_a_file_for_a_folder_is_refused(tmp_path):
    source, _ = cifar_archive(tmp_path)
    assert "give the folder" in refused(load_cifar, source, tmp_path / source.archive.name)


# ---- Fashion-MNIST ----


def test_fashion_mnist_is_read_from_unpacked_files(tmp_path):
    arrays = fashion_mnist_files(tmp_path)
    data = load_data("fashion-mnist", tmp_path)
    assert (data.train_size, data.test_size, data.classes, data.shape) == (30, 10, 10, (1, 28, 28))
    for key, array in arrays.items():
        assert np.array_equal(getattr(data, key).squeeze(1 if key.endswith("x") else -1).numpy(), array)
    assert (data.padding, data.padding_mode, data.flip) == (2, "zeros", True)


def test_fashion_mnist_is_read_from_packed_files_that_are_checked(tmp_path, monkeypatch):
    arrays = fashion_mnist_files(tmp_path, packed=True)
    assert "checksum" in refused(load_fashion_mnist, tmp_path)
    trust_all(tmp_path, monkeypatch)
    assert np.array_equal(load_fashion_mnist(tmp_path).train_x[:, 0].numpy(), arrays["train_x"])


def trust_all(folder, monkeypatch):
    for key, file in fashion_mnist.FILES.items():
        checksum = with_checksum(CIFAR10, folder / file.name).archive.checksum
        monkeypatch.setitem(fashion_mnist.FILES, key, replace(file, checksum=checksum))


def test_fashion_mnist_truncated_packed_file_is_refused(tmp_path, monkeypatch):
    fashion_mnist_files(tmp_path, packed=True)
    path = tmp_path / fashion_mnist.FILES["train_x"].name
    path.write_bytes(path.read_bytes()[:-20])
    trust_all(tmp_path, monkeypatch)
    assert "damaged" in refused(load_fashion_mnist, tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        idx(np.zeros((30, 28, 28), np.uint8))[:-1],
        idx(np.zeros((30, 28, 28), np.uint8)) + b"0",
        idx(np.zeros((30, 28, 28), np.uint8))[:10],
        idx(np.zeros((30, 28, 27), np.uint8)),
        idx(np.zeros((29, 28, 28), np.uint8)),
        idx(np.zeros((30, 784), np.uint8)),
        b"\0\0\x0d\3" + b"\xff" * 12,
        b"\0\0\x08\3" + b"\xff" * 12,
        gzip.compress(b"packed", mtime=0),
    ],
    ids=lambda c: f"{c[:8].hex()}-{len(c)}",
)
def test_an_idx_file_of_the_wrong_kind_or_size_is_refused(tmp_path, content):
    fashion_mnist_files(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    assert str(tmp_path) in refused(load_fashion_mnist, tmp_path)


def test_a_fashion_mnist_label_beyond_the_classes_is_refused(tmp_path):
    fashion_mnist_files(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(np.full(10, 10, np.uint8)))
    assert "label" in refused(load_fashion_mnist, tmp_path)


def test_fashion_mnist_without_a_network_says_what_to_put_where(tmp_path):
    message = refused(load_data, "fashion-mnist", tmp_path)
    assert "train-images-idx3-ubyte.gz" in message and f"into {tmp_path}" in message
