"""What the files of transformers and peft call what a run has trained. Pure."""

import re
from collections.abc import Collection, Iterable

from diloco.pipeline.errors import UsageError

METHODS = {"LORA": "lora_", "IA3": "ia3_", "LOHA": "hada_", "LOKR": "lokr_"}
"""peft's kinds of adapters whose files are known here, and how the names of their parameters begin."""
_ANY = "|".join(METHODS.values())
_OF_METHOD = re.compile(rf"(?P<module>.+)\.(?P<what>({_ANY})\w+)\.(?P<adapter>[^.]+)(?P<rest>\.weight)?")
_BESIDE = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)(?P<rest>\..+)")
"""A module that is trained whole beside the adapter."""
_ROOT = "base_model.model."
_DORA = "lora_magnitude_vector"
MOST_NAMED = 5
DEEPEST = 4
"""Modules around a model are fewer than this."""


def some(names: Collection[str]) -> str:
    """The first of them, for a message."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(sorted(names)[:MOST_NAMED]) + more


def has_adapter(names: Iterable[str]) -> bool:
    """Whether one of a run's tensors is an adapter's."""
    return any(_OF_METHOD.fullmatch(name) for name in names)


def adapter_names(trained: Collection[str], kind: str) -> dict[str, str]:
    """The tensors of an adapter: name in the run -> name in peft's file, which has the adapter's own name nowhere.

    kind: `peft_type` of adapter_config.json.

    Raises:
        UsageError: an unknown kind, several adapters, or a tensor that is no part of one.
    """
    if kind not in METHODS:
        raise UsageError(
            f"peft_type {kind!r} is not known here, only {', '.join(METHODS)}. In the training program, "
            "learner.load_globals() and then the model's save_pretrained() write it"
        )
    found, adapters, strange = dict[str, str](), set[str](), []
    for name in trained:
        match = _OF_METHOD.fullmatch(name) or _BESIDE.fullmatch(name)
        if match is None or not match.groupdict().get("what", METHODS[kind]).startswith(METHODS[kind]):
            strange.append(name)
            continue
        adapters.add(match["adapter"])
        what = match.groupdict().get("what")
        # As peft has kept it since DoRA's vector was a plain parameter.
        rest = "" if what == _DORA else match["rest"] or ""
        saved = ".".join(part for part in (match["module"], what) if part) + rest
        found[name] = _ROOT + saved.rpartition(_ROOT)[2]
    if strange:
        raise UsageError(f"trained, and no part of a {kind} adapter's file: {some(strange)}")
    if len(adapters) > 1:
        raise UsageError(f"the run has trained several adapters ({some(adapters)}): a folder holds one")
    return found


def names_in(theirs: Collection[str], ours: Collection[str]) -> dict[str, str]:
    """Which of a folder's tensors is which of a run's: name in the run -> in the folder, of those that are there.

    The run's may have a prefix that the folder's have not: of a module that was around the model in training, or of the
    base model ("transformer.h.0" where the folder has "h.0").
    """
    prefixes = {"".join(f"{part}." for part in name.split(".")[:depth]) for name in ours for depth in range(DEEPEST)}

    def fitting(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in theirs for name in ours if name.startswith(prefix))

    prefix = max(sorted(prefixes), key=fitting, default="")
    return {name: there for name in ours if (there := name.removeprefix(prefix)) in theirs}
