"""A vision-language model as a learner, in a plain loop: two handwritten digits, read out in words, byte by byte.

An image's patches stand before the text. Needs scikit-learn. Start a syncer (`diloco syncer --run vision-language`),
then this as often as you like, all with DILOCO_REDIS_URL set.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from diloco import Learner
from diloco.workers.trainer.models.vlm import build_vision_language

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BATCH, LONGEST, END = 16, 13, 10  # END: the newline's byte, which begins and ends words
digits = load_digits()
images = torch.from_numpy(digits.images).float()[:, None] / 16  # (N, 1, 8, 8)
train = (torch.arange(len(images)) % 5 != 0).nonzero().flatten()
held_out = (torch.arange(len(images)) % 5 == 0).nonzero().flatten()


def pairs(of: torch.Tensor, count: int = BATCH) -> tuple[torch.Tensor, torch.Tensor, list[bytes]]:
    """Images of two digits each (B, 1, 8, 16), their text (B, LONGEST) from END to END, and the words in it."""
    left, right = of[torch.randint(len(of), (2, count))]
    words = [f"{WORDS[digits.target[a]]} {WORDS[digits.target[b]]}".encode() for a, b in zip(left, right, strict=True)]
    text = [torch.tensor([END, *one, *[END] * (LONGEST - 1 - len(one))]) for one in words]
    return torch.cat((images[left], images[right]), dim=-1), torch.stack(text), words


model = build_vision_language("nano", seed=0, patches=8, patch=4)  # any nn.Module would do
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loss = None
with Learner(model, optimizer, run="vision-language") as learner:
    learner.attach(tokens=BATCH * (8 + LONGEST), loss=lambda: loss)  # patches count as the text's bytes do
    while not learner.finished:
        pixels, text, _ = pairs(train)  # each learner draws its own
        loss = nn.functional.cross_entropy(model(pixels, text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
learner.load_globals()  # the model is the run's from here on

torch.manual_seed(0)  # the same pairs for all
pixels, text, words = pairs(held_out, 360)
said = text[:, :1]
with torch.no_grad():
    while said.size(1) < LONGEST:
        said = torch.cat((said, model(pixels, said)[:, -1:].argmax(-1)), dim=1)  # the likeliest byte, one after another
right = sum(bytes(row).strip() == word for row, word in zip(said.tolist(), words, strict=True))
print(f"said {bytes(said[0].tolist()).strip().decode(errors='replace')!r} of {words[0].decode()!r}")
print(f"exactly right {right / len(words):.2f}")
