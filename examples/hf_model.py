"""Train a causal language model of transformers as a learner, in a plain loop. Needs transformers.

Start a syncer (`diloco syncer --run hf-model`), then this script once per learner, all with DILOCO_REDIS_URL set.
At the end each script saves the run's weights to a folder.
"""

import os
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from diloco import Learner

BATCH, LENGTH, MICRO_BATCHES = 8, 64, 2
text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))
tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()  # a byte is a token

config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = AutoModelForCausalLM.from_config(config)  # or .from_pretrained("a-folder"), the same in all learners
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with Learner(
    model, optimizer, run="hf-model"
) as learner:  # trains 2.5M tokens, the default; tokens="1B" sets another budget
    # The tokens of a step are those of all its micro-batches; the loss is shown in the status and on the page.
    learner.attach(tokens=BATCH * LENGTH * MICRO_BATCHES, loss=lambda: MICRO_BATCHES * loss)
    while not learner.finished:
        for _ in range(MICRO_BATCHES):
            starts = torch.randint(len(tokens) - LENGTH, (BATCH, 1))  # each learner draws its own
            inputs = tokens[starts + torch.arange(LENGTH)]  # (BATCH, LENGTH)
            loss = model(input_ids=inputs, labels=inputs).loss / MICRO_BATCHES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
learner.load_globals()  # from here on the model has the run's values, not this learner's
model.save_pretrained(f"hf-model-{learner.id}")
