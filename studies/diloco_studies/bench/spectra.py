"""What orthogonalised steps leave of spectra that fall as powers; `python -m diloco_studies.bench.spectra`. Pure.

The k-th singular value of a matrix of n x n is k^-power. Printed are, after the step and beside their root mean square,
the largest one, the median, the share below 0.3, and the cosine between the step and the nearest orthogonal matrix.
"""

from collections.abc import Callable, Mapping

import numpy as np

from diloco.syncer.algorithm import Float64, halley_values, newton_schulz

STEPS: Mapping[str, Callable[[Float64], Float64]] = {
    "five Newton-Schulz iterations": newton_schulz,
    "three": lambda values: newton_schulz(values, 3),
    "one of Halley's": halley_values,
}
SIDES, POWERS = (96, 768, 2048, 4096), (0.5, 0.75, 1.0)


def left_of(turned: Float64) -> tuple[float, float, float, float]:
    """The four figures, of singular values (n,) after a step."""
    beside = turned / np.sqrt(np.mean(turned**2))
    return float(beside.max()), float(np.median(beside)), float(np.mean(beside < 0.3)), float(beside.mean())


def rows() -> list[str]:
    """A Markdown table."""
    found = ["| n | power | step | largest | median | below 0.3 | cosine |", "|---|---|---|---|---|---|---|"]
    for side in SIDES:
        for power in POWERS:
            for name, step in STEPS.items():
                largest, median, low, cosine = left_of(step(np.arange(1.0, side + 1) ** -power))
                found.append(f"| {side} | {power} | {name} | {largest:.2f} | {median:.2f} | {low:.0%} | {cosine:.3f} |")
    return found


if __name__ == "__main__":
    print("\n".join(rows()))
