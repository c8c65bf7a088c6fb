"""Promises about optimizers of other packages: each does as its stand-in in `tests/workers/odd_optimizers.py`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers import test_all_optimizers as promises
from tests.workers.test_all_optimizers import FRESH, Large, Sized

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.trainers,
    pytest.mark.filterwarnings("default"),  # of libraries that are not ours
]
FREE = ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeReference")
REAL = [
    *(("torchao.optim", name, kind) for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8") for kind in (Large, Sized)),
    *(("schedulefree", name, Sized) for name in FREE),
]


def in_the_table(monkeypatch: pytest.MonkeyPatch, package: str, name: str, kind: type[Any]) -> None:
    found = pytest.importorskip(package, reason="it comes with the extra `trainers`")
    rate = 0.05 if name.startswith("SGD") else 0.005
    made = (lambda parameters: getattr(found, name)(parameters, lr=rate), kind, FRESH)
    monkeypatch.setattr(promises, "TABLE", {name: made})
    monkeypatch.setattr(promises, "UNDO", set(FREE))


@pytest.mark.parametrize(("package", "name", "kind"), REAL)
def test_a_real_one_trains_and_begins_fresh_or_is_refused_as_its_stand_in(
    package: str, name: str, kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_table(monkeypatch, package, name, kind)
    promises.test_each_trains_and_keeps_what_it_adopts_or_is_refused_by_name(name)
    promises.test_each_comes_back_from_its_folder_to_the_last_bit_or_fresh_and_says_so(name, tmp_path)


@pytest.mark.parametrize("name", FREE)
def test_a_schedule_free_one_keeps_what_it_adopts_with_what_the_page_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_table(monkeypatch, "schedulefree", name, Sized)
    promises.test_one_that_goes_on_from_a_copy_keeps_what_it_adopts_once_the_copy_follows(name, torch.float32, "z")
