"""The inner optimizer: a learner's, with what a run says otherwise. The same for every method."""

import torch
from torch import nn

from diloco.studies.quality.settings import LabRun
from diloco.workers.trainer.recipe import make_optimizer


def inner_optimizer(model: nn.Module, run: LabRun) -> torch.optim.Optimizer:
    """AdamW as learners have it, but for the run's `beta2` and `eps`."""
    optimizer = make_optimizer(model, run.lr, run.weight_decay)
    for group in optimizer.param_groups:
        if run.beta2 is not None:
            group["betas"] = (group["betas"][0], run.beta2)
        if run.eps is not None:
            group["eps"] = run.eps
    return optimizer
