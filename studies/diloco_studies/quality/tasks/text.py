"""Language modelling, by bytes or tokens, on any text that `diloco run` takes; files held out are never trained on."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.data.tokens import BYTES
from diloco.workers.trainer.models.gpt import build
from diloco.workers.trainer.recipe import held_out_loss, loss_of, to_device
from diloco_studies.quality.models.moe import MixtureGPT, build_mixture
from diloco_studies.quality.settings import LabRun


class TextTask:
    """An example is a block of `seq_len` tokens."""

    higher_is_better = False

    def __init__(self, run: LabRun, device: torch.device) -> None:
        """Open the text.

        Raises:
            UsageError: it cannot be read.
        """
        text = open_text(run.data)
        self._run, self._device, self._vocab = run, device, text.vocab
        self.measure = f"held-out loss (nats a {'byte' if text.vocab == BYTES else 'token'})"
        self.same_kernels = run.experts is None
        self._blocks = Blocks(text.train, run.seq_len, run.seed)
        self._held_out = Blocks(text.validation, run.seq_len).spread(run.eval_tokens)
        self.examples, self.example_tokens = self._blocks.count, run.seq_len

    def build(self) -> nn.Module:
        """A GPT, dense or with a mixture of experts."""
        run = self._run
        if run.experts is None:
            return build(run.model, run.seed, self._vocab).to(self._device)
        mixture = build_mixture(run.model, run.seed, run.experts, run.experts_a_token, self._vocab)
        return mixture.to(self._device)

    def batch(self, chosen: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, ...]:
        """One tensor (B, T + 1) int64."""
        rows = np.stack([self._blocks.block(epoch, index) for epoch, index in chosen])
        return (to_device(rows, self._device),)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Nats a token, and the balancing loss of this learner's batch."""
        loss = loss_of(model, batch[0])
        return loss + self._run.balance * model.balance if isinstance(model, MixtureGPT) else loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Nats a token on the held-out slice."""
        return {"value": held_out_loss(model, self._held_out, self._device)}
