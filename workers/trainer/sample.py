"""Generates text with a checkpoint's global parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.tensor_file import Tensor
from diloco.pipeline.wrong_values import complaint
from diloco.workers.trainer.data import bpe
from diloco.workers.trainer.data.token_shards import TOKENIZER_FILE, check_digest, read_index
from diloco.workers.trainer.data.tokens import BOUNDARY, BYTES
from diloco.workers.trainer.models.named import model_of
from diloco.workers.trainer.recipe import TrainerSpec, choose_device, logits_of


class Loaded(NamedTuple):
    """The model of a checkpoint, and the trainer's part of its run's spec."""

    model: nn.Module
    spec: TrainerSpec


_TRAINER: TypeAdapter[TrainerSpec] = TypeAdapter(TrainerSpec)


def load_model(where: str, trainer: object, tensors: Mapping[str, Tensor]) -> Loaded:
    """Build the model of a checkpoint.

    Args:
        where: the checkpoint's location, for messages.
        trainer: the trainer's part of its run's spec.
        tensors: the checkpoint's global parameters, float32.

    Raises:
        UsageError: this is not a checkpoint, or it is damaged, or its model is not a built-in one.
    """
    try:
        spec = _TRAINER.validate_python(trainer)
    except ValidationError as error:
        raise UsageError(f"{where} is not a checkpoint, or is damaged: {complaint(error)}") from error
    values = {name: _values(tensor) for name, tensor in tensors.items()}
    if broken := [name for name, tensor in values.items() if not torch.isfinite(tensor).all()]:
        raise UsageError(f"{where} is damaged: {broken[0]} has non-finite elements")
    model = model_of(spec).eval()
    misfit = f"{where} does not fit model {spec['model']!r}"
    try:
        strange = model.load_state_dict(values, strict=False).unexpected_keys  # tied tensors are there under one name
    except RuntimeError as error:
        raise UsageError(f"{misfit}: {error}") from error
    if wrong := strange or [name for name, _ in model.named_parameters() if name not in values]:
        raise UsageError(f"{misfit}: {'the model has no' if strange else 'it lacks'} {wrong[0]}")
    return Loaded(model, spec)


def _values(tensor: Tensor) -> torch.Tensor:
    flat = np.frombuffer(tensor.read(), np.float32).copy()
    return torch.from_numpy(flat).reshape(tensor.shape)


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    end, count = BOUNDARY, BYTES
    """The token between documents, and the number of tokens."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


class _Pairs:
    """The tokenizer whose file lies next to token shards."""

    def __init__(self, folder: Path, fingerprint: object) -> None:
        index = read_index(folder)
        if index.fingerprint != fingerprint:
            raise UsageError(
                f"{folder} holds different token shards from those this model was trained on: pass the "
                "right ones with --data"
            )
        check_digest(folder / TOKENIZER_FILE, index.tokenizer)
        self._tokenizer = bpe.load(folder / TOKENIZER_FILE)
        self.end, self.count = index.separator, bpe.entries(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return bpe.encode(self._tokenizer, [text])[0]

    def decode(self, tokens: list[int]) -> str:
        return bpe.decode(self._tokenizer, tokens)


def tokenizer_of(spec: TrainerSpec, data: Path | None) -> _Bytes | _Pairs:
    """Return the tokenizer of a run's model.

    Args:
        spec: the trainer's part of the run's spec.
        data: a folder with the run's token shards; None takes the one that the spec names.

    Raises:
        UsageError: the tokenizer is not there or is not the run's, or the extra `data` is missing.
    """
    if spec.get("vocab") is None:
        return _Bytes()
    if spec.get("tokenizer") is not None:
        raise UsageError(
            "only this model's own tokenizer can read its output: use `diloco export --hf` to write a folder for "
            "transformers"
        )
    if data is None and str(spec.get("data")).endswith(".npy"):
        raise UsageError(
            "this model was trained on a token file, and only the tokenizer of that file could read its output"
        )
    folder = data or Path(str(spec.get("data")))
    if not folder.is_dir():
        raise UsageError(
            f"this model was trained on token shards, but their tokenizer is not in {folder}: pass their folder with "
            f"--data, or one with their index.json and {TOKENIZER_FILE}"
        )
    return _Pairs(folder, spec.get("data_fingerprint"))


def sample(
    loaded: Loaded, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, data: Path | None = None
) -> str:
    """Return the prompt and up to `tokens` more tokens as text; it ends early if the model ends the document.

    temperature: 0 takes the likeliest token. top_k: draw from this many likeliest tokens; 0 from all. data: a folder
    with the run's token shards (`tokenizer_of`).

    Raises:
        UsageError: the model's tokens are not bytes, and there is no tokenizer here that can read them.
    """
    words, context = tokenizer_of(loaded.spec, data), loaded.spec.get("seq_len")
    device = _to_fastest_device(loaded.model)
    given = torch.tensor([words.end, *words.encode(prompt)], device=device)
    context = context if isinstance(context, int) else 128
    drawn = generate(loaded.model, given, tokens, context, temperature, top_k, seed, words.count)
    text = drawn[1:].tolist()
    return words.decode(text[: text.index(words.end)] if words.end in text else text)


def _to_fastest_device(model: nn.Module) -> torch.device:
    """Move a model to a GPU if one has memory for it: on a CPU a large model would take minutes."""
    device = choose_device("auto")
    try:
        model.to(device)
    except torch.OutOfMemoryError:
        device = torch.device("cpu")
        model.to(device)
    return device


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompt: torch.Tensor,
    tokens: int,
    context: int,
    temperature: float,
    top_k: int,
    seed: int,
    vocab: int = BYTES,
) -> torch.Tensor:
    """Generate `tokens` more tokens after a prompt (T,); return both.

    Each is sampled from the first `vocab` entries of the logits, given at most `context` tokens before it. temperature
    0 takes the likeliest token; top_k 0 samples from all.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    out = prompt
    for _ in range(tokens):
        logits = logits_of(model, out[None, -context:])[0, -1, :vocab].float().cpu()  # models may have more entries
        if temperature == 0:
            chosen = logits.argmax()[None]
        else:
            if 0 < top_k < logits.numel():
                logits[logits < logits.topk(top_k).values[-1]] = float("-inf")
            chosen = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        out = torch.cat((out, chosen.to(out.device)))
    return out
