"""One run, from its settings to its result. What decides a result is imported from here."""

import logging
import os
import platform
from typing import Any

import structlog
import torch

from diloco.workers.trainer.recipe import choose_device
from diloco_studies.quality.curve import Progress, Recorder
from diloco_studies.quality.decoupled import train_decoupled
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.synchronous import train_synchronous
from diloco_studies.quality.tasks.tasks import open_task


def train(
    run: LabRun,
    device: str = "auto",
    progress: Progress = lambda share, last: True,
) -> dict[str, Any]:
    """Train one run; its result in JSON types.

    Args:
        run: its settings.
        device: as `choose_device`.
        progress: asked at each step whether to go on.

    Raises:
        UsageError: it cannot be run as its settings say.
        Stopped: `progress` said so.
    """
    chosen = choose_device(device)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # of thousands of merges
    torch.manual_seed(run.seed)  # for tasks whose models draw while they train
    task = open_task(run, chosen)
    method = train_decoupled if run.decoupled else train_synchronous
    result = method(Recorder(run, task, progress), task.build())
    return {"settings": run.model_dump(mode="json"), **result, "machine": machine(chosen)}


def machine(device: torch.device) -> dict[str, Any]:
    """Where a result was computed: another place may round otherwise."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": device.type,
        "name": name,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
