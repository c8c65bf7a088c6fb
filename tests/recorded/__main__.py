"""`python -m tests.recorded`: record this tree's wire format, and a small run, anew."""

import logging
import shutil

import structlog

from diloco_studies.virtual.virtual_time import run_virtual
from tests.recorded import FOLDER, RUN, wire
from tests.virtual_run import VirtualLearner, VirtualRun, sync_spec


async def record() -> None:
    """Two learners and a syncer, with checkpoint, tape and deltas."""
    world = VirtualRun(
        sync_spec(tokens=600, quorum=2),
        checkpoint_dir=str(RUN / "checkpoints"),
        tape_dir=RUN / "tape",
        record_deltas=RUN / "deltas",
    )
    world.start_syncer()
    await world.finish(*(VirtualLearner(f"l{i}", world, 0.1, f"{i:016x}").start() for i in range(2)))


def main() -> None:
    """Write both."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    wire.write()
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir()
    run_virtual(record())
    print(f"wrote {FOLDER}: {sum(path.stat().st_size for path in FOLDER.rglob('*'))} bytes")


if __name__ == "__main__":
    main()
