"""Where people say that something lies: a folder, or an address of an object store. Pure."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

Address = Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, Path) else given)]
"""A folder, or an address such as s3://bucket/path."""


def is_address(place: str) -> bool:
    """Whether it is an object store's, and no folder on a disk."""
    return "://" in place and not place.startswith("file://")
