"""Builds the model that a run's settings name: a built-in size, or a model of transformers."""

from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.settings import TrainerSettings
from diloco.workers.trainer.data.tokens import BYTES, TextData
from diloco.workers.trainer.models import gpt, hf
from diloco.workers.trainer.models.hf_config import HfModel, read_hf
from diloco.workers.trainer.recipe import TrainerSpec


def build_model(settings: TrainerSettings, named: HfModel | None, text: TextData) -> nn.Module:
    """Build a learner's model for its text.

    named: the result of `read_hf` for `settings.model`. text: from `open_for`, which checked that the model can read
    it.

    Raises:
        UsageError: there is no such model.
    """
    if named is None:
        return gpt.build(settings.model, settings.seed, text.vocab)
    return hf.build_hf(named, settings.seed)


def check_model(spec: Spec) -> None:
    """Check that a run's transformers model has the run's tensors, before memory is allocated for them.

    Both come from a peer.

    Raises:
        SpecMismatch: it has other tensors.
        UsageError: raised by `hf.check_tensors`.
    """
    if (named := read_hf(str(spec.trainer.get("model")))) is not None:
        hf.check_tensors(named, spec.tensors)


def model_of(spec: TrainerSpec) -> nn.Module:
    """Build the model of a run of the built-in trainer, with random parameters.

    Raises:
        UsageError: another program trained the run, and its model is not known here.
    """
    name, seed = spec.get("model"), spec.get("seed")
    if not isinstance(name, str) or not isinstance(seed, int):
        raise UsageError(
            "this run's model does not belong to the built-in trainer: its spec names neither model nor seed"
        )
    if (named := read_hf(name)) is not None:
        return hf.build_hf(named, seed, weights=False)
    vocab = spec.get("vocab")
    return gpt.build(name, seed, vocab if isinstance(vocab, int) else BYTES)
