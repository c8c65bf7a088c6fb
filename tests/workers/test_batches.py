"""A `batch_sampler` from the work queue, in torch's own loader: each index once, acknowledged when it is trained on."""

import threading
from typing import Any

import pytest

from diloco.pipeline.errors import UsageError
from diloco.workers.batches import whole_number
from diloco.workers.permutation import permuted
from tests.workers.fed import SEED, Fed

LOADERS: list[dict[str, Any]] = [
    {},
    {"num_workers": 2, "multiprocessing_context": "fork"},
    {"num_workers": 2, "multiprocessing_context": "fork", "prefetch_factor": 5, "persistent_workers": True},
]
NAMES = ["no workers", "fork", "fork, persistent"]
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


@pytest.fixture(params=LOADERS, ids=NAMES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


@pytest.mark.parametrize(("length", "batch_size", "per_shard"), [(48, 4, 12), (50, 4, 12), (50, 7, 10), (3, 8, 64)])
def test_each_index_of_each_epoch_is_trained_once(
    length: int, batch_size: int, per_shard: int, options: dict[str, Any]
) -> None:
    """Also where a batch does not divide the data, or is larger: batches are full, and go on in the next epoch."""
    fed = Fed(length, batch_size, per_shard=per_shard)
    loader = fed.loader(**options)
    for _ in range(3):
        batches = 0
        for batch in loader:
            assert len(batch) == batch_size
            batches += 1
            fed.step(batch)
        assert batches == len(loader) == len(fed.sampler) == -(-length // batch_size)
    assert fed.acknowledged == len(fed.trained) == 3 * batches * batch_size
    epochs = [fed.trained[i : i + length] for i in range(0, len(fed.trained) - length + 1, length)]
    assert all(sorted(epoch) == list(range(length)) for epoch in epochs)
    assert length < 10 or epochs[0] != epochs[1], "each epoch has its own order"


def test_nothing_is_acknowledged_before_a_step_has_trained_it(options: dict[str, Any]) -> None:
    fed = Fed(400, 4, per_shard=8)
    trained = 0
    for batch in fed.loader(**options):
        assert fed.acknowledged == trained
        fed.step(batch)
        trained += 4
        assert fed.acknowledged == trained
        if trained == 120:
            break
    assert len(fed.drawn) >= len(fed.finished) == 15


@pytest.mark.parametrize("length", [96, 100, 7])
def test_a_pass_has_whole_steps_of_several_batches(length: int, options: dict[str, Any]) -> None:
    fed = Fed(length, 4, accumulate=4)
    for _ in range(3):
        batches = list(fed.loader(**options))
        assert len(batches) == len(fed.sampler) == 4 * -(-length // 16)
        for at in range(0, len(batches), 4):
            fed.step(*batches[at : at + 4])
        assert fed.acknowledged == len(fed.trained)


def test_a_loop_that_breaks_off_is_given_again_what_it_has_not_trained(options: dict[str, Any]) -> None:
    """Each index is trained once, however often the loader is begun anew."""
    fed = Fed(60, 4, per_shard=20)
    loader = fed.loader(**options)
    for steps in (3, 0, 1, 7, 4):
        for made, batch in enumerate(loader):
            if made == steps:
                break
            fed.step(batch)
        assert fed.acknowledged == len(fed.trained)
    assert sorted(fed.trained) == list(range(60))


def test_a_pass_that_ends_untrained_is_given_again() -> None:
    """A look at all of the data (to count its tokens, say) takes nothing from the run."""
    fed = Fed(32, 4)
    seen = [int(at) for batch in fed.loader() for at in batch]
    assert fed.acknowledged == 0
    for batch in fed.loader():
        fed.step(batch)
    assert fed.trained == seen


def test_two_passes_at_once_are_refused() -> None:
    fed = Fed(40, 4)
    first, second = iter(fed.sampler), iter(fed.sampler)
    assert next(first)
    assert next(second)
    with pytest.raises(UsageError, match="an earlier pass continued after a newer one had started"):
        next(first)
    assert next(second)


def test_without_the_queue_the_loop_goes_on_with_what_it_had(options: dict[str, Any]) -> None:
    """What is read again is not acknowledged again; the queue is taken up when it is back."""
    fed = Fed(24, 4, per_shard=8)
    loader = fed.loader(**options)
    ahead = options.get("num_workers", 0) * options.get("prefetch_factor", 2)
    fed.cut_off = True
    for made, batch in enumerate(loader):
        fed.step(batch)
        if made == 3:
            break
    assert sorted(fed.finished) == ["1-0", "2-0"]
    for made, batch in enumerate(loader):
        fed.step(batch)
        if made == 5:
            break
    assert len(fed.trained) == 40
    assert set(fed.trained[16:]) <= set(fed.trained[:16])
    assert fed.acknowledged == 16
    fed.cut_off = False
    fed._claim()
    for _ in range(3 * (ahead + 6)):
        for batch in loader:
            fed.step(batch)
    assert set(fed.trained) == set(range(24))


def test_batches_are_drawn_where_they_are_trained() -> None:
    fed = Fed(40, 4)
    drawn: list[list[int]] = []
    thread = threading.Thread(target=lambda: drawn.append(next(iter(fed.sampler))))
    thread.start()
    thread.join()
    with pytest.raises(UsageError, match="a different thread"):
        fed.step(drawn[0])


def test_all_learners_have_the_same_permutation() -> None:
    one, other = Fed(1000, 10, per_shard=50), Fed(1000, 8, accumulate=3, per_shard=80)
    first = [at for batch in one.sampler for at in batch]
    assert first == [at for batch in other.sampler for at in batch][:1000]
    assert first == [permuted(at, 1000, b"/%d/0" % SEED) for at in range(1000)], "by the seed and the epoch"
    assert first != sorted(first)


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None, 2**60])
def test_an_argument_that_is_no_number_of_its_kind_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"batches\(\): batch_size=.*; pass a whole number from 1 to"):
        whole_number("batch_size", value)
