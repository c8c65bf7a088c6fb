"""What a checkpoint consists of, and which of several are kept. Pure.

    <place>/<run>-<when it began>/              the run's own: nobody else's checkpoints are seen or removed in there
      latest                                    text: names of the kept checkpoints, one a line, the newest first
      checkpoint-<tokens>-<nonce>/              one checkpoint
        fragment-<id>-<version>-<digest>.safetensors   `globals`, and the outer `momentum` unless it is all zeros:
                                                float32 (elements,), as the layout puts tensors into them
        fragment-<id>-<version>-<digest>.json   `SavedFragment`: written after it, so it is whole
        SHA256SUMS                              digests of the files of the checkpoint; empty while it is written:
                                                by that others see that it is begun in this place
        state.json                              `SavedState`, the manifest, written last: it makes the files one

A fragment's file is immutable, and named by what is in it. So any syncer may write any of them at any time, twice too,
and the manifest picks one of each fragment.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from diloco.pipeline.files.replacing import TEMPORARY
from diloco.pipeline.files.sums import SUMS_FILE
from diloco.pipeline.fragments import FragmentLayout, Layout, Slot
from diloco.pipeline.messages.head import Norms
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import DataOrder, ShardQueue
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import Count, Digest, FirstFormat, Message, TokenElements, Version

KEPT = 3
"""Checkpoints of a run that are kept."""
LATEST, STATE_FILE = "latest", "state.json"
GLOBALS, MOMENTUM = "globals", "momentum"
CHECKPOINT = "checkpoint-"
_FRAGMENT = re.compile(r"^(fragment-([0-9]{4,})-([0-9]+)-[0-9a-f]{16})\.json$")
_HALF = re.escape(TEMPORARY) + "[a-z0-9_]{8}"
_LEFT = re.compile(rf"{CHECKPOINT}[0-9]{{1,19}}-[0-9a-f]{{8}}|{_HALF}")
_FILE = re.compile(
    rf"fragment-[0-9]{{4,}}-[0-9]+-[0-9a-f]{{16}}\.(json|safetensors)|{SUMS_FILE}|{re.escape(STATE_FILE)}|{_HALF}"
)

Float32 = npt.NDArray[np.float32]


class SavedFragment(Message):
    """A fragment's head at the time of the checkpoint."""

    version: Version
    digest: Digest
    merged_deltas: Count
    merged_tokens: Count
    rejected_tokens: Count
    file: Annotated[str, Field(pattern=r"^fragment-[0-9]{4,}-[0-9]+-[0-9a-f]{16}\.safetensors$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """Of that file."""
    norms: Norms


class SavedState(Message):
    """state.json (bytes as hex)."""

    format: FirstFormat
    spec: Spec
    run: RunState
    overwritten: TokenElements
    """Sum of the learners' reports (token-elements), without what was resumed."""
    fragments: tuple[SavedFragment, ...]
    shards: ShardQueue
    data_order: DataOrder | None
    """What the shards are of; None: no learner has said."""


def fragment_name(fragment: int, version: int, digest: bytes) -> str:
    """Name of a fragment's files, without what comes after the dot."""
    return f"fragment-{fragment:04d}-{version}-{digest.hex()[:16]}"


def found_fragments(names: Iterable[str]) -> dict[int, str]:
    """The newest version of each fragment of which all is written, by the names in a folder: id -> name."""
    found: dict[int, tuple[int, str]] = {}
    for name in names:
        if match := _FRAGMENT.match(name):
            p, one = int(match[2]), (int(match[3]), match[1])
            found[p] = max(found.get(p, one), one)
    return {p: name for p, (_, name) in found.items()}


def kept_names(before: Sequence[str], new: str) -> tuple[list[str], list[str]]:
    """The names to keep, newest first, and those to drop, once there is a new one."""
    names = [new, *(name for name in before if name != new)]
    return names[:KEPT], names[KEPT:]


def may_be_left(name: str) -> bool:
    """Whether a killed writer of ours may have left this in a place: people and other programs have folders there."""
    return _LEFT.fullmatch(name) is not None


def all_ours(files: Iterable[str]) -> bool:
    """Whether all files of a folder have names that we give."""
    return all(map(_FILE.fullmatch, files))


class Leftovers:
    """Tells what killed writers left, by looks at a place: folders that are not kept, and do not grow any more.

    What is not kept is a leftover if it is old, or had the same files at the look before, a checkpoint earlier. Whole
    ones go too, but only when there are as many newer ones as are kept.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, frozenset[str]] = {}

    def look(self, others: Mapping[str, frozenset[str]], old: Collection[str], kept: int) -> list[str]:
        """What may go.

        Args:
            others: names of what is not kept, with the names of the files in it.
            old: those of them that nobody has written to for long.
            kept: how many are.
        """
        left = [name for name, files in others.items() if name in old or self._before.get(name) == files]
        self._before = others
        return [name for name in left if kept >= KEPT or STATE_FILE not in others[name]]


def pieces(layout: Layout) -> dict[str, list[tuple[FragmentLayout, Slot]]]:
    """Where each tensor lies: its pieces by name, in the order of their rows."""
    found: dict[str, list[tuple[FragmentLayout, Slot]]] = {}
    for fragment in layout.fragments:
        for slot in fragment.slots:
            found.setdefault(slot.tensor.name, []).append((fragment, slot))
    for parts in found.values():
        parts.sort(key=lambda part: part[1].within.start)
    return found
