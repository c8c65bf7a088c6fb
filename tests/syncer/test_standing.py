"""Who disagrees with all others again and again is known after some windows, and nobody else is."""

import time

import ml_dtypes
import numpy as np
import pytest

from diloco.pipeline.messages.wire import MAX_LEARNERS
from diloco.pipeline.payload import quantize
from diloco.syncer.standing import (
    LATELY,
    LEAST,
    RUN,
    SAMPLE,
    SAMPLES_BYTES,
    Standings,
    agreements,
    gram,
    places,
    sample_of,
)

ELEMENTS = 4000


def window(chance: np.random.Generator, honest: int, *others: str, noise: float = 1.5) -> list[np.ndarray]:
    """Deltas that have a part in common, and after them others that are something else."""
    common = chance.standard_normal(ELEMENTS)

    def one() -> np.ndarray:
        return common + noise * chance.standard_normal(ELEMENTS)

    kinds = {
        "flipped": lambda: -one(),
        "flipped-3": lambda: -3 * one(),
        "random": lambda: (1 + noise) * chance.standard_normal(ELEMENTS),
        "honest": one,
    }
    return [one() for _ in range(honest)] + [kinds[kind]() for kind in others]


def names(count: int) -> list[str]:
    return [f"l{number}" for number in range(count)]


def found(deltas: list[np.ndarray]) -> dict[str, float | None]:
    values = agreements(gram([d.astype(np.float32) for d in deltas], places(ELEMENTS, 0)))
    return dict(zip(names(len(deltas)), values, strict=True))


def windows_until(standings: Standings, honest: int, *others: str, windows: int = 100, seed: int = 0) -> int | None:
    """After how many windows all of the others are at odds; nobody else ever is."""
    chance, bad = np.random.default_rng(seed), {f"l{honest + number}" for number in range(len(others))}
    for number in range(1, windows + 1):
        standings.observe(found(window(chance, honest, *others)))
        assert standings.at_odds <= bad
        if others and standings.at_odds == bad:
            return number
    return None


@pytest.mark.parametrize(
    ("honest", "others", "most"),
    [
        (2, ("flipped",), 8),
        (3, ("flipped",), 8),
        (7, ("flipped",), 8),
        (7, ("flipped-3",), 8),
        (7, ("random",), 40),
        (3, ("random",), 40),
        (3, ("flipped", "flipped"), 10),
        (5, ("flipped", "flipped", "flipped"), 10),
        (5, ("flipped-3", "flipped-3"), 10),
    ],
)
def test_a_minority_that_disagrees_is_at_odds_within_some_windows(
    honest: int, others: tuple[str, ...], most: int
) -> None:
    """Whatever it sends, and also if its members send alike."""
    taken = windows_until(Standings(), honest, *others)
    assert taken is not None
    assert taken <= most


@pytest.mark.parametrize("honest", [3, 4, 8, 16])
def test_learners_that_agree_a_little_are_never_at_odds(honest: int) -> None:
    chance, standings = np.random.default_rng(honest), Standings()
    for _ in range(100):
        standings.observe(found(window(chance, honest, noise=3.0)))
    assert min(standings.of(name) for name in names(honest)) > 0.5
    assert not standings.at_odds


def test_of_two_nobody_is_judged() -> None:
    standings = Standings()
    assert windows_until(standings, 1, "flipped") is None
    assert standings.of("l0") == standings.of("l1") == 1.0


def test_where_nobody_agrees_nobody_is_judged() -> None:
    """Deltas without anything in common: the one that has some luck is no measure of the others."""
    chance, standings = np.random.default_rng(0), Standings()
    for _ in range(100):
        standings.observe(found(window(chance, 0, *["random"] * 6)))
    assert not standings.at_odds


def test_half_of_the_learners_cannot_put_the_other_half_at_odds() -> None:
    """Nor can a majority that is seen in other windows: fewer than half of all known ones are ever at odds."""
    standings = Standings()
    for chance in (np.random.default_rng(n) for n in range(60)):
        standings.observe(found(window(chance, 3, "flipped", "flipped", "flipped")))
        assert len(standings.at_odds) <= 2
    others = Standings()
    for n in range(40):
        for bad in range(4):  # each window has another one that three agree against
            told = dict.fromkeys(names(4), 0.5) | {f"l{bad}": -0.5}
            others.observe(told if n % 2 else dict(reversed(told.items())))
    assert len(others.at_odds) <= 1


def test_who_agrees_again_comes_back_but_not_at_once() -> None:
    standings, chance = Standings(), np.random.default_rng(0)
    assert windows_until(standings, 4, "flipped") is not None
    back = 0
    while "l4" in standings.at_odds:
        standings.observe(found(window(chance, 5)))
        back += 1
        assert back < 100
    assert back > 3


def test_who_is_honest_two_times_of_three_is_at_odds_all_the_same() -> None:
    standings, chance, low = Standings(), np.random.default_rng(0), 0
    for number in range(120):
        standings.observe(found(window(chance, 7, "honest" if number % 3 else "flipped")))
        low += number >= 60 and standings.at_odds == {"l7"}
    assert low > 40


def test_a_delta_of_zeros_and_too_few_others_tell_nothing() -> None:
    chance = np.random.default_rng(0)
    deltas = [*window(chance, LEAST - 1), np.zeros(ELEMENTS)]
    assert found(deltas) == dict.fromkeys(names(LEAST))
    some = found([*window(chance, LEAST), np.zeros(ELEMENTS)])
    assert some[f"l{LEAST}"] is None
    assert all(some[name] is not None for name in names(LEAST))


def one_by_one(products: np.ndarray) -> list[float]:
    """The agreements as their docstring says them, of deltas of which none is zero."""
    lengths, told = np.sqrt(np.diag(products)), []
    cosines = products / np.outer(lengths, lengths)
    for m in range(len(lengths)):
        others = [other for other in range(len(lengths)) if other != m]
        mean = np.sqrt(cosines[np.ix_(others, others)].sum())
        with_half = np.sort(cosines[m, others])[len(others) // 2]
        told.append(float(np.clip(max(cosines[m, others].sum() / mean, with_half), -1, 1)))
    return told


@pytest.mark.parametrize("count", [3, 4, 9, 40])
def test_agreements_are_those_of_each_delta_with_all_others(count: int) -> None:
    chance = np.random.default_rng(count)
    products = gram(window(chance, count - 1, "flipped-3"), None)
    assert agreements(products) == pytest.approx(one_by_one(products), abs=1e-12)


def test_others_that_add_up_to_nothing_agree_with_nobody() -> None:
    """What rounding leaves of their sum is no direction."""
    up, right = np.random.default_rng(0).standard_normal((2, ELEMENTS))
    told = agreements(gram([right, up, -up], None))
    assert told[0] == pytest.approx(0.0, abs=0.1), "the cosine that half of the others have with it"


def test_the_agreements_of_a_thousand_deltas_take_no_seconds() -> None:
    """Nor gigabytes: the more deltas, the smaller the sample of each."""
    count = 1024
    deltas = np.random.default_rng(0).standard_normal((count, 2000)) + 1
    products, began = gram(list(deltas), None), time.process_time()
    assert len(agreements(products)) == count
    assert time.process_time() - began < 1.5
    assert sample_of(8) == SAMPLE
    for many in (129, 1000, MAX_LEARNERS):
        assert 0 < 8 * many * sample_of(many) <= SAMPLES_BYTES
        at = places(10 * SAMPLE, 0, sample_of(many))
        assert at is not None
        assert len(at) == sample_of(many) // RUN


def test_a_sample_tells_what_all_of_a_delta_tells() -> None:
    """In bf16 too, and whatever the seed; each seed looks elsewhere, and at all parts of the fragment."""
    elements, chance = 10 * SAMPLE, np.random.default_rng(0)
    common = chance.standard_normal(elements, np.float32)
    deltas = [common + 2 * chance.standard_normal(elements, np.float32) for _ in range(4)]
    exact = agreements(gram(deltas, None))
    at = [places(elements, seed) for seed in range(4)]
    for one in at:
        assert one is not None
        assert len(one) == SAMPLE // RUN
        assert np.diff(one).max() < 2 * elements // SAMPLE
        assert agreements(gram(deltas, one)) == pytest.approx(exact, abs=0.02)
    assert not np.array_equal(at[0], at[1])
    narrow = [delta.astype(ml_dtypes.bfloat16) for delta in deltas]
    coded = [quantize.Quantized(quantize.encode(delta, "int8"), elements, "int8") for delta in deltas]
    for wire in (narrow, coded):
        assert agreements(gram(wire, at[0])) == pytest.approx(agreements(gram(deltas, at[0])), abs=0.01)
    assert places(SAMPLE, 3) is None


def test_what_is_remembered_is_bounded() -> None:
    standings = Standings()
    told = {f"n{number}": 0.5 if number % 3 else -0.5 for number in range(MAX_LEARNERS + 50)}
    standings.observe(told)
    assert standings.of("n0") == 1.0
    last = max(number for number in range(len(told)) if not number % 3)
    assert standings.of(f"n{last}") < 1.0
    for number in range(LATELY):
        standings.observe({f"m{number}": 0.5})
    assert len(standings._seen) == LATELY


def test_zeros_are_at_odds_as_noise_is_where_others_agree() -> None:
    standings, chance, taken = Standings(), np.random.default_rng(0), 0
    while "l4" not in standings.at_odds:
        standings.observe(found([*window(chance, 4), np.zeros(ELEMENTS)]))
        taken += 1
        assert taken <= 40
    assert taken == 23
    assert standings.at_odds == {"l4"}


def test_zeros_tell_nothing_where_all_send_them_or_nobody_agrees() -> None:
    """A fragment that is frozen for all; and one in which all pull their own way."""
    standings, chance = Standings(), np.random.default_rng(0)
    for _ in range(60):
        standings.observe(found([np.zeros(ELEMENTS)] * 5))
        standings.observe(found([*window(chance, 0, *["random"] * 4), np.zeros(ELEMENTS)]))
    assert {standings.of(name) for name in names(5)} == {1.0}


def test_two_of_seven_cannot_frame_one_whom_they_meet_alone() -> None:
    """Every other window has the two and one of the honest, whom they pull against."""
    standings, chance = Standings(), np.random.default_rng(0)
    for _ in range(60):
        standings.observe(found(window(chance, 7)))
        a, b, victim = window(chance, 0, "flipped", "flipped", "honest")
        met = agreements(gram([a, a + 0.01 * b, -a + 0.01 * victim], None))
        assert met[2] is not None
        assert met[2] < -0.5, "alone they would frame it"
        standings.observe(dict(zip(("l5", "l6", "l0"), met, strict=True)))
        assert not standings.at_odds
    assert standings.of("l0") > 0.5


def test_the_three_that_are_left_judge_once_the_others_were_not_seen_for_a_while() -> None:
    standings, chance = Standings(), np.random.default_rng(0)
    standings.observe(found(window(chance, 8)))
    assert (taken := windows_until(standings, 2, "flipped")) is not None
    assert LATELY <= taken < LATELY + 10


def test_names_that_have_left_do_not_raise_how_many_may_be_at_odds() -> None:
    standings, chance = Standings(), np.random.default_rng(0)
    for n in range(20):
        standings.observe({f"old{n}-{i}": 0.5 for i in range(3)})
    for n in range(LATELY + 60):
        told = dict.fromkeys(names(4), 0.5) | {f"l{n % 4}": -0.5}  # each window has another one that three are against
        standings.observe(told if chance.random() < 0.5 else dict(reversed(told.items())))
        if n >= LATELY:
            assert len(standings.at_odds) <= 1


def test_who_was_at_odds_and_stays_away_is_so_when_it_comes_back() -> None:
    standings, chance = Standings(), np.random.default_rng(0)
    assert windows_until(standings, 4, "flipped") is not None
    for _ in range(LATELY + 5):
        standings.observe(found(window(chance, 4)))
    assert standings.at_odds == {"l4"}
