"""Restoring (asyncio): put a checkpoint on an empty run, with one fragment in memory at a time."""

import asyncio
import secrets
from typing import Any

import structlog

from diloco.pipeline.agreement import differences
from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.bus.ports import Bus, Clock
from diloco.pipeline.bus.schema import readable
from diloco.pipeline.bus.times import BUS_TIMES
from diloco.pipeline.errors import BadMessage, UsageError
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import IDLE_VIEW, NOTHING_MERGED, Committed
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import MAX_ELEMENTS
from diloco.pipeline.payload.codec import as_bytes, encode, payload_digest
from diloco.pipeline.transfer.globals import push_global
from diloco.pipeline.transfer.payloads import Offload
from diloco.syncer.checkpoints.loading import Checkpoint, known_elements


async def restore_checkpoint(
    bus: Bus,
    checkpoint: Checkpoint,
    spec: Spec,
    nonce: str,
    syncer: str,
    clock: Clock,
    offload: Offload = asyncio.to_thread,
    *,
    finished: bool = False,
) -> None:
    """Put a checkpoint on an empty run: spec, run state, data, then every fragment at its saved version.

    The heads come last, because learners wait for them: a learner that reads a head must find the data's order and
    shards in place. It can be called again after an interruption, and keeps what the interrupted restore of the same
    checkpoint left. While there is no head, it replaces a spec or data that learners have put there, if they differ or
    cannot be read.

    Args:
        bus: bound to the run, with its groups set.
        spec: the saved spec, or one with another budget or other sync settings; the tensors must be the same.
        nonce: the nonce under which the caller holds the leases of all fragments.
        finished: True if the run should stay finished, as it was saved.

    Raises:
        UsageError: the run was started before, with another spec or values; or a file is damaged.
        LeaseLost: another syncer took over.
    """
    if spec.tensors != checkpoint.spec.tensors:
        raise UsageError(f"{checkpoint.folder} holds a different model from the one to be trained")
    fragments = checkpoint.layout.fragments
    heads = await bus.read_heads([fragment.id for fragment in fragments])
    proposed = await bus.propose_spec(encode(spec))
    if (held := readable(Spec, proposed)) != spec:
        if any(heads) or not await bus.replace_spec(encode(spec), proposed):
            raise UsageError(f"the run already has a different spec: {taken(bus)}")
        differs = "it cannot be read" if held is None else differences(spec, held)
        structlog.get_logger().warning("proposal_replaced", by=str(checkpoint.folder), differs=differs)
    for p, (head, mine) in enumerate(zip(heads, checkpoint.fragments, strict=True)):
        if head is None:
            continue
        if head.version != mine.version or head.digest != await offload(_digest, checkpoint, p, spec):
            raise UsageError(f"the run has already been started: {taken(bus)}")
    if not any(heads):
        run = (
            checkpoint.state.model_copy(update=_sums(checkpoint))
            if finished
            else _restored_run(checkpoint, spec, clock)
        )
        await bus.write_state(run)
        try:
            await _restore_data(bus, checkpoint)
        except (BadMessage, UsageError) as error:  # no learner reads data before there is a head
            structlog.get_logger().warning("data_queue_replaced", by=str(checkpoint.folder), error=str(error))
            await bus.delete_data()
            await _restore_data(bus, checkpoint)

    async def restore_fragment(fragment: FragmentLayout) -> None:
        """Commit one fragment at its saved version; it has no head yet."""
        p, sync = fragment.id, fragment.sync(spec.sync)
        saved = checkpoint.fragments[p]
        theta, momentum = await offload(checkpoint.fragment, p)
        at, kept = (p, saved.version, secrets.token_hex(8)), momentum if sync.outer_momentum else None
        published = await push_global(bus, *at, theta, sync, BUS_TIMES.staged_ttl_s, offload, kept)
        digest = await offload(payload_digest, as_bytes(theta), sync.chunk_bytes)
        reason = f"restored from {checkpoint.folder_name}"
        record = Committed(
            fragment=p,
            version=saved.version,
            digest=digest,
            reason=reason,
            syncer=syncer,
            unix_s=clock.unix(),
            began_unix_s=checkpoint.state.began_unix_s,
            **NOTHING_MERGED,
        )
        await bus.commit(
            Commit(
                nonce=nonce,
                expected=None,
                published=published,
                window=IDLE_VIEW.model_copy(update={"reason": reason}),
                merged=(),
                norms=saved.norms,
                merged_tokens=saved.merged_tokens,
                record=record,
            )
        )

    for head, fragment in zip(heads, fragments, strict=True):
        if head is None:
            await restore_fragment(fragment)


async def _restore_data(bus: Bus, checkpoint: Checkpoint) -> None:
    order = checkpoint.data_order
    if order is not None and await bus.propose_data_order(order) != order:
        raise UsageError(f"the run already has a different data order: {taken(bus)}")
    if await bus.count_epochs() == 0:
        await bus.restore_shards(checkpoint.shards)
    else:
        await bus.read_shards()  # raises if the queue cannot be read


def taken(bus: Bus) -> str:
    """Return advice for the case that another run has the name."""
    run = bus.keys.run
    return (
        "to join it, leave out --resume; to start from the checkpoint, choose a --run name that is not in use. If "
        f"that run is no longer needed and has no parties, `diloco runs delete {run}` frees the name"
    )


def _digest(checkpoint: Checkpoint, p: int, spec: Spec) -> bytes:
    """Return the digest of a fragment's values, in the chunks of the run that they are put into."""
    return payload_digest(as_bytes(checkpoint.fragment(p)[0]), spec.sync.chunk_bytes)


def _sums(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the sums of the run up to the checkpoint; the reports and records that they are of are not on the bus."""
    tokens, (merged, overwritten, rejected) = checkpoint.state.tokens, known_elements(checkpoint)
    return {
        "base_tokens": tokens,
        "base_merged": min(tokens, merged // checkpoint.layout.elements),
        "base_overwritten": min(MAX_ELEMENTS, overwritten),
        "base_rejected": min(MAX_ELEMENTS, rejected),
    }


def _restored_run(checkpoint: Checkpoint, spec: Spec, clock: Clock) -> RunState:
    return RunState(
        **_sums(checkpoint),
        phase=Phase.RUNNING,
        tokens=checkpoint.state.tokens,
        set_aside=checkpoint.state.set_aside,
        budget_tokens=spec.sync.tokens,
        started_unix_s=clock.unix(),
        reason=f"resumed from {checkpoint.folder_name}",
        manifest=(),
        origin_unix_s=checkpoint.state.began_unix_s,
    )
