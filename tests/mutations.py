"""Deliberate defects of the protocol, put in by changing a method's source text for the length of a block."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from diloco.pipeline.bus import schema
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.fragments import FragmentLayout
from diloco.syncer.admission import Admission
from diloco.syncer.committing import Committing
from diloco.syncer.merging import fragment, outer
from diloco.syncer.merging.fragment import FragmentState
from diloco.syncer.owner import FragmentOwner
from diloco.syncer.serving.leases import Leases
from diloco.syncer.session import Session
from diloco.syncer.window import Window
from diloco.workers.exchange.publishing import Publishing
from diloco.workers.exchange.pulling import Following, Pulling
from diloco.workers.rounds import Rounds
from diloco_studies.virtual.memory import MemoryBus


@dataclass(frozen=True)
class Mutation:
    """One defect: in a method of a class or a function of a module, each old text becomes the new one."""

    name: str
    where: type | ModuleType
    method: str
    changes: tuple[tuple[str, str], ...]
    more: tuple["Mutation", ...] = ()
    """What else the same defect takes."""


MUTATIONS = [
    Mutation(
        "a commit, refusal or window is written without the lease",
        MemoryBus,
        "_owned",
        (("if self._bytes(key) != nonce.encode():", "if False:"),),
    ),
    Mutation(
        "headers are deleted before the head moves",
        MemoryBus,
        "commit",
        (
            (
                "    head = self._owner_checks(",
                "    self._delete(headers, ())\n    head = self._owner_checks(",
            ),
        ),
    ),
    Mutation(
        "an owner's write does not look at the head", MemoryBus, "_expect", (("if now != expected:", "if False:"),)
    ),
    Mutation(
        "what is committed goes on expiring",
        MemoryBus,
        "_keep",
        (("self.store.expiries.pop(s.key, None)", "pass"),),
    ),
    Mutation(
        "a learner that offers again counts twice in the quorum",
        Window,
        "_next",
        (
            (
                "phase, count = self.phase, self._count(given)",
                "phase, count = self.phase, sum(1 + (m.offer.header.attempt > 0) for m in self._members.values())",
            ),
        ),
        (
            Mutation(
                "in its uploads too",
                Window,
                "_next_of_uploads",
                (("if len(done) < given.quorum:", "if sum(1 + (o.header.attempt > 0) for o in done) < given.quorum:"),),
            ),
        ),
    ),
    Mutation(
        "merged bases are forgotten",
        Admission,
        "refusal",
        (("if before is not None and header.base_version <= before.base_version:", "if False:"),),
    ),
    Mutation(
        "a stale delta opens a window",
        Window,
        "_is_due",
        (("header.due and header.base_version == self.version", "header.due"),),
    ),
    Mutation("a delta that follows opens a window", Window, "_is_due", (("header.due and", ""),)),
    Mutation("an attempt is never opened again", Window, "_reopen", (("self.attempt += 1", "pass"),)),
    Mutation(
        "merges happen below the quorum",
        Window,
        "_next_of_uploads",
        (("if len(done) < given.quorum:", "if not done:"),),
    ),
    Mutation(
        "only higher versions are adopted",
        Pulling,
        "look",
        (
            (
                "if self.latest.get(p) != (head.version, head.digest):",
                "if self.latest.get(p, (-1, b''))[0] < head.version:",
            ),
        ),
    ),
    Mutation(  # either makes up for the other: what is not offered again is renewed half an interval later
        "after an outage nothing is offered again, nor renewed",
        Following,
        "follow",
        (("if gap:", "if False:"),),
        (Mutation("", Rounds, "_renewable", (("return late and", "return False and"),)),),
    ),
    Mutation(
        "a header goes out before the report of its tokens",
        Publishing,
        "_send_header",
        (("await self._reporting.write()", "self._reporting._make(False)"),),
    ),
    Mutation(
        "payloads are named by base and attempt only",
        RunKeys,
        "delta_payload",
        (("{incarnation}.{serial}", "{incarnation}"),),
    ),
    Mutation(
        "adopting does not zero the counters",
        Rounds,
        "adopt",
        (("f.steps = f.tokens = f.published_steps", "f.published_steps"),),
    ),
    Mutation(
        "the owner trusts its cache over the bus",
        FragmentOwner,
        "load",
        (
            (
                "if cached is None or cached.at != (head.version, head.digest):",
                "if cached is None:",
            ),
        ),
    ),
    Mutation(
        "free leases are looked for every two seconds only",
        Leases,
        "_share",
        (("await self._take(sharing)", "if self._clock.now() % 2 < 0.2:\n        await self._take(sharing)"),),
    ),
    Mutation(
        "a dead syncer's share is left to it for ever",
        Leases,
        "_share",
        (("self.syncers = syncers", "syncers = self.syncers = tuple(sorted({*self.syncers, *syncers}))"),),
    ),
    Mutation(
        "every late offer is refused as too stale",
        Window,
        "offer",
        (
            (
                "if fixed:",
                "if fixed:\n        return Refused(RefusalReason.TOO_STALE, 'late', header.tokens)",
            ),
        ),
    ),
    Mutation(
        "what is only pending is refused as merged",
        Window,
        "_offer_again",
        (
            (
                "return superseded(header, before)",
                "return Refused(RefusalReason.ALREADY_MERGED, 'merged', superseded(header, before).lost_tokens)",
            ),
        ),
    ),
    Mutation(
        "the payload of a pending delta goes with its duplicate",
        Session,
        "_refuse",
        (("still_needed = any(", "still_needed = False and any("),),
    ),
    Mutation(
        "uploads have no time",
        Window,
        "_next",
        (("now + given.upload_s", "now"),),
    ),
    Mutation(
        "a learner's report tells of no pull",
        Pulling,
        "_pull_wanted_on",
        (("if pulled and seen_s is not None and not layout.averaged:", "if False:"),),
    ),
    Mutation(
        "pulls are added up instead of smoothed",
        Pulling,
        "_pull_wanted_on",
        (("self._member.shared.pull_s = self._times.pull_s", "self._member.shared.pull_s += self._times.pull_s"),),
    ),
    Mutation(
        "a grace never ends early",
        Window,
        "_next",
        (("if missing and now < phase.deadline:", "if now < phase.deadline:"),),
    ),
    Mutation(
        "a window closes 1.5 s late",
        Window,
        "_next",
        (("if given.grace_s is None else given.grace_s", "if given.grace_s is None else given.grace_s + 1.5"),),
    ),
    Mutation(
        "the momentum is lost",
        FragmentState,
        "merge",
        ((".take()", ".take()._replace(momentum=None)"),),
    ),
    Mutation(
        "the outer warm-up is a step too short",
        FragmentState,
        "outer",
        (("self.sync, self.version, (", "self.sync, self.version + 1, ("),),
    ),
    Mutation(
        "what is left behind at the end takes the whole outer step",
        FragmentState,
        "outer",
        (("(delta.offer.header.steps for delta in deltas)", "[2**40]"),),
    ),
    Mutation(
        "an orthogonalised step has another length",
        outer,
        "with_norm_of",
        (("length / now if now else 0.0", "1.0"),),
    ),
    Mutation(
        "the momentum is of orthogonalised steps",
        outer,
        "matrix_blocks",
        (
            (
                "yield slot.stop",
                "step._after[slot.start : slot.stop] = taken\n        yield slot.stop",
            ),
        ),
    ),
    Mutation(
        "a growing interval goes by a learner's own rounds",
        Rounds,
        "_due_after",
        (("(self._sync, base.version, base.interval)", "(self._sync, self.deltas // len(self._fragments), 0)"),),
    ),
    Mutation(
        "a learner goes by the planned interval, whatever its head says",
        Rounds,
        "_due_after",
        (("(self._sync, base.version, base.interval)", "(self._sync, base.version, 0)"),),
    ),
    Mutation(
        "the tape tells another interval than the head",
        Committing,
        "_record",
        (("interval=loaded.head.interval", "interval=0"),),
    ),
    Mutation(
        "a head does not say its interval",
        schema,
        "head_fields",
        (('"interval": b"%d" % commit.interval', '"interval": b"0"'),),
    ),
    Mutation(
        "a delta goes before the one that renews it is whole",
        Publishing,
        "_offer_one",
        (("if not item[0].renews:", "if True:"),),
    ),
    Mutation(
        "an owner goes on from what learners have",
        FragmentState,
        "advance",
        (
            (
                "self.theta, self.momentum = stepped.theta,",
                "self.theta, self.momentum = (stepped.theta.view('u4') // 65536 * 65536).view('f4'),",
            ),
        ),
    ),
    Mutation(
        "the rest of a replaced global stays",
        MemoryBus,
        "commit",
        (("for old in replaced:", "for old in replaced[:1]:"),),
    ),
    Mutation(
        "average-only tensors are stepped as all others are",
        FragmentLayout,
        "sync",
        (("if not self.averaged:", "if True:"),),
    ),
    Mutation(
        "average-only tensors go half the way to the mean",
        outer.AveragingStep,
        "__init__",
        (("super().__init__(theta, out, 1.0)", "super(AveragingStep, self).__init__(theta, out, 0.5)"),),
    ),
    Mutation(
        "a stale delta is rebased with the wrong sign",
        fragment,
        "rebase",
        (("np.subtract(theta[start:stop], before[start:stop],", "np.subtract(before[start:stop], theta[start:stop],"),),
    ),
    Mutation(
        "a stale delta is rebased by one version too many",
        FragmentState,
        "advance",
        (
            (
                "= merged.version, stepped.digest, self.theta",
                "= merged.version, stepped.digest, self.theta if self.before is None else self.before",
            ),
        ),
    ),
    Mutation(
        "the momentum is not carried on",
        FragmentState,
        "advance",
        (("self.theta, self.momentum = stepped.theta, stepped.momentum", "self.theta = stepped.theta"),),
    ),
]


def mutated(mutation: Mutation) -> Callable[..., Any]:
    """The method with the defect, in its own module's names."""
    original = inspect.getattr_static(mutation.where, mutation.method)
    static = isinstance(original, staticmethod)
    function: FunctionType = original.__func__ if static else original
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in mutation.changes:
        if source.count(old) != 1:
            raise AssertionError(f"{mutation.name}: {old!r} is not once in {mutation.where.__name__}.{mutation.method}")
        source = source.replace(old, new)
    names = dict(function.__globals__)
    exec(compile(source, f"<{mutation.name}>", "exec"), names)  # noqa: S102  # our own source, changed on purpose
    made = names[mutation.method]
    made.__globals__.update({k: v for k, v in function.__globals__.items() if k != mutation.method})
    return staticmethod(made) if static else made  # type: ignore[return-value]


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The defect is there inside the block."""
    parts = (mutation, *mutation.more)
    originals = [inspect.getattr_static(part.where, part.method) for part in parts]
    for part in parts:
        setattr(part.where, part.method, mutated(part))
    try:
        yield
    finally:
        for part, original in zip(parts, originals, strict=True):
            setattr(part.where, part.method, original)


__all__ = ["MUTATIONS", "Mutation", "applied"]
