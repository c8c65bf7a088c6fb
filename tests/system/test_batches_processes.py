"""Three learners over one dataset, each with two DataLoader workers, under SIGKILL: how often an index is trained."""

import asyncio
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.messages.shards import ShardQueue
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.workers.permutation import permuted
from tests.parties import Parties

pytestmark = [pytest.mark.redis, pytest.mark.slow]

LENGTH, BATCH, SEED = 1500, 4, 11
"""A shard has 32 indices, so a batch is from one shard."""
LEARNER = """
import os
import sys
import time
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from diloco import Learner


class Rows(Dataset):
    def __init__(self, path):
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return at, torch.tensor(self.rows[at])


if __name__ == "__main__":
    name, context, persistent, data, diary = sys.argv[1:]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    learner = Learner(model, optimizer, run="batches", learner_id=name).open()
    learner.attach(tokens=BATCH)
    batches = learner.batches(LENGTH, BATCH, seed=SEED)
    rows = Rows(data)
    loader = DataLoader(rows, batch_sampler=batches, num_workers=2, multiprocessing_context=context,
                        persistent_workers=persistent == "persistent")
    file = os.open(diary, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while not learner.finished:
        for indices, row in loader:
            model(row).square().mean().backward()
            (reached,) = batches._prefetched._drawn[0].reached  # before the step takes it
            os.write(file, f"{reached.entry_id} {reached.read} {' '.join(str(int(at)) for at in indices)}\\n".encode())
            optimizer.step()
            optimizer.zero_grad()
            if learner.finished:
                break
            time.sleep(0.02)
    learner.close()
    sys.exit(not learner.left_in_order)
"""


async def shards_of(url: str) -> ShardQueue:
    async with open_bus(url, "batches") as bus:
        return await bus.read_shards()


def held_by(redis: Any, learner: str) -> dict[str, int]:
    """Entry id -> saved position, of the shards that a learner's incarnations hold."""
    key = "diloco:{batches}:shards"
    pending = redis.xpending_range(key, "learners", "-", "+", 1000)
    mine = [one["message_id"].decode() for one in pending if one["consumer"].decode().startswith(f"{learner}.")]
    return {entry: int(redis.hget("diloco:{batches}:shard-positions", entry) or 0) for entry in mine}


def arrive(redis: Any) -> None:
    """What a dead process had sent is done once this returns, so that its positions stay as they are.

    The server's one thread takes some 16 KiB of each socket that has something, then answers, then begins again.
    """
    for _ in range(100):
        redis.ping()


def test_every_index_is_trained_once_but_for_those_in_hand_at_a_kill(tmp_path: Path) -> None:
    """Fork and spawn. What a killed learner held is trained by others.

    Twice are exactly those indices that it had trained and not yet acknowledged: those behind the saved positions.
    """
    import numpy as np
    import redis as redis_client

    script, data = tmp_path / "learner.py", tmp_path / "rows.npy"
    script.write_text(LEARNER.replace("LENGTH", str(LENGTH)).replace("BATCH", str(BATCH)).replace("SEED", str(SEED)))
    np.save(data, np.random.default_rng(0).standard_normal((LENGTH, 3), dtype=np.float32))
    kinds = {"a": ("fork", "new"), "b": ("spawn", "persistent"), "c": ("fork", "persistent")}
    again: Counter[int] = Counter()
    untrained = 0
    with Parties(tmp_path, sync_interval=10, fragments=2, log_level="info") as here:

        def learner(name: str) -> subprocess.Popen[bytes]:
            diary = tmp_path / f"{name}.diary"
            # Those that it starts, to load data, look for it every 5 s.
            return here.start(name, script, name, *kinds[name], data, diary, start_new_session=True)

        def trained(name: str) -> list[tuple[str, int, list[int]]]:
            """Entry id, position behind the batch, its indices."""
            file = tmp_path / f"{name}.diary"
            lines = (line.split() for line in (file.read_text() if file.exists() else "").splitlines())
            return [(entry, int(read), [int(at) for at in indices]) for entry, read, *indices in lines]

        def all_train() -> None:
            before = {one: len(trained(one)) for one in kinds}
            here.until(lambda: all(len(trained(one)) >= before[one] + 40 for one in kinds))

        syncer = here.syncer("--run", "batches", "--tokens", "1B")
        learners = {name: learner(name) for name in kinds}
        with redis_client.Redis.from_url(here.url) as client:
            for name in kinds:
                all_train()
                learners[name].kill()
                learners[name].wait()
                arrive(client)
                held = held_by(client, name)
                assert len(held) >= 4
                redone = [batch for batch in trained(name) if batch[1] > held.get(batch[0], batch[1])]
                again += Counter(at for _, _, indices in redone for at in indices)
                untrained += sum(32 - position for position in held.values()) - BATCH * len(redone)
                learners[name] = learner(name)
            dead = set(held)
            here.until(lambda: not dead & {entry for name in kinds for entry in held_by(client, name)})
            all_train()
        for one in learners.values():
            one.terminate()
        assert here.ends(*learners.values()) == [0, 0, 0]
        syncer.terminate()
        assert here.ends(syncer) == [AGAIN_STATUS]
        queue = asyncio.run(shards_of(here.url))
    counts = Counter(at for name in kinds for _, _, indices in trained(name) for at in indices)
    total = counts.total()
    for shard, read in queue.open:
        key = b"/%d/%d" % (SEED, shard.epoch)
        counts.update(permuted(at, LENGTH, key) for at in range(shard.start + read, shard.stop))
    print(f"{total} trained in {queue.epochs} epochs; in hand at kills: {again.total()} trained, {untrained} not yet")
    assert queue.epochs > 1
    assert untrained > 0
    assert counts == Counter(dict.fromkeys(range(LENGTH), queue.epochs)) + again
