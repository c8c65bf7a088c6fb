"""`diloco data`: turn text into token shards, once before a run. Needs no torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from diloco.cli import new_app
from diloco.pipeline.errors import UsageError
from diloco.pipeline.units import parse_whole, written
from diloco.workers.trainer.data import bpe
from diloco.workers.trainer.data.preparing import SAMPLE_BYTES, new_folder, write_shards
from diloco.workers.trainer.data.text_sources import DATA_SET, Source, open_sources, sample
from diloco.workers.trainer.data.token_shards import Index, check_shards, digest_of_file, read_index

USUAL_VOCAB = 32_000

app = new_app(
    no_args_is_help=True,
    help="Turn texts, tables and data sets of any size into token shards for `--data`, and check them.",
)


def _whole(least: int, most: int, value: str) -> int:
    """Parse an option that is a whole number as people write it, such as 32k."""
    try:
        number: int | None = int(parse_whole(value))
    except ValueError:
        number = None
    if number is None or not least <= number <= most:
        raise typer.BadParameter(f"{value}: use a whole number from {least} to {most}, such as 32k or 2.5M")
    return number


_vocab, _tokens = partial(_whole, bpe.MIN_VOCAB, bpe.MAX_VOCAB), partial(_whole, 1, 2**62)
_vocab.__name__ = _tokens.__name__ = "N"  # type: ignore[attr-defined]  # typer asks a parser for its name


@app.command()
def prepare(
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...",
            help="Text files, folders, globs, .parquet and .arrow files, stdlib, or "
            "hf:OWNER/NAME[,config=C][,split=S][,column=T]",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder to create (default: the name of the first TEXT plus -tokens)"),
    ] = None,
    vocab: Annotated[
        int | None,
        typer.Option(
            parser=_vocab,
            metavar="N",
            help="Entries of a byte-pair vocabulary that is trained on a sample of the text (default "
            f"{written(USUAL_VOCAB)})",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Use this tokenizer.json, or the one in this folder, instead of training one"
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="Token of --tokenizer that ends each document"),
    ] = None,
    column: Annotated[str, typer.Option(metavar="NAME", help="Text column of tables and data sets")] = "text",
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Stream data sets, without a copy on this disk")
    ] = False,
    tokens: Annotated[
        int | None, typer.Option(parser=_tokens, metavar="N", help="Stop after about this many tokens, e.g. 10B")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the token shards in FOLDER")] = False,
) -> None:
    """Write text as token shards, for `--data FOLDER` of a run, learner or evaluator.

    A vocabulary is trained on a sample first, unless --tokenizer gives one. An unfinished folder is deleted.
    """
    if tokenizer is not None and vocab is not None:
        raise UsageError(
            "--vocab is for a vocabulary that is trained here, but --tokenizer has its own: leave out one of them"
        )
    if separator is not None and tokenizer is None:
        raise UsageError(
            "--separator is only for a --tokenizer: leave it out; a vocabulary that is trained here "
            f"uses {bpe.SEPARATOR}"
        )
    if streaming and not any(text.startswith(DATA_SET) for text in texts):
        raise UsageError(f"--streaming is only for data sets by name, but no TEXT begins with {DATA_SET}: leave it out")
    out = out or Path(f"{_stem(texts[0])}-tokens")
    _check_apart(out, texts)
    loaded = None if tokenizer is None else bpe.load(tokenizer)
    made_by = None if tokenizer is None else digest_of_file(bpe.file_of(tokenizer))
    with new_folder(out, overwrite, typer.echo) as folder:
        source = open_sources(texts, column, streaming)
        words = loaded or _trained(source, vocab or USUAL_VOCAB)
        stop = bpe.separator_of(words, separator)
        with _bar("encoding", len(source.parts) if source.counted else None) as bar:
            index = write_shards(
                folder,
                source,
                words,
                stop,
                made_by=made_by,
                max_tokens=tokens,
                part_done=partial(bar, advance=1),
                encoded=lambda tokens: bar(said=f"{tokens / 1e6:.1f}M tokens"),
            )
    typer.echo(f"{out}: {_told(index)}\nto train on it, run: diloco run --data {out}")


@app.command()
def check(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of token shards")]) -> None:
    """Read all token shards and compare them with the digests in their index, for instance after copying them."""
    index = read_index(folder)
    with _bar("reading", index.tokens * np.dtype(index.dtype).itemsize) as bar:
        check_shards(folder, lambda size: bar(advance=size))
    typer.echo(f"{folder}: unchanged since it was written; {_told(index)}")


@contextmanager
def _bar(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """Show a progress bar on the terminal, if there is one; yields `Progress.update` of its task."""
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield partial(progress.update, progress.add_task(what, total=total, said=""))


def _stem(text: str) -> str:
    """Return a name for the output that is made of a text."""
    if text.startswith(DATA_SET):
        return text.removeprefix(DATA_SET).split(",")[0].rpartition("/")[2]
    if Path(text).exists():
        return Path(text).absolute().name.removesuffix(Path(text).suffix) or "text"
    return text if text.isidentifier() else "text"


def _check_apart(out: Path, texts: Sequence[str]) -> None:
    """Raise UsageError if the folder would be part of the text the next time, or holds text that it would replace."""
    for text in texts:
        if Path(text).is_dir() and out.resolve().is_relative_to(Path(text).resolve()):
            raise UsageError(f"{out} is inside {text}, which is the text: choose a different --out")
        if Path(text).resolve().is_relative_to(out.resolve()):
            raise UsageError(f"{text} is inside {out}, which would be replaced: choose a different --out")


def _trained(source: Source, vocab: int) -> Any:
    typer.echo(
        f"training a vocabulary of {vocab} on {SAMPLE_BYTES // 2**20} MiB of the text, or on all of it if it is smaller"
    )
    return bpe.train(sample(source, SAMPLE_BYTES), vocab)


def _told(index: Index) -> str:
    return (
        f"{index.tokens} tokens of {index.documents} documents in {len(index.shards)} shards, "
        f"{index.tokens - index.train_tokens} of them held out; vocabulary {index.entries}, "
        f"{index.text_bytes / max(1, index.tokens):.2f} bytes per token; {index.skipped} empty or unreadable "
        f"documents skipped; fingerprint {index.fingerprint}"
    )
