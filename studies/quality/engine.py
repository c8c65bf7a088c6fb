"""One run, from its settings to its result. What decides a result is imported from here."""

import logging
import os
import platform
from typing import Any

import structlog
import torch

from diloco.studies.quality.curve import Progress
from diloco.studies.quality.decoupled import train_decoupled
from diloco.studies.quality.settings import LabRun
from diloco.studies.quality.synchronous import train_synchronous
from diloco.workers.trainer.recipe import choose_device


def train(run: LabRun, device: str = "auto", progress: Progress = lambda share, last: True) -> dict[str, Any]:
    """Train one run; its result in JSON types.

    Raises:
        UsageError: it cannot be run as its settings say.
        Stopped: `progress` said so.
    """
    chosen = choose_device(device)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # of thousands of merges
    torch.manual_seed(run.seed)  # for tasks whose models draw while they train
    method = train_decoupled if run.decoupled else train_synchronous
    return {"settings": run.model_dump(mode="json"), **method(run, chosen, progress), "machine": machine(chosen)}


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
