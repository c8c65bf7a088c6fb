"""Deliberate defects of learners of several ranks: only worlds that have some can find them."""

from diloco.workers.ranks.joined import JoinedRank
from diloco.workers.ranks.part import Part
from diloco.workers.ranks.wires import Wires
from tests.mutations import Mutation

RANK_MUTATIONS = [
    Mutation(
        "a rank adopts a step later",
        JoinedRank,
        "_do",
        (
            (
                "for p, number in sorted(decided.adoptions.items()):",
                "now, self.kept = (getattr(self, 'kept', {}), decided.adoptions) if self._number else "
                "(decided.adoptions, {})\n    for p, number in sorted(now.items()):",
            ),
        ),
    ),
    Mutation(
        "a rank snapshots a step later",
        JoinedRank,
        "_do",
        (
            (
                "if decided.snapshots:",
                "if self._number and decided.snapshots:\n"
                "        tag, late = self._steps, sorted(decided.snapshots)\n"
                "        def send(self=self, tag=tag, late=late):\n"
                "            items = [(p, tag, self._servers[p], self._own_snapshot(p)) for p in late]\n"
                "            self.thread.call(self._rank.part.send, items)\n"
                "        self.kept_sends = [*getattr(self, 'kept_sends', []), (tag, send)]\n"
                "    for at, send in list(getattr(self, 'kept_sends', [])):\n"
                "        if at < self._steps:\n"
                "            self.kept_sends.remove((at, send))\n"
                "            send()\n"
                "    if decided.snapshots and not self._number:",
            ),
        ),
    ),
    Mutation(
        "a gather takes rows from an earlier snapshot",
        Part,
        "_send",
        (
            (
                "own, pieces = await self._member.offload(snapshot), self._shares.sent(self._rank, p, server)",
                "now, pieces = await self._member.offload(snapshot), self._shares.sent(self._rank, p, server)\n"
                "    self.kept = getattr(self, 'kept', {})\n"
                "    own = self.kept.get(p, now) if self._rank else now\n"
                "    self.kept[p] = now.copy()",
            ),
        ),
    ),
    Mutation(
        "the server uploads before all rows are in",
        Part,
        "_whole",
        (("await gathering.whole.wait()", "await asyncio.sleep(0)"),),
    ),
    Mutation(
        "a rank's tokens are not summed",
        JoinedRank,
        "stepped",
        (("numbers(tokens,", "numbers(tokens * (self._number == 0),"),),
    ),
    Mutation(
        "what was trained since the decision is not in the header",
        JoinedRank,
        "_settle",
        (("self._count(step, agreed.tokens)", "self._count(step - 1, agreed.tokens)"),),
    ),
    Mutation(
        "a rank's death is unnoticed",
        Wires,
        "_hear",
        (("self._break(gone)", "return"),),
    ),
    Mutation(
        "a global is adopted before all ranks have it",
        Part,
        "_pull",
        (
            (
                'await self._wires.ask(rank, "give", p, number, at_once, group, vector=vector)',
                'self._wires.go_on(self._wires.ask(rank, "give", p, number, at_once, group, vector=vector))',
            ),
        ),
    ),
    Mutation(
        "a rank is given another rank's rows",
        Part,
        "_pull",
        (("self._shares.pieces(rank, p)", "self._shares.pieces(self._rank, p)"),),
    ),
    Mutation(
        "rank 0 ends as soon as it knows that the run is over",
        JoinedRank,
        "ended",
        (("or self._over", "or self._over or JoinedLearner.over.fget(self)"),),
    ),
    Mutation(
        "who is asked to end leaves alone",
        JoinedRank,
        "ended",
        (("stopping.asked", "stopping.heard"),),
    ),
]
