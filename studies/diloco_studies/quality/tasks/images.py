"""Images from a folder that has a folder for each class. Knows no torch.

A fifth is held out, chosen by a hash of the path within the folder: the same on every machine, and more images later
move none from one side to the other. Images are read when they are needed, and the last 256 MiB of them are kept.
"""

from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from diloco.pipeline.errors import UsageError
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.digits import HELD_OUT, Pixels

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
KEPT_BYTES = 256 * 1024**2
DEEP = ("I", "F")
"""What Pillow's modes of more than eight bits a channel begin with; it would make them white, or black."""

Bytes = npt.NDArray[np.uint8]
Listed = tuple[tuple[Path, int], ...]
"""(file, class) of each image."""


class ImageFolder:
    """`vision.Pictures`: in colour, the middle square of each, made `image_size` pixels wide."""

    channels = 3

    def __init__(self, run: LabRun) -> None:
        """Look which files there are.

        Raises:
            UsageError: no such folder, or too few classes or images in it.
        """
        self.side, self.patch = run.image_size, run.patch_size
        names, images = listed(run.data)
        self.classes = len(names)
        root = Path(run.data)
        self._train = tuple(one for one in images if not is_held_out(one[0], root))
        held_out = [one for one in images if is_held_out(one[0], root)]
        if not self._train or not held_out:
            raise UsageError(f"data={run.data!r}: {len(images)} images are too few to hold a fifth of them out")
        self._held_out = tuple(held_out[:: -(-len(held_out) // run.eval_tokens)])  # of all classes, which come in turn
        self.train_classes = np.array([one[1] for one in self._train], np.int64)
        self.held_out_classes = np.array([one[1] for one in self._held_out], np.int64)
        self._read = lru_cache(maxsize=max(1, KEPT_BYTES // (3 * self.side**2)))(self._decode)

    def train(self, index: int) -> Pixels:
        """(3, S, S).

        Raises:
            UsageError: it cannot be read.
        """
        return np.float32(1 / 255) * self._read(self._train[index][0]).astype(np.float32)

    def held_out(self, index: int) -> Pixels:
        """(3, S, S).

        Raises:
            UsageError: it cannot be read.
        """
        return np.float32(1 / 255) * self._read(self._held_out[index][0]).astype(np.float32)

    def _decode(self, path: Path) -> Bytes:
        from PIL import Image

        try:
            with Image.open(path) as image:
                if image.mode.startswith(DEEP):
                    raise UsageError(
                        f"image {path} has more than 8 bits a channel (mode {image.mode}). Save it with 8 bits, or "
                        "take it out of the folder"
                    )
                short = min(image.size)
                left, top = ((full - short) // 2 for full in image.size)
                middle = image.crop((left, top, left + short, top + short)).convert("RGB")
                square = middle.resize((self.side, self.side), Image.Resampling.BILINEAR)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise UsageError(
                f"image {path} cannot be read: {error}. Repair it, or take it out of the folder"
            ) from error
        pixels: Bytes = np.asarray(square).transpose(2, 0, 1)
        return pixels


@cache
def listed(data: str) -> tuple[tuple[str, ...], Listed]:
    """Names of the classes in order, and all images, those of a class together and by name; hidden ones left out.

    Raises:
        UsageError: no such folder, or fewer than two classes in it.
    """
    root = Path(data)
    if not root.is_dir():
        raise UsageError(
            f"data={data!r}: no such folder; task='images' needs one with a folder of images for each class"
        )
    found = {
        path.name: tuple(_images(path)) for path in sorted(root.iterdir()) if path.is_dir() and path.name[0] != "."
    }
    names = tuple(name for name, images in found.items() if images)
    if len(names) < 2:
        raise UsageError(
            f"data={data!r}: {len(names)} folders with images in it; there must be one for each of at least two "
            f"classes. Images are files that end in {', '.join(sorted(SUFFIXES))}"
        )
    return names, tuple((path, number) for number, name in enumerate(names) for path in found[name])


def fingerprint(data: str) -> str:
    """Of the names and sizes of all images: who changes one and keeps its size is not found out.

    Raises:
        UsageError: as `listed`.
    """
    digest = xxhash.xxh3_128()
    for path, _ in listed(data)[1]:
        digest.update(f"{path.relative_to(data).as_posix()}\0{path.stat().st_size}\0".encode())
    return digest.hexdigest()


def is_held_out(path: Path, root: Path) -> bool:
    """Whether an image is never trained on."""
    return xxhash.xxh3_64_intdigest(path.relative_to(root).as_posix().encode()) % HELD_OUT == 0


def _images(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part[0] == "." for part in path.relative_to(folder).parts)
        if path.suffix.lower() in SUFFIXES and not hidden and path.is_file():
            yield path
