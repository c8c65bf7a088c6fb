"""Train a vision transformer as a learner, in a plain loop, on handwritten digits. Needs scikit-learn.

Start a syncer (`diloco syncer --run images`), then this script once per learner, all with DILOCO_REDIS_URL set.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from diloco import Learner

BATCH, WIDTH, PATCH = 32, 64, 2
digits = load_digits()
images = torch.from_numpy(digits.images).float()[:, None] / 16  # (N, 1, 8, 8)
classes = torch.from_numpy(digits.target)


class ViT(nn.Module):
    """A vision transformer with two layers, whose mean over patches is classified into ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.place = nn.Parameter(0.02 * torch.randn((8 // PATCH) ** 2, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map pixels (B, 1, 8, 8) to logits (B, 10)."""
        return self.head(self.layers(self.patches(pixels).flatten(2).mT + self.place).mean(1))


model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out = torch.arange(len(images)) % 5 == 0
train, loss = (~held_out).nonzero().flatten(), None
with Learner(model, optimizer, run="images") as learner:
    learner.attach(tokens=BATCH * (8 // PATCH) ** 2, loss=lambda: loss)  # a patch counts as a token
    while not learner.finished:
        chosen = train[torch.randint(len(train), (BATCH,))]  # each learner draws its own
        loss = nn.functional.cross_entropy(model(images[chosen]), classes[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
learner.load_globals()  # from here on the model has the run's values
right = (model(images[held_out]).argmax(-1) == classes[held_out]).float().mean()
print(f"held-out accuracy {right:.3f}")
