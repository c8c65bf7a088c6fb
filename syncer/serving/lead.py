"""The lead (asyncio) moves the run: it counts the tokens, drains the run at the budget, and closes it once drained.

The lead is the syncer that serves fragment 0. `closing` then ends the closing run.
"""

from typing import Any

import structlog

from diloco.pipeline.bus.by_group import by_group
from diloco.pipeline.errors import BusUnavailable
from diloco.pipeline.messages.fragment import Head
from diloco.pipeline.messages.run import Phase, RunState
from diloco.pipeline.messages.wire import MAX_TEXT_CHARS
from diloco.pipeline.view.merged_share import sample_due, with_sample
from diloco.pipeline.view.status import token_totals
from diloco.syncer.context import SyncerContext
from diloco.syncer.times import TIMES


class Lead:
    """Work of the lead."""

    def __init__(self, context: SyncerContext) -> None:
        self._bus, self._clock, self._watch = context.bus, context.clock, context.watch
        self._layout, self._budget_tokens = context.layout, context.sync.tokens
        self._sample_from_s, self._diverged = 0.0, context.diverged
        self._asked_since_s: float | None = None
        """Time since which fresh parameters wait for trained ones; None if they do not."""
        self._waits = False
        self._aside: dict[tuple[str, str], int] = {}
        """(learner, incarnation) of diverged learners -> the most tokens that they have reported since."""

    async def move(self, state: RunState | None, checkpoint: str = "", problem: str = "") -> RunState | None:
        """Write the state that follows from the current one, and return it; None before the run has parameters.

        Args:
            checkpoint: the checkpoint that this syncer is saving, "" for none.

        Raises:
            BusError: the bus failed; call it again.
        """
        if (begun := state or await self._first()) is None:
            return None
        counted = await self._counted(begun)
        counted = counted.model_copy(update={"problem": problem[:MAX_TEXT_CHARS]})
        if checkpoint:
            counted = counted.model_copy(update={"checkpoint": checkpoint})
        state = await self._closed(counted)
        return state if state.phase is Phase.FINISHED else await self._bus.write_state(state)

    async def begin(self) -> None:
        """Write the first state of a run if it has none, because it is stopped within its first moments.

        Raises:
            BusError: the bus failed; call it again.
        """
        if await self._bus.read_state() is None and (first := await self._first()) is not None:
            await self._bus.write_state(first)

    async def _first(self) -> RunState | None:
        """Return the first state of a run that has parameters or an upload of them; None if it has neither.

        If the upload holds trained parameters of this run, which the bus had lost, the state continues that run.
        """
        upload = await self._bus.read_initial()
        if upload is None and await self._bus.read_heads([0]) == [None]:
            return None
        took = upload if upload is not None and upload.began_unix_s is not None else None
        if upload is not None and took is None and await self._others_have_more():
            return None
        self._asked_since_s, self._waits = None, False
        now = self._clock.unix()
        return RunState(
            phase=Phase.RUNNING,
            tokens=took.tokens if took else 0,
            base_tokens=took.tokens if took else 0,
            base_merged=min(took.tokens, took.merged_tokens) if took else 0,
            budget_tokens=self._budget_tokens,
            started_unix_s=now,
            reason=f"continues from what {took.learner} reported, because the bus had lost the run's state"
            if took
            else "training",
            manifest=(),
            origin_unix_s=took.began_unix_s if took else None,
        )

    async def _others_have_more(self) -> bool:
        """Return whether fresh parameters must wait for trained ones, which they would replace.

        A live learner that has a trained version of this run (above 0) uploads it soon, or a syncer that has the run's
        checkpoint puts it on the bus. After `trained_first_s` they wait no longer.
        """
        now = self._clock.now()
        self._asked_since_s = now if self._asked_since_s is None else self._asked_since_s
        if now - self._asked_since_s > TIMES.trained_first_s:
            return False
        live = (seen.report for seen in self._watch.live())
        who = [f"learner {one.learner}" for one in live if max(one.versions, default=-1) > 0]
        who += [f"syncer {name}" for _, _, name in await self._bus.read_savers()]
        if who and not self._waits:
            detail = (
                f"{', '.join(who)} has trained parameters of this run: newly initialised ones are held back for "
                f"{TIMES.trained_first_s:g} s"
            )
            structlog.get_logger().warning("initial_upload_waits", detail=detail)
        self._waits = bool(who)
        return self._waits

    async def _counted(self, state: RunState) -> RunState:
        """Return the state with the current tokens, and in phase draining once they reach the budget."""
        update: dict[str, Any] = {"tokens": max(state.tokens, self._watch.tokens(state))}
        # A report may fall and rise again, while the run's tokens never fall. So tokens that count already are never
        # set aside afterwards.
        update["set_aside"] = min(
            state.set_aside + self._diverged_tokens(state), update["tokens"] - state.counted_tokens
        )
        update["liveness_s"] = self._watch.liveness_s  # used by status and page
        sampled = state.phase.rank < Phase.CLOSING.rank and sample_due(state.samples, unix_s := self._clock.unix())
        if sampled and (heads := await self._all_heads()):
            reports, counted = self._watch.reports, state.model_copy(update=update)
            tokens, merged, lost = token_totals(self._layout, counted, reports, heads, self._watch.liveness_s)
            update["samples"] = with_sample(state.samples, (unix_s, tokens - lost["pending"], merged))
        if state.phase is Phase.RUNNING and update["tokens"] - update["set_aside"] >= state.budget_tokens:
            update |= {"phase": Phase.DRAINING, "reason": "the token budget is reached"}
        return state.model_copy(update=update)

    def _diverged_tokens(self, state: RunState) -> int:
        """Return the tokens that diverged learners have trained since the last check, which are lost."""
        before, of = self._aside, self._diverged.learners
        reports = [seen.report for seen in self._watch.reports if seen.counts_in(state) and seen.report.learner in of]
        now = {(one.learner, one.incarnation): one.tokens for one in reports}
        self._aside = {who: max(tokens, before.get(who, tokens)) for who, tokens in now.items()}
        return sum(most - before.get(who, most) for who, most in self._aside.items())

    async def _closed(self, state: RunState) -> RunState:
        """Return the state in phase closing, if the run is drained or draining takes too long; otherwise unchanged."""
        if state.phase is Phase.DRAINING and self._watch.drain_until is not None:
            overdue = self._clock.now() >= self._watch.drain_until + 2 * TIMES.watch_s
            if overdue or await self._drained():
                return state.model_copy(update={"phase": Phase.CLOSING})
        return state

    async def _all_heads(self) -> list[Head]:
        """Return the heads of all fragments; none until each has one, since a sum over some would mislead."""
        now, count = self._clock.now(), len(self._layout.fragments)
        if now < self._sample_from_s:
            return []
        self._sample_from_s = now + TIMES.retry_s
        # A head that cannot be read is reported by its owner, by the learners and by the status.
        found = await by_group(self._bus.keys, range(count), self._bus.read_heads, lambda error: None)
        heads = [head for head in found.values() if head is not None]
        return heads if len(heads) == count else []

    async def _drained(self) -> bool:
        """Return whether all learners have left (or died) and no delta is pending."""
        if not self._watch.draining or self._watch.live():
            return False
        try:
            for fragment in self._layout.fragments:
                if await self._bus.read_offers(fragment.id, limit=1):
                    return False
        except BusUnavailable:  # one node may be down, and must not keep the lead from the rest of its work
            return False
        return True
