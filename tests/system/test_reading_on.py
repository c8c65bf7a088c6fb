"""A learner whose own loader is kept (`Learner(state=...)`), killed with -9 and started again: what it reads twice."""

import json
import signal
from pathlib import Path

import pytest

from diloco.workers.moments.state_folder import read_state
from tests.parties import Parties

pytestmark = [pytest.mark.redis]
ROWS, BATCH = 800, 4
LEARNER = f"""
import json, os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
from diloco import Learner

kind, folder, life = sys.argv[1:]

class Counter:
    "Stands for a stateful loader."
    at = 0
    def __iter__(self):
        while self.at < {ROWS}:
            self.at += {BATCH}
            yield torch.arange(self.at - {BATCH}, self.at)
    def state_dict(self):
        return {{"at": self.at}}
    def load_state_dict(self, state):
        self.at = state["at"]

def loaders():
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader
        loader = StatefulDataLoader(list(range({ROWS})), batch_size={BATCH}, shuffle=True, num_workers=2)
        return loader, loader
    if kind == "datasets":
        from datasets import load_dataset
        files = [f"{{folder}}/rows-{{i}}.jsonl" for i in range(4)]
        rows = load_dataset("json", data_files=files, split="train", streaming=True).with_format("torch")
        return rows, (batch["row"] for batch in DataLoader(rows, batch_size={BATCH}))
    return (loader := Counter()), loader

if __name__ == "__main__":
    torch.manual_seed(int(life))
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept, loader = loaders()
    how = {{"run": "kept", "learner_id": "l0", "state_dir": f"{{folder}}/state", "state_every_s": 0.3}}
    read = os.open(f"{{folder}}/read-{{life}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with Learner(model, optimizer, state={{"data": kept}}, **how) as learner:
        for batch in loader:
            model(torch.ones(8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            os.write(read, (json.dumps(batch.tolist()) + "\\n").encode())
            learner.step(tokens=len(batch))
            time.sleep(0.02)
"""


def batches(folder: Path, life: int) -> list[list[int]]:
    file = folder / f"read-{life}"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("stand-in", marks=pytest.mark.slow),
        pytest.param("torchdata", marks=pytest.mark.trainers),
        pytest.param("datasets", marks=pytest.mark.trainers),
    ],
)
def test_a_killed_learner_reads_on_at_its_saved_state(tmp_path: Path, kind: str) -> None:
    """Up to that state and from it on, it reads each row once; the batches after it were read, and are read again."""
    if kind != "stand-in":
        pytest.importorskip(kind)
    for i in range(4):
        rows = range(i * ROWS // 4, (i + 1) * ROWS // 4)
        (tmp_path / f"rows-{i}.jsonl").write_text("".join(f'{{"row": {row}}}\n' for row in rows))
    (tmp_path / "learner.py").write_text(LEARNER)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    with Parties(tmp_path, run="kept", fragments=2, sync_interval=8, quorum=1, tokens="1M") as here:
        here.syncer()
        trained = list[list[int]]()
        for life in range(3):
            process = here.start(f"life-{life}", tmp_path / "learner.py", kind, tmp_path, life, env=offline)
            if life == 2:
                assert here.ends(process) == [0], here.shown()
                break
            state = tmp_path / "state/state.json"
            here.until(lambda: len(batches(tmp_path, life)) >= 20 and state.exists())  # noqa: B023
            process.send_signal(signal.SIGKILL)
            process.wait()
            read, steps = batches(tmp_path, life), read_state(state).steps - len(trained)
            trained += read[:steps]
            print(f"{kind}: killed after {len(read)} steps; {len(read) - steps} of them are read again")
        trained += batches(tmp_path, 2)
        assert len(trained) == ROWS // BATCH
        assert sorted(row for batch in trained for row in batch) == list(range(ROWS)), "none twice, none left out"
