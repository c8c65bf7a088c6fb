"""The data-parallel baseline under torchrun's elastic agent: if a rank dies, all begin again at the last checkpoint.

    python -m diloco_studies.strikes.elastic.agent SETTINGS OUT LEARNERS EVERY_S THREADS

    agent (this process) ──forkserver──▶ ranks 0..N-1 ──gloo──▶ each other

This is `torchrun --standalone --nproc-per-node N --max-restarts MANY`, called as a library. Only, its ranks are forked
from a process that has loaded torch and the text, as `diloco chaos` forks learners: else loading would be most of a
restart.

In the output folder:

    ranks/learner-N              process id of the rank's present life
    learners/learner-N/losses.jsonl   its steps, those that were made again included
    elastic.safetensors          the last checkpoint: parameters, moments, number of steps
    stop                         made by whoever wants the run to end; the ranks stop after the same step
    checkpoint/, result.json     at the end
"""

import multiprocessing
import os
import sys
from pathlib import Path

from torch.distributed.launcher.api import elastic_launch

from diloco.pipeline.errors import UsageError
from diloco.pipeline.process import logs
from diloco.pipeline.settings import PARTIES, RankProcess, load
from diloco.workers.trainer.agent import one_machine
from diloco.workers.trainer.data.tokenized import open_for
from diloco.workers.trainer.models.hf_config import read_hf
from diloco.workers.trainer.models.named import build_model
from diloco.workers.trainer.recipe import choose_device
from diloco_studies.strikes.elastic import preload
from diloco_studies.strikes.elastic.rank import be_rank

MOST_RESTARTS = 1_000_000


def run_agent(settings: RankProcess, out: Path, learners: int, every_s: float) -> int:
    """Start the ranks, and all of them again whenever one dies, until they end in order; the exit status.

    Args:
        settings: of each rank.
        out: an existing folder.
        learners: number of ranks.
        every_s: time between checkpoints.

    Raises:
        UsageError: no such model, text or device.
    """
    named = read_hf(settings.model)  # what cannot be is said once, here: a rank that fails is only started again
    text = open_for(settings.data, named, settings.seq_len)
    build_model(settings, named, text).to(choose_device(settings.device))
    os.environ[preload.TEXT] = settings.data
    multiprocessing.set_forkserver_preload([preload.__name__])
    for name in ("ranks", *(f"learners/learner-{rank}" for rank in range(learners))):
        (out / name).mkdir(parents=True, exist_ok=True)
    config = one_machine(learners, settings.run, max_restarts=MOST_RESTARTS, start_method="forkserver")
    elastic_launch(config, be_rank)(settings, out, learners, every_s)
    return 0


def main(config: str, out: str, learners: str, every_s: str, threads: str) -> int:
    """Be the agent; the exit status."""
    settings = load(RankProcess, {"threads": threads}, Path(config), known=PARTIES)
    logs.configure(settings.log_level)
    try:
        return run_agent(settings, Path(out), int(learners), float(every_s))
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
