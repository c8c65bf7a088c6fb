"""The storage format of reports, and which reports are kept when they are too many or too large. Pure.

Like `schema`, it is shared by the bus's adapters.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import accumulate

from diloco.pipeline.bus.schema import decode_count, is_learner, readable
from diloco.pipeline.errors import BadMessage, LearnerReplaced
from diloco.pipeline.messages.run import LearnerReport, SeenReport
from diloco.pipeline.messages.wire import MAX_LEARNERS, MAX_NAME_CHARS

# With more reports than MAX_REPORTS on the bus, the least important are deleted until REPORTS_LEFT remain. The gap
# between the two keeps the deletion rare.
MAX_REPORTS = 2 * MAX_LEARNERS
REPORTS_LEFT = MAX_LEARNERS

# Maximum length of a report's name, `learner/incarnation`, and of its arrival time in decimal.
REPORT_NAME_BYTES = MAX_NAME_CHARS + 1 + 32
TIME_BYTES = 20

# Rank of a report that is unreadable, or is stored under a name that is not its own.
NOTHING = False, -1

# Cache: name of a report -> its stored bytes, the decoded report (None if it is invalid), and its arrival time in ms.
Known = dict[bytes, tuple[bytes, LearnerReport | None, int]]


def seen_reports(
    now_ms: int, reports: Mapping[bytes, bytes], seen: Mapping[bytes, bytes], known: Known
) -> list[SeenReport]:
    """Decode stored reports, with their ages, sorted by name; skip those that are unreadable or have another's name.

    A report whose arrival time is gone keeps that of the previous read. If there was none, it has just arrived.

    known: cache of the previous read, updated in place; most reports have not changed since.
    """
    for name in known.keys() - reports.keys():
        del known[name]
    found = []
    for name, blob in sorted(reports.items()):
        before = known.get(name)
        report = before[1] if before and before[0] == blob else _read_report(name, blob)
        with suppress(BadMessage):
            seen_ms = decode_count("report time", seen.get(name)) or (before[2] if before else now_ms)
            known[name] = blob, report, seen_ms
            if report is not None:
                found.append(SeenReport(report=report, age_s=max(0, now_ms - seen_ms) / 1000))
    return found


def _read_report(name: bytes, blob: bytes) -> LearnerReport | None:
    """Decode a report; None if it is unreadable or is not stored under its own name."""
    report = readable(LearnerReport, blob)
    return report if report and name == f"{report.learner}/{report.incarnation}".encode() else None


def reporting(names: Iterable[bytes]) -> list[str]:
    """Return the learners that have reports, from the names of the reports."""
    learners = {name.partition(b"/")[0] for name in names}
    return [learner.decode() for learner in sorted(learners) if is_learner(learner)]


def reports_bytes(count: int, fragments: int) -> int:
    """Return a limit on the size of `count` reports with names and times; a single report may be above the average.

    A usual report has about 1.2 KB, of which its curve is 0.7 KB, and up to 9 bytes per fragment.
    """
    return count * (2**11 + 9 * fragments)


def have_surplus(reports: Mapping[bytes, bytes], seen: Mapping[bytes, bytes], fragments: int) -> bool:
    """Return whether some reports must be deleted."""
    size = sum(len(name) + len(value) for fields in (reports, seen) for name, value in fields.items())
    return max(len(reports), len(seen)) > MAX_REPORTS or size > reports_bytes(MAX_REPORTS, fragments)


def oversized(fields: Mapping[bytes, bytes], value_bytes: int) -> set[bytes]:
    """Return the names of fields whose name or value is too large for a report, or for its time."""
    return {name for name, value in fields.items() if len(name) > REPORT_NAME_BYTES or len(value) > value_bytes}


def surplus_reports(reports: Mapping[bytes, bytes], holders: Mapping[str, bytes | None], fragments: int) -> set[bytes]:
    """Return the names of the reports to delete when there are too many.

    Reports of the incarnations that hold their learner's id are kept first, since no other learner can forge those;
    then the reports with the most tokens, since trained tokens are counted from reports. Unreadable reports are always
    deleted.

    holders: learner -> value of its holder key.
    """

    def priority(name: bytes) -> tuple[bool, int]:
        if (report := _read_report(name, reports[name])) is None:
            return NOTHING
        return holders.get(report.learner) == holder(report), report.tokens

    priorities = {name: priority(name) for name in sorted(reports)}
    ranked = sorted(priorities, key=lambda name: priorities[name], reverse=True)
    sizes = accumulate(len(name) + len(reports[name]) for name in ranked)
    left = sum(size <= reports_bytes(REPORTS_LEFT, fragments) for size in sizes)
    return {*ranked[min(left, REPORTS_LEFT) :], *(name for name in ranked if priorities[name] == NOTHING)}


def holder(report: LearnerReport) -> bytes:
    """Return the value that a report gives its learner's holder key."""
    return b"%d %s" % (report.generation, report.incarnation.encode())


def replaced(key: str, generation: int) -> LearnerReplaced:
    """Return the error for a report whose learner's id is held by another incarnation."""
    return LearnerReplaced(f"{key} is held by generation {generation}", generation)
