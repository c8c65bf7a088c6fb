"""JSON files that hold one object: those of an output folder, configs of other programs."""

import json
from pathlib import Path
from typing import Any

from diloco.pipeline.errors import UsageError


def read_object(file: Path) -> dict[str, Any]:
    """What a file says.

    Raises:
        UsageError: it cannot be read, or is no object.
    """
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {file}: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"{file} holds no JSON object: it is damaged, or another file")
    return found
