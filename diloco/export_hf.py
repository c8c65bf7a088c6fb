"""`diloco export --hf`: write a folder that transformers' or peft's `from_pretrained` loads, without these packages.

It needs no torch either. A folder of the user's supplies what a checkpoint does not hold: the config, the tokenizer and
the values of parameters that were not trained.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import typer
import xxhash

from diloco.export import Globals, make_folder, make_of_globals
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.json_object import read_object
from diloco.pipeline.files.scratch import move_into, scratch_folder
from diloco.pipeline.files.tensor_file import Tensor, read_tensors, write_tensors
from diloco.pipeline.messages.spec import frozen_head
from diloco.pipeline.payload.codec import as_bytes

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, ADAPTER_WEIGHTS = "model.safetensors", "adapter_model.safetensors"
INDEX = ".index.json"
# Suffixes of the files of a config or a tokenizer; only these are copied.
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
# Dtypes that a config can name -> their names in safetensors and their numpy types.
DTYPES: dict[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32),
    "bfloat16": ("BF16", ml_dtypes.bfloat16),
    "float16": ("F16", np.float16),
}
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


def export_hf(checkpoint: str | Path, out: Path, config: Path, overwrite: bool = False) -> None:
    """Write a folder like `save_pretrained` of transformers and peft does.

    Args:
        checkpoint: the checkpoint, as a path that `read_globals` takes.
        out: folder to write.
        config: folder with config.json, or with adapter_config.json for a run that trained an adapter. Parameters that
            the run has not trained are taken from the weights in it. Trained ones are written in the config's dtype, or
            in float32 if it has none; an adapter is written in float32.
        overwrite: replace files of the same names in `out`.

    Raises:
        UsageError: there is no sound checkpoint or no such config, the weights are another model's, or the values of a
            parameter are in neither.
    """
    make_of_globals(checkpoint, partial(_export, out=out, config=config, overwrite=overwrite))


def _export(found: Globals, out: Path, config: Path, overwrite: bool) -> None:
    adapter = (config / ADAPTER_CONFIG).is_file() and (has_adapter(found.tensors) or not (config / CONFIG).is_file())
    name, dtype, tensors = _adapter(found, config) if adapter else _model(found, config)
    _check_out(out, config, name, overwrite)
    make_folder(out.parent)
    try:
        with scratch_folder(out.parent) as temporary:
            for file in sorted(config.iterdir()):
                if file.is_file() and file.suffix in COPIED and not file.name.endswith(INDEX):
                    (temporary / file.name).write_bytes(file.read_bytes())
            write_tensors(temporary / name, tensors)
            move_into(temporary, out, last=ADAPTER_CONFIG if adapter else CONFIG)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error}") from error
    elements = sum(tensor.nbytes for tensor in found.tensors.values()) // 4
    own = len(tensors) - len(found.tensors)
    beside = f"; {own} more tensors from {config}" if own else ""
    typer.echo(f"{out}: {len(found.tensors)} tensors, {elements} elements, {found.origin}; as {dtype}{beside}")
    if not adapter and (others := _other_values(found, tensors)):
        typer.echo(
            f"warning: {some(others)} of {config} differ from the run's values, although the run has not trained "
            "them: unless they were quantized there, give the folder that the run started from",
            err=True,
        )


def _check_out(out: Path, config: Path, name: str, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: --hf writes a folder")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{out} is not empty: choose another name, or pass --overwrite")
    if out.resolve() == config.resolve():
        raise UsageError(f"{out} is the folder of --hf itself: choose a different output folder")
    others = [file.name for kind in ("*.safetensors", "*.bin", f"*{INDEX}") for file in out.glob(kind)]
    if others := [other for other in others if other != name]:
        raise UsageError(f"{out} holds other weights ({some(others)}): choose another folder")


# --- a model ----------------------------------------------------------------------------------------------


def _model(found: Globals, folder: Path) -> tuple[str, str, dict[str, Tensor]]:
    """Return the name of the file, its dtype, and its tensors: first the trained ones, then those of the folder."""
    config = read_object(folder / CONFIG)
    if has_adapter(found.tensors):
        raise UsageError(f"the run has trained an adapter: pass --hf the folder with its {ADAPTER_CONFIG}")
    if config.get("quantization_config"):
        raise UsageError(
            f"{folder / CONFIG} describes a quantized model: give the folder of the model in full precision"
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    if dtype not in DTYPES:
        raise UsageError(f"{folder / CONFIG}: dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    own = _own_weights(folder)
    there = names_in(own, [*found.tensors, *found.frozen])
    if own and not there:
        raise UsageError(
            f"the weights in {folder} belong to a different model: they have {some(list(own))}, but the run has "
            f"{some(list(found.tensors))}"
        )
    if missing := [name for name in found.frozen if name not in there]:
        raise UsageError(
            f"the run has not trained {some(missing)}, and {folder} lacks them: give the folder with the weights that "
            "the run started from"
        )
    tensors = {there.get(name, name): _trained(name, one, dtype) for name, one in found.tensors.items()}
    _check_shapes(tensors, own, folder)
    replaced, frozen = [own[name] for name in tensors if name in own], {there[name] for name in found.frozen}
    rest = {name: one for name, one in own.items() if name not in tensors}
    return WEIGHTS, dtype, tensors | {n: one for n, one in rest.items() if n in frozen or not _is_copy(one, replaced)}


def _other_values(found: Globals, tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the frozen parameters whose values in the run were not the written ones in any known dtype."""
    there = names_in(tensors, [*found.tensors, *found.frozen])
    return [name for name, digest in found.frozen.items() if digest not in _digests(tensors[there[name]])]


def _digests(tensor: Tensor) -> Iterator[bytes]:
    """Yield a tensor's digests as `workers.checks.frozen_digests` makes them, in its own dtype and in all others."""
    own = {stored: (name, kind) for name, (stored, kind) in DTYPES.items()}.get(tensor.dtype)
    if own is None:
        return
    values = np.frombuffer(tensor.read(), own[1])
    for name, kind in (own, *((name, kind) for name, (_, kind) in DTYPES.items())):
        with np.errstate(over="ignore"):
            one = as_bytes(values.astype(kind, copy=False))
        yield xxhash.xxh3_128_digest(frozen_head(tensor.shape, f"torch.{name}") + bytes(one))


def _own_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights in the folder of a config; empty if there are none."""
    if (index := folder / f"{WEIGHTS}{INDEX}").is_file():
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict) or not all(Path(str(file)).name == file for file in files.values()):
            raise UsageError(f"{index} does not say which weights are in which file")
        shards = {file: read_tensors(folder / file) for file in sorted(set(files.values()))}
        if missing := [name for name, file in files.items() if name not in shards[file]]:
            raise UsageError(f"{index} lists {some(missing)}, which its file does not have")
        return {name: shards[file][name] for name, file in files.items()}
    if (folder / WEIGHTS).is_file():
        return read_tensors(folder / WEIGHTS)
    if pickled := [file.name for file in folder.glob("*.bin")]:
        raise UsageError(f"{folder} has its weights in {some(pickled)}: save them as safetensors first")
    return {}


def _is_copy(one: Tensor, of: list[Tensor]) -> bool:
    """Return whether a matrix is a second copy of a tied one that is trained now: its old values would be wrong."""
    alike = [other for other in of if (other.shape, other.dtype) == (one.shape, one.dtype) and len(one.shape) > 1]
    return any(one.read() == other.read() for other in alike)


# --- an adapter -------------------------------------------------------------------------------------------


def _adapter(found: Globals, folder: Path) -> tuple[str, str, dict[str, Tensor]]:
    kind = str(read_object(folder / ADAPTER_CONFIG).get("peft_type"))
    names = adapter_names(found.tensors, kind)
    tensors = {names[name]: _trained(name, one, "float32") for name, one in found.tensors.items()}
    if (folder / ADAPTER_WEIGHTS).is_file():
        own = read_tensors(folder / ADAPTER_WEIGHTS)
        _check_shapes(tensors, own, folder)
        if missing := [name for name in own if name not in tensors]:
            raise UsageError(f"the adapter in {folder} has {some(missing)}, which the run did not train")
    return ADAPTER_WEIGHTS, "float32", tensors


# --- tensors ----------------------------------------------------------------------------------------------


def _trained(name: str, one: Tensor, dtype: str) -> Tensor:
    stored, kind = DTYPES[dtype]
    return Tensor(stored, one.shape, one.nbytes // 4 * np.dtype(kind).itemsize, _converted(name, one, kind))


def _converted(name: str, one: Tensor, kind: Any) -> Callable[[], Any]:
    def read() -> memoryview:
        with np.errstate(over="ignore"):
            values = np.frombuffer(one.read(), np.float32).astype(kind, copy=False)
        if kind is np.float16 and not np.isfinite(values).all():
            raise UsageError(
                f"{name} has values that do not fit in float16: set dtype in {CONFIG} to bfloat16 or float32"
            )
        return as_bytes(values)

    return read


def _check_shapes(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], folder: Path) -> None:
    for name, tensor in tensors.items():
        if name in own and own[name].shape != tensor.shape:
            raise UsageError(
                f"{name} is {list(tensor.shape)} in the run, but {list(own[name].shape)} in {folder}: it belongs to a "
                "different model"
            )


# --- names ----------------------------------------------------------------------------------------------


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
