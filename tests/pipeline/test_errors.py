"""Errors cross processes whole."""

import inspect
import pickle

import pytest

from diloco.pipeline import errors
from diloco.pipeline.errors import DilocoError, LearnerReplaced

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, DilocoError)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_can_be_sent_to_another_process(kind):
    """As a pool of processes does."""
    error = kind("what was wrong", 7) if kind is LearnerReplaced else kind("what was wrong")
    error.add_note("seen twice")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own
    assert type(again) is kind
    assert str(again) == "what was wrong"
    assert vars(again) == vars(error)
