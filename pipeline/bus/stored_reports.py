"""How reports lie in the bus, and which of them stay where they are too many or too large. Pure.

Shared by the bus's adapters, as `schema`.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate

from diloco.pipeline.bus.schema import decode_count, is_learner, readable
from diloco.pipeline.errors import BadMessage, LearnerReplaced
from diloco.pipeline.messages.run import LearnerReport, SeenReport
from diloco.pipeline.messages.wire import MAX_LEARNERS, MAX_NAME_CHARS

MOST_REPORTS = 2 * MAX_LEARNERS
REPORTS_LEFT = MAX_LEARNERS
"""Reports on the bus: of more than the first, those that matter least go, until there are so few as the second."""

REPORT_NAME_BYTES = MAX_NAME_CHARS + 1 + 32
TIME_BYTES = 20
"""Of a report's name, learner/incarnation, and of the time at which it came, at most."""

NOTHING = False, -1
"""What a report is worth that cannot be read, or has another's name."""

Known = dict[bytes, tuple[bytes, LearnerReport | None]]
"""Name of a report -> as it was stored, and what that says; None: nothing."""


def seen_reports(
    now_ms: int, reports: Mapping[bytes, bytes], seen: Mapping[bytes, bytes], known: Known
) -> list[SeenReport]:
    """Stored reports with their ages, by name; one that cannot be read, or has another's name, is as good as none.

    known: what the last reading found, and then this one: most reports are as they were.
    """
    for name in known.keys() - reports.keys():
        del known[name]
    found = []
    for name, blob in sorted(reports.items()):
        before = known.get(name)
        if before is None or before[0] != blob:
            before = known[name] = blob, _read_report(name, blob)
        with suppress(BadMessage):
            age_s = max(0, now_ms - decode_count("report time", seen.get(name))) / 1000
            if before[1] is not None:
                found.append(SeenReport(report=before[1], age_s=age_s))
    return found


def _read_report(name: bytes, blob: bytes) -> LearnerReport | None:
    """None: it cannot be read, or does not stand under its own name."""
    report = readable(LearnerReport, blob)
    return report if report and name == f"{report.learner}/{report.incarnation}".encode() else None


def reporting(names: Iterable[bytes]) -> list[str]:
    """Learners of whom there are reports, by the names of these."""
    learners = {name.partition(b"/")[0] for name in names}
    return [learner.decode() for learner in sorted(learners) if is_learner(learner)]


def reports_bytes(count: int, fragments: int) -> int:
    """Of so many reports, with their names and times, at most: one or another of them may be larger."""
    return count * (2**10 + 9 * fragments)


def are_too_many(reports: Mapping[bytes, bytes], seen: Mapping[bytes, bytes], fragments: int) -> bool:
    """Whether some of them are to go."""
    size = sum(len(name) + len(value) for fields in (reports, seen) for name, value in fields.items())
    return max(len(reports), len(seen)) > MOST_REPORTS or size > reports_bytes(MOST_REPORTS, fragments)


def oversized(fields: Mapping[bytes, bytes], value_bytes: int) -> set[bytes]:
    """Names of fields that are larger than a report, or the time of one, can be."""
    return {name for name, value in fields.items() if len(name) > REPORT_NAME_BYTES or len(value) > value_bytes}


def surplus_reports(reports: Mapping[bytes, bytes], holders: Mapping[str, bytes | None], fragments: int) -> set[bytes]:
    """Those that go, where there are too many.

    Kept are those of who holds its learner's id, which no other learner can make up; then those of most tokens, since
    what is trained is counted by them. What cannot be read counts for nothing.

    holders: learner -> what its holder's key has.
    """

    def worth(name: bytes) -> tuple[bool, int]:
        if (report := _read_report(name, reports[name])) is None:
            return NOTHING
        return holders.get(report.learner) == holder(report), report.tokens

    worths = {name: worth(name) for name in sorted(reports)}
    ranked = sorted(worths, key=lambda name: worths[name], reverse=True)
    sizes = accumulate(len(name) + len(reports[name]) for name in ranked)
    left = sum(size <= reports_bytes(REPORTS_LEFT, fragments) for size in sizes)
    return {*ranked[min(left, REPORTS_LEFT) :], *(name for name in ranked if worths[name] == NOTHING)}


def holder(report: LearnerReport) -> bytes:
    """What a report makes its learner's holder."""
    return b"%d %s" % (report.generation, report.incarnation.encode())


def replaced(key: str, generation: int) -> LearnerReplaced:
    """Another incarnation holds a learner's id."""
    return LearnerReplaced(f"{key} is held by generation {generation}", generation)
