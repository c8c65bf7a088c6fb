"""Deliberate defects of learners of several ranks: only worlds that have some can find them."""

from diloco.workers.ranks.gather import Transfers
from diloco.workers.ranks.rank_learner import JoinedRank
from diloco.workers.ranks.transport import Transport
from tests.mutations import Mutation

RANK_MUTATIONS = [
    Mutation(
        "a rank adopts a step later",
        JoinedRank,
        "_settle",
        (
            (
                "for p, number in sorted(agreed.decided.adoptions.items()):",
                "now, self.kept = (getattr(self, 'kept', {}), agreed.decided.adoptions) if self.number else "
                "(agreed.decided.adoptions, {})\n    for p, number in sorted(now.items()):",
            ),
        ),
    ),
    Mutation(
        "a rank sends the snapshot of an earlier step",
        JoinedRank,
        "stepped",
        (
            (
                "fragments, stop =",
                "if self.number:\n"
                "        now, self.kept = taken, {**getattr(self, 'kept', {}), **taken}\n"
                "        before, self.before = getattr(self, 'before', {}), dict(self.kept)\n"
                "        taken = {p: one._replace(snapshot=before.get(p, one).snapshot) for p, one in now.items()}\n"
                "    fragments, stop =",
            ),
        ),
    ),
    Mutation(
        "a snapshot counts that not all ranks have taken",
        JoinedRank,
        "_count",
        (("self._shares.ranks", "1"),),
    ),
    Mutation(
        "a gather takes rows from an earlier snapshot",
        Transfers,
        "_send",
        (
            (
                "own, pieces = await self._member.offload(snapshot), self._shares.sent(self._rank, p)",
                "now, pieces = await self._member.offload(snapshot), self._shares.sent(self._rank, p)\n"
                "    self.kept = getattr(self, 'kept', {})\n"
                "    own = self.kept.get(p, now) if self._rank else now\n"
                "    self.kept[p] = now.copy()",
            ),
        ),
    ),
    Mutation(
        "the server uploads before all rows are in",
        Transfers,
        "_whole",
        (("await gathering.whole.wait()", "await asyncio.sleep(0)"),),
    ),
    Mutation(
        "a rank's tokens are not summed",
        JoinedRank,
        "stepped",
        (("encode(counted,", "encode(tokens * (self.number == 0),"),),
    ),
    Mutation(
        "the last step's tokens are not in the header",
        JoinedRank,
        "_count_agreed",
        (
            (
                "self.training.rounds.trained(agreed.tokens)",
                "self.training.rounds.trained(getattr(self, 'kept', 0))\n    self.kept = agreed.tokens",
            ),
        ),
    ),
    Mutation(
        "a rank's death is unnoticed",
        Transport,
        "_receive",
        (("self._break(gone)", "return"),),
    ),
    Mutation(
        "a global is adopted before all ranks have it",
        Transfers,
        "_pull",
        (
            (
                'await self._transport.ask(rank, "give", p, number, at_once, group, vector=vector)',
                "self._transport.start_task("
                'self._transport.ask(rank, "give", p, number, at_once, group, vector=vector))',
            ),
        ),
    ),
    Mutation(
        "a rank is given another rank's rows",
        Transfers,
        "_pull",
        (("self._shares.given(rank, p)", "self._shares.given((rank + 1) % self._shares.ranks, p)"),),
    ),
    Mutation(
        "rank 0 ends as soon as it knows that the run is over",
        JoinedRank,
        "_settle",
        (("or agreed.decided.over", "or agreed.decided.over or (self.number == 0 and is_over(self.shared.state))"),),
    ),
    Mutation(
        "who is asked to end leaves alone",
        JoinedRank,
        "_settle",
        (("if agreed.stop:", "if agreed.stop or self._stopping.heard:"),),
    ),
]
