"""Pictures in few bytes: pages show them, and the tree keeps them."""

import io
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

COLOURS = 256
"""Lines, bands and the edges of letters need no more; a palette takes a third of the bytes."""


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG with a palette, at its own size and resolution."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    few_colours(Image.open(drawn)).save(path, format="png", optimize=True)


def few_colours(picture: Image.Image) -> Image.Image:
    """The same in `COLOURS` colours, with no dither: plain areas stay plain."""
    return picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
