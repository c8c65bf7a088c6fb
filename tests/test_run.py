"""Promises of the launcher about the ends of a run, on the bus in memory and without processes."""

from pathlib import Path
from typing import Any

from diloco.folder import Folder
from diloco.options import RunProcess
from diloco.run import Launcher
from pipeline.clock import LoopClock
from pipeline.codec import encode
from pipeline.memory import MemoryBus

from . import samples


async def test_a_run_stopped_between_its_spec_and_its_first_version_leaves_nothing(tmp_path: Path) -> None:
    """There is no report to write, hence no complaint about a missing checkpoint."""
    bus = MemoryBus("run", LoopClock())
    nothing: Any = None
    launcher = Launcher(RunProcess(), Folder(tmp_path), "", bus, nothing, nothing, {})
    assert await launcher.gather(1.0, None) is None
    await bus.propose_spec(encode(samples.spec()))
    await bus.write_state(samples.run_state())
    assert await launcher.gather(1.0, None) is None
