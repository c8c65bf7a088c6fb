"""From a failing seed to the few faults that matter: delta debugging over the faults that struck."""

from collections.abc import Callable

from tests.world.world import Result, run_seed

RUNS = 150
"""Worlds that shrinking may run."""


def shrink(seed: int, progress: Callable[[int, int], None] = lambda left, runs: None) -> Result:
    """The seed's world with as few faults as still break the same promise; its trace is that of the short world.

    Args:
        seed: one that fails.
        progress: told how many faults are left, and how many worlds were run.

    Returns:
        The result of the smallest failing world found; `struck` are its faults.
    """
    found = run_seed(seed, traced=True)
    runs = 1

    def fails(only: frozenset[str]) -> Result | None:
        nonlocal runs
        runs += 1
        result = run_seed(seed, only=only, traced=True)
        same = result.violation is not None and found.violation is not None
        return result if same and result.violation.promise == found.violation.promise else None  # type: ignore[union-attr]

    if found.violation is None:
        return found
    parts = 2
    while len(found.struck) > 1 and runs < RUNS:
        ids = sorted(found.struck)
        size = -(-len(ids) // parts)
        for start in range(0, len(ids), size):
            smaller = fails(frozenset(ids[:start] + ids[start + size :]))
            if smaller is not None and len(smaller.struck) < len(ids):
                found, parts = smaller, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(ids))
        progress(len(found.struck), runs)
    return found
