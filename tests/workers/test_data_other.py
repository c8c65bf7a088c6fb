"""Token files and data sets by name: what they are read as, and what is refused."""

import sys

import numpy as np
import pytest
import torch

from diloco.pipeline.errors import UsageError
from diloco.pipeline.settings import TrainerSettings
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.models.named import model_of
from diloco.workers.trainer.recipe import to_device, trainer_spec
from diloco.workers.trainer.sample import Loaded, sample
from diloco_studies.quality.engine import train
from diloco_studies.quality.settings import LabRun


@pytest.mark.parametrize(("dtype", "largest", "vocab"), [("u1", 100, 256), ("u2", 999, 1024), ("u4", 70_000, 70_016)])
def test_a_token_file_is_mapped_and_its_end_held_out(tmp_path, dtype, largest, vocab) -> None:
    """The vocabulary is what the largest token asks for; blocks reach the device as they lie in the file."""
    tokens = np.random.default_rng(0).integers(0, largest, 10_000).astype(dtype)
    tokens[-1] = largest
    np.save(tmp_path / "tokens.npy", tokens)
    text = open_text(str(tmp_path / "tokens.npy"))
    assert text.vocab == vocab
    assert (len(text.train), len(text.validation)) == (9600, 400)
    assert isinstance(text.train.base, np.memmap) or isinstance(text.train, np.memmap)
    held_out = to_device(Blocks(text.validation, 9).spread(400), torch.device("cpu"))
    assert held_out.dtype == torch.int64
    assert held_out[0].tolist() == tokens[9600:9610].tolist()
    assert int(held_out.max()) <= largest


def test_a_model_has_its_text_s_vocabulary_wherever_it_is_built(tmp_path) -> None:
    """The spec says it, for the evaluator; a byte text has the spec it always had."""
    np.save(tmp_path / "tokens.npy", np.arange(8192, dtype=np.uint16) % 300)
    settings = TrainerSettings(data=str(tmp_path / "tokens.npy"))
    spec = trainer_spec(settings, open_text(settings.data))
    model = model_of(spec)
    assert model.embedding.num_embeddings == 320
    assert "vocab" not in trainer_spec(TrainerSettings(), open_text("stdlib"))
    with pytest.raises(UsageError, match="tokenizer"):
        sample(Loaded(model, spec), "x", 1, 0.0, 0, 0)


def test_the_lab_learns_from_a_token_file(tmp_path) -> None:
    """A text of 300 tokens in a row is soon known."""
    np.save(tmp_path / "tokens.npy", np.arange(16_384, dtype=np.uint16) % 300)
    small = {"model": "nano", "batch": 4, "seq_len": 16, "eval_tokens": 256}
    run = LabRun(data=str(tmp_path / "tokens.npy"), method="single", steps=30, **small)
    values = [point["measures"]["value"] for point in train(run, "cpu")["points"]]
    assert values[-1] < 0.8 * values[0]


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (np.zeros(9000, np.int64), "int64"),
        (np.zeros((90, 100), np.uint16), "flat array"),
        (np.zeros(100, np.uint16), "too few"),
        (np.array([{}] * 9000), "not a token file"),
    ],
)
def test_another_array_is_refused(tmp_path, tokens, said) -> None:
    """Pickled objects too: they are never loaded."""
    np.save(tmp_path / "tokens.npy", tokens, allow_pickle=True)
    with pytest.raises(UsageError, match=said):
        open_text(str(tmp_path / "tokens.npy"))


class Hub:
    """Stands in for the library `datasets`: one data set of one column."""

    column_names = ("id", "story")

    def load_dataset(self, name: str, config: str | None, split: str) -> "Hub":
        if (name, config, split) != ("someone/stories", "small", "train"):
            raise FileNotFoundError(f"{name} doesn't exist")
        return self

    def select_columns(self, names: list[str]) -> "Hub":
        assert names == ["story"]
        return self

    def __len__(self) -> int:
        return 501

    def __getitem__(self, rows: slice) -> dict[str, list[str | None]]:
        return {"story": [*(f"story {n} \0 is told" for n in range(500)), None][rows]}


def test_a_data_set_by_name_is_its_documents(monkeypatch) -> None:
    """About 4 % of them held out, one boundary after each."""
    monkeypatch.setitem(sys.modules, "datasets", Hub())
    text = open_text("hf:someone/stories,config=small,column=story")
    stories = text.train.tobytes().split(b"\0")[:-1]
    held_out = text.validation.tobytes().split(b"\0")[:-1]
    assert sorted(stories + held_out) == sorted(b"story %d  is told" % n for n in range(500))
    assert 5 < len(held_out) < 50
    assert (text.vocab, text.files, text.skipped) == (256, 500, 1)


def test_a_folder_of_tables_says_how_it_is_read(tmp_path) -> None:
    """Its text is in none of its files as such. A folder that has the name of a table is one of files all the same."""
    folder = tmp_path / "stories.parquet"
    folder.mkdir()
    (folder / "part-0.parquet").write_bytes(b"PAR1\0\0" + bytes(9000))
    with pytest.raises(UsageError, match=rf"0 bytes of text .*`diloco data prepare {folder} --out FOLDER`"):
        open_text(str(folder))
    (folder / "part-0.parquet").rename(folder / "picture")
    with pytest.raises(UsageError, match=r"give at least 4096$"):
        open_text(str(folder))
    (folder / "story.txt").write_text("a story\n" * 1000)
    assert open_text(str(folder)).files == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("hf:someone/stories,config=small", "no column 'text'; it has id, story"),
        ("hf:someone/else", "doesn't exist"),
        ("hf:someone/stories,part=1", "unknown 'part'"),
    ],
)
def test_what_is_not_there_is_named(monkeypatch, data, said) -> None:
    """With what there is instead."""
    monkeypatch.setitem(sys.modules, "datasets", Hub())
    with pytest.raises(UsageError, match=said):
        open_text(data)


def test_without_the_library_the_extra_is_named(monkeypatch) -> None:
    """Not an ImportError."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"diloco\[data\]"):
        open_text("hf:someone/stories")
