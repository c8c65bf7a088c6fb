"""A text in the tokens of a model's own tokenizer. Each party tokenises at its start, so this is for some megabytes of
text."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import structlog
import xxhash

from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.payload.codec import as_bytes, digest_of
from diloco.workers.trainer.data import bpe
from diloco.workers.trainer.data.text import has_tokens, open_text
from diloco.workers.trainer.data.text_sources import shortened
from diloco.workers.trainer.data.tokens import BOUNDARY, BYTES, TextData, Tokens
from diloco.workers.trainer.models.hf_config import EXTRA, HfModel, check_fits, config_of

# A larger text must be made into token shards once: each party would tokenise it again at each start.
MAX_BYTES = 256 * 2**20
# Pieces handed to the tokenizer's threads at once.
SOME = 64

log = structlog.get_logger()


def check_model(model: HfModel, data: str, seq_len: int) -> None:
    """Report at once what would stop every party of a run, before any is started.

    Neither a text nor token shards are read for this; a token file is, to find its largest token.

    Raises:
        UsageError: raised by `config_of` and `check_fits`, or there are no such tokens.
    """
    config = config_of(model)
    tokens = open_text(data) if has_tokens(data) else None
    tokenizer = _tokenizer(model) if tokens is None else None
    check_fits(config, *_vocabulary(data, tokens, model, tokenizer), seq_len)


def open_for(data: str, model: HfModel | None, seq_len: int) -> TextData:
    """Open the text of a run, tokenised by its model's tokenizer if there is one and the text is not tokens already.

    It warns if another tokenizer made the token shards. seq_len: tokens in a sequence.

    Raises:
        UsageError: raised by `open_text`, `config_of` and `check_fits`; or the text is too large to be tokenised at
            each start, or `tokenizers` is missing.
    """
    config = None if model is None else config_of(model)
    text = open_text(data)
    if model is None:
        return text
    if text.made_by is not None:
        check_fits(config, *_vocabulary(data, text, model, None), seq_len)
        if model.tokenizer is not None and text.made_by and model.tokenizer_digest not in text.made_by:
            detail = (
                f"the token shards in {data} were made with a tokenizer file with digest {text.made_by[0]}, but "
                f"{model.tokenizer} has {model.tokenizer_digest}: the model may misread them. Create shards for this "
                f"model: diloco data prepare TEXT --tokenizer {model.folder}"
            )
            log.warning("tokenizer_differs", detail=detail)
        return text
    tokenizer = _tokenizer(model)
    check_fits(config, *_vocabulary(data, None, model, tokenizer), seq_len)
    if tokenizer is None:
        return text
    if (size := len(text.train) + len(text.validation)) > MAX_BYTES:
        raise UsageError(
            f"data={data!r}: {size} bytes are too many for each party to tokenise at each start; create token shards "
            f"once: `diloco data prepare {data} --tokenizer {model.folder}`"
        )
    log.info("text_tokenised", tokenizer=str(model.tokenizer), bytes=size)
    return _tokenised(text, tokenizer, model)


def _tokenizer(model: HfModel) -> Any:
    """Load a model's tokenizer; None if it has none."""
    return None if model.tokenizer is None else bpe.load(model.tokenizer, EXTRA)


def _vocabulary(data: str, tokens: TextData | None, model: HfModel, tokenizer: Any) -> tuple[int, str]:
    """Return the size of the vocabulary that the model must read, and a description of its source.

    tokens: the text if it is tokens already, otherwise None.
    """
    if tokens is not None:
        return tokens.entries, f"the vocabulary of data={data!r}"
    if tokenizer is None:
        return BYTES, "a byte text"
    return _entries(tokenizer, _between(model)), f"the tokenizer {model.tokenizer}"


def _between(model: HfModel) -> list[int]:
    """Return the token that stands between documents, as a list that is empty if the model has none."""
    end = model.config.get("eos_token_id")
    ends = end if isinstance(end, list) else [end]
    return [token for token in ends[:1] if isinstance(token, int) and token >= 0]  # -1 says that there is none


def _entries(tokenizer: Any, between: list[int]) -> int:
    return max([bpe.entries(tokenizer), *(token + 1 for token in between)])


def check_tokenizer(text: TextData, spec: dict[str, str | int | float | bool | None]) -> None:
    """Refuse to read a text by a tokenizer other than the run's.

    Raises:
        UsageError: the run's tokenizer is not on this machine.
        SpecMismatch: the tokenizer here is another one.
    """
    run = spec.get("tokenizer")
    if run is not None and text.tokenizer is None:
        raise UsageError(
            "this run reads its text with its model's tokenizer: pass --model hf:FOLDER with tokenizer.json"
        )
    if run != text.tokenizer:
        raise SpecMismatch(f"the tokenizer here ({text.tokenizer}) is not the run's ({run}): pass the run's folder")


def _tokenised(text: TextData, tokenizer: Any, model: HfModel) -> TextData:
    between = _between(model)
    train, validation = (_tokens(part[:], tokenizer, between) for part in (text.train, text.validation))
    sums = b"".join(digest_of(as_bytes(part)) for part in (train, validation))
    return TextData(
        train,
        validation,
        xxhash.xxh3_128_hexdigest(sums),
        text.files,
        text.skipped,
        entries=_entries(tokenizer, between),
        tokenizer=model.tokenizer_digest,
    )


def _tokens(text: Tokens, tokenizer: Any, between: list[int]) -> Tokens:
    """Return all documents (bytes,) as tokens (tokens,), each followed by the token between documents."""
    found: list[Tokens] = []
    pieces = _pieces(text.tobytes())
    while some := list(islice(pieces, SOME)):
        for tokens, (_, ends) in zip(bpe.encode(tokenizer, [piece for piece, _ in some]), some, strict=True):
            found.append(np.array(tokens + between * ends, np.uint32))
    return np.concatenate(found) if found else np.empty(0, np.uint32)


def _pieces(text: bytes) -> Iterator[tuple[str, bool]]:
    """Yield documents, cut if they are long, and whether a piece is the last of its document."""
    for document in text.split(bytes([BOUNDARY])):
        if document:
            *first, last = shortened(document.decode(errors="replace"))
            yield from ((piece, False) for piece in first)
            yield last, True
