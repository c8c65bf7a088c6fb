"""What ranks tell each other as they meet, between two processes over gloo."""

import json
import multiprocessing
import pickle
from pathlib import Path

import pytest
import torch
from torch import distributed

from diloco.pipeline.errors import UsageError
from diloco.pipeline.payload import codec
from diloco.workers.ranks.topology import Address, gather_messages
from tests import HANGING_S

pytestmark = [pytest.mark.slow]
FIRST, SECOND = Address(host="first", port=1), Address(host="second", port=2)
UNREADABLE = "rank 1 of this learner sent an unreadable message: Address"
CASES = [
    (codec.encode(SECOND), None, "[('first', 1), ('second', 2)]"),
    *[(b"", size, f"rank 1 of this learner announced {size} bytes") for size in (-1, 0, 2**60)],
    (pickle.dumps(("second", 2)), None, UNREADABLE),
    (codec.encode(SECOND) + b"\0", None, UNREADABLE),
    (codec.encode(SECOND)[:-1], None, UNREADABLE),
    (codec.encode(Address.model_construct(host="second", port=0)), None, f"{UNREADABLE}: port"),
]
"""What rank 1 sends, the size that it says if that is another one, and what rank 0 makes of it."""


def one_rank(rank: int, folder: Path) -> None:
    """Rank 0 writes what it has heard, of each case."""
    distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    found = []
    for sent, size, _ in CASES:
        if rank == 0:
            try:
                found.append(repr([(one.host, one.port) for one in gather_messages(distributed.group.WORLD, FIRST)]))
            except UsageError as error:
                found.append(str(error))
        else:
            first = codec.encode(FIRST)
            distributed.broadcast(torch.tensor([len(first)]), 0)
            distributed.broadcast(torch.empty(len(first), dtype=torch.uint8), 0)
            distributed.broadcast(torch.tensor([len(sent) if size is None else size]), 1)
            if size is None:
                distributed.broadcast(torch.frombuffer(bytearray(sent), dtype=torch.uint8), 1)
    if rank == 0:
        (folder / "heard").write_text(json.dumps(found))


def test_a_rank_hears_messages_and_nothing_else(tmp_path: Path) -> None:
    """Of all ranks, in order; sizes without bounds, pickles and what is out of bounds are refused, naming who."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=one_rank, args=(rank, tmp_path)) for rank in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(HANGING_S)
    heard = json.loads((tmp_path / "heard").read_text())
    for found, (sent, size, expected) in zip(heard, CASES, strict=True):
        assert found.startswith(expected), (sent, size)
