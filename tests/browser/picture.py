"""A picture of a page, to be looked at: `python -m tests.browser.picture ADDRESS FILE.png --width 360 --dark`.

An address may be that of a live run, or of the file that `diloco report --html` has written.
"""

import argparse
import asyncio
from pathlib import Path

from PIL import Image

from tests.browser.chromium import tab

SETTLES_S = 2.0
"""Charts are drawn once a second."""
COLOURS = 224
"""More of them make pictures that are too large for a repository."""


async def take(address: str, file: Path, width: int, dark: bool, script: str) -> None:
    """Open it, wait until it shows something, take its picture at full height."""
    async with tab() as page:
        await page.size(width, 900)
        await page.theme("dark" if dark else "light")
        await page.open(address)
        await page.until("globalThis.diloco?.took.updates > 0 || !document.getElementById('ask').hidden")
        if script:
            await page.value(script)
        await page.size(width, round(await page.value("document.documentElement.scrollHeight")))
        await asyncio.sleep(SETTLES_S)
        await page.picture(file)
        with Image.open(file) as picture:
            picture.convert("RGB").quantize(COLOURS).save(file, optimize=True)
        print("\n".join(page.errors) or f"{file}: {file.stat().st_size // 1024} KiB")  # noqa: ASYNC240  # the end


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address")
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--script", default="", help="JavaScript to run before")
    asyncio.run(take(**vars(parser.parse_args())))
