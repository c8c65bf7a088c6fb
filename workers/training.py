"""The training thread's part of a learner: counters, parameters, moments."""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from diloco.pipeline.fragments import Layout, layout_of
from diloco.pipeline.messages.run import LearnerReport
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.process.cores import usable_cores
from diloco.workers.checks.arguments import Arguments
from diloco.workers.checks.model_watch import ModelWatch
from diloco.workers.copies.losses import Losses
from diloco.workers.moments.keeper import Keeper
from diloco.workers.moments.local_state import RecoveryOptions, own_moments
from diloco.workers.moments.recovery import Recovery
from diloco.workers.moments.state_folder import StateFolder
from diloco.workers.parameters import Adopted, FragmentParameters
from diloco.workers.rounds import Rounds
from diloco.workers.step_times import StepTimes


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
    parameters: FragmentParameters
    encode_on_device: bool
    """True if deltas are encoded on the model's device."""
    watch: ModelWatch
    recovery: Recovery
    """Belongs to the exchange thread."""
    keeper: Keeper
    times: StepTimes
    losses: Losses = field(default_factory=Losses)
    ranks: int = 1
    """Number of processes of this learner."""

    def report(self, left: bool) -> LearnerReport:
        """Return what others learn of this learner. Called by the exchange thread; it does not block."""
        counts, device = self.rounds.counts, self.parameters.device
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
            left=left,
            **self.times.reported(time.perf_counter(), left),
            host=socket.gethostname(),
            device=str(device),
            ranks=self.ranks,
            moments=self.keeper.source,
            threads=(torch.get_num_threads(), usable_cores()) if device.type == "cpu" else (0, 0),
        )


def make_training(
    who: tuple[str, str],
    spec: Spec,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    given: Arguments,
    device: torch.device,
    times: StepTimes,
    own: Layout | None = None,
    make_folder: Callable[[Path, Layout], StateFolder] = StateFolder,
    check: Callable[[], object] = lambda: None,
    adopted: Adopted | None = None,
) -> Training:
    """Make the training side of a learner that is about to join.

    Args:
        who: learner and incarnation.
        spec: see `Training.spec`.
        model: already checked by `model_checks`.
        optimizers: already checked as well.
        given: the learner's arguments.
        device: where the trained tensors are.
        times: the learner's.
        own: layout of the part that this process holds, if it is one of several ranks; None: it holds everything.
        make_folder: see `own_moments`.
        check: see `ModelWatch`.
        adopted: see `FragmentParameters`.
    """
    layout = layout_of(spec.tensors)
    own = layout if own is None else own
    rounds, parameters = Rounds(layout, spec.sync), FragmentParameters(model, own, adopted)
    folder = None if given.state_dir is None else Path(given.state_dir)
    moments = own_moments(
        model,
        optimizers,
        own.trained,
        run=given.run,
        learner=who[0],
        incarnation=who[1],
        options=RecoveryOptions(given.recover, folder, given.state_every_s, given.log_losses),
        make_folder=make_folder,
    )
    on_device = given.encode_on == "device" or (given.encode_on == "auto" and device.type == "cuda")
    watch = ModelWatch(model, {tensor.name for tensor in spec.tensors}, check=check, optimizers=optimizers)
    recovery, keeper = Recovery(moments), Keeper(moments, rounds)
    return Training(*who, spec, layout, rounds, parameters, on_device, watch, recovery, keeper, times)
