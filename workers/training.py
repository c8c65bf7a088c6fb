"""The training thread's part of a learner (counters, parameters, moments), and what a framework must do for it."""

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from diloco.pipeline.fragments import Layout
from diloco.pipeline.messages.run import LearnerReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.cores import usable_cores
from diloco.workers.checks.model_watch import ModelWatch
from diloco.workers.copies.losses import Losses
from diloco.workers.encoding import AT_ONCE, Encoder, Float32, OnHost, Snapshot
from diloco.workers.moments.keeper import Keeper
from diloco.workers.moments.recovery import Recovery
from diloco.workers.rounds import Rounds
from diloco.workers.step_times import StepTimes


class Copied(Protocol):
    """A fragment's values at one moment, perhaps still on a device."""

    def numpy(self) -> Float32:
        """Return the flat vector (elements,), which the caller may overwrite; waits for the device."""


class Parameters(Protocol):
    """A model's tensors, fragment by fragment: all that the exchange needs to know of a framework.

    `FragmentParameters` implements it for torch, including one rank's shards, and `PytreeParameters` for JAX. Used by
    the training thread, and by the exchange thread while the training thread waits for it to join.
    """

    @property
    def device(self) -> torch.device | str:
        """Where the tensors are; a string: where torch does not train."""

    def snapshot(self, p: int) -> Copied:
        """Copy fragment p; later steps do not change the copy. Does not wait for a device."""

    def overwrite(self, p: int, flat: Any) -> None:
        """Put a global's vector (elements,), of the encoder's kind, into fragment p."""


@dataclass(slots=True)
class Training:
    """The model's side of one incarnation. The training thread writes all fields except `recovery`.

    The exchange thread reads the counters for reports. It reads the parameters only while the learner joins, when the
    training thread waits.
    """

    learner: str
    incarnation: str
    spec: Spec
    """This learner's proposal; a learner joins only if the run's spec agrees with it."""
    layout: Layout
    rounds: Rounds
    parameters: Parameters
    recovery: Recovery
    """Belongs to the exchange thread."""
    keeper: Keeper
    times: StepTimes
    watch: ModelWatch | None = None
    """None: the framework's learner itself checks at each step that the model is still the model that joined."""
    on_device: Callable[[int], Snapshot] | None = None
    """Copies a fragment as the encoder on its device takes it; None: deltas are encoded in host memory."""
    encoder: Encoder = field(default_factory=lambda: OnHost(AT_ONCE))
    losses: Losses = field(default_factory=Losses)
    ranks: int = 1
    """Number of processes of this learner."""

    def report(self, left: bool) -> LearnerReport:
        """Return what others learn of this learner. Called by the exchange thread; it does not block."""
        counts, device = self.rounds.counts, self.parameters.device
        curve_s, curve = self.losses.curve()
        on_cpu = isinstance(device, torch.device) and device.type == "cpu"
        return LearnerReport(
            learner=self.learner,
            incarnation=self.incarnation,
            step=counts.steps,
            tokens=counts.tokens,
            overwritten=counts.overwritten,
            published=counts.published,
            part_unix_s=counts.part_unix_s,
            versions=self.rounds.versions,
            loss=self.losses.shown(),
            curve_s=curve_s,
            curve=curve,
            left=left,
            **self.times.reported(time.perf_counter(), left),
            host=socket.gethostname(),
            device=str(device),
            ranks=self.ranks,
            moments=self.keeper.source,
            threads=(torch.get_num_threads(), usable_cores()) if on_cpu else (0, 0),
        )
