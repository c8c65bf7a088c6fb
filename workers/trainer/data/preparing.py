"""`diloco data prepare`: text to token shards, in memory that does not grow with the text.

All is written to a hidden folder beside the one that was asked for, which gets its name at the end: what has the name
is finished. Documents are held out by a hash of their place in the text; where that gives too much or too little (few
documents), the last part of all tokens is.
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
from diloco.workers.trainer.data.shards import (
    FORMAT,
    INDEX_FILE,
    TOKENIZER_FILE,
    Index,
    ShardWriter,
    digest_of_file,
    fingerprint_of,
    strange_in,
)
from diloco.workers.trainer.data.sources import Source, documents
from diloco.workers.trainer.data.tokens import BYTES, HELD_OUT, MIN_BYTES, balanced, is_held_out

SAMPLE_BYTES = 32 * 2**20
"""Text that a vocabulary is trained on, from all over the source: what the training holds in memory follows from it."""
SHARD_TOKENS = 2**28
_BATCH_BYTES = 2**20
"""Text encoded in one go: some 50 MB of memory while it is."""


@contextmanager
def new_folder(out: Path, overwrite: bool, say: Callable[[str], None]) -> Iterator[Path]:
    """A folder to write to, which becomes `out` if the block ends well, and is deleted if it does not.

    overwrite: replace token shards that are there. say: told of what an earlier process has left.

    Raises:
        UsageError: something is there, another process is at it, or it cannot be made.
    """
    out = out.absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        if strange := strange_in(out):
            raise UsageError(f"{out} holds something else than token shards ({strange}): choose another --out")
        if not overwrite:
            raise UsageError(f"{out} holds token shards: choose another --out, or give --overwrite to replace them")
    unfinished = out.with_name(f".{out.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        lock = os.open(unfinished, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"cannot make {unfinished}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another `diloco data prepare` is at work on {out}") from error
        if strange := strange_in(unfinished, finished=False):
            raise UsageError(f"{unfinished} is in the way, and holds what no preparation has left ({strange})")
        if any(unfinished.iterdir()):
            say(f"{out}: an earlier preparation did not end; this one begins anew")
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
    most_tokens: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
    part_done: Callable[[], None] = lambda: None,
    encoded: Callable[[int], None] = lambda tokens: None,
) -> Index:
    """Encode a source into an empty folder.

    Args:
        folder: it gets shards, the tokenizer and, last, the index.
        source: text, not empty.
        tokenizer: as of `bpe.train` or `bpe.load`.
        separator: token after each document.
        made_by: digest of the file that the tokenizer was loaded from, if it was.
        most_tokens: end with the document that reaches so many.
        shard_tokens: in a file.
        part_done: called after each part of the source.
        encoded: called with the number of tokens so far.

    Raises:
        UsageError: too little text, or a source that cannot be read to its end.
    """
    entries = max(bpe.entries(tokenizer), BYTES + 1)  # 256 would be those of bytes
    dtype: Literal["uint16", "uint32"] = "uint16" if entries <= 2**16 else "uint32"
    train, held_out = (ShardWriter(folder, name, dtype, shard_tokens) for name in ("train", "validation"))
    count = tokens = text_bytes = skipped = 0
    for batch, size, empty in _batches(documents(source, part_done)):
        text_bytes, skipped = text_bytes + size, skipped + empty
        for one in bpe.encode(tokenizer, batch):
            (held_out if is_held_out(str(count)) else train).add([*one, separator])
            count, tokens = count + 1, tokens + len(one) + 1
            if most_tokens is not None and tokens >= most_tokens:
                break
        encoded(tokens)
        if most_tokens is not None and tokens >= most_tokens:
            break
    train.close()
    held_out.close()
    if tokens < MIN_BYTES:
        raise UsageError(f"{tokens} tokens in {count} documents are too few; at least {MIN_BYTES} are needed")
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
    """Texts of some megabytes together, their bytes, and how many empty ones were left out."""
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
