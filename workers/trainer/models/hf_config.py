"""Reads what `--model hf:...` names: a causal language model of transformers. Only `config_of` imports transformers; it
asks, before anything is built, whether the trainer can train such a model.

hf:FOLDER          config.json, with weights (safetensors) and a tokenizer (tokenizer.json) if they are there
hf:FILE.json       only a config: the run begins from random parameters
hf:OWNER/NAME      a folder of the Hugging Face hub
hf:{...}           the config itself, as a run's spec has it
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.workers.trainer.optional import first_line, library

# Prefix of a model's path or name. The prefix of a data set is the same: `text_sources.DATA_SET`.
MODEL = "hf:"
EXTRA = "transformers"
# Keys of a config that say where it came from, how its numbers were stored, which code to fetch, what the model
# returns, or what a classifier distinguishes. The agreed config has none of them, nor any `..._implementation`: they
# may name code on the hub, and a spec comes from other parties.
_NOT_OF_THE_MODEL = frozenset(
    {
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map"),
        *("dtype", "torch_dtype", "use_cache", "custom_pipelines", "kernel_config", "use_kernels"),
        *("num_labels", "id2label", "label2id", "return_dict", "output_hidden_states", "output_attentions"),
    }
)
# Some kinds of config make a list with one entry per layer before anything is built. This bounds its memory.
_MAX_LAYERS = 100_000
_MAX_NESTED = 32
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = ("*.json", "*.safetensors")
# Kinds among transformers' causal language models whose tokens see later ones, whatever the config says.
_WITHOUT_A_SWITCH = frozenset({"cpmant", "xlnet"})
# Kinds that are causal whatever the config's `is_decoder` says.
_CAUSAL_ANYWAY = frozenset({"gpt_neox", "gpt_neox_japanese", "trocr"})
# (key of a config, values with which a model's tokens see later ones, value with which they do not).
_SWITCHES: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("is_decoder", (False,), True),
    ("is_causal", (False,), True),
    ("causal", (False,), True),
    ("use_bidirectional_attention", (True, "all"), False),
)


@dataclass(frozen=True)
class HfModel:
    """A model of transformers."""

    config: dict[str, Any]
    """The config that the model is built from."""
    folder: Path | None = None
    """The folder with its weights and its tokenizer; None if there is none on this machine."""

    @property
    def agreed(self) -> str:
        """The model as a spec has it, the same for all parties: its config, without the folder."""
        return MODEL + json.dumps(self.config, sort_keys=True, separators=(",", ":"))

    @property
    def has_weights(self) -> bool:
        """True if the run begins from weights in the folder."""
        return self.folder is not None and any(self.folder.glob("*.safetensors"))

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer's file; None if there is none."""
        path = None if self.folder is None else self.folder / "tokenizer.json"
        return path if path is not None and path.is_file() else None

    @cached_property
    def tokenizer_digest(self) -> str | None:
        """Digest of the tokenizer's file, by which other parties know it; None if there is none."""
        return None if self.tokenizer is None else xxhash.xxh3_128_hexdigest(self.tokenizer.read_bytes())


def read_hf(name: str) -> HfModel | None:
    """Return the model that a setting names; None if it names a built-in size.

    Raises:
        UsageError: there is no such folder, file or name, or it is not the config of one model.
    """
    if not name.startswith(MODEL):
        return None
    given = name.removeprefix(MODEL)
    if given.startswith("{"):
        return HfModel(_config(given, "the run's spec"))
    path = Path(given)
    if path.is_file():
        return HfModel(_config(path.read_text("utf-8", "replace"), str(path)))
    folder = path if path.is_dir() else _from_hub(given)
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(f"model={name!r}: {file} does not exist; give a folder with config.json, or such a file")
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise UsageError(f"model={name!r}: the weights are pickled (.bin): save them as safetensors first")
    return HfModel(_config(file.read_text("utf-8", "replace"), str(file)), folder)


def check_same(here: HfModel, run: HfModel) -> None:
    """Compare the config that this party was given with the run's.

    Raises:
        SpecMismatch: the message shows each key that differs.
    """
    keys = sorted({*here.config, *run.config})
    lines = [
        f"  {key}: here {here.config.get(key)!r}, the run has {run.config.get(key)!r}"
        for key in keys
        if here.config.get(key) != run.config.get(key)
    ]
    if lines:
        told = "\n".join(lines)
        raise SpecMismatch(
            f"this party's model config and the run's disagree:\n{told}\nTo follow the run's config, leave out --model."
        )


def is_same_model(model: str, run: object) -> bool:
    """Return whether a setting and a run's spec name the same transformers model, so that the folders may differ.

    Raises:
        SpecMismatch: raised by `check_same`.
        UsageError: raised by `read_hf`.
    """
    here, there = read_hf(model), read_hf(str(run))
    if here is None or there is None:
        return False
    check_same(here, there)
    return True


def _config(text: str, where: str) -> dict[str, Any]:
    try:
        found = _kept(json.loads(text))
    except RecursionError as error:
        raise UsageError(f"{where} is not a config: it is nested more than {_MAX_NESTED} deep") from error
    except ValueError as error:
        raise UsageError(f"{where} is not a config: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise UsageError(f"{where} is not a config of a transformers model: it has no model_type")
    for key, n in found.items():
        if "layer" in key and isinstance(n, int) and not 0 <= n <= _MAX_LAYERS:
            raise UsageError(f"{where} is not a config: {key} is {n}, but must be from 0 to {_MAX_LAYERS}")
    if found.get("quantization_config"):
        raise UsageError(f"{where} describes a quantized model: use the full-precision one")
    return found


def _kept(value: Any, depth: int = 0) -> Any:
    """Return a part of a config without the keys that do not describe the model.

    Raises:
        RecursionError: it is nested too deep.
    """
    if depth > _MAX_NESTED:
        raise RecursionError
    if isinstance(value, dict):
        return {
            key: _kept(part, depth + 1)
            for key, part in value.items()
            if key not in _NOT_OF_THE_MODEL and "_implementation" not in key
        }
    return [_kept(part, depth + 1) for part in value] if isinstance(value, list) else value


def _from_hub(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise UsageError(f"model='{MODEL}{name}': no such file or folder; give a folder with config.json, or a name")
    hub = library("huggingface_hub", EXTRA, f"model='{MODEL}{name}'")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the library raises many kinds of its own
        said = first_line(error)
        raise UsageError(f"model='{MODEL}{name}': no such file or folder here, and the hub says: {said}") from error


def config_of(given: HfModel) -> Any:
    """Return a model's config as transformers has it.

    The model must be a causal language model: one that predicts every token from earlier ones only.

    Raises:
        UsageError: transformers is missing or does not know the model, or it is another kind of model.
    """
    transformers = library("transformers", EXTRA, "this run's model")
    kind = str(given.config["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(f"model_type {kind!r} is unknown to transformers {transformers.__version__}")
    made = transformers.CONFIG_MAPPING[kind]
    if made not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _another(kind, "transformers' AutoModelForCausalLM has no such model")
    try:
        config = made.from_dict(given.config)
        trains_half = getattr(config, "is_encoder_decoder", False)
        text = config if trains_half else config.get_text_config()
    except Exception as error:  # raised by the config's own validation
        raise UsageError(f"the config of model_type {kind!r} is invalid: {first_line(error)}") from error
    if kind in _WITHOUT_A_SWITCH:
        raise _another(kind, "its tokens attend to later ones")
    if trains_half:
        raise _another(kind, "is_encoder_decoder is True in its config, so its encoder would not be trained")
    for key, wrong, right in _SWITCHES:
        if key == "is_decoder" and kind in _CAUSAL_ANYWAY:
            continue
        if (value := getattr(text, key, None)) in wrong:
            raise _another(
                kind,
                f"{key} is {value} in its config; set it to {right}, so that its tokens do not attend to later ones",
            )
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise _another(kind, "its config has no vocab_size")
    config.use_cache = False  # the key-value cache, which only generation needs
    return config


def check_fits(config: Any, entries: int, reader: str, seq_len: int) -> None:
    """Check that a model can read a text.

    Args:
        config: the model's config, from `config_of`.
        entries: size of the text's vocabulary; tokens are below it.
        reader: what has this vocabulary, in words, for the message.
        seq_len: tokens in a sequence.

    Raises:
        UsageError: the model has too few tokens or positions.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if entries > text.vocab_size:
        raise UsageError(
            f"{reader} has {entries} entries, but the model's vocab_size is {text.vocab_size}, so it does not know "
            f"the tokens {text.vocab_size} to {entries - 1}; use the model's own tokenizer"
        )
    if isinstance(positions, int) and seq_len > positions:
        raise UsageError(
            f"seq_len={seq_len}: the model has {positions} positions (max_position_embeddings): pass --seq-len "
            f"{positions} or less"
        )


def _another(kind: str, why: str) -> UsageError:
    needed = "use a causal language model, such as llama, qwen3 or gpt2"
    return UsageError(f"model_type {kind!r} is not a causal language model: {why}; {needed}")
