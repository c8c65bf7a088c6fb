"""A learner's state folder: each rank saves what it holds, and any number of ranks, even one, can read it again.

    <folder>/rank-<r>-of-<n>/   a `StateFolder` of rank r's shards; among replicas only the first one saves, and the
                                others save only a `RANDOM_FILE` with their random states and objects
    <folder>/                   the state of a learner that is one process

What is read is the complete set of files that has gone furthest; docs/explanation/ranks.md ("Moments") says why its
files may come from different steps.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import structlog
import torch
from typing_extensions import override

from diloco.pipeline.files.replacing import replace
from diloco.pipeline.fragments import Layout, Slot
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.payload.codec import digest_of
from diloco.workers.moments.saved_moments import KeptLayout, Moments, slots
from diloco.workers.moments.state_folder import (
    STATE_FILE,
    RunIdentity,
    SavedState,
    StateFolder,
    StateRefused,
    read_state,
)
from diloco.workers.ranks.placement import Block, Blocks, local_layout, tiles, whole_block

# Holds a `SavedState` of which only the random states and the objects are used.
RANDOM_FILE = "random.json"
# The states of one saved set, by folder.
Parts = dict[Path, SavedState]


class RankFolder(StateFolder):
    """One rank's state folder."""

    def __init__(self, path: Path, kept: Layout, whole: Layout, held: Sequence[Blocks], rank: int, of: int) -> None:
        """Open a rank's folder.

        Args:
            path: the learner's folder.
            kept: what this rank saves.
            whole: all trained tensors.
            held: by rank.
            rank: this rank.
            of: the rank whose random states and objects this rank takes: itself, unless they train on the same data.
        """
        self._all, self._whole, self._held, self._rank = path, whole, held, rank
        first = held.index(held[rank])
        self._saves = first == rank
        self._own, self._of = (path / f"rank-{one}-of-{len(held)}" for one in (rank, of))
        if len(held) == 1:
            super().__init__(path, kept)
        else:
            partition = digest_of(msgpack.packb([sorted(one.items()) for one in held])).hex()
            extra = {"held": dict(held[rank]), "partition": partition}
            super().__init__(path / f"rank-{first}-of-{len(held)}", kept, extra)

    @classmethod
    def of_one(cls, path: Path, kept: Layout, whole: Layout) -> "RankFolder":
        """Return the folder of a learner that is one process."""
        held = {slot.tensor.name: whole_block(slot.tensor) for _, slot in slots(whole)}
        return cls(path, kept, whole, [held], 0, 0)

    @override
    def look(self) -> None:
        if self._saves:  # replicas share the first one's folder
            super().look()

    def save(self, make: Callable[[], tuple[SavedState, Moments]]) -> None:
        """Save in the background; replicas other than the first save only their random states."""
        if self._saves:
            super().save(make)
        else:
            self._writer.submit(partial(self._logged, self._save_random_state, make))

    def _save_random_state(self, make: Callable[[], tuple[SavedState, Moments]]) -> None:
        self._own.mkdir(parents=True, exist_ok=True)
        state = make()[0].model_copy(update=self._ranks)
        replace(self._own / RANDOM_FILE, [state.model_dump_json().encode()])

    @override
    def append_losses(self, lines: Callable[[], Sequence[str]]) -> None:
        if self._saves:  # replicas share the first one's folder
            super().append_losses(lines)

    def load(self, identity: RunIdentity | None, kind: OptimizerKind) -> tuple[SavedState, Moments] | None:
        """Load what this rank holds now, whichever ranks saved it; None if nothing of this run is saved."""
        if len(self._held) == 1:
            self.check_alone()
        parts = self._newest(identity)
        same = self.path in parts and parts[self.path].partition == self._ranks.get("partition", "")
        if not parts or (same and not self._shares_blocks()):
            found = super().load(identity, kind)
            if found is None:
                return None
            state, moments = found
            if not self._saves or self._of != self._own:
                state = self._with_own_random_state(state)
            return _with_fewest_steps(state, parts.values()), moments
        if isinstance(self._layout, KeptLayout):
            raise StateRefused(
                f"{self._all} was saved by other ranks, or by ranks that divide some layers only, and not all tensors "
                "keep the same moments"
            )
        return self._gathered(parts, identity, kind)

    def _shares_blocks(self) -> bool:
        """Return whether ranks that save different files hold some tensors alike.

        Each saves by its own clock, so their copies may be of different steps. If they came back with their own, they
        would never be alike again.
        """
        files = {tuple(sorted(one.items())) for one in self._held}
        names = {slot.tensor.name for _, slot in slots(self._whole)}
        held = [(name, block) for one in files for name, block in one if name in names and block.elements]
        return len(set(held)) < len(held)

    def _compare(self, state: SavedState, identity: RunIdentity | None, kind: OptimizerKind) -> None:
        super()._compare(state, identity, kind)
        if state.partition != self._ranks.get("partition", ""):
            raise StateRefused(
                f"{self.path} was saved by ranks that held different rows, and some of these are missing"
            )

    def _newest(self, identity: RunIdentity | None) -> Parts:
        """Return this run's complete set that has gone furthest, its first rank first; empty if there is none."""
        sets: dict[str, Parts] = defaultdict(dict)
        for path in [self._all, *sorted(self._all.glob("rank-*-of-*"))]:
            with suppress(StateRefused):  # there is none, or a damaged one
                state = read_state(path / STATE_FILE)
                if state.identity.same(identity):
                    sets[state.partition][path] = state
        whole = [parts for parts in sets.values() if self._covers(parts.values())]
        return max(whole, key=lambda parts: min(state.steps for state in parts.values()), default={})

    def _covers(self, states: Collection[SavedState]) -> bool:
        """Return whether these states together hold all elements."""
        for _, slot in slots(self._whole):
            blocks = {_block(state, slot.tensor) for state in states}
            if not tiles([block for block in blocks if block.elements], slot.tensor):
                return False
        return True

    def _gathered(self, parts: Parts, identity: RunIdentity | None, kind: OptimizerKind) -> tuple[SavedState, Moments]:
        own = [{name: np.zeros(f.elements, np.float32) for name in kind.moments} for f in self._layout.fragments]
        places = list(slots(self._layout))
        numbers = {name: [0.0] * len(places) for name in kind.numbers}
        missing, taken = self._layout.elements, set[tuple[str, Block]]()
        for path, saved in parts.items():
            blocks = {slot.tensor.name: _block(saved, slot.tensor) for _, slot in slots(self._whole)}
            new = blocks.items() - taken  # ranks that divide layers hold the undivided ones alike
            taken |= new
            layout = local_layout(self._whole, blocks)
            if not (layout.elements and self._layout.elements):
                continue  # a rank that holds nothing saved no moments
            loaded = StateFolder(path, layout).load(identity, kind)
            if loaded is None or loaded[1].others:
                raise StateRefused(
                    f"{path} was saved with a different set of ranks, and holds data that cannot be redistributed"
                )
            saved_here: dict[str, list[tuple[int, int, Slot]]] = defaultdict(list)
            for there, (q, slot) in enumerate(slots(layout)):
                if (slot.tensor.name, blocks[slot.tensor.name]) in new:
                    saved_here[slot.tensor.name].append((there, q, slot))
            for at, (p, mine) in enumerate(places):
                to = _block_in(self._held[self._rank][mine.tensor.name], mine)
                for there, q, slot in saved_here[mine.tensor.name]:
                    for name in kind.numbers:
                        numbers[name][at] = loaded[1].numbers[name][there]
                    of = _block_in(blocks[slot.tensor.name], slot)
                    both = to.both(of)
                    for name in kind.moments if both.elements else ():
                        found = of.cut(loaded[1].flats[q][name][slot.start : slot.stop], both)
                        to.cut(own[p][name][mine.start : mine.stop], both)[:] = found
                    missing -= both.elements
        if missing:
            raise StateRefused(f"{self._all} does not hold each of this rank's elements exactly once: {missing} remain")
        state = self._with_own_random_state(_with_fewest_steps(next(iter(parts.values())), parts.values()))
        structlog.get_logger().info("state_resharded", folder=str(self._all), parts=len(parts), ranks=len(self._held))
        return state, Moments(kind, tuple(own), {name: tuple(values) for name, values in numbers.items()})

    def _with_own_random_state(self, state: SavedState) -> SavedState:
        """Replace the random states and objects by those that the rank `of`, of as many, saved with this state's set.

        If it saved none, random states are this process's, and there are no objects.
        """
        # With another group's random states or data position this rank would read that group's data. Ranks of one group
        # must not differ, and each saves by its own clock: all take the first one's.
        here: dict[str, Any] = {"torch_rng": torch.get_rng_state().numpy().tobytes(), "python_rng": random.getstate()}
        here["objects"] = {}
        saved = list[SavedState]()
        for name in (STATE_FILE, RANDOM_FILE):
            with suppress(StateRefused):  # there is none, or a damaged one
                saved.append(read_state(self._of / name))
        # Another set of ranks may have gone further since.
        saved = [one for one in saved if one.identity.same(state.identity) and one.partition == state.partition]
        if saved:
            last = max(saved, key=lambda one: one.steps)
            here = {"torch_rng": last.torch_rng, "python_rng": last.python_rng, "objects": last.objects}
        return state.model_copy(update=here)


def _with_fewest_steps(state: SavedState, parts: Collection[SavedState]) -> SavedState:
    """Replace the steps by the lowest number in the set, so that all ranks begin with the same."""
    if len({part.steps for part in parts}) > 1:
        steps = sorted(part.steps for part in parts)
        structlog.get_logger().info(
            "state_of_several_steps", steps=steps, detail="its ranks did not save at the same time"
        )
    first = min([*parts, state], key=lambda part: part.steps)
    return state.model_copy(update={"steps": first.steps})


def _block(state: SavedState, tensor: TensorSpec) -> Block:
    return Block(*state.held.get(tensor.name, whole_block(tensor)))


def _block_in(held: Block, slot: Slot) -> Block:
    """Return the block of the whole tensor that lies in a slot of the layout of a rank that holds `held`."""
    first, last = slot.tensor.rows or (0, held.last - held.first)
    return held._replace(first=held.first + first, last=held.first + last)
