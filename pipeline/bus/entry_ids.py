"""Ids of stream entries, and names of headers, which say whose stream an entry is on. Pure."""

import re
from collections.abc import Iterable, Mapping

from diloco.pipeline.bus.ports import START
from diloco.pipeline.errors import BusError

_LEARNER = re.compile(rb"[A-Za-z0-9._-]{1,64}")


def offer_id(learner: str, at: str) -> str:
    """Name of an entry of a learner's stream: `ms-seq@learner`."""
    return f"{at}@{learner}"


def parse_offer_id(text: str) -> tuple[str, str]:
    """(learner, entry id) of such a name.

    Raises:
        BusError: it is none.
    """
    at, _, learner = text.partition("@")
    entry_id(at)
    if not learner:
        raise BusError(f"invalid name of a header {text!r:.80}: it is <entry id>@<learner>")
    return learner, at


def by_learner(entries: Iterable[str]) -> dict[str, list[str]]:
    """Names of headers as learner -> entry ids, learners in order."""
    found: dict[str, list[str]] = {}
    for learner, at in map(parse_offer_id, entries):
        found.setdefault(learner, []).append(at)
    return dict(sorted(found.items()))


def cursors(senders: Iterable[bytes], after: Mapping[str, str] | None) -> dict[str, str]:
    """Learner -> entry id after which its stream is read: from the start where none is named.

    A sender that cannot be a learner's name has no stream: any learner may have put it there.
    """
    names = {name.decode() for name in senders if _LEARNER.fullmatch(name)}
    known = after or {}
    return {learner: known.get(learner, START) for learner in sorted({*names, *known})}


def entry_id(text: str) -> tuple[int, int]:
    """A stream entry id, `ms-seq` or `ms`, as numbers.

    Raises:
        BusError: not an entry id.
    """
    ms, _, seq = text.partition("-")
    if not ms.isdecimal() or not (seq or "0").isdecimal():
        raise BusError(f"invalid stream entry id {text!r:.80}")
    return int(ms), int(seq or 0)
