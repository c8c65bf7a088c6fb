"""Promises of `diloco export --dcp`: torch's own loader finds each tensor under its name."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp

from tests.diloco.test_export_hf import TRAINED, checkpoint, export
from tests.parties import python


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """What torch reads into a model's state dict."""
    state = {name: torch.full(values.shape, torch.nan) for name, values in TRAINED.items()}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_torch_loads_what_was_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bit for bit; a second export needs --overwrite, and leaves no other file than the first."""
    saved = checkpoint(tmp_path / "run", TRAINED)
    out = tmp_path / "new" / "dcp"
    assert export(capsys, saved, out, "--dcp") == (0, f"{out}: 2 tensors, 36 elements, trained on 900 tokens\n")
    files = sorted(file.name for file in out.iterdir())
    assert all(torch.equal(found, torch.from_numpy(TRAINED[name])) for name, found in loaded(out).items())
    status, said = export(capsys, saved, out, "--dcp")
    assert (status, "--overwrite" in said) == (2, True)
    assert export(capsys, saved, out, "--dcp", "--overwrite")[0] == 0
    assert sorted(file.name for file in out.iterdir()) == files
    assert [file.name for file in out.parent.iterdir()] == ["dcp"]


def test_other_peoples_files_are_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Even with --overwrite; a file is no folder, and there is one format at a time."""
    saved, out = checkpoint(tmp_path / "run", TRAINED), tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("theirs")
    for arguments, needed in [
        ((out, "--dcp", "--overwrite"), "notes.txt"),
        ((out / "notes.txt", "--dcp"), "is a file"),
        ((tmp_path / "x", "--dcp", "--hf", out), "pass one of them"),
    ]:
        status, said = export(capsys, saved, *arguments)
        assert (status, needed in said) == (2, True), said
    assert [file.read_text() for file in out.iterdir()] == ["theirs"]


def test_a_disk_that_is_full_is_one_line(tmp_path: Path) -> None:
    """torch's own error for it is not even an Exception."""
    saved = checkpoint(tmp_path / "run", {"large": np.ones(2**20, np.float32)})
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)); from diloco.cli import "
    program = f"{limited}main; sys.exit(main(sys.argv[1:]))"
    done = python("-c", program, "export", saved, tmp_path / "out", "--dcp")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
    assert "cannot write" in done.stderr
    assert not (tmp_path / "out").exists()
