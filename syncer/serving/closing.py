"""End of a run that several syncers may share (asyncio), as ARCHITECTURE.md tells under "Ending".

The syncer that holds the leases of all fragments refuses the rest and writes the manifest: no other can commit then.
"""

import asyncio
from collections import Counter

import structlog

from diloco.pipeline.bus.commits import Refusal
from diloco.pipeline.bus.ports import Bus, Clock, Offered
from diloco.pipeline.errors import DilocoError
from diloco.pipeline.messages.fragment import Head, RefusalReason, Rejected
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.wire import MAX_TOKENS
from diloco.syncer.refusals import TOLD_A_WINDOW
from diloco.syncer.serving.leases import CALLS, TURNS, holding, in_time, release_all
from diloco.syncer.times import TIMES


async def finish_run(
    bus: Bus, clock: Clock, nonce: str, fragments: int, lease_s: float, stop: asyncio.Event, known: RunState
) -> RunState | None:
    """Wait until the closing run is finished, and finish it unless another syncer does.

    `known` is the closing state, which is written again if the bus has lost it.

    Returns:
        The finished run's state; None if `stop` was set first.

    Raises:
        BusError: the bus failed; call it again.
        DilocoError: the run was extended, and continues.
    """
    while not stop.is_set():
        state = await bus.read_state() or await bus.write_state(known)
        if state.phase is Phase.FINISHED:
            return state
        _check_not_extended(state, known)
        if await _gather(bus, nonce, fragments, lease_s, stop):
            async with holding(bus, range(fragments), nonce, lease_s):
                finished = await _finish(bus, clock, nonce, fragments, state)
            await release_all(bus, nonce, fragments)
            return finished
        await asyncio.sleep(min(TIMES.watch_s, lease_s / TURNS))
    return None


def _check_not_extended(state: RunState, known: RunState) -> None:
    if state.budget_tokens > known.budget_tokens:  # this syncer was paused, and has the old spec
        raise DilocoError("the run was finished and then extended: restart this syncer")


async def _gather(bus: Bus, nonce: str, fragments: int, lease_s: float, stop: asyncio.Event) -> bool:
    """Take all leases, beginning with fragment 0.

    Returns False, with no lease held, if another syncer has the first one, or if `stop` is set.
    """
    if not await bus.acquire_lease(0, nonce, lease_s):
        return False
    while True:
        calls = (in_time(bus.acquire_lease(p, nonce, lease_s), lease_s / CALLS) for p in range(fragments))
        held = await asyncio.gather(*calls)
        if all(held):
            return True
        if stop.is_set() or not held[0]:
            await release_all(bus, nonce, fragments)
            return False
        await asyncio.sleep(min(TIMES.watch_s, lease_s / TURNS))


async def _finish(bus: Bus, clock: Clock, nonce: str, fragments: int, known: RunState) -> RunState:
    """Refuse the pending deltas and write the manifest. All leases must be held."""
    for head in await bus.read_heads(range(fragments)):
        if head is not None:
            await _refuse_leftovers(bus, clock, nonce, head)
    while True:
        state = await bus.read_state() or known
        _check_not_extended(state, known)
        heads = [head for head in await bus.read_heads(range(fragments)) if head is not None]
        manifest = tuple((head.version, head.digest) for head in heads)
        # A syncer that was paused on the way here might have written a manifest of older heads, so it is read again.
        if state.phase is Phase.FINISHED and state.manifest == manifest:
            break
        counted = (seen.report.tokens for seen in await bus.read_reports() if seen.counts_in(state))
        tokens = min(MAX_TOKENS, state.base_tokens + sum(counted))
        update = {"phase": Phase.FINISHED, "tokens": max(state.tokens, tokens), "manifest": manifest}
        await bus.write_state(state.model_copy(update=update))
    outer_steps = sum(head.version for head in heads)
    if state.tokens and len(heads) < fragments:
        lost = sorted({*range(fragments)} - {head.fragment for head in heads})
        detail = "the bus lost these heads while the run was ending: only the run's last checkpoint may still have them"
        structlog.get_logger().error("heads_lost", fragments=lost, detail=detail)
    structlog.get_logger().info("run_finished", tokens=state.tokens, outer_steps=outer_steps)
    return state


async def _refuse_leftovers(bus: Bus, clock: Clock, nonce: str, head: Head) -> None:
    """Refuse the deltas that are still on a fragment's streams, since they will never be merged.

    The streams are read once, and at most `TOLD_A_WINDOW` refusals of each learner go on the tape, so that a learner
    that floods its stream cannot keep the run from ending. Deltas that remain there, or come later, count as refused.
    """
    counted = {(one.learner, one.incarnation, one.base_version): one.tokens for one in head.merged}
    offers = await bus.read_offers(head.fragment)
    if not offers:
        return
    told, records, untold, lost_tokens = Counter[str](), list[Rejected](), list[RefusalReason](), 0
    for entry in offers:
        h, lost = entry.header, 0
        if h is not None:  # of several deltas of one training, each loses only its tokens beyond those before it
            training = h.learner, h.incarnation, h.base_version
            lost = max(0, h.tokens - counted.get(training, 0))
            counted[training] = max(h.tokens, counted.get(training, 0))
        lost_tokens += lost
        record = _refused(head, entry, lost, clock.unix())
        told[record.learner] += 1
        if told[record.learner] <= TOLD_A_WINDOW:
            records.append(record.model_copy(update={"last_told": told[record.learner] == TOLD_A_WINDOW}))
        else:
            untold.append(record.reason)
    keys = {
        bus.keys.delta_payload(head.fragment, h.learner, h.incarnation, h.serial): None
        for entry in offers
        if (h := entry.header) is not None
    }
    entries = tuple(entry.entry_id for entry in offers)
    at = (head.version, head.digest)
    refusal = Refusal(nonce, at, entries, tuple(keys), tuple(records), lost_tokens, tuple(untold))
    await bus.refuse(head.fragment, refusal)
    structlog.get_logger().warning("deltas_rejected", fragment=head.fragment, reason="run_finished", n=len(entries))


def _refused(head: Head, entry: Offered, lost: int, unix_s: float) -> Rejected:
    return Rejected.of(
        entry.header,
        (head.fragment, head.version),
        lost_tokens=lost,
        reason=RefusalReason.RUN_FINISHED if entry.header else RefusalReason.BAD_MESSAGE,
        detail="the run is finished" if entry.header else entry.problem,
        unix_s=unix_s,
    )
