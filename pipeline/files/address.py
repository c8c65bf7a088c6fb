"""Where people say that something lies: a folder, or an address of an object store. Pure."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

Address = Annotated[str, BeforeValidator(lambda given: str(given) if isinstance(given, Path) else given)]
"""A folder, or an address such as s3://bucket/path."""


_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+:/")


def is_address(place: str) -> bool:
    """Whether it is meant for one, with a slash too few or not: a folder of such a name is ./s3:/name."""
    return _ADDRESS.match(place) is not None
