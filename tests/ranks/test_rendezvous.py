"""Ranks that cannot be one learner, as processes over gloo."""

import textwrap
from pathlib import Path

import pytest

from diloco.pipeline.bus.embedded import free_port
from tests.ranks.party import Party

pytestmark = [pytest.mark.redis, pytest.mark.slow]

PROGRAM = textwrap.dedent(
    """
    import json, sys
    import torch
    from torch import distributed, nn
    from diloco import Learner
    from diloco.pipeline.errors import DilocoError

    distributed.init_process_group("gloo")
    rank, (bias, given) = distributed.get_rank(), json.loads(sys.argv[1])
    for odd in (rank == 1, False):  # then once more, alike
        model = nn.Linear(4, 4, bias=bias or not odd)
        told = {"learner_id": "them", "run": "ranks"} | (given if odd else {})
        try:
            with Learner(model, torch.optim.AdamW(model.parameters()), mesh="world", **told) as learner:
                learner.step(tokens=4)
            print("left", learner.left_in_order, flush=True)
        except DilocoError as error:
            print("refused", str(error).replace(chr(10), " "), flush=True)
    distributed.destroy_process_group()
    """
)


@pytest.mark.parametrize(
    ("given", "named", "fragments"),
    [
        ("[false, {}]", "tensor bias", 1),
        ("[false, {}]", "fragments", 2),
        ('[true, {"learner_id": "other"}]', "learner_id", 1),
        ('[true, {"recover": "fresh"}]', "recover", 1),
        ('[true, {"tokens": 7}]', "tokens", 1),
        ('[true, {"leave_s": 7}]', "leave_s: 7.0; rank 0: ", 1),
    ],
    ids=["model", "no_proposal", "id", "setting", "budget", "leave_s"],
)
def test_what_one_rank_has_otherwise_all_refuse(tmp_path: Path, given: str, named: str, fragments: int) -> None:
    """Each names it, none waits; also what that rank refuses before it meets the others. Then they join, alike."""
    with Party(tmp_path, fragments=fragments, tokens=10**9) as party:
        port = str(free_port())
        ranks = [
            party.start(
                f"them-{rank}.log",
                {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank)},
                "-c",
                PROGRAM,
                given,
            )
            for rank in range(3)
        ]
        assert party.ended(*ranks) == [0] * 3, party.shown()
        for rank in range(3):
            (refused,) = party.said(f"them-{rank}", "refused")
            assert named in refused, refused
            assert party.said(f"them-{rank}", "left True"), party.shown()
