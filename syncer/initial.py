"""Version 0 of a fragment, from a learner's complete upload. asyncio."""

import numpy as np
import structlog

from pipeline.errors import BadPayload
from pipeline.fragments import FragmentLayout
from pipeline.globals import push_global
from pipeline.messages import Committed, InitialUpload, SyncSpec, WindowView
from pipeline.payloads import pull
from pipeline.ports import Bus, Clock, Commit, Rest, Staged

from .staging import STAGED_TTL_S

IDLE_VIEW = WindowView(state="idle", attempt=0, members=(), expected=0, reason="", deadline_unix_s=None)


async def commit_initial(
    bus: Bus, clock: Clock, layout: FragmentLayout, sync: SyncSpec, *, nonce: str, syncer: str
) -> bool:
    """Commit version 0 if a sound upload is there; False if there is none (yet).

    Raises:
        BusError: as the bus; a commit that was refused changed nothing.
    """
    upload = await bus.read_initial()
    if upload is None:
        return False
    key = bus.keys.initial_payload(layout.id, upload.nonce)
    try:
        payload = await pull(bus, key, layout.elements, "fp32", sync.chunk_bytes)
        if not np.isfinite(payload.array()).all():
            raise BadPayload("the initial parameters have elements that are not finite")
    except BadPayload as error:
        structlog.get_logger().error(
            "initial_upload_refused", fragment=layout.id, learner=upload.learner, error=str(error)
        )
        return False
    # A copy: learners may write to the key of an upload, and to no global. The same upload gives the same bytes.
    staged, rest = await push_global(bus, layout.id, 0, upload.nonce, payload.array(), sync, STAGED_TTL_S)
    await bus.commit(_first_commit(upload, key, layout.id, payload.digest, staged, rest, nonce, syncer, clock))
    return True


def _first_commit(
    upload: InitialUpload,
    key: str,
    fragment: int,
    digest: bytes,
    payload: Staged,
    rest: Rest | None,
    nonce: str,
    syncer: str,
    clock: Clock,
) -> Commit:
    record = Committed.installed(
        fragment,
        0,
        digest,
        reason=f"initial parameters of {upload.learner}",
        syncer=syncer,
        unix_s=clock.unix(),
    )
    return Commit(
        nonce=nonce,
        expected=None,
        version=0,
        digest=digest,
        payload=payload,
        rest=rest,
        momentum=None,
        window=IDLE_VIEW,
        merged=(),
        record=record,
        delta_payloads=(key,),
    )
