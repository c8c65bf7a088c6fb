"""Checkpoints for people: the global parameters as a plain safetensors file."""

import json
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import typer
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.sums import check_sums
from diloco.pipeline.fragments import layout_of
from diloco.syncer import checkpoint as checkpoints

BASELINE = "checkpoint"
"""Folder of the data-parallel baseline's only checkpoint; it holds the global parameters and the spec alone."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint folder meant by `path`: itself, or the newest one of a run's output folder.

    Raises:
        UsageError: there is none.
    """
    baseline = path / BASELINE
    return baseline if (baseline / "state.json").is_file() else checkpoints.find_checkpoint(path)


def printable(text: str) -> str:
    """Generated text, safe for a terminal: control characters other than line ends and tabs become `?`."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def _is_baselines(folder: Path) -> bool:
    """Whether a checkpoint folder is the baseline's: its state says nothing of a run's fragments."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {folder / 'state.json'}: {error}") from error
    return isinstance(state, dict) and "fragments" not in state


class Globals(NamedTuple):
    """What a checkpoint holds of a model."""

    tensors: dict[str, Any]
    """float32 arrays by name."""
    origin: str
    """Where they come from, in words."""
    frozen: dict[str, bytes]
    """The parameters that were not trained, as far as the run knows them: digests by name."""


def read_globals(folder: Path) -> Globals:
    """The global parameters of a checkpoint folder, checked where their digests are on record.

    Raises:
        UsageError: it is no sound checkpoint.
    """
    if _is_baselines(folder):
        check_sums(folder)
        try:
            return Globals(load_file(folder / "globals.safetensors"), "data-parallel", {})
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot read {folder / 'globals.safetensors'}: {error}") from error
    saved = checkpoints.load_checkpoint(folder)
    tensors = layout_of(saved.spec.tensors).whole(saved.globals)
    return Globals(tensors, f"trained on {saved.state.tokens} tokens", dict(saved.spec.frozen or ()))


def make_folder(folder: Path) -> None:
    """Make it, and say so, unless it is there."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        typer.echo(f"{folder}: made this folder")


def export(checkpoint: Path, out: Path, overwrite: bool = False) -> None:
    """Write one float32 entry a tensor; digests and shapes are checked against the spec on the way.

    Raises:
        UsageError: no sound checkpoint there, or `out` exists already.
    """
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: choose another name, or give --overwrite")
    tensors, origin, _ = read_globals(find_checkpoint(checkpoint))
    make_folder(out.parent)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        save_file(tensors, temporary)
        temporary.replace(out)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write {out}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    total = sum(tensor.size for tensor in tensors.values())
    typer.echo(f"{out}: {len(tensors)} tensors, {total} elements, {origin}")
