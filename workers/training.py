"""What the training thread of a learner has of its run: counters, parameters, moments."""

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
    """One incarnation's side of the model. The training thread writes all of it but `recovery`.

    The exchange thread reads counters for reports; while the learner joins, and the training thread waits, it reads the
    parameters.
    """

    learner: str
    incarnation: str
    spec: Spec
    """As this learner would have it; the run's is the same."""
    layout: Layout
    rounds: Rounds
    parameters: FragmentParameters
    encode_on_device: bool
    """Deltas are encoded where the model is."""
    watch: ModelWatch
    recovery: Recovery
    """The exchange thread's."""
    keeper: Keeper
    times: StepTimes
    losses: Losses = field(default_factory=Losses)
    ranks: int = 1
    """Processes of this learner."""

    def report(self, left: bool) -> LearnerReport:
        """What others learn of this learner. The exchange thread's, whose loop it does not hold up."""
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
    """That of a learner that is about to join.

    Args:
        who: learner and incarnation.
        spec: as `Training.spec`.
        model, optimizers: judged (`model_checks`).
        given: what the learner was called with.
        device: of the trained tensors.
        times: the learner's.
        own: of what this process holds, if it is a rank among several; None: all of it.
        make_folder: as `own_moments`.
        check: as `ModelWatch`.
        adopted: as `FragmentParameters`.
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
