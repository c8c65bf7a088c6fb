"""Measures the held-out loss of the newest checkpoint again and again, as the evaluator does of a run's globals.

    evaluate SETTINGS FOLDER

A line in FOLDER/evaluations.jsonl each time, also where nothing has changed. It ends with that of the spent budget.
"""

import sys
import time
from pathlib import Path

import torch

from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.settings import PARTIES, RankProcess, load
from diloco.workers.trainer.data_parallel import parts_of
from diloco.workers.trainer.recipe import held_out_loss
from diloco_studies.bench.kills.train import CHECKPOINT

EVALUATIONS = "evaluations.jsonl"


def main(config: str, out: str) -> None:
    """Until the budget is spent."""
    settings = load(RankProcess, {}, Path(config), known=PARTIES)
    parts = parts_of(settings)
    newest, blocks, tokens, loss = Path(out) / CHECKPOINT, -1, 0, 0.0
    with (Path(out) / EVALUATIONS).open("a", 1) as record:
        while tokens < settings.tokens:
            began = time.monotonic()
            if newest.is_file():
                at_s, saved = time.time(), torch.load(newest)
                if saved["blocks"] != blocks:
                    parts.model.load_state_dict(saved["model"])
                    loss = held_out_loss(parts.model, parts.validation, parts.device)
                    blocks, tokens = saved["blocks"], saved["blocks"] * settings.seq_len
                record.write(dumps({"unix_s": at_s, "tokens": tokens, "loss": loss}) + "\n")
            time.sleep(max(0.0, began + settings.eval_every - time.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
