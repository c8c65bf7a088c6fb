"""torchtitan's debug model on CPUs, a learner by one line: `torchrun ... titan.py NAME FOLDER PARALLEL`.

torchtitan is for GPUs. The stand-ins below are what its CPU runs lack: statistics of a device's memory, attention with
a backward pass, gloo's plain sums, and a call that torch 2.13 does not have yet.
"""

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

NO_DEVICE = SimpleNamespace(
    **dict.fromkeys(("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"), lambda *_: None),
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: SimpleNamespace(total_memory=2**34),
    memory_stats=lambda *_: {},
)
utils.device_type, utils.device_module, utils.get_local_device = "cpu", NO_DEVICE, lambda: torch.device("cpu")

from torchtitan.hf_datasets import text_datasets  # noqa: E402  # these read what was set above
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from diloco.integrations.torchtitan import train  # noqa: E402


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None, **_: Any) -> Any:
    """Causal, as FlexAttention with a causal mask; (B, heads, L, head_dim)."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out, SimpleNamespace(lse=None)


FlexAttention._compiled_flex_attn = staticmethod(attention)
if not hasattr(distributed, "set_timeout"):
    distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]


def lines_of(path: str) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"text": Path(path).read_text().splitlines()})


def config_of(name: str, folder: Path, parallel: int) -> Any:
    """Of the debug model, small enough for a test; tensor parallelism of so many ranks, FSDP over them."""
    config = llama3_debugmodel()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = 10**6, 32, 2
    config.training.disable_cuda_graphs, config.validator.enable = True, False
    config.parallelism.tensor_parallel_degree = parallel
    config.parallelism.spmd_backend = "partial_dtensor"  # the others need a newer torch than 2.13
    config.checkpoint.enable, config.checkpoint.interval, config.dump_folder = True, 10**6, str(folder / name)
    config.hf_assets_path = str(folder)
    path = str(folder / "text.txt")
    text_datasets.DATASETS["own"] = text_datasets.DatasetConfig(path, lines_of, lambda sample: sample["text"])
    config.dataloader = text_datasets.HuggingFaceTextDataLoader.Config(dataset="own")
    return config


def waiting(batches: Iterator[Any], name: str, folder: Path) -> Iterator[Any]:
    """The batches, once both learners are in the run; slowly until the folder has a file `hurry`."""
    (folder / f"{name}.here").touch()
    while not all((folder / f"{one}.here").exists() for one in ("one", "two")):
        time.sleep(0.05)
    for batch in batches:
        if not (folder / "hurry").exists():
            time.sleep(0.1)
        yield batch


def main(name: str, folder: Path, parallel: int) -> int:
    trainer = config_of(name, folder, parallel).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    make = trainer.batch_generator
    trainer.batch_generator = lambda batches: waiting(make(batches), name, folder)
    status = train(trainer, run="ranks", learner_id=name, tokens=20_000, state_dir=folder / f"{name}-state")
    digest = hashlib.sha256()
    for _, p in sorted(trainer.model_parts[0].named_parameters()):
        digest.update((p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().numpy().tobytes())
    os.write(1, f"ended {trainer.step} {trainer.ntokens_seen} {digest.hexdigest()[:16]}\n".encode())
    trainer.close()
    distributed.destroy_process_group()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
