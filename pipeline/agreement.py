"""Comparison of two specs of one run, or of a party's settings with the run's spec, in words. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from diloco.pipeline.errors import SpecMismatch
from diloco.pipeline.messages.spec import Spec, TensorSpec
from diloco.pipeline.settings import Settings

S = TypeVar("S", bound=Settings)

# The most differences that are listed.
MAX_LISTED = 20
# The most characters of a value that are shown.
MAX_SHOWN = 500


def shown(value: Any) -> str:
    """Return a value as a message shows it, not at any length."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


def differences(here: Spec, held: Spec) -> str:
    """Return one line for each difference, at most `MAX_LISTED`; "" if there is none. `held` is the run's spec."""
    lines = [
        f"  {part}.{name}: here {shown(mine.get(name))}, the run has {shown(theirs.get(name))}"
        for part, mine, theirs in (
            ("sync", here.sync.model_dump(), held.sync.model_dump()),
            ("trainer", here.trainer, held.trainer),
        )
        for name in sorted({*mine, *theirs})
        if mine.get(name) != theirs.get(name)
    ]
    ours, runs = _by_name(here.tensors), _by_name(held.tensors)
    for name in sorted({*ours, *runs}):
        if ours.get(name) != runs.get(name):
            told = (_described(ours.get(name, ())), _described(runs.get(name, ())))
            lines.append(f"  tensor {name}: here {told[0]}, the run has {told[1]}")
    if ours == runs and here.tensors != held.tensors:  # the order counts: it is the order of a fragment's elements
        mine, theirs = next((a.name, b.name) for a, b in zip(here.tensors, held.tensors, strict=True) if a != b)
        lines.append(f"  order of the tensors: here {mine!r} where the run has {theirs!r}")
    lines += _frozen(here, held)
    more = [f"  ... and {len(lines) - MAX_LISTED} more"] if len(lines) > MAX_LISTED else []
    return "\n".join([*lines[:MAX_LISTED], *more])


def _by_name(tensors: Iterable[TensorSpec]) -> dict[str, list[TensorSpec]]:
    """Group the parts of each tensor by its name."""
    found: dict[str, list[TensorSpec]] = {}
    for tensor in tensors:
        found.setdefault(tensor.name, []).append(tensor)
    return found


def _described(parts: Sequence[TensorSpec]) -> str:
    if not parts:
        return "absent"
    one, many = parts[0], len(parts) > 1
    where = f"fragment{'s' * many} {', '.join(str(part.fragment) for part in parts)}"
    return f"{list(one.shape)} {one.dtype} {where}, {one.rule}{', a matrix' * one.matrix}"


def _frozen(here: Spec, held: Spec) -> list[str]:
    """Return the differences in the frozen parameters; none if the run has not agreed on any."""
    if not held.frozen and None in (held.frozen, here.frozen):
        return []
    if here.frozen is None:
        return ["  same_frozen: here False, the run has True, as set by its first learner"]
    ours, runs = dict(here.frozen), dict(held.frozen or ())
    differing = [name for name in sorted({*ours, *runs}) if ours.get(name) != runs.get(name)]

    def how(name: str) -> str:
        if name in ours and name in runs:
            return "values, shape or precision differ from the run's"
        return "the run has none" if name in ours else "absent here"

    return [f"  frozen tensor {name}: {how(name)}" for name in differing]


THE_RUN = "the run"
# The `who` of `agree` while a run has no spec: the syncer that waits for the first learner may have set its length.
WAITING_SYNCER = "a waiting syncer"


def agree(settings: S, spec: Mapping[str, Any], kind: type[Settings], who: str = THE_RUN) -> S:
    """Return settings with the spec's values in all fields of `kind` (SyncSettings or TrainerSettings).

    A field that was set explicitly must have the spec's value; all others take it. `who` names where these values are
    from.

    Raises:
        SpecMismatch: fields differ; the message lists each with both values.
    """
    names = [name for name in kind.model_fields if name in spec]
    differing = {
        name: f"  {name}: here {shown(getattr(settings, name))}, {who} has {shown(spec[name])}"
        for name in names
        if name in settings.model_fields_set and getattr(settings, name) != spec[name]
    }
    if differing:
        follow = f"Leave these settings out to follow {who}; to use them, begin a new run under a different name"
        if "tokens" in differing and who == THE_RUN:
            follow += ". To train a finished run longer, run `diloco runs extend RUN --tokens N`"
        raise SpecMismatch(f"this party and {who} disagree:\n" + "\n".join(differing.values()) + f"\n{follow}.")
    return settings.model_copy(update={name: spec[name] for name in names})
