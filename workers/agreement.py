"""What a learner and its run must agree on, and how a difference is told. Pure."""

from pipeline.errors import SpecMismatch
from pipeline.messages import Spec


def compare(spec: Spec, held: Spec) -> None:
    """Compare this learner's spec with the run's.

    Raises:
        SpecMismatch: showing what differs.
    """
    frozen = _frozen(spec, held)
    if not frozen and spec.model_copy(update={"frozen": held.frozen}) == held:
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
    lines += frozen
    more = f"\n  ... and {len(lines) - 20} more" if len(lines) > 20 else ""
    raise SpecMismatch(
        "this learner and the run disagree:\n" + "\n".join(lines[:20]) + more + "\n"
        "Give all learners the same model and settings, or choose another run name."
        + " If frozen tensors differ on purpose, say same_frozen=False in all learners of a new run."
        * bool(frozen)
    )


def _frozen(spec: Spec, held: Spec) -> list[str]:
    """What differs in the frozen parameters; nothing where the run has not agreed on any."""
    if not held.frozen and None in (held.frozen, spec.frozen):
        return []
    if spec.frozen is None:
        return ["  same_frozen: here False, the run has True, as its first learner said"]
    ours, runs = dict(spec.frozen), dict(held.frozen or ())
    differing = [name for name in sorted({*ours, *runs}) if ours.get(name) != runs.get(name)]

    def how(name: str) -> str:
        if name in ours and name in runs:
            return "other values, shape or precision than the run's"
        return "the run has none" if name in ours else "absent here"

    return [f"  frozen tensor {name}: {how(name)}" for name in differing]
