"""A table of how far the learners of lab runs agreed, and who was at odds: `agreement` has what it says.

`python -m diloco_studies.quality.poison.table FILE.toml` prints it, of what was run of an experiment.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from diloco_studies.quality.experiment import read_experiment
from diloco_studies.quality.results.store import Store

FOLDER = Path("runs/lab")


def table(files: Sequence[Path], folder: Path = FOLDER) -> str:
    """Markdown: a line a run; of one that was not done, that."""
    lines = ["| run | seed | loss | usual cosine, early and late | least share | lowest standing | at odds | clipped |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for file in files:
        for row in read_experiment(file).rows:
            for run in row.runs:
                result = Store(folder).read(run, any_code=True)
                if result is None or "standing" not in result:
                    why = "not run" if result is None else "run by a build that did not note it"
                    lines.append(f"| {row.label} | {run.seed} | {why} | | | | | |")
                    continue
                who, standing = min(result["standing"].items(), key=lambda one: one[1])
                odds = ", ".join(
                    f"{learner}: {share:.0%} of merges, first after {result['first_at_odds'][learner]}"
                    for learner, share in result["at_odds"].items()
                )
                early, late = result["usual_cosine"]
                lines.append(
                    f"| {row.label} | {run.seed} | {result['final']['value']:.4f} | {early:.2f}, {late:.2f} | "
                    f"{result['least_share']:.2f} | {standing:.2f} ({who}) | {odds or 'nobody'} | {result['clipped']} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table([Path(name) for name in sys.argv[1:]]) + "\n")
