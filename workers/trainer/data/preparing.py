"""`diloco data prepare`: turns text into token shards, with memory that does not grow with the text.

Everything is written to a hidden folder next to the requested one and renamed at the end, so a folder with the final
name is always complete. A hash of a document's position in the text decides if it is held out; where that holds out too
much or too little (few documents), the last part of all tokens is held out instead.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.workers.trainer.data import bpe
from diloco.workers.trainer.data.text_sources import Source, documents
from diloco.workers.trainer.data.token_shards import (
    FORMAT,
    INDEX_FILE,
    TOKENIZER_FILE,
    Index,
    ShardWriter,
    digest_of_file,
    fingerprint_of,
    foreign_file,
)
from diloco.workers.trainer.data.tokens import BYTES, HELD_OUT, MIN_BYTES, balanced, is_held_out

# Bytes of text that a vocabulary is trained on, from all over the source. They determine the memory of the training.
SAMPLE_BYTES = 32 * 2**20
SHARD_TOKENS = 2**28
# Bytes of text encoded at a time. Encoding takes about 50 MB of memory meanwhile.
_BATCH_BYTES = 2**20


@contextmanager
def new_folder(out: Path, overwrite: bool, say: Callable[[str], None]) -> Iterator[Path]:
    """Give a folder to write to, which is renamed to `out` if the block ends well and deleted if it does not.

    Args:
        out: the final folder.
        overwrite: replace token shards that are there.
        say: receives a message if an earlier process left an unfinished folder.

    Raises:
        UsageError: something is there, another process is writing it, or it cannot be created.
    """
    out = out.absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if strange := foreign_file(out):
            raise UsageError(f"{out} holds something other than token shards ({strange}): choose a different --out")
        if not overwrite:
            raise UsageError(f"{out} holds token shards: choose a different --out, or pass --overwrite to replace them")
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        lock = os.open(unfinished, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"cannot create {unfinished}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another `diloco data prepare` is already working on {out}") from error
        if strange := foreign_file(unfinished, finished=False):
            raise UsageError(
                f"{unfinished} is in the way, and holds something that `diloco data prepare` did not "
                f"write ({strange}): move it away"
            )
        if any(unfinished.iterdir()):
            say(f"{out}: an earlier preparation did not finish; starting from scratch")
            for left in unfinished.iterdir():
                left.unlink()
        try:
            yield unfinished
            _take_name(unfinished, out)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _take_name(finished: Path, out: Path) -> None:
    before = out.with_name(f".{out.name}.replaced")
    shutil.rmtree(before, ignore_errors=True)
    if out.exists():
        out.rename(before)
    finished.rename(out)
    shutil.rmtree(before, ignore_errors=True)


def write_shards(
    folder: Path,
    source: Source,
    tokenizer: Any,
    separator: int,
    *,
    made_by: str | None = None,
    max_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    part_done: Callable[[], None] = lambda: None,
    encoded: Callable[[int], None] = lambda tokens: None,
) -> Index:
    """Encode a source into an empty folder.

    Args:
        folder: receives the shards, the tokenizer and, last, the index.
        source: the text, not empty.
        tokenizer: a tokenizer from `bpe.train` or `bpe.load`.
        separator: token after each document.
        made_by: digest of the file that the tokenizer was loaded from; None if it was trained.
        max_tokens: stop after the document that reaches this number of tokens.
        shard_tokens: tokens in a file.
        part_done: called after each part of the source.
        encoded: called with the number of tokens so far.

    Raises:
        UsageError: there is too little text, or the source cannot be read to its end.
    """
    entries = max(bpe.entries(tokenizer), BYTES + 1)  # 256 would mean bytes
    dtype: Literal["uint16", "uint32"] = "uint16" if entries <= 2**16 else "uint32"
    train, held_out = (ShardWriter(folder, name, dtype, shard_tokens) for name in ("train", "validation"))
    count = tokens = text_bytes = skipped = 0
    for batch, size, empty in _batches(documents(source, part_done)):
        text_bytes, skipped = text_bytes + size, skipped + empty
        for one in bpe.encode(tokenizer, batch):
            (held_out if is_held_out(str(count)) else train).add([*one, separator])
            count, tokens = count + 1, tokens + len(one) + 1
            if max_tokens is not None and tokens >= max_tokens:
                break
        encoded(tokens)
        if max_tokens is not None and tokens >= max_tokens:
            break
    train.close()
    held_out.close()
    if tokens < MIN_BYTES:
        raise UsageError(f"{tokens} tokens in {count} documents are too few; give at least {MIN_BYTES}")
    trained = sum(shard.tokens for shard in train.shards)
    if not balanced(tokens - trained, tokens):
        trained = tokens - round(tokens * HELD_OUT)
    tokenizer.save(str(folder / TOKENIZER_FILE))
    saved = digest_of_file(folder / TOKENIZER_FILE)
    index = Index(
        format=FORMAT,
        dtype=dtype,
        entries=entries,
        separator=separator,
        tokenizer=saved,
        made_by=made_by or saved,
        train_tokens=trained,
        documents=count,
        skipped=skipped + source.skipped,
        text_bytes=text_bytes,
        shards=(*train.shards, *held_out.shards),
        fingerprint="",
    )
    index = index.model_copy(update={"fingerprint": fingerprint_of(index)})
    (folder / INDEX_FILE).write_text(dumps(index.model_dump(), indent=1) + "\n")
    return index


def _batches(texts: Iterable[str]) -> Iterator[tuple[list[str], int, int]]:
    """Yield texts of about `_BATCH_BYTES` together, their number of bytes, and how many empty texts were left out."""
    batch: list[str] = []
    size = empty = 0
    for text in texts:
        if not text:
            empty += 1
            continue
        batch.append(text)
        size += len(text.encode())
        if size >= _BATCH_BYTES:
            yield batch, size, empty
            batch, size, empty = [], 0, 0
    if batch or empty:
        yield batch, size, empty
