"""`diloco data prepare` with the real `tokenizers`, `pyarrow` and `datasets`, and a run on what it makes."""

import json
import os
import random
import signal
import string
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from diloco.cli import main
from diloco.pipeline.errors import UsageError
from diloco.workers.trainer.data import bpe
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.data.text_sources import documents, open_sources
from diloco.workers.trainer.data.token_shards import check_shards, open_shards, read_index
from diloco.workers.trainer.sample import tokenizer_of
from tests import HANGING_S

pytestmark = pytest.mark.trainers

STORIES = [
    f"Story {n}: a fox, wörter & 数字 {n * n}\n" + "once upon\ta time  there was\n" * (n % 7) for n in range(600)
]


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A parquet file of several row groups, with a column beside the text and rows without one."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [*STORIES, "", None]
    table = arrow.table({"id": list(range(len(rows))), "text": rows})
    parquet.write_table(table, tmp_path / "stories.parquet", row_group_size=100)
    return tmp_path / "stories.parquet"


def prepare(*arguments: object) -> int:
    return main(["data", "prepare", *map(str, arguments)])


def read_documents(folder: Path) -> list[str]:
    """All documents of token shards as their tokenizer writes them."""
    index, text = read_index(folder), open_shards(folder)
    tokenizer = bpe.load(folder)
    tokens = np.concatenate([text.train[:], text.validation[:]])
    ends = np.flatnonzero(tokens == index.separator)
    return [bpe.decode(tokenizer, one.tolist()[:-1]) for one in np.split(tokens, ends + 1)[:-1]]


def test_text_comes_back_as_it_was(tmp_path, stories, capsys) -> None:
    """Of any characters, by the tokenizer beside the shards; the command says what it made."""
    assert prepare(stories, "--vocab", "400", "--out", tmp_path / "tokens") == 0
    assert sorted(read_documents(tmp_path / "tokens")) == sorted(STORIES)
    index = check_shards(tmp_path / "tokens")
    assert (index.entries, index.dtype, index.documents, index.skipped) == (400, "uint16", 600, 2)
    said = capsys.readouterr().out
    assert f"{index.tokens} tokens of 600 documents" in said
    assert f"diloco run --data {tmp_path / 'tokens'}" in said
    spec = {"vocab": 448, "data": str(tmp_path / "tokens"), "data_fingerprint": index.fingerprint}
    words = tokenizer_of(spec, None)
    assert words.decode(words.encode("wörter & 数字\n")) == "wörter & 数字\n"
    with pytest.raises(UsageError, match="different token shards"):
        tokenizer_of(spec | {"data_fingerprint": "of another run"}, None)
    with pytest.raises(UsageError, match="pass their folder with --data"):
        tokenizer_of(spec | {"data": "nowhere"}, None)
    assert tokenizer_of(spec | {"data": "nowhere"}, tmp_path / "tokens").end == index.separator


def test_every_way_to_the_same_text_makes_the_same_shards(tmp_path, stories, monkeypatch) -> None:
    """Parquet, arrow as `datasets` and as others write it, a data set by name, streamed or not; with one tokenizer."""
    arrow, datasets = pytest.importorskip("pyarrow"), pytest.importorskip("datasets")
    assert prepare(stories, "--vocab", "300", "--out", tmp_path / "first") == 0
    table = datasets.Dataset.from_dict({"id": list(range(602)), "text": [*STORIES, "", None]})
    table.save_to_disk(tmp_path / "saved", num_shards=3)
    with arrow.ipc.new_file(tmp_path / "plain.arrow", table.data.table.schema) as file:
        file.write_table(table.data.table, max_chunksize=70)

    def load_dataset(name: str, config: str | None, split: str, streaming: bool = False):
        assert (name, config, split) == ("someone/stories", None, "train")
        return table.to_iterable_dataset() if streaming else table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    ways = [[tmp_path / "saved"], [tmp_path / "plain.arrow"], ["hf:someone/stories"]]
    ways.append(["hf:someone/stories,column=text", "--streaming"])
    for number, way in enumerate(ways):
        out = tmp_path / f"out-{number}"
        assert prepare(*way, "--tokenizer", tmp_path / "first", "--out", out) == 0
        assert read_index(out).fingerprint == read_index(tmp_path / "first").fingerprint, way


def test_a_column_that_is_not_there_is_named(tmp_path, stories, capsys) -> None:
    """With those that hold text; and a file that is no table."""
    assert prepare(stories, "--column", "story", "--out", tmp_path / "out") == 2
    assert "no text column 'story'; its text columns are text" in capsys.readouterr().err
    (tmp_path / "broken.parquet").write_bytes(stories.read_bytes()[:-20])
    assert prepare(tmp_path / "broken.parquet", "--out", tmp_path / "out") == 2
    assert "broken.parquet cannot be read as parquet" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_table_is_a_text_of_bytes_for_a_run(stories) -> None:
    """Without preparing it, as a data set by name is."""
    text = open_text(str(stories))
    assert text.vocab == 256
    assert text.train.tobytes().decode().split("\0")[0] in STORIES
    assert (text.files, text.skipped) == (600, 2)
    assert open_text(f"{stories},column=text").fingerprint == text.fingerprint
    with pytest.raises(UsageError, match="no text column 'id'"):
        open_text(f"{stories},column=id")


def test_a_separator_in_the_text_is_one(tmp_path) -> None:
    """As in dumps of documents; of a tokenizer with another one it has to be said."""
    (tmp_path / "dump.txt").write_text("<|endoftext|>".join(STORIES))
    assert prepare(tmp_path / "dump.txt", "--vocab", "300", "--out", tmp_path / "tokens") == 0
    assert read_documents(tmp_path / "tokens") == STORIES
    told = json.loads((tmp_path / "tokens" / "tokenizer.json").read_text())
    renamed = json.loads(json.dumps(told).replace("<|endoftext|>", "<|stop|>"))
    (tmp_path / "own.json").write_text(json.dumps(renamed))
    tokenizer = bpe.load(tmp_path / "own.json")
    with pytest.raises(UsageError, match="--separator"):
        bpe.separator_of(tokenizer, None)
    assert bpe.separator_of(tokenizer, "<|stop|>") == 0
    with pytest.raises(UsageError, match=r"does not have the token '</s>'"):
        bpe.separator_of(tokenizer, "</s>")
    with pytest.raises(UsageError, match="is not a tokenizer"):
        bpe.load(tmp_path / "dump.txt")


HELD = """
import signal, sys
from diloco.cli import main
from diloco.workers.trainer.data.token_shards import ShardWriter

add = ShardWriter.add

def add_and_wait(self, tokens):
    add(self, tokens)
    self._file.flush()
    while True:
        signal.pause()

ShardWriter.add = add_and_wait
sys.exit(main(sys.argv[1:]))
"""
"""The command, which waits for ever once it has written its first tokens."""


@pytest.fixture
def started(popen):
    def start(program: list[str], *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, *program, "data", "prepare", *map(str, arguments)]
        return popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    return start


@pytest.mark.parametrize(("number", "left"), [(signal.SIGINT, False), (signal.SIGKILL, True)])
def test_one_that_is_ended_looks_unfinished(tmp_path, stories, started, number, left) -> None:
    """After Ctrl-C nothing is left; after a kill what is left is hidden, and the next one says so and begins anew."""
    text = tmp_path / "book.txt"
    text.write_text("".join(f"line {n} of a book\n" for n in range(5000)))
    assert prepare(stories, "--vocab", "300", "--out", tmp_path / "small") == 0
    process = started(["-c", HELD], text, "--tokenizer", tmp_path / "small", "--out", tmp_path / "tokens")
    unfinished = tmp_path / ".tokens.unfinished"
    while process.poll() is None and not any(shard.stat().st_size for shard in unfinished.glob("*.bin")):
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0]
    os.kill(process.pid, number)
    said = process.communicate(timeout=HANGING_S)[0]
    assert process.returncode not in (0, 2), said
    assert not (tmp_path / "tokens").exists()
    assert unfinished.exists() == left
    if left:
        again = [text, "--tokenizer", tmp_path / "small", "--out", tmp_path / "tokens", "--tokens", "10k"]
        process = started(["-m", "diloco"], *again)
        assert "did not finish; starting from scratch" in process.communicate(timeout=HANGING_S)[0]
        assert process.returncode == 0
        assert check_shards(tmp_path / "tokens").tokens >= 10_000


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path) -> None:
    """160 MB take hardly more than 40 MB do."""
    line = "the quick brown fox {} jumps over the lazy dog, and {} times it is told\n"
    with (tmp_path / "some.txt").open("w") as file:
        file.writelines(line.format(n, n * n % 9973) for n in range(500_000))
    some = (tmp_path / "some.txt").read_bytes()
    with (tmp_path / "more.txt").open("wb") as more:
        more.writelines([some] * 4)
    assert prepare(tmp_path / "some.txt", "--vocab", "1k", "--tokens", "10k", "--out", tmp_path / "small") == 0
    told = "--tokenizer", tmp_path / "small"
    assert peak_kib(tmp_path, "more.txt", *told) < peak_kib(tmp_path, "some.txt", *told) + 40 * 1024


def peak_kib(folder: Path, text: str, *told: object) -> int:
    """Of the command's memory, in a process of its own."""
    asked = [folder / text, *told, "--out", folder / f"{text}-out"]
    code = (
        "import resource, sys; from diloco.cli import main; status = main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "data", "prepare", *map(str, asked)]
    threads = os.environ | {"RAYON_NUM_THREADS": "2"}  # each thread has memory of its own
    return int(subprocess.run(command, capture_output=True, check=True, env=threads).stdout.split()[-1])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_different_words(tmp_path) -> None:
    """A million that come once take hardly more than as many as a vocabulary is trained on: all took 1 GB."""
    letters, chance = string.ascii_lowercase, random.Random(0)
    for name, count in (("some.txt", bpe.MAX_WORDS), ("more.txt", 1_000_000)):
        words = ("".join(chance.choices(letters, k=8)) for _ in range(count))
        with (tmp_path / name).open("w") as file:
            file.writelines(f"{word}\n" for word in words)
    told = "--vocab", "1k", "--tokens", "10k"
    assert peak_kib(tmp_path, "more.txt", *told) < peak_kib(tmp_path, "some.txt", *told) + 100 * 1024


def test_a_text_of_few_different_words_is_trained_on_whole() -> None:
    """Of more, it is those words that come most often: none is joined with another."""
    texts = ["one two\n", "two two one", "three one\n  two", "four\nfour"]
    assert list(bpe._of_few_words(texts, 8)) == texts
    some = [[" two", "\n"], [" two", " one"], [" one", " two"], ["four", "\n", "four"]]
    assert list(bpe._of_few_words(texts, 4)) == some
    assert all("".join(bpe._PARTS.findall(text)) == text for text in (*texts, *STORIES))


def test_what_comes_late_gets_its_vocabulary_too() -> None:
    """However many different words came before it; and of words that come once, some of each part are trained on."""
    chance = random.Random(0)
    once = [f" {''.join(chance.choices(string.ascii_lowercase, k=9))}" for _ in range(40_000)]
    early = ["".join(once[at : at + 1000]) for at in range(0, 40_000, 1000)]
    late = "слова приходят позже " * 500
    kept = ["".join(text) for text in bpe._of_few_words([*early, late], 2000)]
    assert set(bpe._PARTS.findall(kept[-1])) >= {" приходят", " позже", " слова"}
    assert all(20 < len(bpe._PARTS.findall(text)) < 100 for text in kept[:-1])


@pytest.mark.slow
def test_a_run_trains_on_shards_and_its_sample_is_text(tmp_path, stories) -> None:
    """Learners and evaluator have the index's vocabulary; the report's text is the tokenizer's."""
    assert prepare(stories, "--vocab", "500", "--out", tmp_path / "tokens") == 0
    run = ["run", "--data", tmp_path / "tokens", "--model", "nano", "--learners", "2", "--tokens", "20k"]
    command = [sys.executable, "-m", "diloco", *map(str, run), "--seq-len", "32", "--out", str(tmp_path / "run")]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["warnings"] == []
    assert report["evaluations"][-1]["loss"] < np.log(512) - 0.5
    assert report["sample"].startswith("def ")


def test_a_folder_of_tables_is_read_as_these_alone(tmp_path, stories) -> None:
    """Not what describes them."""
    (tmp_path / "README.md").write_text("about the stories")
    found = list(documents(open_sources([str(tmp_path)], "text", False)))
    assert [text for text in found if text] == STORIES


def test_what_no_preparation_has_written_is_never_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not with --overwrite, nor where the folder for unfinished shards leads elsewhere."""
    text, out = tmp_path / "book.txt", tmp_path / "tok"
    text.write_text("\n".join(f"line {number}" for number in range(3000)))
    asked = ["data", "prepare", str(text), "--vocab", "300", "--out", str(out)]
    assert main(asked) == 0
    (out / "notes.md").write_text("mine")
    assert main([*asked, "--overwrite"]) == 2
    assert "notes.md" in capsys.readouterr().err
    inside = out / "notes.md"
    assert main(["data", "prepare", str(inside), "--vocab", "300", "--out", str(out), "--overwrite"]) == 2
    assert "would be replaced" in capsys.readouterr().err
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "train-00000.bin").write_bytes(b"not ours")
    assert main([*asked[:-1], str(foreign), "--overwrite"]) == 2
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "a").write_text("mine")
    (tmp_path / ".linked.unfinished").symlink_to(victim)
    assert main([*asked[:-1], str(tmp_path / "linked")]) == 2
    assert (inside.read_text(), (victim / "a").read_text()) == ("mine", "mine")
    assert (foreign / "train-00000.bin").read_bytes() == b"not ours"


def test_a_column_of_categories_is_text_too(tmp_path: Path) -> None:
    """As pandas writes columns in which texts come again and again."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    words = arrow.array(["one", "two", "one", None]).dictionary_encode()
    parquet.write_table(arrow.table({"text": words}), tmp_path / "words.parquet")
    source = open_sources([str(tmp_path / "words.parquet")], "text", streaming=False)
    assert [text for text in documents(source) if text] == ["one", "two", "one"]
