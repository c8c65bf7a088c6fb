"""`diloco export --dcp`: write a folder that torch.distributed.checkpoint loads into a state dict, on any ranks."""

from functools import partial
from pathlib import Path

import numpy as np
import typer

from diloco.export import Globals, make_of_globals
from diloco.extras import naming_extra
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.scratch import move_into, scratch_folder

with naming_extra("diloco export --dcp", "learner"):
    from diloco.workers.dcp_folder import write_dcp


def export_dcp(checkpoint: str | Path, out: Path, overwrite: bool = False) -> None:
    """Write the parameters as float32 tensors under their own names. The whole model is held in memory.

    Args:
        checkpoint: the checkpoint, as a path that `read_globals` takes.
        out: folder to write.
        overwrite: replace a folder that this function has written.

    Raises:
        UsageError: there is no intact checkpoint, or `out` exists already or cannot be written.
    """
    make_of_globals(checkpoint, partial(_export, out=out, overwrite=overwrite))


def _export(found: Globals, out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: --dcp writes a folder")
    names = [file.name for file in out.iterdir()] if out.is_dir() else []
    if names and not overwrite:
        raise UsageError(f"{out} is not empty: choose another name, or pass --overwrite")
    tensors = {name: np.frombuffer(one.read(), np.float32).reshape(one.shape) for name, one in found.tensors.items()}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(out.parent) as temporary:
            write_dcp(tensors, temporary)
            if foreign := sorted(set(names) - {file.name for file in temporary.iterdir()}):
                raise UsageError(f"{out} holds other files ({', '.join(foreign[:5])}): choose another folder")
            move_into(temporary, out, last=".metadata")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error
    elements = sum(values.size for values in tensors.values())
    typer.echo(f"{out}: {len(tensors)} tensors, {elements} elements, {found.origin}")
