"""The settings of `diloco doctor`."""

from pathlib import Path

from pydantic import Field

from diloco.pipeline.files.address import Address
from diloco.pipeline.messages.wire import PartyName
from diloco.pipeline.settings import BusSettings, Settings, SyncSettings


class MachineSettings(Settings):
    """Settings with which parties on this machine would be started, as far as the checks use them."""

    section = "This machine"

    learner_id: PartyName | None = Field(None, description="Name of the learner on this machine")
    threads: int | None = Field(None, ge=1, le=4096, description="Torch threads of a learner on this machine")
    model: str | None = Field(None, description="Size of the built-in model, instead of --params")
    checkpoint_dir: Address | None = Field(None, description="Folder of a syncer's checkpoints")
    tape_dir: Path | None = Field(None, description="Folder of a syncer's tape")
    state_dir: Path | None = Field(None, description="Folder of a learner's own state")


class DoctorSettings(MachineSettings, BusSettings, SyncSettings):
    """`diloco doctor`."""
