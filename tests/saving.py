"""A checkpoint of a run without its syncers."""

import asyncio
import secrets

from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.checkpoints.manifest import Leftovers
from diloco.syncer.checkpoints.places import Place
from diloco.syncer.checkpoints.saving import begin_checkpoint, checkpoint_name, finish_checkpoint, run_state


async def save_checkpoint(bus: Bus, spec: Spec, place: Place, offload: Offload = asyncio.to_thread) -> Place:
    """The folder of a new checkpoint of the run in a place; raises as `finish_checkpoint`."""
    name = checkpoint_name((await run_state(bus)).tokens, secrets.token_hex)
    await begin_checkpoint(place, name, Leftovers(), offload)
    return await finish_checkpoint(bus, spec, place, name, range(spec.sync.fragments), offload)
