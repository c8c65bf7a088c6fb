"""Objects that must not be used in another process, whether forked or reached by pickling."""

import os
from collections.abc import Iterator
from typing import Generic, NoReturn, TypeVar

from diloco.pipeline.errors import UsageError

T = TypeVar("T")


class OwnProcess:
    """Base class of objects that belong to the process that made them."""

    def __init__(self, what: str) -> None:
        """what: name of the object, for the error."""
        self._what, self._pid = what, os.getpid()

    def check_process(self) -> None:
        """Check that this is the process that made the object.

        Raises:
            UsageError: it is another one.
        """
        if os.getpid() != self._pid:
            raise self._refusal()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, which would send the object to another process.

        Raises:
            UsageError: always.
        """
        raise self._refusal()

    def _refusal(self) -> UsageError:
        return UsageError(
            f"{self._what} yields indices only in the learner's own process, not in a DataLoader worker: create the "
            "loader as DataLoader(dataset, batch_sampler=learner.batches(...)), so that workers get the indices"
        )


class OwnIterator(OwnProcess, Iterator[T], Generic[T]):
    """An iterator that works only in the process that made it."""

    def __init__(self, what: str, inner: Iterator[T]) -> None:
        super().__init__(what)
        self._inner = inner

    def __next__(self) -> T:
        """Return the next item of `inner`.

        Raises:
            UsageError: this is another process.
        """
        self.check_process()
        return next(self._inner)
