"""The lab's tasks with answers that are right or not, and runs that begin with another run's parameters."""

import math
import re

import numpy as np
import pytest
import torch

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import SyncSettings
from diloco.workers.parameters import tensor_table
from diloco.workers.trainer.data.tokens import is_held_out
from diloco.workers.trainer.models.sizes import Size
from diloco_studies.quality.engine import train
from diloco_studies.quality.models.vlm import VisionLanguage
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks.answers import END, Scored, loss_of_answers, rows_of
from diloco_studies.quality.tasks.captions import BEGIN, in_words
from diloco_studies.quality.tasks.keywords import ASKED, BLANK, examples_of, statements
from diloco_studies.quality.tasks.tasks import open_task

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path):
    """60 files of two functions each; some files are held out."""
    for number in range(60):
        lines = (
            f"def f{number}(self, x{number}, y):",
            '    """What it does."""',
            f"    return x{number} + y\n",
            "def g(a): pass\n",
        )
        (tmp_path / f"file{number}.py").write_text("\n".join(lines))
    (tmp_path / "broken.py").write_text("def f(x:\n")
    (tmp_path / "notes.txt").write_text("def f(x):\n    return x\n")
    return tmp_path


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


# --- keywords ---------------------------------------------------------------------------------------------


def test_a_keyword_is_left_out_where_a_statement_begins():
    """Wherever the source has it: after letters of two bytes, a form feed, in a branch; other words stay."""
    source = "x = 'ä\f'\nif x: pass\nelif not x:\n    return_it = for_it()\n"
    found = list(examples_of(source, 64))
    assert [answer for _, answer in found] == [b"if", b"pass", b"elif"]
    for prompt, answer in found:
        before, after = prompt.removesuffix(ASKED).split(BLANK)
        assert before + answer + after in source.encode()
    for source in ("if x\n", "if x: pass\nx = " + "(" * 999, "if x: pass\nx = " + "-" * 99_999 + "1"):
        assert list(examples_of(source, 64)) == []


def test_a_piece_around_a_keyword_fits_with_its_answer():
    """Of a long source as much as there is room for, before and after it."""
    source = "continued = 1\n" * 20 + "while x:\n    continue\n" + "ended = 1\n" * 20
    prompts = [prompt for prompt, _ in examples_of(source, 64)]
    assert [len(prompt) for prompt in prompts] == [54, 54]
    rows_of([(prompt, b"continue") for prompt in prompts], 64)  # which raises where something does not fit


def test_a_sequence_without_room_for_a_statement_is_refused(folder):
    """It says how long one must be; with that a byte of the source is on either side."""
    with pytest.raises(UsageError, match="task='keywords' needs 15 or more") as error:
        statements(str(folder), 14)
    assert "seq_len=14" in str(error.value)
    assert b"\n" + BLANK + b"\n" + ASKED in [prompt for prompt, _ in examples_of("x = y\npass\n", 15)]


def test_held_out_statements_are_of_held_out_files(folder):
    """Of the files that are held out of the text which models are pre-trained on."""
    train_on, held_out = statements(str(folder), 64)
    files = {b"x%d" % number: is_held_out(f"file{number}.py") for number in range(60)}
    for found, of_held_out in ((train_on, False), (held_out, True)):
        names = [re.search(rb"x\d+", prompt) for prompt, answer in found if answer == b"def" and b"f" in prompt]
        assert {name[0] for name in names if name} == {name for name, kept in files.items() if kept == of_held_out}
    with pytest.raises(UsageError, match="0 statements to train on"):
        statements(str(folder / "nowhere"), 64)


def test_a_folder_of_which_too_much_is_held_out_is_refused(tmp_path):
    """Of such a one pre-training holds out the last part instead, and would train on what is held out here."""
    names = [f"{number}.py" for number in range(400)]
    for name in names:
        (tmp_path / name).write_text("if True:\n    pass\n" * (900 if is_held_out(name) else 1))
    with pytest.raises(UsageError, match="bytes are in files that are held out"):
        statements(str(tmp_path), 64)


def small(folder, **told):
    given = {"task": "keywords", "data": str(folder), "seq_len": 64, "model": "nano", "learners": 2, "fragments": 2}
    given |= {"batch": 4, "steps": 8, "sync_interval": 4, "evaluations": 2, "lr": 8e-3}
    return LabRun(**{**given, **told})


@pytest.mark.parametrize("method", ["decoupled", "data-parallel"])
def test_a_run_learns_keywords(folder, method):
    """The same run twice is the same curve."""
    first, second = (train(small(folder, method=method), "cpu") for _ in range(2))
    assert first["digest"] == second["digest"]
    assert first["final"]["value"] < first["points"][0]["measures"]["value"] < math.log(256) + 0.5
    assert 0 <= first["final"]["exact"] <= 1


# --- runs that begin with another one's parameters --------------------------------------------------------


@pytest.mark.parametrize("method", ["decoupled", "data-parallel"])
@pytest.mark.parametrize("before", ["decoupled", "data-parallel"])
def test_a_run_begins_with_the_final_parameters_of_another(folder, tmp_path, before, method):
    """What the first run's globals scored at its end, the second one's score where it hardly moves them."""
    file = tmp_path / "kept" / "parameters.safetensors"
    first = train(small(folder, method=before), "cpu", keep=file)
    told = {"method": method, "after": small(folder, method=before), "steps": 1, "lr": 1e-12}
    exact = {"global_codec": "fp32", "codec": "fp32", "outer": "nesterov", "outer_momentum": 0.0}
    second = train(small(folder, **told, **exact), "cpu", begin_from=file)
    assert second["final"]["value"] == pytest.approx(first["final"]["value"], rel=1e-6)
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_parameters_that_are_none_are_refused_by_name(folder, tmp_path):
    file = tmp_path / "parameters.safetensors"
    for contents in (None, b"none"):
        if contents is not None:
            file.write_bytes(contents)
        with pytest.raises(UsageError, match=r"parameters\.safetensors has no parameters"):
            train(small(folder), "cpu", begin_from=file)
