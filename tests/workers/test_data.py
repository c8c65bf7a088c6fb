"""Promises about text sources and their blocks."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.pipeline.errors import UsageError
from diloco.workers.permutation import permuted
from diloco.workers.trainer.data.blocks import Blocks
from diloco.workers.trainer.data.text import open_text

LINE = b"the quick brown fox jumps over the lazy dog\n"


def folder(root: Path, files: int = 200) -> Path:
    for i in range(files):
        path = root / f"part{i % 7}" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"file %d\n" % i + LINE * (2 + i % 5))
    return root


def test_the_standard_library_is_always_there() -> None:
    """Megabytes of text, about 4 % of it held out, without the test suites."""
    text = open_text("stdlib")
    share = len(text.validation) / (len(text.train) + len(text.validation))
    assert len(text.train) > 4_000_000
    assert 0.01 < share < 0.16
    assert b"class IdleConf" not in text.train.tobytes()


def test_the_same_text_has_the_same_fingerprint_wherever_it_lies(tmp_path: Path) -> None:
    """Names and bytes decide, not the folder's place; one changed byte is noticed."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        folder(tmp_path / name)
    first, second = open_text(str(tmp_path / "a")), open_text(str(tmp_path / "b"))
    assert first.fingerprint == second.fingerprint
    (tmp_path / "b" / "part0" / "0.txt").write_bytes(b"changed\n" + LINE * 2)
    assert open_text(str(tmp_path / "b")).fingerprint != first.fingerprint


def test_held_out_files_are_never_trained_on(tmp_path: Path) -> None:
    """Every file is on one side as a whole, and both sides are there."""
    text = open_text(str(folder(tmp_path)))
    train, validation = text.train.tobytes(), text.validation.tobytes()
    in_train = {i for i in range(200) if b"file %d\n" % i in train}
    in_validation = {i for i in range(200) if b"file %d\n" % i in validation}
    assert in_train | in_validation == set(range(200))
    assert not in_train & in_validation
    assert 1 <= len(in_validation) <= 30


def test_binary_empty_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    folder(tmp_path)
    before = open_text(str(tmp_path))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\x00\x00" + bytes(9000))
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(LINE * 100)
    after = open_text(str(tmp_path))
    assert after.fingerprint == before.fingerprint
    assert (after.files, after.skipped) == (200, 2)


def test_of_a_single_file_the_last_part_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(LINE * 1000)
    text = open_text(str(path))
    assert text.train.tobytes() + text.validation.tobytes() == LINE * 1000
    assert len(text.validation) == round(len(LINE) * 1000 * 0.04)


def test_a_folder_of_few_files_has_a_validation_part_too(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(LINE * 1000)
    (tmp_path / "two.txt").write_bytes(LINE * 1000)
    text = open_text(str(tmp_path))
    assert len(text.validation) == pytest.approx(0.04 * 2000 * len(LINE), rel=0.01)


def test_useless_sources_are_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_bytes(LINE)
    (tmp_path / "binary.bin").write_bytes(bytes(10_000))
    (tmp_path / "nothing").mkdir()
    for data, words in [
        (tmp_path / "missing", "no such file or folder"),
        (tmp_path / "short.txt", "too few"),
        (tmp_path / "binary.bin", "binary"),
        (tmp_path / "nothing", "0 bytes of text in 0 files"),
    ]:
        with pytest.raises(UsageError, match=words):
            open_text(str(data))


@given(count=st.integers(1, 400), key=st.binary(max_size=8))
def test_an_epoch_is_a_permutation(count: int, key: bytes) -> None:
    """Every block once, none twice, for any number of blocks."""
    assert sorted(permuted(i, count, key) for i in range(count)) == list(range(count))


def test_the_permutation_is_fixed_for_ever() -> None:
    """Learners of different builds must agree; this order may never change."""
    assert [permuted(i, 10, b"/0/0") for i in range(10)] == [5, 8, 0, 6, 1, 2, 7, 9, 3, 4]


def test_an_epoch_trains_on_every_token_once() -> None:
    """The targets of all blocks together are the text without its first token (and its ragged end)."""
    text = np.arange(100, dtype=np.uint8)
    data = Blocks(text, seq_len=8)
    targets = np.concatenate([data.block(0, i)[1:] for i in range(data.count)])
    assert sorted(targets.tolist()) == list(range(1, 97))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    text = np.arange(200, dtype=np.uint8)

    def order(seed: int, epoch: int) -> list[int]:
        data = Blocks(text, 4, seed)
        return [int(data.block(epoch, i)[0]) for i in range(data.count)]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(2) for epoch in range(2)}) == 4


def test_the_validation_slice_is_spread_over_the_text_and_bounded() -> None:
    text = np.arange(250, dtype=np.uint8)
    data = Blocks(text, seq_len=4)
    some = data.spread(40)
    assert some.shape == (10, 5)
    assert some[0, 0] < 30
    assert some[-1, 0] > 220
    assert data.spread(10**9).shape == (data.count, 5)
    np.testing.assert_array_equal(some, Blocks(text, 4, seed=9).spread(40))


def test_a_text_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(UsageError, match="seq_len=64"):
        Blocks(np.zeros(64, np.uint8), 64)
