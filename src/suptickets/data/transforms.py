"""The standard ImageNet transforms: from an image file to 224 x 224 pixels, for training and for testing."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
from PIL import Image

from suptickets.errors import SparsityError, reason

SIZE = 224  # pixels a side of the result
SHORTER = 256  # the shorter side of a test image, before its centre is cut out
AREA = (0.08, 1.0)  # share of the image that a crop covers
RATIO = (3 / 4, 4 / 3)  # width over height of a crop
TRIES = 10


def read_image(path: Path) -> Image.Image:
    """The image in a file, as RGB: grey, CMYK, palette, 16 bit are converted, transparency is dropped."""
    try:
        with Image.open(path) as image:
            return _rgb(image)
    except Exception as error:  # a damaged file can fail in any way
        raise SparsityError(
            f"{path} cannot be read as an image ({reason(error)}): replace or remove it"
        ) from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):  # 16 bits: `convert` would cut off what is above 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":  # `convert` warns of transparency
        image = image.convert("RGBA")
    return image.convert("RGB")


def random_crop(image: Image.Image, rng: random.Random) -> Image.Image:
    """A box of random area and shape at a random place, scaled to `SIZE`, mirrored half of the time."""
    cut = image.crop(_random_box(*image.size, rng)).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else cut


def _random_box(width: int, height: int, rng: random.Random) -> tuple[int, int, int, int]:
    """Left, top, right, bottom; if none fits in ten tries, the largest central box of a permitted shape."""
    for _ in range(TRIES):
        area = width * height * rng.uniform(*AREA)
        ratio = math.exp(rng.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = rng.randint(0, width - w), rng.randint(0, height - h)
            return left, top, left + w, top + h
    w = min(width, max(1, round(height * RATIO[1])))
    h = min(height, max(1, round(width / RATIO[0])))
    return _centred(width, height, w, h)


def centre_crop(image: Image.Image) -> Image.Image:
    """The image with its shorter side scaled to `SHORTER`, and of that the central `SIZE` x `SIZE`."""
    width, height = image.size
    short = min(width, height)
    scaled = (int(SHORTER * width / short), int(SHORTER * height / short))
    box = _centred(*scaled, SIZE, SIZE)
    return image.resize(scaled, Image.Resampling.BILINEAR).crop(box)


def _centred(width: int, height: int, w: int, h: int) -> tuple[int, int, int, int]:
    left, top = round((width - w) / 2), round((height - h) / 2)
    return left, top, left + w, top + h
