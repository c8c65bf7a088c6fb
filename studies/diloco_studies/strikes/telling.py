"""What a struck run's tasks raised, as the one error that its command tells."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diloco.pipeline.errors import DilocoError


@contextmanager
def one_error(logs: Path) -> Iterator[None]:
    """Around `asyncio.run` of a run whose logs are in a folder.

    Raises:
        DilocoError: a second signal ended everything.
        BaseException: the first of those that a group of tasks has raised.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        raise DilocoError(f"a second signal stopped everything at once; logs in {logs}") from error
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
