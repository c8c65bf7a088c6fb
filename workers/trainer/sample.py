"""Text from a checkpoint's global parameters."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.torch
import structlog
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.sums import check_sums
from diloco.workers.trainer.data.tokens import BOUNDARY, BYTES
from diloco.workers.trainer.models.gpt import GPT, build
from diloco.workers.trainer.recipe import TrainerSpec


class _RunSpec(BaseModel):
    trainer: TrainerSpec


class _State(BaseModel):
    """The part of state.json that is needed here; the syncer reads the whole."""

    spec: _RunSpec


class Loaded(NamedTuple):
    """A model as a checkpoint holds it, and the trainer's part of its run's spec."""

    model: GPT
    spec: TrainerSpec


def model_of(spec: TrainerSpec) -> GPT:
    """The built-in trainer's model, with its initial parameters.

    Raises:
        UsageError: the run was trained by another program, whose model is not known here.
    """
    name, seed = spec.get("model"), spec.get("seed")
    if not isinstance(name, str) or not isinstance(seed, int):
        raise UsageError("this run's model is not one of the built-in trainer's: its spec names no model and seed")
    vocab = spec.get("vocab")
    return build(name, seed, vocab if isinstance(vocab, int) else BYTES)


def load_model(checkpoint: Path) -> Loaded:
    """Read a checkpoint folder: `state.json` for the model's name, `globals.safetensors` for its parameters.

    Raises:
        UsageError: not a checkpoint, damaged, or of a model that is not built in.
    """
    try:
        state = _State.model_validate_json((checkpoint / "state.json").read_bytes())
        tensors = safetensors.torch.load_file(checkpoint / "globals.safetensors")
    except OSError as error:
        raise UsageError(f"{checkpoint} is not a checkpoint: {error}") from error
    except (ValidationError, SafetensorError) as error:
        raise UsageError(f"{checkpoint} is not a checkpoint, or damaged: {error}") from error
    if strange := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise UsageError(f"{checkpoint} is damaged: {strange[0]} has elements that are not finite")
    model = model_of(state.spec.trainer)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UsageError(f"{checkpoint} does not fit model {state.spec.trainer['model']!r}: {error}") from error
    if not check_sums(checkpoint):
        structlog.get_logger().warning("checkpoint_without_sums", path=str(checkpoint), checked="no digest")
    return Loaded(model, state.spec.trainer)


def sample(loaded: Loaded, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """The prompt and up to `tokens` more bytes as text; ends early where the model ends the document.

    temperature: 0 takes the likeliest byte. top_k: draw from this many likeliest bytes; 0 from all.

    Raises:
        UsageError: the model's tokens are no bytes, and nothing here can read them.
    """
    if loaded.spec.get("vocab") is not None:
        raise UsageError("this model was trained on a token file: only its tokenizer could read what it writes")
    context = loaded.spec.get("seq_len")
    given = torch.tensor([BOUNDARY, *prompt.encode()])
    drawn = loaded.model.generate(given, tokens, context if isinstance(context, int) else 128, temperature, top_k, seed)
    text = drawn[1:].numpy().astype(np.uint8).tobytes()
    return text.split(bytes([BOUNDARY]))[0].decode(errors="replace")
