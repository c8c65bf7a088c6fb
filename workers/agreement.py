"""What a learner and its run must agree on, and how a difference is told. Pure."""

from pipeline.errors import SpecMismatch
from pipeline.messages import Spec


def compare(spec: Spec, held: Spec) -> None:
    """Compare this learner's spec with the run's.

    Raises:
        SpecMismatch: showing what differs.
    """
    if spec == held:
        return
    lines = [
        f"  {part}.{name}: here {mine.get(name)!r}, the run has {theirs.get(name)!r}"
        for part, mine, theirs in (
            ("sync", spec.sync.model_dump(), held.sync.model_dump()),
            ("trainer", spec.trainer, held.trainer),
        )
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    ours, runs = ({t.name: t for t in s.tensors} for s in (spec, held))
    for name in sorted({*ours, *runs}):
        if ours.get(name) != runs.get(name):
            described = [
                f"{list(t.shape)} {t.dtype} fragment {t.fragment}" if t else "absent"
                for t in (ours.get(name), runs.get(name))
            ]
            lines.append(f"  tensor {name}: here {described[0]}, the run has {described[1]}")
    more = f"\n  ... and {len(lines) - 20} more" if len(lines) > 20 else ""
    raise SpecMismatch(
        "this learner and the run disagree:\n" + "\n".join(lines[:20]) + more + "\n"
        "Give all learners the same model and settings, or choose another run name."
    )
