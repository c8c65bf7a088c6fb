"""Keep a learner's moments: restore what was found, then copy a fragment a step while a copy is wanted.

Used by the training thread, which only copies (`stepped`); other threads write and upload.
"""

import random
import time
from collections import deque

import structlog
import torch

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.messages.moments import OptimizerKind
from diloco.workers.copies.losses import Loss
from diloco.workers.exchange.shared import Shared
from diloco.workers.moments.local_state import OwnMoments
from diloco.workers.moments.optimizer_state import StateCopy
from diloco.workers.moments.recovery import FoundMoments, Source, torch_rng
from diloco.workers.moments.saved_moments import Moments
from diloco.workers.moments.state_folder import SavedState
from diloco.workers.moments.stateful import pack, unpack, warn_unmoved
from diloco.workers.rounds import Rounds
from diloco.workers.times import TIMES

# Most losses that wait to be written; older ones are dropped.
LOSSES_KEPT = 100_000


class Keeper:
    """One learner's moments, from its first step to its last. Used by the training thread only."""

    def __init__(self, own: OwnMoments, rounds: Rounds) -> None:
        self._own, self._rounds = own, rounds
        self.source: Source = "start"
        self.earlier_steps = 0  # inner steps of earlier incarnations
        self._copy: StateCopy | None = None  # the copy being made, a fragment a step
        self._failed = False  # a failure to copy was logged
        self._next_save_s = self._next_losses_s = 0.0
        self._losses: deque[tuple[int, float, float, Loss]] = deque(maxlen=LOSSES_KEPT)
        self._packed = False  # the objects' states were once packed
        self._saved: tuple[int, dict[str, bytes]] = 0, {}  # steps and objects of the last save
        self._compared = False  # the objects of two saves were compared; some objects change only now and then

    def restore(self, found: FoundMoments) -> None:
        """Put what was found into the optimizer, the objects and this process, before the first step; release it then.

        Raises:
            UsageError: an object does not take its saved state.
        """
        now = time.monotonic()
        self._next_save_s, self._next_losses_s = now + self._own.options.state_every_s, now
        self.source = found.source
        if self._own.folder is not None and self._own.state is not None:
            self._own.folder.look()
        if found.moments is not None and self._own.state is not None:
            self._own.state.load(found.moments)
        found.moments = None
        if (saved := found.saved) is not None:
            self.earlier_steps = saved.steps
            unpack(self._own.options.state, saved.objects, self._own.options.state_dir, saved.steps)
            torch.set_rng_state(torch_rng(saved))
            random.setstate(saved.python_rng)

    def drop(self) -> bool:
        """Empty the optimizers' state; return False if it cannot be emptied safely, and is kept."""
        self._copy = None
        if self._own.state is None:
            return False
        return self._own.state.clear()

    def stepped(self, shared: Shared, progress: float, loss: Loss | None) -> None:
        """Copy a fragment of the moments after a step, if a copy is wanted. Never waits.

        Raises:
            UsageError: after the first step: an object's state cannot be saved.
        """
        if not self._packed:
            pack(self._own.options.state)
            self._packed = True
        now = time.monotonic()
        try:
            self._stepped(now, shared, progress, loss)
        except Exception as error:  # peers and a restart may lose by it, but it must not end the training
            self._copy, self._next_save_s = None, now + self._own.options.state_every_s
            self._own.answer_copies(None)
            if not self._failed:
                self._failed = True
                detail = "training continues, and a restart uses what was saved earlier, or begins with fresh moments"
                structlog.get_logger().warning(
                    "moments_not_copied", learner=self._own.learner, error=str(error)[:500], detail=detail
                )

    def _stepped(self, now: float, shared: Shared, progress: float, loss: Loss | None) -> None:
        self._copy_on(now, shared)
        if self._own.options.log_losses and self._own.folder is not None:
            if loss is not None:
                self._losses.append((self._rounds.steps, time.time(), progress, loss))
            # This comes after `_copy_on`: a copy begins only while nothing is being written. If steps are long, losses
            # are written at every step, and would never let a copy begin.
            if now >= self._next_losses_s and not self._own.folder.busy:
                self._next_losses_s = now + TIMES.losses_s
                self._own.folder.append_losses(self._loss_lines)

    def _copy_on(self, now: float, shared: Shared) -> None:
        if self._own.state is None:
            return
        if self._copy is None:
            due = self._own.folder is not None and now >= self._next_save_s and not self._own.folder.busy
            if due or self._own.copies:
                self._copy = self._own.state.start_copy()
        if self._copy is not None and self._copy.advance():
            copy, self._copy = self._copy, None
            self._own.answer_copies(copy)
            if now >= self._next_save_s:
                self._next_save_s = now + self._own.options.state_every_s
                self._save(self._own.state.kind, copy, shared)
                self._failed = False

    @property
    def saves(self) -> bool:
        """True while a copy is being written, in another thread. Any thread may ask."""
        return self._own.folder is not None and self._own.folder.busy

    def close(self, shared: Shared, save: bool, within_s: float) -> None:
        """Save once more after the training, and wait for that a while.

        The learner may come back, even in a resumed run.
        """
        if self._own.folder is None:
            return
        if self._own.options.log_losses:
            self._own.folder.append_losses(self._loss_lines)
        if save and self._own.state is not None and self._rounds.steps:
            try:
                copy = self._own.state.start_copy()
                while not copy.advance():
                    pass
                self._save(self._own.state.kind, copy, shared)
            except Exception as error:  # the device has failed or has no memory for a copy: still leave the run
                folder = str(self._own.folder.path)
                structlog.get_logger().warning("state_not_saved", folder=folder, error=str(error))
        self._own.folder.close(within_s)

    def _save(self, kind: OptimizerKind, copy: StateCopy, shared: Shared) -> None:
        identity = self._own.identity(shared.state)
        if self._own.folder is None or identity is None:
            return
        steps, shard = self.earlier_steps + self._rounds.steps, shared.shard_position
        torch_rng, python_rng = torch.get_rng_state(), random.getstate()
        objects = pack(self._own.options.state)
        if self._saved[1] and steps > self._saved[0] and not self._compared:
            self._compared = True
            warn_unmoved(self._own.options.state, self._saved[1], objects)
        self._saved = steps, objects

        def make() -> tuple[SavedState, Moments]:
            moments = copy.moments()
            state = SavedState(
                identity=identity,
                learner=self._own.learner,
                layout=self._own.layout.digest,
                kind=kind,
                moments_file=f"moments-{steps}.safetensors",
                numbers=dict(moments.numbers),
                steps=steps,
                torch_rng=torch_rng.numpy().tobytes(),
                python_rng=python_rng,
                shard=shard,
                objects=objects,
            )
            return state, moments

        self._own.folder.save(make)

    def _loss_lines(self) -> list[str]:
        """Return the lines to append; runs in the writer's thread, since reading a loss may wait for a device."""
        lines = []
        while self._losses:
            step, unix_s, progress, loss = self._losses.popleft()
            line = {
                "incarnation": self._own.incarnation,
                "step": step,
                "unix_s": unix_s,
                "progress": progress,
                "loss": loss.number(),
            }
            lines.append(dumps(line))
        return lines
