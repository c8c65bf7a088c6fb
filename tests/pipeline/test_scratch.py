"""Folders in the making: those of the dead go, those of the living stay."""

import subprocess
import sys

import pytest

from diloco.pipeline.files.scratch import move_into, scratch_folder

WRITER = """
import sys
from pathlib import Path
from diloco.pipeline.files.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "globals.safetensors").write_bytes(b"half")
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_writer_left_goes_with_the_next_writer(tmp_path):
    """And what a writer that lives has begun, in the same folder, stays."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        dead, living = (writer.stdout.readline().strip() for writer in writers)
        writers[0].kill()
        writers[0].wait()
        assert {dead, living} == {path.name for path in tmp_path.iterdir()}
        with scratch_folder(tmp_path) as folder:
            folder.rmdir()
        assert {path.name for path in tmp_path.glob(".writing-*")} == {living}
        assert (tmp_path / living / "globals.safetensors").read_bytes() == b"half"
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()


def test_files_that_are_replaced_in_part_are_not_valid(tmp_path):
    """What makes the old ones valid goes before the first of them is replaced."""
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        for file in (".metadata", "data", "more"):
            (tmp_path / name / file).write_text(name)
    (tmp_path / "out" / "data").unlink()
    (tmp_path / "out" / "data").mkdir()  # cannot be replaced by a file: it stops there
    with pytest.raises(OSError, match="data"):
        move_into(tmp_path / "new", tmp_path / "out", ".metadata")
    assert not (tmp_path / "out" / ".metadata").exists()
    (tmp_path / "out" / "data").rmdir()
    move_into(tmp_path / "new", tmp_path / "out", ".metadata")
    assert {file.read_text() for file in (tmp_path / "out").iterdir()} == {"new"}
