"""What moments are worth, with nothing else differing: the same parameters and the same batches from one point on.

Two learners train alone on different data, for as many steps as a run would before a kill. The mean of their
parameters stands for the run's heads. From there one learner goes on several times over the same batches: with its own
moments, with the other learner's, and with fresh ones, with and without the ramp. In one process, without Redis.
"""

import copy
from collections.abc import Iterator
from itertools import count
from statistics import fmean
from typing import Annotated, Any

import typer

from diloco.pipeline.fragments import layout_of
from diloco.pipeline.settings import SyncSettings, TrainerSettings
from diloco.workers.moments.optimizer_state import OptimizerState
from diloco.workers.parameters import FragmentParameters, tensor_table
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.models.gpt import build
from diloco.workers.trainer.recipe import add_gradients, choose_device, make_optimizer, read_batch, update, use_threads
from diloco.workers.trainer.schedule import FRESH_MOMENTS_STEPS, learning_rate

SPANS = ((1, 5), (6, 10), (11, 20), (21, 40))


class Alone:
    """A learner without a run."""

    def __init__(self, settings: TrainerSettings, blocks: Blocks, beta2: float) -> None:
        self.settings, self.blocks, self.device = settings, blocks, choose_device("cpu")
        self.model = build(settings.model, settings.seed)
        self.optimizer = make_optimizer(self.model, settings.lr, settings.weight_decay)
        for group in self.optimizer.param_groups:
            group["betas"] = (0.9, beta2)
        sync = SyncSettings()
        self.layout = layout_of(tensor_table(self.model, sync))
        self.parameters = FragmentParameters(self.model, self.layout)
        self.state = OptimizerState(self.model, self.optimizer, self.layout)

    def train(self, order: Iterator[tuple[int, int]], steps: int, progress: float, ramp_steps: int) -> list[float]:
        """Training loss of each step."""
        given, losses = self.settings, []
        for own in range(steps):
            batch = read_batch(self.blocks, order, given.batch, self.device)
            loss = add_gradients(self.model, [batch], 1)
            lr = learning_rate(
                progress,
                own,
                peak=given.lr,
                min_ratio=given.min_lr_ratio,
                warmup=given.warmup,
                ramp_steps=ramp_steps,
            )
            update(self.model, self.optimizer, lr, given.clip)
            losses.append(float(loss))
        return losses

    def moments(self) -> Any:
        """A copy of its moments."""
        made = self.state.start_copy()
        while not made.advance():
            pass
        return made.moments()


def _order(blocks: Blocks, epoch: int) -> Iterator[tuple[int, int]]:
    return ((epoch + at // blocks.count, at % blocks.count) for at in count())


def main(
    steps: Annotated[int, typer.Option(help="Steps before the point")] = 80,
    points: Annotated[int, typer.Option(min=1, help="Repetitions, with seeds 0, 1 ...")] = 3,
    progress: Annotated[float, typer.Option(help="Progress of the run that sets the learning rate")] = 0.5,
    beta2: Annotated[float, typer.Option(help="Adam's beta2 (the trainer's: 0.95)")] = 0.95,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads")] = 1,
) -> None:
    """Compare own, a peer's and fresh moments on the same batches."""
    use_threads(threads)
    text = open_text("stdlib")
    found: dict[str, list[list[float]]] = {}
    for seed in range(points):
        settings = TrainerSettings(seed=seed)
        blocks = Blocks(text.train, settings.seq_len, seed)
        one, other = (Alone(settings, blocks, beta2) for _ in range(2))
        for learner, epoch in ((one, 0), (other, 100)):
            learner.train(_order(blocks, epoch), steps, progress, FRESH_MOMENTS_STEPS)
        own, peers = one.moments(), other.moments()
        for p in range(len(one.layout.fragments)):
            mean = (one.parameters.snapshot(p).numpy() + other.parameters.snapshot(p).numpy()) / 2
            one.parameters.overwrite(p, mean.astype("float32"))
        here = copy.deepcopy(one.model.state_dict())
        for way, moments, ramp in (
            ("own moments", own, 0),
            ("a peer's", peers, 0),
            ("fresh, ramp", None, FRESH_MOMENTS_STEPS),
            ("fresh, no ramp", None, 0),
            ("own moments, ramp", own, FRESH_MOMENTS_STEPS),
        ):
            again = Alone(settings, blocks, beta2)
            again.model.load_state_dict(here)
            if moments is not None:
                again.state.load(moments)
            order = _order(blocks, 200)
            found.setdefault(way, []).append(again.train(order, SPANS[-1][1], progress, ramp))
            typer.echo(f"seed {seed}, {way}: {fmean(found[way][-1]):.3f}")
    typer.echo("\n| moments | " + " | ".join(f"steps {first}-{last}" for first, last in SPANS) + " |")
    typer.echo("|---" * (len(SPANS) + 1) + "|")
    for way, runs in found.items():
        cells = [f"{fmean(fmean(losses[first - 1 : last]) for losses in runs):.3f}" for first, last in SPANS]
        typer.echo(f"| {way} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    typer.run(main)
