"""One rank of a learner's training without a run, as a program: each way of training, a few steps of the same batches.

What the parameters are afterwards goes to FOLDER/NAME.pt; without torch's launcher it is what one process makes.
"""

import itertools
import math
import sys
from pathlib import Path

import torch

from diloco.pipeline.settings import LearnerProcess, load
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.models.gpt import build
from diloco.workers.trainer.recipe import add_gradients, update
from diloco.workers.trainer.together import Rows, prepare, process_group, ranks_here

folder, ranks, device = Path(sys.argv[1]), ranks_here(), torch.device("cpu")
torch.set_num_threads(1)
text = torch.randint(256, (20_000,), generator=torch.Generator().manual_seed(3)).to(torch.uint8).numpy()
with process_group(ranks, device):
    for sharding, precision, again in itertools.product(("ddp", "fsdp"), ("fp32", "bf16"), (False, True)):
        given = {"sharding": sharding, "precision": precision, "checkpoint_activations": again}
        settings = load(LearnerProcess, given | {"batch": 4, "accumulate": 2, "seq_len": 16})
        model, forward, begin, end, _ = prepare(build("nano", 0), device, settings, ranks)
        optimizer = torch.optim.SGD(model.parameters())  # AdamW would hide a gradient that is twice as long
        order = None if ranks.number else iter(divmod(n, 100) for n in itertools.count())
        rows = Rows(Blocks(text, 16, 0), order, settings, ranks)
        for _ in range(3):
            loss = add_gradients(forward, rows.step(device), 2, begin)
            end()
            update(model, [optimizer], 0.1, math.inf)
        whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in model.named_parameters()}
        if ranks.number == 0:
            named = {name.removeprefix("module."): tensor for name, tensor in whole.items()}
            torch.save(named, folder / f"{sharding}-{precision}-{again}.pt")

    if ranks.count > 1:  # each uses a parameter that the others do not, and none the last two
        settings = load(LearnerProcess, {"precision": "bf16"})
        used = torch.nn.ParameterList(torch.zeros(2) for _ in range(ranks.count + 2))
        used[-1].requires_grad = False
        mean = prepare(used, device, settings, ranks).end
        used[ranks.number].grad = torch.full((2,), 10.0 * (ranks.number + 1))
        mean()
        torch.save([p.grad for p in used], folder / f"used-{ranks.number}.pt")
