"""Deliberate defects that show where another server takes over, or where the one before lives on for some."""

from diloco.pipeline.bus.tape_reading import TapeReader
from diloco.pipeline.view import ledger
from diloco.syncer.intake import Arrivals
from diloco.syncer.owner import FragmentOwner
from diloco.workers.exchange.pulling import Pulling
from tests.mutations import Mutation

FAILOVER_MUTATIONS = [
    Mutation(
        "who follows a tape goes on where it was, whichever server it is on",
        TapeReader,
        "read",
        (("if not sure:", "if False:"),),
    ),
    Mutation(
        "of two histories the later records count",
        ledger,
        "surviving",
        (("if leads := _back_from(made, (fragment, version, digest)):", "if leads := {}:"),),
    ),
    Mutation(
        "an owner reads headers on where it was, whichever server they are on",
        Arrivals,
        "_read",
        (
            ("after: dict[str, str] = {}", "after = self._bus.__dict__.setdefault('was', {}).setdefault(self._p, {})"),
            ("after = {**after, learner: after_id}", "after[learner] = after_id"),
        ),
    ),
    Mutation(
        "an owner trusts the head that it had over that of another server",
        FragmentOwner,
        "load",
        (
            (
                "if cached is None or cached.at != (head.version, head.digest):",
                "if cached is None or cached.fragment.version < head.version:",
            ),
        ),
    ),
    Mutation(
        "a learner trusts the version of a head, and not its digest",
        Pulling,
        "look",
        (
            (
                "if self.latest.get(p) != (head.version, head.digest):",
                "if self.latest.get(p, (-1, b''))[0] != head.version:",
            ),
        ),
    ),
]
