"""Data-parallel, and one learner alone: one loop, in a time that is only counted.

Data-parallel here is what its processes compute together: the mean of all learners' gradients at each step, on the
same order of data that the decoupled methods draw from. Its steps take as long as the slowest learner's. A failure of
any learner costs all of them a pause, and then the failed one's share of the batch until it is back; what was computed
since the last step is lost. What happens in a pause is dealt with by it, as in the simulator
(`diloco_studies/goodput/job.py`).
"""

import heapq
import math
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from torch import nn

from diloco.workers.schedule import learning_rate
from diloco.workers.trainer.recipe import update
from diloco_studies.quality.curve import Recorder
from diloco_studies.quality.inner import Gradients, inner_optimizers
from diloco_studies.quality.schedule import Schedule
from diloco_studies.quality.settings import LabRun

Outages = Iterator[tuple[float, float]]
Change = tuple[float, int, int, Outages]
"""(time, +1 back or -1 gone, learner, its further outages)"""


def train_synchronous(recorder: Recorder, model: nn.Module) -> dict[str, Any]:
    """Train to the run's budget; a result as `Recorder.result`. The model has the final parameters then.

    Raises:
        Stopped: the recorder said so.
        UsageError: it came to no end in `LabRun.patience_s`.
    """
    run, task = recorder.run, recorder.task
    optimizers, gradients = inner_optimizers(model, run), Gradients(task, model)
    order = (divmod(position, task.examples) for position in count())  # (epoch, index)
    now = 0.0
    for steps, (now, busy_s, learners) in enumerate(step_times(run)):
        if now > run.patience_s:
            raise recorder.give_up()
        examples = min(learners * run.batch, run.budget_examples - recorder.tokens // task.example_tokens)
        with recorder.computing():
            loss = gradients(task.batch(list(islice(order, examples))))
            lr = learning_rate(
                recorder.tokens / recorder.budget_tokens,
                steps,
                peak=run.lr,
                min_ratio=run.min_lr_ratio,
                warmup=run.warmup,
            )
            update(model, optimizers, lr, run.clip)
        recorder.trained(examples * task.example_tokens, busy_s, loss)
        if recorder.tokens >= recorder.budget_tokens:
            break
        if recorder.due:
            recorder.measure(model, recorder.tokens, now)
    recorder.measure(model, recorder.tokens, now)
    return recorder.result(now)


def step_times(run: LabRun) -> Iterator[tuple[float, float, int]]:
    """(virtual time at its end, time its learners computed together, learners in it) of each step, endless.

    The last one is of no learner, where there is none until `LabRun.patience_s`.
    """
    schedule = Schedule(run)
    members = run.members
    changes: list[Change] = []
    if run.method != "single":
        for learner in range(members):
            _push_next(changes, learner, schedule.outages(learner))
    present, now, done = set(range(members)), 0.0, [0] * members
    while now <= run.patience_s:
        ready = sorted(present)
        takes = [schedule.step_s(m, done[m]) for m in ready]
        end = now + max(takes, default=math.inf)
        if not changes or changes[0][0] > end:
            for m in ready:
                done[m] += 1
            now = end
            yield now, sum(takes), len(ready)
            continue
        at, sign, learner, outages = heapq.heappop(changes)
        if sign < 0:
            present.discard(learner)
        else:
            present.add(learner)
            _push_next(changes, learner, outages)
        if at > now:  # else it falls into a pause, which deals with it too
            now = at + run.resize_s  # what was computed of the step under way is lost
    yield now, 0.0, 0


def _push_next(changes: list[Change], learner: int, outages: Outages) -> None:
    gone = next(outages, None)
    if gone is not None:
        heapq.heappush(changes, (gone[0], -1, learner, outages))
        heapq.heappush(changes, (gone[1], +1, learner, outages))
