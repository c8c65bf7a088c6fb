"""The lab's folders of images: what is in them, what is held out, and that a run learns from them."""

import numpy as np
import pytest
import torch

from diloco.pipeline.errors import UsageError
from diloco_studies.quality.engine import train
from diloco_studies.quality.results.store import settings_digest
from diloco_studies.quality.settings import LabRun
from diloco_studies.quality.tasks import images
from diloco_studies.quality.tasks.images import ImageFolder, listed
from diloco_studies.quality.tasks.tasks import open_task

Image = pytest.importorskip("PIL.Image")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(one_thread):
    """What is there is looked up once a process."""
    listed.cache_clear()
    yield
    listed.cache_clear()


@pytest.fixture
def pictures(tmp_path):
    """40 images of each of two classes, of which one is bright on the left; wider than high, and in two formats."""
    random = np.random.default_rng(0)
    for name in ("left", "right"):
        (tmp_path / name / "deep").mkdir(parents=True)
        for number in range(40):
            pixels = random.integers(0, 80, (16, 20, 3)).astype(np.uint8)
            pixels[:, slice(0, 10) if name == "left" else slice(10, 20)] += 150
            where = tmp_path / name / ("deep" if number % 2 else ".") / f"{number}.{'png' if number % 3 else 'jpg'}"
            Image.fromarray(pixels).save(where)
    (tmp_path / "left" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / ".hidden" / "a.png")
    (tmp_path / "empty").mkdir()
    return tmp_path


def small(pictures, **told):
    given = {"learners": 2, "fragments": 2, "sync_interval": 4, "batch": 8, "steps": 24, "evaluations": 2, "lr": 2e-3}
    given |= {"data": str(pictures), "image_size": 8, "patch_size": 4}
    return LabRun(task="images", **{**given, **told})


def test_a_folder_is_a_class_and_a_fifth_is_held_out(pictures):
    """Whatever order files come in; a further image moves no other from one side to the other."""
    found = ImageFolder(small(pictures))
    names, images = listed(str(pictures))
    assert names == ("left", "right")
    assert len(images) == 80
    assert len(found.train_classes) + len(found.held_out_classes) == 80
    assert 6 <= len(found.held_out_classes) <= 28
    assert {*found.held_out_classes.tolist()} == {*found.train_classes.tolist()} == {0, 1}
    before = set(found._held_out)
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(pictures / "left" / "0a.png")
    listed.cache_clear()
    assert before <= set(ImageFolder(small(pictures))._held_out)
    assert not set(ImageFolder(small(pictures))._train) & before


def test_an_image_is_its_middle_square_in_colour(pictures):
    """Of 16 x 20 pixels the middle 16 x 16, made 8 x 8; grey ones have three channels too."""
    flat = np.zeros((16, 32), np.uint8)
    flat[:, 8:24] = 200
    for number in range(20):  # some are held out, some not
        Image.fromarray(flat).save(pictures / "right" / f"grey{number}.png")
    found = ImageFolder(small(pictures))
    grey = [n for n, (path, _) in enumerate(found._train) if path.name.startswith("grey")]
    assert found.train(grey[0]).shape == (3, 8, 8)
    assert found.train(grey[0]) == pytest.approx(200 / 255)
    left = found.train(int(np.flatnonzero(found.train_classes == 0)[0]))
    assert left[:, :, :3].mean() > left[:, :, 5:].mean() + 0.3


def test_what_is_kept_of_images_is_bounded(pictures, monkeypatch):
    """Ten of 8 x 8 pixels in three colours, and the others are read again."""
    monkeypatch.setattr(images, "KEPT_BYTES", 10 * 3 * 8 * 8)
    found = ImageFolder(small(pictures))
    for _ in range(2):
        for index in range(20):
            found.train(index)
    assert found._read.cache_info().currsize == 10


def test_the_held_out_slice_is_as_large_as_told(pictures):
    """Of all classes."""
    found = ImageFolder(small(pictures, eval_tokens=5))
    assert 2 <= len(found.held_out_classes) <= 5
    assert {*found.held_out_classes.tolist()} == {0, 1}


@pytest.mark.parametrize("method", ["decoupled", "data-parallel"])
def test_a_run_learns_from_a_folder(pictures, method):
    """Which side is bright, seen through a ViT; the same run twice is the same curve."""
    first, second = (train(small(pictures, method=method), "cpu") for _ in range(2))
    assert first["digest"] == second["digest"]
    assert first["final"]["value"] > 80
    assert first["higher_is_better"]


def test_a_digest_knows_which_images_there_are(pictures):
    """And what they are made to be; text and digits have no such settings."""
    digests = {settings_digest(small(pictures)), settings_digest(small(pictures, eval_tokens=5))}
    digests.add(settings_digest(small(pictures).model_copy(update={"patch_size": 2})))
    (pictures / "left" / "more.png").write_bytes((pictures / "left" / "2.png").read_bytes())
    listed.cache_clear()
    digests.add(settings_digest(small(pictures)))
    assert len(digests) == 4
    for task in ("text", "digits"):
        assert not {"image_size", "patch_size"} & LabRun(task=task).relevant().keys()


def test_what_is_wrong_with_a_folder_is_named(pictures, tmp_path):
    """None there, one class only, none to hold out, one that is no image, patches that do not fit."""
    with pytest.raises(UsageError, match="no such folder"):
        ImageFolder(small(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="0 folders with images"):
        ImageFolder(small(pictures / "left" / "deep"))
    few = tmp_path / "few"
    for name in "ab":
        (few / name).mkdir(parents=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(few / name / "0.png")
    with pytest.raises(UsageError, match="2 images are too few"):
        ImageFolder(small(few))
    (pictures / "left" / "broken.png").write_bytes(b"no image")
    listed.cache_clear()
    task = open_task(small(pictures, eval_tokens=100), CPU)
    with pytest.raises(UsageError, match=r"broken\.png cannot be read"):
        task.batch([(0, index) for index in range(task.examples)]), task.evaluate(task.build())
    with pytest.raises(ValueError, match="no multiple"):
        small(pictures, patch_size=3)


@pytest.mark.parametrize(("kind", "mode"), [("uint16", "I;16"), ("int32", "I"), ("float32", "F")])
def test_an_image_of_more_than_eight_bits_is_refused_with_its_mode(pictures, kind, mode):
    """Pillow would make it white in colour, whatever is on it."""
    for number in range(20):  # some are held out, some not
        Image.fromarray(np.full((8, 8), 300, kind)).save(pictures / "left" / f"deep{number}.tif")
    found = ImageFolder(small(pictures))
    deep = next(n for n, (path, _) in enumerate(found._train) if path.suffix == ".tif")
    with pytest.raises(UsageError, match=rf"deep\d+.tif has more than 8 bits a channel \(mode {mode}\)"):
        found.train(deep)
