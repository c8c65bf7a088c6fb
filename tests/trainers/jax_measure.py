"""What two torch learners, two JAX learners, and one of each make of one small model.

    python -m tests.trainers.jax_measure        prints the held-out loss of each run's last global, for three seeds

First in step: all merge after the same steps. Then as processes, with the default settings, as learners run: when their
deltas meet is a matter of time. Each learner draws data of its own, and has one thread.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from diloco.pipeline.bus.embedded import EmbeddedRedis
from tests import quiet

SEEDS = (0, 1, 2)
KINDS = {"2 torch": ("torch", "torch"), "2 JAX": ("jax", "jax"), "1 + 1": ("jax", "torch")}
ROUNDS = 30
TOKENS = 24_000
STEP_S = 0.002
"""An inner step takes so long at least."""
ROOT = Path(__file__).parents[2]


def learner(kind: str, seed: int, number: int, url: str, ends: Any) -> None:
    """One process: trains until the run is over, and tells what the run has then."""
    import torch

    from tests.trainers.jax_models import NAMES, JaxParty, TorchParty

    torch.set_num_threads(1)
    how: dict[str, Any] = {"run": "measured", "redis_url": url, "tokens": TOKENS, "learner_id": f"l{number}"}
    party = JaxParty(seed, number, names=NAMES, **how) if kind == "jax" else TorchParty(seed, number, **how)
    with party.learner as one:
        party.joined()
        while not one.finished:
            party.train()
            time.sleep(STEP_S)
    ends.put(party.globals())


def held_out(values: dict[str, np.ndarray]) -> float:
    """Loss in nats on data that nobody trained on, in float64."""
    from tests.trainers.jax_models import batches

    draw, losses = batches(0, 99), []
    for _ in range(64):
        inputs, targets = draw()
        hidden = np.tanh(inputs.astype(np.float64) @ values["0.weight"].T + values["0.bias"])
        logits = hidden @ values["2.weight"].T + values["2.bias"]
        logits -= logits.max(1, keepdims=True)
        right = logits[np.arange(len(targets)), targets]
        losses.append((np.log(np.exp(logits).sum(1)) - right).mean())
    return float(np.mean(losses))


def of_both(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Loss of what two learners of a run have."""
    if any(one[name].tobytes() != other[name].tobytes() for name in one):
        raise AssertionError("the two have different models")
    return held_out(one)


def measure(kinds: tuple[str, str], seed: int) -> float:
    """One run's last loss. Both learners have the same bits, or it raises."""
    spawn = multiprocessing.get_context("spawn")
    with EmbeddedRedis(appendonly=False, dies_with_us=True) as redis:
        own = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        own |= {"DILOCO_REDIS_URL": redis.url, "DILOCO_LOG_LEVEL": "error"}
        command = [sys.executable, "-m", "diloco", "syncer", "--run", "measured", "--http-port", "0"]
        syncer = subprocess.Popen([*command, "--tokens", str(TOKENS)], env=own, cwd=ROOT)
        ends = spawn.Queue()
        given = [(kind, seed, number, redis.url, ends) for number, kind in enumerate(kinds)]
        parties = [spawn.Process(target=learner, args=one) for one in given]
        for party in parties:
            party.start()
        try:
            one, other = (ends.get(timeout=120) for _ in parties)
            syncer.wait(30)
        finally:
            for party in parties:
                party.kill()
            syncer.kill()
    return of_both(one, other)


def show(how: str, run: Callable[[tuple[str, str], int], float]) -> None:
    """Rows of a table."""
    for name, kinds in KINDS.items():
        print(f"| {name}, {how} | {' | '.join(f'{run(kinds, seed):.6f}' for seed in SEEDS)} |", flush=True)


def together(kinds: tuple[str, str], seed: int) -> float:
    """One run's last loss, in step. Both learners have the same bits, or it raises."""
    import torch

    from tests.trainers.jax_models import IN_STEP, JaxParty, TorchParty, in_step

    torch.set_num_threads(1)
    parties = tuple({"jax": JaxParty, "torch": TorchParty}[kind] for kind in kinds)
    with EmbeddedRedis(appendonly=False, dies_with_us=True) as redis:
        return of_both(*in_step(parties, redis.url, "measured", seed, IN_STEP, ROUNDS))


if __name__ == "__main__":
    os.environ |= {"DILOCO_LOG_LEVEL": "error", "OMP_NUM_THREADS": "1"}
    quiet()
    show("in step", together)
    show("as processes", measure)
