"""A model that is mostly embedding and head, each in several fragments, through a whole run as processes."""

import asyncio
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import as_bytes, decode, payload_digest
from tests.parties import Parties

pytestmark = [pytest.mark.redis, pytest.mark.slow]

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


async def read(url: str, run: str) -> tuple[Spec, list[bytes]]:
    """The run's spec, and the digests of its heads."""
    async with open_bus(url, run) as bus:
        spec = decode(Spec, await bus.read_spec() or b"")
        return spec, [head.digest for head in await bus.read_heads(range(spec.sync.fragments)) if head is not None]


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
    all_bits = {"global_codec": "fp32"}  # so that a learner has those of a head
    with Parties(tmp_path, fragments=3, sync_interval=6, tokens=20_000, **all_bits) as here:

        def learner(run: str, name: str, **how: dict[str, str]) -> subprocess.Popen[bytes]:
            return here.start(name, "-c", LEARNER, run, name, tmp_path, **how)

        syncer = here.syncer("--run", "first", "--checkpoint-dir", saved)
        learners = [learner("first", name) for name in ("a", "bb")]
        here.until(lambda: (tmp_path / "state-bb" / "state.json").is_file())
        learners[1].kill()
        learners[1].wait()
        learners[1] = learner("first", "bb")
        assert here.ends(*learners, syncer) == [0, 0, 0], here.shown()
        spec, heads = asyncio.run(read(here.url, "first"))
        sizes = [fragment.elements for fragment in layout_of(spec.tensors).fragments]
        assert max(sizes) <= 1.01 * sum(sizes) / 3
        assert {one.name for one in spec.tensors if one.rows} == {"0.weight", "3.weight"}
        models = [torch.load(tmp_path / f"first-{name}.pt") for name in ("a", "bb")]
        assert [digests(model, spec) for model in models] == [heads, heads]

        out = tmp_path / "first.safetensors"
        assert here.ends(here.diloco("export", "export", saved, out)) == [0], here.shown()
        exported = load_file(out)
        assert exported.keys() == models[0].keys()
        assert all(torch.equal(exported[name], value) for name, value in models[0].items())

        more = {"DILOCO_TOKENS": "30000"}
        syncer = here.syncer("--run", "next", "--checkpoint-dir", saved, "--resume", saved, env=more)
        assert here.ends(learner("next", "a", env=more), syncer) == [0, 0], here.shown()
        again, heads = asyncio.run(read(here.url, "next"))
        assert again.tensors == spec.tensors
        resumed = torch.load(tmp_path / "next-a.pt")
        assert digests(resumed, again) == heads
        assert not torch.equal(resumed["0.weight"], models[0]["0.weight"])
