"""What transformers says of a config, asked before anything is built: whether the trainer can train such a model."""

from typing import Any

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.models.hf_config import EXTRA, HfModel
from diloco.workers.trainer.optional import first_line, library

_WITHOUT_A_SWITCH = frozenset({"cpmant", "xlnet"})
"""Kinds among transformers' causal language models that read later tokens whatever their config says."""
_CAUSAL_ANYWAY = frozenset({"gpt_neox", "gpt_neox_japanese", "trocr"})
"""Kinds that have `is_decoder` and never look at it."""
_SWITCHES: tuple[tuple[str, tuple[Any, ...], Any], ...] = (
    ("is_decoder", (False,), True),
    ("is_causal", (False,), True),
    ("causal", (False,), True),
    ("use_bidirectional_attention", (True, "all"), False),
)
"""Keys of a config, the values by which a model reads later tokens, and the value by which it does not."""


def config_of(given: HfModel) -> Any:
    """Its config as transformers has it, of a causal language model: one whose every token follows from earlier ones.

    Raises:
        UsageError: transformers is missing, does not know the model, or it is another kind of model.
    """
    transformers = library("transformers", EXTRA, "this run's model")
    kind = str(given.config["model_type"])
    if kind not in transformers.CONFIG_MAPPING:
        raise UsageError(f"model_type {kind!r} is not known to transformers {transformers.__version__}")
    made = transformers.CONFIG_MAPPING[kind]
    if made not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _another(kind, "transformers' AutoModelForCausalLM has no such model")
    try:
        config = made.from_dict(given.config)
        trains_half = getattr(config, "is_encoder_decoder", False)
        text = config if trains_half else config.get_text_config()
    except Exception as error:  # of its own validation
        raise UsageError(f"the config of model_type {kind!r} is not sound: {first_line(error)}") from error
    if kind in _WITHOUT_A_SWITCH:
        raise _another(kind, "each of its tokens sees later ones")
    if trains_half:
        raise _another(kind, "is_encoder_decoder is True in its config, and its encoder would not be trained")
    for key, wrong, right in _SWITCHES:
        if key == "is_decoder" and kind in _CAUSAL_ANYWAY:
            continue
        if (value := getattr(text, key, None)) in wrong:
            raise _another(kind, f"{key} is {value} in its config; with {right} its tokens see no later ones")
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise _another(kind, "its config has no vocab_size")
    config.use_cache = False  # of keys and values, which only generation needs
    return config


def check_fits(config: Any, entries: int, reader: str, seq_len: int) -> None:
    """Whether a model can read a text.

    Args:
        config: as of `config_of`.
        entries: of the text's vocabulary; tokens are below it.
        reader: what has this vocabulary, in words.
        seq_len: tokens in a sequence.

    Raises:
        UsageError: it has too few tokens or positions.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if entries > text.vocab_size:
        raise UsageError(
            f"{reader} has {entries} entries, and the model's vocab_size is {text.vocab_size}: a token up to "
            f"{entries - 1} would be unknown to it; the text must be read by the model's own tokenizer"
        )
    if isinstance(positions, int) and seq_len > positions:
        raise UsageError(f"seq_len={seq_len}: the model has {positions} positions (max_position_embeddings)")


def _another(kind: str, why: str) -> UsageError:
    needed = "a causal language model is needed, such as llama, qwen3 or gpt2"
    return UsageError(f"model_type {kind!r} is no causal language model: {why}; {needed}")
