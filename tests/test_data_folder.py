"""Class folders of image files, and the ImageNet transforms."""

import multiprocessing
import os
import random
import warnings

import numpy as np
import pytest
import torch
from make_data import image, image_folder, same
from PIL import Image
from scipy.stats import chisquare

from suptickets.data import folder, load_data, transforms
from suptickets.errors import SparsityError


def pixels(batches) -> np.ndarray:
    """Images as bytes again, places last."""
    x = torch.cat([x for x, _ in batches])
    mean, std = (torch.tensor(t).view(3, 1, 1) for t in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (x * std + mean).mul(255).round().permute(0, 2, 3, 1).numpy()


# ---- batches ----


@pytest.mark.parametrize("name", ["folder", "imagenet"])
@pytest.mark.parametrize("test_name", ["val", "test"])
def test_a_folder_is_read(tmp_path, name, test_name):
    data = load_data(name, image_folder(tmp_path, ("b", "a", "c"), test_name=test_name), workers=0)
    assert (data.name, data.classes, data.class_names, data.shape) == (
        name,
        3,
        ("a", "b", "c"),
        (3, 224, 224),
    )
    assert (data.train_size, data.test_size, data.steps(4)) == (18, 9, 5)
    batches = list(data.train_batches(4, 0, 0))
    assert [len(y) for _, y in batches] == [4, 4, 4, 4, 2] and batches[0][0].shape == (4, 3, 224, 224)
    assert torch.cat([y for _, y in batches]).bincount().tolist() == [6, 6, 6]
    assert torch.cat([y for _, y in data.test_batches(4)]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_some_of_the_images_are_held_out(tmp_path):
    whole = load_data("folder", image_folder(tmp_path), workers=0)
    part = load_data("folder", tmp_path, workers=0, holdout=0.25)
    train, test = (dict(zip(files.paths, files.labels, strict=True)) for files in (part.train, part.test))
    assert len(test) == part.test_size == round(0.25 * whole.train_size) and not set(train) & set(test)
    assert {**train, **test} == dict(zip(whole.train.paths, whole.train.labels, strict=True))
    assert torch.cat([y for _, y in part.test_batches(4)]).tolist() == part.test.labels.tolist()
    assert part.class_names == whole.class_names


def test_batches_depend_on_seed_and_epoch_and_not_on_workers_or_processes(tmp_path):
    image_folder(tmp_path)
    alone, helped = load_data("folder", tmp_path, workers=0), load_data("folder", tmp_path, workers=2)
    state = torch.get_rng_state()
    epoch = list(alone.train_batches(5, 1, 2))
    assert same(epoch, list(helped.train_batches(5, 1, 2)))
    assert same(list(alone.test_batches(4)), list(helped.test_batches(4)))
    assert torch.equal(state, torch.get_rng_state())
    assert same(epoch[1:], list(alone.train_batches(5, 1, 2, skip=1)))
    assert not same(epoch, list(alone.train_batches(5, 1, 3)))
    assert not same(epoch, list(alone.train_batches(5, 2, 2)))
    for rank in range(3):
        mine = list(alone.train_batches(5, 1, 2, rank=rank, world=3))
        assert same(mine, [(x[rank::3], y[rank::3]) for x, y in epoch])
    assert len(mine[-1][1]) == 0


def test_test_images_are_the_centre_of_the_image_and_never_augmented(tmp_path):
    data = load_data("folder", image_folder(tmp_path), workers=0)
    found = pixels(data.test_batches(4))
    files = [tmp_path / "val" / c / f"{i}.jpg" for c in ("cat", "dog") for i in range(3)]
    expected = [np.asarray(transforms.centre_crop(Image.open(file))) for file in files]
    np.testing.assert_array_equal(found, np.stack(expected))


def test_numbers_are_normalised_in_the_dtype_that_is_asked_for(tmp_path):
    data = load_data("folder", image_folder(tmp_path), workers=0)
    (x, y), *_ = data.test_batches(4, dtype=torch.float64)
    assert x.dtype == torch.float64 and y.dtype == torch.int64


# ---- kinds of files ----


@pytest.mark.parametrize(
    "mode, suffix",
    [
        ("L", ".jpg"),
        ("CMYK", ".JPEG"),
        ("RGB", ".png"),
        ("P", ".png"),
        ("RGBA", ".png"),
        ("LA", ".PNG"),
        ("1", ".png"),
        ("I;16", ".png"),
    ],
)
def test_all_kinds_of_images_become_rgb(tmp_path, mode, suffix):
    path = tmp_path / f"image{suffix}"
    image(mode).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = transforms.read_image(path)
    assert found.mode == "RGB" and found.size == (60, 40)
    expected = image("RGB") if mode in ("RGB", "RGBA", "CMYK", "P") else image("L").convert("RGB")
    tolerance = {"1": 128, "P": 40, "CMYK": 12, "L": 6}.get(mode, 0)
    assert np.abs(np.asarray(found, int) - np.asarray(expected, int)).mean() <= tolerance


def test_a_palette_with_transparency_is_read_without_a_warning(tmp_path):
    picture = image("P")
    picture.save(tmp_path / "image.png", transparency=bytes(range(256)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert transforms.read_image(tmp_path / "image.png").mode == "RGB"


def test_a_folder_of_all_kinds_is_read_by_workers(tmp_path):
    image_folder(tmp_path)
    for mode, name in (("L", "grey.jpg"), ("CMYK", "print.jpg"), ("P", "palette.png")):
        image(mode).save(tmp_path / "train" / "cat" / name)
    data = load_data("folder", tmp_path, workers=2)
    assert data.train_size == 15 and sum(len(y) for _, y in data.train_batches(4, 0, 0)) == 15


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_a_broken_file_is_named_in_one_line(tmp_path, workers, damage):
    image_folder(tmp_path)
    path = tmp_path / "train" / "dog" / "2.jpg"
    raw = path.read_bytes()
    path.write_bytes({"truncated": raw[: len(raw) // 2], "text": b"no image\nat all", "empty": b""}[damage])
    data = load_data("folder", tmp_path, workers=workers)
    with pytest.raises(SparsityError) as caught:
        list(data.train_batches(4, 0, 0))
    assert str(caught.value).startswith(f"{path} cannot be read") and "\n" not in str(caught.value)
    assert not multiprocessing.active_children()  # though `caught` still has the frames


def test_a_broken_png_is_named(tmp_path):
    path = tmp_path / "image.png"
    image().save(path)
    raw = bytearray(path.read_bytes())
    raw[60:70] = b"0123456789"
    path.write_bytes(raw)
    with pytest.raises(SparsityError, match="image.png"):
        transforms.read_image(path)


# ---- folders that will not do ----


def refused(folder) -> str:
    with pytest.raises(SparsityError) as caught:
        load_data("folder", folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_empty_class_is_named(tmp_path):
    image_folder(tmp_path)
    for part in ("train", "val"):
        (tmp_path / part / "eel").mkdir()
    (tmp_path / "train" / "eel" / "notes.txt").write_text("no image")
    assert str(tmp_path / "train" / "eel") in refused(tmp_path)


def test_missing_folders_are_named(tmp_path):
    assert "none was given" in refused(None)
    assert "not a folder" in refused(tmp_path / "nowhere")
    assert str(tmp_path / "train") in refused(tmp_path)
    image_folder(tmp_path)
    os.rename(tmp_path / "val", tmp_path / "other")
    assert str(tmp_path / "val") in refused(tmp_path)
    (tmp_path / "val").mkdir()
    image().save(tmp_path / "val" / "unsorted.jpg")
    assert "class folders" in refused(tmp_path)


@pytest.mark.parametrize("part, other", [("train", "val"), ("val", "train")])
def test_a_class_of_one_part_only_is_named(tmp_path, part, other):
    image_folder(tmp_path)
    (tmp_path / part / "eel").mkdir()
    image().save(tmp_path / part / "eel" / "0.jpg")
    assert f"'eel' is in {tmp_path / part} but not in {tmp_path / other}" in refused(tmp_path)


def test_hidden_files_and_folders_are_passed_over_and_deep_ones_found(tmp_path):
    image_folder(tmp_path)
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "cat" / "more").mkdir()
    image().save(tmp_path / "train" / "cat" / "more" / "0.jpg")
    (tmp_path / "train" / "cat" / "._0.jpg").write_bytes(b"left by another system")
    data = load_data("folder", tmp_path)
    assert data.classes == 2 and data.train_size == 13


# ---- transforms ----


def test_random_boxes_have_the_published_distribution():
    rng, width, height = random.Random(0), 400, 300
    boxes = np.array([transforms._random_box(width, height, rng) for _ in range(4000)])
    w, h = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    assert boxes.min() >= 0 and boxes[:, 2].max() <= width and boxes[:, 3].max() <= height
    ratio, area = w / h, w * h / (width * height)
    assert 0.73 < ratio.min() < 0.76 and 1.31 < ratio.max() < 1.36
    assert 0.075 < area.min() < 0.09 and area.max() <= 1
    small = area[(area > 0.1) & (area < 0.5)]  # these always fit: evenly distributed
    assert chisquare(np.histogram(small, 8, (0.1, 0.5))[0]).pvalue > 0.01
    place = boxes[:, 0] / np.maximum(width - w, 1)
    assert abs(place.mean() - 0.5) < 0.02 and place.min() == 0 and place.max() == 1


@pytest.mark.parametrize("size, box", [((1000, 10), (494, 0, 507, 10)), ((10, 1000), (0, 494, 10, 507))])
def test_very_long_images_give_their_centre(size, box):
    class Never(random.Random):
        def uniform(self, low, high):
            return high

    assert transforms._random_box(*size, Never(0)) == box


def test_half_of_the_training_images_are_mirrored():
    picture = image(size=(300, 300))
    rising = [np.asarray(transforms.random_crop(picture, random.Random(i)), int)[0, :, 0] for i in range(400)]
    mirrored = sum(row[0] > row[-1] for row in rising)
    assert 160 < mirrored < 240


@pytest.mark.parametrize("size", [(256, 256), (500, 375), (375, 500), (1, 1), (3, 900)])
def test_the_centre_is_cut_out_of_the_scaled_image(size):
    found = transforms.centre_crop(image(size=size))
    assert found.size == (224, 224)
    if size == (256, 256):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(image(size=size))[16:240, 16:240])
    if size == (500, 375):
        scaled = image(size=size).resize((341, 256), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(scaled)[16:240, 58:282])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_workers_fill_pinned_memory_for_a_gpu(tmp_path, monkeypatch, device):
    """What the loader is asked for; where there is no GPU, nothing more can be seen."""
    data, asked = load_data("folder", image_folder(tmp_path / "images"), workers=3), []

    def loader(images, **options):
        asked.append(options)
        return []

    monkeypatch.setattr(folder, "DataLoader", loader)
    monkeypatch.setattr(folder, "Normalise", lambda *_: None)
    for batches in (data.train_batches(4, 0, 0, device=device), data.test_batches(4, device=device)):
        assert list(batches) == []
    assert [o["pin_memory"] for o in asked] == [device == "cuda"] * 2
    assert [o["num_workers"] for o in asked] == [min(3, len(o["batch_sampler"])) for o in asked]
    with pytest.raises(SparsityError, match="from 0 to 1024, not 1000000"):
        load_data("folder", tmp_path / "images", workers=1_000_000)


def test_links_that_lead_back_are_not_followed(tmp_path):
    before = load_data("folder", image_folder(tmp_path), workers=0).train.labels
    os.symlink(".", tmp_path / "train" / "cat" / "loop")
    os.symlink(tmp_path / "train", tmp_path / "train" / "cat" / "all")  # other classes' folders, once
    after = load_data("folder", tmp_path, workers=0).train.labels
    assert len(before) < len(after) < 2.5 * len(before)
    os.symlink(tmp_path / "train" / "dog", tmp_path / "train" / "cat" / "twice")  # as one meant it
    os.symlink(tmp_path / "train" / "dog", tmp_path / "train" / "cat" / "thrice")
    assert len(load_data("folder", tmp_path, workers=0).train.labels) > len(after) + 10


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    """Its images would be left out without a word. (Root may read any.)"""
    image_folder(tmp_path)
    (tmp_path / "train" / "cat" / "sub").mkdir()
    scan = os.scandir

    def refused(folder):
        if str(folder).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(SparsityError, match="cannot read the folder .*/cat/sub: Permission denied"):
        load_data("folder", tmp_path, workers=0)
