"""Locations as people give them: a folder, or an address of an object store. Pure."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

# A folder, or an address such as s3://bucket/path.
Address = Annotated[
    str, Field(min_length=1), BeforeValidator(lambda given: str(given) if isinstance(given, Path) else given)
]


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/")


def is_address(place: str) -> bool:
    """Return whether this is meant as an address, even with a slash missing. (Write such a folder as ./s3:/name.)"""
    return _ADDRESS.match(place) is not None
