"""What `diloco doctor` takes."""

from pathlib import Path

from pydantic import Field

from diloco.pipeline.files.address import Address
from diloco.pipeline.messages.wire import PartyName
from diloco.pipeline.settings import BusSettings, Settings, SyncSettings


class MachineSettings(Settings):
    """What parties of this machine would be started with, as far as it matters here."""

    section = "This machine"

    learner_id: PartyName | None = Field(None, description="Name that a learner here will have")
    threads: int | None = Field(None, ge=1, le=4096, description="Torch threads of a learner here")
    model: str | None = Field(None, description="Size of the built-in model, in place of --params")
    checkpoint_dir: Address | None = Field(None, description="Folder of a syncer's checkpoints")
    tape_dir: Path | None = Field(None, description="Folder of a syncer's tape")
    state_dir: Path | None = Field(None, description="Folder of a learner's own state")


class DoctorSettings(MachineSettings, BusSettings, SyncSettings):
    """`diloco doctor`."""
