"""`diloco export`: write the global parameters of a checkpoint as a plain safetensors file."""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import typer

from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.address import is_address
from diloco.pipeline.files.sums import check_sums
from diloco.pipeline.files.tensor_file import Tensor, read_tensors, write_tensors
from diloco.syncer.checkpoints.loading import find_checkpoint as find_of_run
from diloco.syncer.checkpoints.loading import load_checkpoint, read_newest
from diloco.syncer.checkpoints.manifest import STATE_FILE
from diloco.syncer.checkpoints.places import Folder, Place

T = TypeVar("T")
# Folder of the data-parallel baseline's only checkpoint, which holds nothing but the global parameters and the spec.
BASELINE = "checkpoint"


class Globals(NamedTuple):
    """The model of a checkpoint."""

    tensors: Mapping[str, Tensor]
    """The global parameters in float32, by name. Each is read, and checked against its digest, when it is accessed."""
    origin: str
    """Where the parameters come from, in words."""
    frozen: dict[str, bytes]
    """Digests of the parameters that were not trained, by name, if the run's spec has them."""
    trainer: Any
    """The trainer's part of the run's spec."""
    folder: str


def find_checkpoint(place: str | Path) -> Place:
    """Return the checkpoint folder that a path means: the baseline's, or the newest one of a run.

    Raises:
        UsageError: there is no checkpoint.
    """
    baseline = None if is_address(str(place)) else Path(place) / BASELINE
    return Folder(baseline) if baseline and (baseline / STATE_FILE).is_file() else find_of_run(place)


def read_globals(place: str | Path) -> Globals:
    """Return the global parameters of a checkpoint, checked against all recorded digests.

    place: folder or address of the checkpoint, or output folder of a run or of the baseline.

    Raises:
        UsageError: there is no checkpoint, or it is damaged.
    """
    return make_of_globals(place, lambda found: found)


def make_of_globals(place: str | Path, make: Callable[[Globals], T]) -> T:
    """Return what `make` makes of a checkpoint's global parameters.

    A live run drops old checkpoints. If it drops this one while it is read, `make` is called again with a newer one.

    Raises:
        UsageError: raised by `read_globals` or `make`.
    """
    return read_newest(partial(find_checkpoint, place), lambda folder: make(_globals_in(folder)))


def _globals_in(folder: Place) -> Globals:
    if isinstance(folder, Folder) and "fragments" not in (state := _read_state(folder.path)):
        return _of_baseline(folder.path, state)
    saved = load_checkpoint(str(folder))
    origin = f"trained on {saved.state.tokens} tokens"
    return Globals(saved.tensors(), origin, dict(saved.spec.frozen or ()), saved.spec.trainer, str(folder))


def _read_state(folder: Path) -> dict[str, Any]:
    try:
        state = json.loads((folder / STATE_FILE).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {folder / STATE_FILE}: {error}") from error
    return state if isinstance(state, dict) else {"fragments": ()}


def _of_baseline(folder: Path, state: Mapping[str, Any]) -> Globals:
    check_sums(folder)
    spec = state.get("spec")
    trainer = spec.get("trainer") if isinstance(spec, dict) else None
    return Globals(read_tensors(folder / "globals.safetensors"), "data-parallel", {}, trainer, str(folder))


def make_folder(folder: Path) -> None:
    """Create the folder if it is missing, and say so."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        typer.echo(f"{folder}: created this folder")


def export(checkpoint: str | Path, out: Path, overwrite: bool = False) -> None:
    """Write the parameters as a file with one float32 entry per tensor, after checking digests and shapes.

    Raises:
        UsageError: there is no intact checkpoint, or `out` exists already or is not a file.
    """
    given, out = out, Path(os.path.realpath(out))  # the file behind a link is replaced, not the link
    if out.exists() and not out.is_file():
        raise UsageError(f"{out} is not a file: give a file name")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: choose another name, or pass --overwrite")
    found = make_of_globals(checkpoint, partial(_written, out=out))
    elements = sum(tensor.nbytes for tensor in found.tensors.values()) // 4
    typer.echo(f"{given}: {len(found.tensors)} tensors, {elements} elements, {found.origin}")


def _written(found: Globals, out: Path) -> Globals:
    make_folder(out.parent)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        write_tensors(temporary, found.tensors)
        temporary.replace(out)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return found
