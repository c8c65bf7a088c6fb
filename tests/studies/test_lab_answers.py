"""The lab's task with answers that are right or not."""

import numpy as np
import pytest
import torch

from diloco.pipeline.settings import SyncSettings
from diloco.workers.parameters import tensor_table
from diloco.workers.trainer.models.sizes import Size
from diloco_studies.quality.models.vlm import VisionLanguage
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.answers import END, Scored, loss_of_answers, rows_of
from diloco_studies.quality.tasks.captions import BEGIN, in_words
from diloco_studies.quality.tasks.tasks import open_task

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


# --- answers ----------------------------------------------------------------------------------------------


def test_only_the_answer_and_its_end_are_learnt():
    """Each is the target of the byte before it; prompts and what fills a row up are nobody's target."""
    inputs, targets = rows_of([(b"2+3=", b"5"), (b"x", b"yes")], 8)
    assert bytes(inputs[0].tolist()) == b"2+3=5\0\0\0"
    assert targets[0].tolist() == [-100, -100, -100, *b"5\n", -100, -100, -100]
    assert targets[1].tolist() == [*b"yes\n", -100, -100, -100, -100]


def test_an_answer_is_exact_where_greedy_decoding_would_write_it():
    """Tried with a model that knows some of the answers; its loss is the mean over all their bytes."""
    answers = (b"1", b"22", b"333", b"1", b"4444")
    texts = [(b"%d=" % number, answer) for number, answer in enumerate(answers)]

    def model(inputs):
        """Right but for the row of "2=", of which it forgets the last byte, and that of "4=", whose first is wrong."""
        logits = torch.zeros(*inputs.shape, 256)
        for row, seen in enumerate(bytes(line.tolist()).rstrip(b"\0") for line in inputs):
            wanted = {b"2": b"33", b"4": b"5444"}.get(seen[:1], answers[int(seen[:1])]) + END
            logits[row, torch.arange(1, 1 + len(wanted)), torch.tensor(list(wanted))] = 9.0
        return logits

    inputs, targets = (torch.from_numpy(part) for part in rows_of(texts, 8))
    scored = Scored()
    for rows in (slice(0, 2), slice(2, 5)):
        scored.add(model(inputs[rows]), targets[rows])
    written = []
    for prompt, _ in texts:
        said = prompt
        while not said.endswith(END):
            one = torch.tensor([*said, *[0] * (8 - len(said))])[None]
            said += bytes([int(model(one)[0, len(said) - 1].argmax())])
        written.append(said.removeprefix(prompt).removesuffix(END))
    right = [one == answer for one, answer in zip(written, answers, strict=True)]
    assert right == [True, True, False, True, False]
    measures = scored.measures()
    assert measures["exact"] == 3 / 5
    assert measures["value"] == pytest.approx(loss_of_answers(model(inputs), targets).item(), rel=1e-6)


# --- captions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [
        *((0, "zero"), (7, "seven"), (14, "fourteen"), (20, "twenty"), (85, "eighty-five"), (100, "one hundred")),
        *((213, "two hundred and thirteen"), (909, "nine hundred and nine"), (999, "nine hundred and ninety-nine")),
    ],
)
def test_a_number_in_words(number, words):
    assert in_words(number) == words


def test_a_caption_says_the_digits_of_its_image():
    """Images are digits of the training images, those of held-out ones are no training image's; seeds repeat them."""
    pytest.importorskip("sklearn")
    from diloco_studies.quality.tasks.digits import Digits

    task, twin = (open_task(LabRun(task="captions", model="nano"), CPU) for _ in range(2))
    everything = [(0, index) for index in range(task.examples)]
    pixels, inputs, targets = task.batch(everything)
    assert pixels.shape == (1437, 1, 8, 24)
    assert torch.equal(pixels, twin.batch(everything)[0])
    assert not torch.equal(pixels, task.batch([(1, index) for index in range(task.examples)])[0])
    of = Digits()
    known = {
        np.pad(of.train(n), ((0, 0), (1, 1), (1, 1)))[:, d : d + 8, r : r + 8].tobytes(): of.train_classes[n]
        for n in range(task.examples)
        for d in range(3)
        for r in range(3)
    }
    for row in range(0, task.examples, 97):
        digits = [known[pixels[row, :, :, 8 * place : 8 * place + 8].numpy().tobytes()] for place in range(3)]
        words = in_words(int("".join(map(str, digits)))).encode()
        whole = BEGIN + words + END
        assert bytes(inputs[row].tolist())[: len(whole) - 1] == whole[:-1]
        assert [t for t in targets[row].tolist() if t >= 0] == [*whole[1:]]
    seen = []
    model = task.build()
    model.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    measures = task.evaluate(model)
    held_out = {
        image[:, :, 8 * place : 8 * place + 8].numpy().tobytes() for image in torch.cat(seen) for place in (0, 1, 2)
    }
    assert len(held_out) == len({of.held_out(n).tobytes() for n in range(360)})
    assert not held_out & known.keys()
    assert measures["value"] > 4
    assert measures["exact"] == 0


def test_words_see_all_of_the_image_and_the_words_before_them():
    """And no later word; every parameter has a gradient, and the same seed gives the same model."""
    size = Size(layers=2, width=32, heads=2, hidden=64)
    model, twin, other = (VisionLanguage(size, 6, 4, 1, 256, seed) for seed in (1, 1, 2))
    triples = zip(model.parameters(), twin.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in triples)
    pixels = torch.rand(1, 1, 8, 12, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tokens = torch.arange(5)[None]
    logits = model(pixels, tokens)
    assert logits.shape == (1, 5, 256)
    logits[0, 0].square().sum().backward(retain_graph=True)
    assert (pixels.grad != 0).all()
    changed = model(pixels, torch.tensor([[0, 1, 2, 9, 4]]))
    assert torch.allclose(changed[:, :3], logits[:, :3], atol=1e-6)
    assert not torch.allclose(changed[:, 4], logits[:, 4])
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert {one.fragment for one in tensor_table(model, SyncSettings(fragments=4))} == set(range(4))
