"""Token shards: what is read is what was written, at no cost at start; what is damaged is named. By numpy alone."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.cli import main
from diloco.pipeline.errors import SpecMismatch, UsageError
from diloco.pipeline.settings import TrainerSettings
from diloco.workers.trainer.data import text_sources
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.preparing import new_folder, write_shards
from diloco.workers.trainer.data.text import open_text
from diloco.workers.trainer.data.text_sources import Source, documents, open_sources, sample
from diloco.workers.trainer.data.token_shards import Index, check_shards, is_shards, open_shards, read_index
from diloco.workers.trainer.recipe import check_text, trainer_spec
from diloco.workers.trainer.sample import model_of
from tests.workers.byte_tokenizer import ByteTokenizer, documents_of

TEXTS = [f"story {n}: " + "once upon a time " * (n % 9) for n in range(500)]


def source_of(texts: Iterable[str]) -> Source:
    return Source([lambda: iter(texts)], counted=True, skipped=0)


def written(folder: Path, texts: Iterable[str] = TEXTS, shard_tokens: int = 5000, above: int = 0) -> Index:
    folder.mkdir(parents=True)
    tokenizer = ByteTokenizer(above)
    return write_shards(folder, source_of(texts), tokenizer, tokenizer.separator, shard_tokens=shard_tokens)


# What is written is read.


def test_every_document_is_on_one_side_with_a_separator_after_it(tmp_path) -> None:
    """In order, and about 4 % of them held out."""
    index = written(tmp_path / "shards")
    text = open_text(str(tmp_path / "shards"))
    train, held_out = documents_of(text.train[:]), documents_of(text.validation[:])
    assert len(index.shards) > 5
    assert sorted(train + held_out) == sorted(TEXTS)
    assert [one for one in TEXTS if one in set(train)] == train
    assert 0.01 < len(held_out) / len(TEXTS) < 0.16
    assert (index.documents, index.text_bytes) == (500, sum(map(len, TEXTS)))


def test_of_few_documents_the_last_part_is_held_out(tmp_path) -> None:
    """Whatever the hashes of their places say."""
    written(tmp_path / "shards", ["a long story. " * 1000] * 2)
    text = open_text(str(tmp_path / "shards"))
    total = len(text.train) + len(text.validation)
    assert len(text.validation) == round(0.04 * total)
    assert documents_of(np.concatenate([text.train[:], text.validation[:]])) == ["a long story. " * 1000] * 2


def test_blocks_are_those_of_one_array(tmp_path) -> None:
    """Also those that lie across shards, of which there are many here."""
    index = written(tmp_path / "shards", shard_tokens=700)
    text = open_shards(tmp_path / "shards")
    whole = np.concatenate([np.fromfile(tmp_path / "shards" / shard.file, "<u2") for shard in index.shards])
    blocks, plain = Blocks(text.train, 64, seed=3), Blocks(whole[: index.train_tokens], 64, seed=3)
    assert blocks.count == plain.count > 100
    for number in range(blocks.count):
        np.testing.assert_array_equal(blocks.block(1, number), plain.block(1, number))
    held_out = Blocks(whole[index.train_tokens :], 64).spread(10**6)
    np.testing.assert_array_equal(Blocks(text.validation, 64).spread(10**6), held_out)


@pytest.mark.parametrize(("above", "dtype", "vocab"), [(0, "uint16", 320), (70_000, "uint32", 70_272)])
def test_a_model_has_the_vocabulary_of_the_index(tmp_path, above, dtype, vocab) -> None:
    """Tokens take two bytes where they can."""
    index = written(tmp_path / "shards", above=above)
    asked = TrainerSettings(data=str(tmp_path / "shards"), model="nano")
    spec = trainer_spec(asked, open_text(asked.data))
    assert (index.dtype, spec["vocab"]) == (dtype, vocab)
    assert model_of(spec).embedding.num_embeddings == vocab


def test_a_preparation_ends_with_the_document_that_has_enough(tmp_path) -> None:
    tokenizer = ByteTokenizer()
    (tmp_path / "shards").mkdir()
    endless = source_of(iter(lambda: "for ever and ever " * 10, None))
    index = write_shards(tmp_path / "shards", endless, tokenizer, 256, max_tokens=50_000)
    assert 50_000 <= index.tokens < 50_000 + 200


def test_too_little_text_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="too few"):
        written(tmp_path / "shards", ["short", ""])


# The fingerprint.


def test_the_same_text_has_the_same_fingerprint_wherever_it_lies(tmp_path) -> None:
    """Another document, order, vocabulary or cut into shards has another one."""
    same = written(tmp_path / "a").fingerprint
    assert written(tmp_path / "b").fingerprint == same
    others = [
        written(tmp_path / "c", [*TEXTS, "one more"]),
        written(tmp_path / "d", TEXTS[::-1]),
        written(tmp_path / "e", above=100),
        written(tmp_path / "f", shard_tokens=6000),
    ]
    assert len({same, *(index.fingerprint for index in others)}) == 5


def test_a_run_of_no_text_is_refused(tmp_path) -> None:
    written(tmp_path / "run")
    with pytest.raises(SpecMismatch, match="not started by the built-in trainer"):
        check_text(open_text(str(tmp_path / "run")), "run", {})


def test_nothing_is_read_at_start(tmp_path) -> None:
    """An altered byte is not seen then; a check finds it and names the file."""
    index = written(tmp_path / "shards")
    file = tmp_path / "shards" / index.shards[2].file
    data = bytearray(file.read_bytes())
    data[1000] ^= 1
    file.write_bytes(data)
    assert open_shards(tmp_path / "shards").fingerprint == index.fingerprint
    with pytest.raises(UsageError, match=rf"{index.shards[2].file} was altered"):
        check_shards(tmp_path / "shards")


# Damage.


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def other_number(path: Path) -> None:
    told = json.loads(path.read_text())
    told["train_tokens"] += 1
    path.write_text(json.dumps(told))


def emptied(path: Path) -> None:
    path.write_text("[]")


DAMAGE = [
    ("train-00001.bin", cut_short, "train-00001.bin is damaged: it has 9997 bytes, but 10000 by the index"),
    ("train-00000.bin", Path.unlink, "train-00000.bin, which is listed in the index, cannot be read: No such file"),
    ("index.json", cut_short, "index.json is damaged"),
    ("index.json", emptied, "index.json is damaged: not an object; copy"),
    ("index.json", other_number, "index.json is damaged: its fingerprint does not match its content"),
    ("index.json", Path.unlink, "index.json is missing"),
]


@pytest.mark.parametrize(("name", "damage", "said"), DAMAGE)
def test_what_is_damaged_is_named_at_start(tmp_path, name, damage, said) -> None:
    """It is not taken for a folder of text, which it is to nobody."""
    written(tmp_path / "shards")
    damage(tmp_path / "shards" / name)
    with pytest.raises(UsageError, match=said):
        open_text(str(tmp_path / "shards"))


def test_an_altered_tokenizer_is_found_by_a_check(tmp_path, capsys) -> None:
    """`diloco data check` reads all; the command's exit status is 2."""
    written(tmp_path / "shards")
    assert main(["data", "check", str(tmp_path / "shards")]) == 0
    assert "unchanged since it was written" in capsys.readouterr().out
    (tmp_path / "shards" / "tokenizer.json").write_text("another")
    assert main(["data", "check", str(tmp_path / "shards")]) == 2
    assert "tokenizer.json was altered" in capsys.readouterr().err


def test_a_token_that_the_model_would_not_know_is_named(tmp_path) -> None:
    """With its file, when it is read: an embedding would only say that an index is out of range."""
    written(tmp_path / "shards")
    file = tmp_path / "shards" / "train-00001.bin"
    tokens = np.fromfile(file, "<u2")
    tokens[10] = 60_000
    tokens.tofile(file)
    text = open_shards(tmp_path / "shards")
    assert len(text.train[:5000]) == 5000
    with pytest.raises(UsageError, match=r"train-00001\.bin is damaged: it has a token 60000"):
        text.train[4000:6000]


def test_a_folder_with_an_index_of_somebody_else_is_text(tmp_path) -> None:
    """As it always was."""
    (tmp_path / "index.json").write_text('{"format": "my pages", "shards": []}')
    (tmp_path / "page.txt").write_text("a page\n" * 1000)
    assert not is_shards(tmp_path)
    assert open_text(str(tmp_path)).vocab == 256


# The folder.


def test_what_is_not_finished_is_not_there(tmp_path) -> None:
    """Whatever ended it: nothing is left beside the folder either."""

    def interrupted() -> None:
        with new_folder(tmp_path / "out", False, print) as folder:
            (folder / "train-00000.bin").write_bytes(b"some")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_killed_is_begun_anew_and_says_so(tmp_path) -> None:
    said: list[str] = []
    left = tmp_path / ".out.unfinished"
    left.mkdir()
    (left / "train-00000.bin").write_bytes(b"some")
    with new_folder(tmp_path / "out", False, said.append) as folder:
        assert list(folder.iterdir()) == []
    assert (tmp_path / "out").is_dir()
    assert said == [f"{tmp_path / 'out'}: an earlier preparation did not finish; starting from scratch"]


def test_two_at_one_folder_do_not_mix(tmp_path) -> None:
    with (
        new_folder(tmp_path / "out", False, print),
        pytest.raises(UsageError, match="another `diloco data prepare` is already working"),
        new_folder(tmp_path / "out", False, print),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_token_shards_are_replaced_and_only_when_asked(tmp_path) -> None:
    """The earlier ones stay until the new ones are finished."""
    before = written(tmp_path / "out")
    with pytest.raises(UsageError, match="--overwrite"), new_folder(tmp_path / "out", False, print):
        pass
    with pytest.raises(OSError, match="disk"), new_folder(tmp_path / "out", True, print):
        raise OSError("the disk is full")
    assert read_index(tmp_path / "out").fingerprint == before.fingerprint
    with new_folder(tmp_path / "out", True, print) as folder:
        written(folder / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"]
    with pytest.raises(UsageError, match="something other"), new_folder(tmp_path / "out", True, print):
        pass


# Sources of text.


@given(data=st.binary(max_size=400).map(lambda some: some.replace(b"\0", b"")), lines=st.booleans())
@settings(max_examples=150)
def test_pieces_of_a_file_are_all_of_it(tmp_path_factory, data: bytes, lines: bool) -> None:
    """Of any bytes, with line ends or not; characters stay whole."""
    text = (data + b"\n\xc3\xa4 " * lines) * 3
    path = tmp_path_factory.mktemp("pieces") / "text"
    path.write_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"PIECE_BYTES": 64, "_LOOK_BYTES": 32, "_PIECES": 2}.items():
            patch.setattr(text_sources, name, size)
        found = list(documents(open_sources([str(path)], "text", False))) if text else []
    assert "".join(found) == text.decode(errors="replace")
    assert all(len(piece.encode()) <= 3 * (64 + 32) for piece in found)


def test_a_long_document_is_cut_at_a_line(tmp_path) -> None:
    """In a file and in a row alike."""
    text = "".join(f"line {n} of a long document\n" for n in range(20_000))
    (tmp_path / "long.txt").write_text(text)
    pieces = list(documents(open_sources([str(tmp_path / "long.txt")], "text", False)))
    assert "".join(pieces) == text
    assert 3 < len(pieces) < 6
    assert all(piece.endswith("\n") for piece in pieces)
    assert list(text_sources.shortened(text)) == pieces


def test_folders_globs_and_files_are_read_in_order(tmp_path) -> None:
    """Hidden, empty and binary ones are left out, and counted."""
    for name, content in {"b/2.txt": "two", "a/1.txt": "one", ".hidden": "no", "3.txt": "three"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "picture").write_bytes(bytes(100))
    (tmp_path / "empty").touch()
    folder = open_sources([str(tmp_path)], "text", False)
    assert list(documents(folder)) == ["three", "one", "two"]
    assert folder.skipped == 2
    assert list(documents(open_sources([f"{tmp_path}/**/*.txt"], "text", False))) == ["three", "one", "two"]
    assert list(documents(open_sources([f"{tmp_path}/b/*", f"{tmp_path}/3.txt"], "text", False))) == ["two", "three"]
    for text in (f"{tmp_path}/*.md", f"{tmp_path}/nothing"):
        with pytest.raises(UsageError, match="nothing matches it"):
            open_sources([text], "text", False)
    with pytest.raises(UsageError, match="has no readable text: 1 files"):
        open_sources([f"{tmp_path}/picture"], "text", False)


def test_a_sample_is_bounded_and_from_all_over_the_source() -> None:
    """Of a part no more than its share, of all parts no more than was asked for."""
    parts = [lambda n=n: iter([f"{n} " * 50_000] * 20) for n in range(64)]
    texts = list(sample(Source(parts, counted=True, skipped=0), 8 * 2**20))
    size = sum(map(len, texts))
    assert 4 * 2**20 < size < 9 * 2**20
    assert len({text.split()[0] for text in texts}) > 20
    assert list(sample(source_of(["all of it"]), 2**20)) == ["all of it"]


# The command.


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "book.txt").write_text("a book\n" * 1000)
    assert main(["data", "prepare", str(tmp_path / "book.txt"), "--out", str(tmp_path / "out")]) == 2
    assert "pip install 'diloco[data]'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--vocab", "32k", "--tokenizer", "x"], "leave out one of them"),
        (["--separator", "</s>"], "--separator is only for a --tokenizer"),
        (["--streaming"], "no TEXT begins with hf:"),
        (["--vocab", "100"], "from 257 to"),
        (["--vocab", "many"], "from 257 to"),
        (["--vocab", "300.5"], "from 257 to"),
        (["--tokens", "0"], "from 1 to"),
        (["--out", "texts/tokens"], "is inside texts"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, monkeypatch, capsys, flags, said) -> None:
    """Before anything is read or made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    assert main(["data", "prepare", "texts", *flags]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.rglob("*")] == ["texts"]
