"""Files of a checkpoint, and which of several checkpoints are kept. Pure.

    <place>/<run>-<when it began>/              the run's own folder: it has no other run's checkpoints
      latest                                    text: names of the kept checkpoints, one per line, the newest first
      checkpoint-<tokens>-<nonce>/              one checkpoint
        fragment-<id>-<version>-<digest>.safetensors   `globals`, and the outer `momentum` unless it is all zeros:
                                                float32 (elements,), in which the layout says where tensors lie
        fragment-<id>-<version>-<digest>.json   `SavedFragment`; it is written after the file above, which is
                                                therefore whole
        SHA256SUMS                              digests of the checkpoint's files; it is empty while the checkpoint is
                                                written, which tells other syncers that it has begun in this place
        state.json                              `SavedState`, the manifest; it is written last, and a folder is a
                                                checkpoint only if it has one

A fragment's file is immutable and named by its content. So any syncer may write any of them at any time, even twice,
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
from diloco.pipeline.messages.fragment import Norms
from diloco.pipeline.messages.run import RunState
from diloco.pipeline.messages.shards import DataOrder, ShardQueue
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.messages.wire import Count, Digest, FirstFormat, Message, TokenElements, Version

KEPT = 3  # checkpoints of a run that are kept
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
    """SHA-256 of `file`, in hex."""
    norms: Norms


class SavedState(Message):
    """Content of state.json (bytes are written in hex)."""

    format: FirstFormat
    spec: Spec
    run: RunState
    overwritten: TokenElements
    """Sum of the learners' reports (token-elements), without earlier parts of a resumed run."""
    fragments: tuple[SavedFragment, ...]
    shards: ShardQueue
    data_order: DataOrder | None
    """Order of the data that the shards belong to; None if no learner has proposed one."""


def fragment_name(fragment: int, version: int, digest: bytes) -> str:
    """Return the name of a fragment's files, without the suffix."""
    return f"fragment-{fragment:04d}-{version}-{digest.hex()[:16]}"


def found_fragments(names: Iterable[str]) -> dict[int, str]:
    """Return the newest completely written version of each fragment (id -> name), from the names in a folder."""
    found: dict[int, tuple[int, str]] = {}
    for name in names:
        if match := _FRAGMENT.match(name):
            p, one = int(match[2]), (int(match[3]), match[1])
            found[p] = max(found.get(p, one), one)
    return {p: name for p, (_, name) in found.items()}


def kept_names(before: Sequence[str], new: str) -> tuple[list[str], list[str]]:
    """Return the checkpoints to keep, newest first, and those to drop, once there is a new one."""
    names = [new, *(name for name in before if name != new)]
    return names[:KEPT], names[KEPT:]


def may_be_left(name: str) -> bool:
    """Return whether a killed syncer may have left a folder or temporary file of this name, and no other program."""
    return _LEFT.fullmatch(name) is not None


def all_ours(files: Iterable[str]) -> bool:
    """Return whether all files of a folder have names that a syncer gives (unfinished temporary files included)."""
    return all(map(_FILE.fullmatch, files))


class Leftovers:
    """Finds folders and temporary files that killed writers left, by comparing successive looks at a place.

    A folder that is not kept is a leftover if it is old, or if it had the same files at the look before, which was a
    checkpoint earlier. Whole checkpoints are leftovers only if `KEPT` newer ones exist.
    """

    def __init__(self) -> None:
        self._before: Mapping[str, frozenset[str]] = {}

    def removable(self, others: Mapping[str, frozenset[str]], old: Collection[str], kept: int) -> list[str]:
        """Return the folders that may be removed.

        Args:
            others: names of what is not kept -> names of the files in each (none in a temporary file).
            old: those of `others` that were not written to for a long time.
            kept: number of kept checkpoints.
        """
        left = [name for name, files in others.items() if name in old or self._before.get(name) == files]
        self._before = others
        return [name for name in left if kept >= KEPT or STATE_FILE not in others[name]]


def pieces(layout: Layout) -> dict[str, list[tuple[FragmentLayout, Slot]]]:
    """Return where each tensor lies: name -> its pieces, in the order of their rows."""
    found: dict[str, list[tuple[FragmentLayout, Slot]]] = {}
    for fragment in layout.fragments:
        for slot in fragment.slots:
            found.setdefault(slot.tensor.name, []).append((fragment, slot))
    for parts in found.values():
        parts.sort(key=lambda part: part[1].within.start)
    return found
