"""A model that is mostly embedding and head, each in several fragments, through a whole run as processes."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.bus.redis_streams import connect
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import as_bytes, decode, payload_digest
from tests import HANGING_S

pytestmark = [pytest.mark.redis, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
WORDS = 4096
LEARNER = f"""
import sys
import time
import torch
from torch import nn
from diloco import Learner

run, name, folder = sys.argv[1:]
torch.manual_seed(len(name))
model = nn.Sequential(nn.Embedding({WORDS}, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, {WORDS}, bias=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
learner = Learner(model, optimizer, run=run, learner_id=name, state_dir=f"{{folder}}/state-{{name}}", state_every_s=0.5)
with learner:
    while not learner.finished:
        x = torch.randint({WORDS}, (64,))
        loss = nn.functional.cross_entropy(model(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=64, loss=loss)
        time.sleep(0.01)
learner.load_globals()
torch.save(model.state_dict(), f"{{folder}}/{{run}}-{{name}}.pt")
"""


class Parties:
    """Processes beside one Redis, and what they log."""

    def __init__(self, url: str, folder: Path) -> None:
        self._folder, self.url = folder, url
        self._environment = {name: value for name, value in os.environ.items() if not name.startswith("DILOCO_")}
        self._environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DILOCO_REDIS_URL": url}
        self._environment |= {"DILOCO_FRAGMENTS": "3", "DILOCO_SYNC_INTERVAL": "6", "DILOCO_TOKENS": "20000"}
        self._environment |= {"DILOCO_GLOBAL_CODEC": "fp32"}  # so that a learner has all bits of a head
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: object, **environment: str) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            command = [sys.executable, *map(str, arguments)]
            process = subprocess.Popen(command, env=self._environment | environment, stdout=log, stderr=log)
        self.started.append(process)
        return process

    def learner(self, run: str, name: str, **environment: str) -> subprocess.Popen[bytes]:
        return self.start("-c", LEARNER, run, name, self._folder, **environment)

    def said(self) -> str:
        return (self._folder / "log").read_text()

    def until(self, true: Callable[[], Any]) -> None:
        deadline = time.monotonic() + HANGING_S
        while not true():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)


@contextmanager
def parties(folder: Path) -> Iterator[Parties]:
    with EmbeddedRedis(dies_with_us=True) as redis:
        found = Parties(redis.url, folder)
        try:
            yield found
        finally:
            for process in found.started:
                process.kill()
                process.wait()


async def _read(url: str, run: str) -> tuple[Spec, list[bytes]]:
    bus = await connect(url, run)
    try:
        spec = decode(Spec, await bus.read_spec() or b"")
        return spec, [head.digest for head in await bus.read_heads(range(spec.sync.fragments)) if head is not None]
    finally:
        await bus.close()


def digests(model: dict[str, torch.Tensor], spec: Spec) -> list[bytes]:
    """Of each fragment, as a head has it."""
    flats = [
        np.concatenate([model[slot.tensor.name].numpy().reshape(-1)[slot.within] for slot in fragment.slots])
        for fragment in layout_of(spec.tensors).fragments
    ]
    return [payload_digest(as_bytes(flat), spec.sync.chunk_bytes) for flat in flats]


def test_every_party_ends_with_the_heads_bit_for_bit(tmp_path: Path) -> None:
    """Two learners, one killed and started again; then the checkpoint is exported, and resumed under another name."""
    saved = tmp_path / "saved"
    with parties(tmp_path) as here:
        arguments = ["--http-port", 0, "--checkpoint-dir", saved]
        syncer = here.start("-m", "diloco", "syncer", "--run", "first", *arguments)
        learners = [here.learner("first", name) for name in ("a", "bb")]
        here.until(lambda: (tmp_path / "state-bb" / "state.json").is_file())
        learners[1].kill()
        learners[1].wait()
        learners[1] = here.learner("first", "bb")
        assert [party.wait(120) for party in (*learners, syncer)] == [0, 0, 0], here.said()
        spec, heads = asyncio.run(_read(here.url, "first"))
        sizes = [fragment.elements for fragment in layout_of(spec.tensors).fragments]
        assert max(sizes) <= 1.01 * sum(sizes) / 3
        assert {one.name for one in spec.tensors if one.rows} == {"0.weight", "3.weight"}
        models = [torch.load(tmp_path / f"first-{name}.pt") for name in ("a", "bb")]
        assert [digests(model, spec) for model in models] == [heads, heads]

        out = tmp_path / "first.safetensors"
        assert here.start("-m", "diloco", "export", saved, out).wait(60) == 0, here.said()
        exported = load_file(out)
        assert exported.keys() == models[0].keys()
        assert all(torch.equal(exported[name], value) for name, value in models[0].items())

        more = {"DILOCO_TOKENS": "30000"}
        syncer = here.start("-m", "diloco", "syncer", "--run", "next", "--resume", saved, *arguments, **more)
        learner = here.learner("next", "a", **more)
        assert [party.wait(120) for party in (learner, syncer)] == [0, 0], here.said()
        again, heads = asyncio.run(_read(here.url, "next"))
        assert again.tensors == spec.tensors
        resumed = torch.load(tmp_path / "next-a.pt")
        assert digests(resumed, again) == heads
        assert not torch.equal(resumed["0.weight"], models[0]["0.weight"])
