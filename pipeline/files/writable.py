"""Whether files can be written, asked before anything is computed that goes into them."""

import os
from pathlib import Path

from diloco.pipeline.errors import UsageError


def check_files(*files: Path | None) -> None:
    """Without making them.

    Raises:
        UsageError: one cannot be written.
    """
    for file in files:
        if file is None:
            continue
        if file.is_dir():
            raise UsageError(f"{file}: a folder, not a file")
        if not file.absolute().parent.is_dir():
            raise UsageError(f"{file}: there is no folder {file.parent}")
        if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UsageError(f"{file}: it may not be written")
