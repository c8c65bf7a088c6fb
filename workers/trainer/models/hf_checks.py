"""Asks transformers about a config, before anything is built, whether the trainer can train such a model."""

from typing import Any

from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.models.hf_config import EXTRA, HfModel
from diloco.workers.trainer.optional import first_line, library

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
            f"{reader} has {entries} entries, but the model's vocab_size is {text.vocab_size}, so tokens up to "
            f"{entries - 1} would be unknown to it; use the model's own tokenizer"
        )
    if isinstance(positions, int) and seq_len > positions:
        raise UsageError(f"seq_len={seq_len}: the model has {positions} positions (max_position_embeddings)")


def _another(kind: str, why: str) -> UsageError:
    needed = "use a causal language model, such as llama, qwen3 or gpt2"
    return UsageError(f"model_type {kind!r} is not a causal language model: {why}; {needed}")
