"""Sizes of the built-in GPT. They are plain numbers, so that starting a run can read them without torch."""

from dataclasses import dataclass

from diloco.pipeline.errors import UsageError
from diloco.pipeline.sources import meant


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a model."""

    layers: int
    width: int
    heads: int
    hidden: int
    """Width of the gated MLP."""

    def parameters(self, vocab_size: int = 256) -> int:
        """Return the number of parameters."""
        return vocab_size * self.width + self.layers * (4 * self.width**2 + 3 * self.width * self.hidden)

    @property
    def tensors(self) -> int:
        """Number of trained tensors: five per layer, and the embedding."""
        return 1 + 5 * self.layers


# In the order of their numbers of parameters. A name that is a number gives the number of parameters with a vocabulary
# of bytes.
SIZES: dict[str, Size] = {
    "nano": Size(layers=2, width=96, heads=3, hidden=256),
    "deep": Size(layers=5, width=128, heads=4, hidden=288),
    "tiny": Size(layers=2, width=192, heads=3, hidden=512),
    "2m": Size(layers=5, width=192, heads=6, hidden=416),
    "small": Size(layers=6, width=256, heads=4, hidden=704),
    "10m": Size(layers=8, width=320, heads=5, hidden=864),
    "base": Size(layers=8, width=384, heads=6, hidden=1024),
    "30m": Size(layers=10, width=512, heads=8, hidden=1280),
    "medium": Size(layers=10, width=640, heads=10, hidden=1728),
    "large": Size(layers=12, width=832, heads=13, hidden=2240),
    "124m": Size(layers=12, width=896, heads=14, hidden=2640),
    "350m": Size(layers=24, width=1088, heads=17, hidden=3008),
    "1b": Size(layers=20, width=2048, heads=16, hidden=5376),
}


def check_size(name: str) -> None:
    """Check that a setting names a size.

    Raises:
        UsageError: it does not.
    """
    if name in SIZES:
        return
    raise UsageError(f"model={name!r}: unknown size{meant(name, SIZES)}", f"choose one of {size_table()}, or hf:FOLDER")


def size_table(vocab_size: int = 256) -> str:
    """Return names and numbers of parameters as text, for help and messages."""
    return ", ".join(f"{name} ({size.parameters(vocab_size) / 1e6:.1f}M)" for name, size in SIZES.items())
