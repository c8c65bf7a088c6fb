"""JSON files that hold one object: files of an output folder, and configuration of other programs."""

import json
from pathlib import Path
from typing import Any

from diloco.pipeline.errors import UsageError


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a file.

    Raises:
        UsageError: the file cannot be read, or does not hold an object.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} does not hold a JSON object: it is damaged, or not the file you meant")
    return found
