"""Launchers that would start a learner's ranks again in vain."""

import pytest
from torch import distributed, nn

from diloco.pipeline.errors import UsageError
from diloco.workers.ranks import topology


@pytest.mark.parametrize(
    ("restarts", "store", "refused"), [("3", "True", True), ("0", "True", False), ("3", "False", False)]
)
def test_a_torchrun_that_would_hang_at_its_restart_is_refused_at_its_start(
    restarts: str, store: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the remedy; without restarts, or with stores of their own, it may go on."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", store)
    monkeypatch.setattr(topology, "_given", lambda mesh: (0, 1))
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    if refused:
        with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
            topology.ranks_of(nn.Linear(2, 2))
    else:
        assert topology.ranks_of(nn.Linear(2, 2)) == (0, 1)
