"""Map the names of a run's tensors to their names in the files of transformers and peft. Pure."""

import re
from collections.abc import Collection, Iterable

from diloco.pipeline.errors import UsageError

# Kinds of peft's adapters whose files are known here -> prefix of the names of their parameters.
METHODS = {"LORA": "lora_", "IA3": "ia3_", "LOHA": "hada_", "LOKR": "lokr_"}
_ANY = "|".join(METHODS.values())
_OF_METHOD = re.compile(rf"(?P<module>.+)\.(?P<what>({_ANY})\w+)\.(?P<adapter>[^.]+)(?P<rest>\.weight)?")
# A parameter of a module that is trained whole, in addition to the adapter.
_BESIDE = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)(?P<rest>\..+)")
_ROOT = "base_model.model."
_DORA = "lora_magnitude_vector"
MAX_NAMED = 5
# A model is inside fewer wrapping modules than this; each adds a part to the names of its tensors.
DEEPEST = 4


def some(names: Collection[str]) -> str:
    """Return the first names and the number of the others, for a message."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(sorted(names)[:MAX_NAMED]) + more


def has_adapter(names: Iterable[str]) -> bool:
    """Return whether any of a run's tensors belongs to an adapter."""
    return any(_OF_METHOD.fullmatch(name) for name in names)


def adapter_names(trained: Collection[str], kind: str) -> dict[str, str]:
    """Map the tensors of an adapter: name in the run -> name in peft's file, which leaves out the adapter's own name.

    kind: `peft_type` of adapter_config.json.

    Raises:
        UsageError: the kind is unknown, there are several adapters, or a tensor is not part of an adapter.
    """
    if kind not in METHODS:
        raise UsageError(
            f"peft_type {kind!r} is not supported here ({', '.join(METHODS)} are). In the training program, call "
            "learner.load_globals() and then the model's save_pretrained() to write it"
        )
    found, adapters, strange = dict[str, str](), set[str](), []
    for name in trained:
        match = _OF_METHOD.fullmatch(name) or _BESIDE.fullmatch(name)
        if match is None or not match.groupdict().get("what", METHODS[kind]).startswith(METHODS[kind]):
            strange.append(name)
            continue
        adapters.add(match["adapter"])
        what = match.groupdict().get("what")
        # peft's files name DoRA's vector without ".weight", as when it was a plain parameter.
        rest = "" if what == _DORA else match["rest"] or ""
        saved = ".".join(part for part in (match["module"], what) if part) + rest
        found[name] = _ROOT + saved.rpartition(_ROOT)[2]
    if strange:
        raise UsageError(f"trained, but not part of a {kind} adapter's file: {some(strange)}")
    if len(adapters) > 1:
        raise UsageError(f"the run has trained several adapters ({some(adapters)}), but a folder holds only one")
    return found


def names_in(theirs: Collection[str], ours: Collection[str]) -> dict[str, str]:
    """Match the tensors of a run and a folder: name in the run -> name in the folder, for those that the folder has.

    The names in the run may have one prefix more: of a module that wrapped the model in training, or of the base model
    ("transformer.h.0" where the folder has "h.0").
    """
    prefixes = {"".join(f"{part}." for part in name.split(".")[:depth]) for name in ours for depth in range(DEEPEST)}

    def fitting(prefix: str) -> int:
        return sum(name.removeprefix(prefix) in theirs for name in ours if name.startswith(prefix))

    prefix = max(sorted(prefixes), key=fitting, default="")
    return {name: there for name in ours if (there := name.removeprefix(prefix)) in theirs}
