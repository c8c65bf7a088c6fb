"""Promises about what a config of transformers may hold; none of them needs transformers."""

import json

import pytest

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.models.hf_config import read_hf

LLAMA = {"model_type": "llama", "vocab_size": 300}


@pytest.mark.parametrize("key", ["num_labels", "id2label", "return_dict", "output_hidden_states", "use_cache"])
def test_what_is_not_of_the_model_is_left_out(key: str) -> None:
    """A hundred million labels would be a table of as many names before anything is checked."""
    found = read_hf(f"hf:{json.dumps(LLAMA | {key: 100_000_000})}")
    assert found is not None
    assert found.config == LLAMA


@pytest.mark.parametrize("n", [-3, 1_000_000_000])
def test_a_number_of_layers_that_cannot_be_is_refused_before_anything_is_made_of_it(n: int) -> None:
    with pytest.raises(UsageError, match=f"num_hidden_layers is {n}, but must be from 0 to"):
        read_hf(f"hf:{json.dumps(LLAMA | {'num_hidden_layers': n})}")
