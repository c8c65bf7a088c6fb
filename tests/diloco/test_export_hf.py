"""Promises of `diloco export --hf`: names, numbers and files, without transformers. `test_hf_loads.py` loads them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import xxhash
from safetensors import safe_open

from diloco import cli
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.tensor_file import Tensor, read_tensors, write_tensors
from diloco.pipeline.messages.spec import TensorSpec
from diloco.pipeline.payload.codec import encode
from diloco.syncer.checkpoints import loading
from diloco.syncer.checkpoints.places import place_of
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, inline, run_virtual
from tests import samples
from tests.saving import save_checkpoint

Arrays = Mapping[str, np.ndarray]
RNG = np.random.default_rng(0)


def array(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


TRAINED = {"model.embed_tokens.weight": array(8, 4), "model.norm.weight": array(4)}
FROZEN = {"model.layers.0.mlp.weight": array(4, 4), "model.layers.0.norm.weight": np.ones(4, np.float32)}
DIGESTS = {
    name: xxhash.xxh3_128_digest(f"{values.shape} torch.float32".encode() + values.tobytes())
    for name, values in FROZEN.items()
}


def checkpoint(folder: Path, trained: Arrays, frozen: Mapping[str, bytes] | None = MappingProxyType({})) -> Path:
    """As a syncer leaves it. frozen: digests."""

    async def main() -> Path:
        tensors = tuple(
            TensorSpec(name=name, shape=one.shape, dtype="float32", rule="mean", fragment=0)
            for name, one in trained.items()
        )
        digests = None if frozen is None else tuple(frozen.items())
        sync = samples.sync_spec(fragments=1)
        spec = samples.spec().model_copy(update={"sync": sync, "tensors": tensors, "frozen": digests})
        bus = MemoryBus("r", VirtualClock())
        await bus.propose_spec(encode(spec))
        await bus.write_state(samples.run_state(tokens=900))
        flat = np.concatenate([one.reshape(-1) for one in trained.values()])
        await samples.commit(bus, 0, 3, flat, chunk_bytes=sync.chunk_bytes)
        return Path(str(await save_checkpoint(bus, spec, place_of(folder), inline)))

    return run_virtual(main())


def hf_folder(folder: Path, weights: Arrays | None = None, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("theirs")
    if weights is not None:
        safetensors.numpy.save_file(dict(weights), folder / "model.safetensors")
    return folder


def export(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    status = cli.main(["export", *map(str, arguments)])
    said = capsys.readouterr()
    return status, said.out + said.err


def loaded(folder: Path, name: str = "model.safetensors") -> dict[str, np.ndarray]:
    kinds = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
    tensors = read_tensors(folder / name).items()
    return {one: np.frombuffer(tensor.read(), kinds[tensor.dtype]).reshape(tensor.shape) for one, tensor in tensors}


def test_the_folder_has_weights_config_and_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says "pt", without which transformers loads nothing; what is neither config nor tokenizer stays behind."""
    saved, config = checkpoint(tmp_path / "saved", TRAINED), hf_folder(tmp_path / "config")
    status, said = export(capsys, saved, tmp_path / "new" / "out", "--hf", config)
    assert status == 0, said
    assert "2 tensors, 36 elements, trained on 900 tokens; as float32" in said.replace("1000", "900")
    out = tmp_path / "new" / "out"
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(file.name for file in out.parent.iterdir()) == ["out"]
    with safe_open(out / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        for name, values in TRAINED.items():
            np.testing.assert_array_equal(file.get_tensor(name), values)


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_numbers_have_the_configs_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, kind: Any, key: str
) -> None:
    saved, config = checkpoint(tmp_path / "saved", TRAINED), hf_folder(tmp_path / "config", **{key: dtype})
    status, said = export(capsys, saved, tmp_path / "out", "--hf", config)
    assert (status, f"as {dtype}" in said) == (0, True)
    found = loaded(tmp_path / "out")
    for name, values in TRAINED.items():
        assert found[name].dtype == kind
        np.testing.assert_array_equal(found[name], values.astype(kind))


def test_what_was_not_trained_comes_from_the_folder_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where it is in several files, in another type, and looks like what was trained; a buffer too. A second
    name of a trained matrix, as of a tied head, would bring back old values: it is left out."""
    old = {"model.embed_tokens.weight": array(8, 4), "model.norm.weight": FROZEN["model.layers.0.norm.weight"]}
    own = old | FROZEN | {"lm_head.weight": old["model.embed_tokens.weight"], "model.bias_of_router": array(3)}
    config = hf_folder(tmp_path / "config")
    names = list(own)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, some in files.items():
        safetensors.numpy.save_file({name: own[name] for name in some}, config / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (config / "model.safetensors.index.json").write_text(json.dumps(index))
    saved = checkpoint(tmp_path / "saved", TRAINED, DIGESTS)
    status, said = export(capsys, saved, tmp_path / "out", "--hf", config)
    assert status == 0, said
    assert f"3 more tensors from {config}" in said
    assert "warning" not in said
    found = loaded(tmp_path / "out")
    assert found.keys() == TRAINED.keys() | FROZEN.keys() | {"model.bias_of_router"}
    for name, values in (TRAINED | FROZEN | {"model.bias_of_router": own["model.bias_of_router"]}).items():
        np.testing.assert_array_equal(found[name], values)
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


def test_a_folder_may_name_its_tensors_without_the_models_prefix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As GPT-2's does; or the run's had a prefix, of a module around the model."""
    own = {name.removeprefix("model."): values for name, values in (TRAINED | FROZEN).items()}
    saved = checkpoint(tmp_path / "saved", TRAINED, DIGESTS)
    status, said = export(capsys, saved, tmp_path / "out", "--hf", hf_folder(tmp_path / "config", own))
    assert status == 0, said
    found = loaded(tmp_path / "out")
    assert found.keys() == own.keys()
    np.testing.assert_array_equal(found["norm.weight"], TRAINED["model.norm.weight"])


def test_what_is_nowhere_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Frozen parameters without a folder that has them."""
    saved = checkpoint(tmp_path / "saved", TRAINED, DIGESTS)
    lacking = TRAINED | {"model.layers.0.mlp.weight": FROZEN["model.layers.0.mlp.weight"]}
    for name, weights in (("bare", None), ("part", lacking)):
        status, said = export(capsys, saved, tmp_path / "out", "--hf", hf_folder(tmp_path / name, weights))
        assert status == 2
        assert "model.layers.0.norm.weight" in said
        assert "give the folder with the weights that the run started from" in said
        assert not (tmp_path / "out").exists()


def test_a_folder_of_another_base_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the digests of what was not trained; the same values in another type of numbers are the same."""
    saved, halves = checkpoint(tmp_path / "saved", TRAINED, DIGESTS), TRAINED | FROZEN
    halves |= {"model.layers.0.norm.weight": np.ones(4, np.float16)}
    status, said = export(capsys, saved, tmp_path / "a", "--hf", hf_folder(tmp_path / "same", halves))
    assert (status, "warning" in said) == (0, False)
    other = TRAINED | FROZEN | {"model.layers.0.mlp.weight": array(4, 4)}
    status, said = export(capsys, saved, tmp_path / "b", "--hf", hf_folder(tmp_path / "other", other))
    assert (status, "warning: model.layers.0.mlp.weight of" in said) == (0, True)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"weights": {"other.weight": array(2, 2)}}, "belong to a different model: they have other.weight"),
        ({"weights": TRAINED | {"model.norm.weight": array(5)}}, "model.norm.weight is [4] in the run, but [5] in"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"dtype": "float8"}, "dtype 'float8' is not one of float32"),
    ],
    ids=["other names", "other shape", "quantized", "unknown type"],
)
def test_a_folder_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], told: str
) -> None:
    saved = checkpoint(tmp_path / "saved", TRAINED)
    status, said = export(capsys, saved, tmp_path / "out", "--hf", hf_folder(tmp_path / "config", **given))
    assert (status, told in said) == (2, True), said
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config", "saved"]


def test_damaged_and_pickled_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, config = checkpoint(tmp_path / "saved", TRAINED), hf_folder(tmp_path / "config", TRAINED)
    weights = config / "model.safetensors"
    whole = weights.read_bytes()
    for broken in (b"", whole[:4], whole[:-1], b"\xff" * 64, (8).to_bytes(8, "little") + b"[1, 2, 3]"):
        weights.write_bytes(broken)
        status, said = export(capsys, saved, tmp_path / "out", "--hf", config)
        assert (status, "cannot be read as a safetensors file" in said) == (2, True), said
    weights.rename(config / "pytorch_model.bin")
    status, said = export(capsys, saved, tmp_path / "out", "--hf", config)
    assert (status, "save them as safetensors first" in said) == (2, True)
    (config / "config.json").unlink()
    status, said = export(capsys, saved, tmp_path / "out", "--hf", config)
    assert (status, "cannot read" in said) == (2, True)


def test_too_large_for_float16_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rather than written as infinite; nothing of the folder is left."""
    saved = checkpoint(tmp_path / "saved", {"w": np.array([[1e6, 0.0]], np.float32)})
    status, said = export(capsys, saved, tmp_path / "out", "--hf", hf_folder(tmp_path / "config", dtype="float16"))
    assert (status, "w has values that do not fit in float16" in said) == (2, True)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config", "saved"]


def test_nothing_is_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --overwrite files of the same names are, and no others; and never the folder of --hf, or other weights."""
    saved, config = checkpoint(tmp_path / "saved", TRAINED), hf_folder(tmp_path / "config", TRAINED)
    out = tmp_path / "out"
    assert export(capsys, saved, out, "--hf", config)[0] == 0
    (out / "notes.txt").write_text("mine")
    status, said = export(capsys, saved, out, "--hf", config)
    assert (status, "is not empty" in said) == (2, True)
    assert export(capsys, saved, out, "--hf", config, "--overwrite")[0] == 0
    assert (out / "notes.txt").read_text() == "mine"
    (out / "model-00001-of-00002.safetensors").write_bytes(b"")
    status, said = export(capsys, saved, out, "--hf", config, "--overwrite")
    assert (status, "holds other weights" in said) == (2, True)
    status, said = export(capsys, saved, config, "--hf", config, "--overwrite")
    assert (status, "choose a different output folder" in said) == (2, True)
    (tmp_path / "file").write_text("")
    status, said = export(capsys, saved, tmp_path / "file", "--hf", config)
    assert (status, "--hf writes a folder" in said) == (2, True)


# An adapter.

PEFT = "base_model.model.model.layers.0"


@pytest.mark.parametrize(
    ("kind", "trained", "saved"),
    [
        ("LORA", "self_attn.q_proj.lora_A.default.weight", "self_attn.q_proj.lora_A.weight"),
        ("LORA", "self_attn.q_proj.lora_A.my-own.weight", "self_attn.q_proj.lora_A.weight"),
        ("LORA", "embed_tokens.lora_embedding_A.default", "embed_tokens.lora_embedding_A"),
        ("LORA", "q_proj.lora_magnitude_vector.default.weight", "q_proj.lora_magnitude_vector"),
        ("LORA", "lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("IA3", "self_attn.k_proj.ia3_l.default", "self_attn.k_proj.ia3_l"),
        ("LOHA", "self_attn.k_proj.hada_w1_a.default", "self_attn.k_proj.hada_w1_a"),
        ("LOKR", "self_attn.k_proj.lokr_w1.default", "self_attn.k_proj.lokr_w1"),
    ],
)
def test_an_adapters_tensors_have_pefts_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, trained: str, saved: str
) -> None:
    """The base model's frozen parameters are not asked for."""
    values = array(2, 4)
    where = checkpoint(
        tmp_path / "saved", {f"{PEFT}.{trained}": values}, {"base_model.model.lm_head.weight": bytes(16)}
    )
    config = tmp_path / "config"
    config.mkdir()
    (config / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    status, said = export(capsys, where, tmp_path / "out", "--hf", config)
    assert status == 0, said
    np.testing.assert_array_equal(loaded(tmp_path / "out", "adapter_model.safetensors")[f"{PEFT}.{saved}"], values)
    assert (tmp_path / "out" / "adapter_config.json").is_file()


@pytest.mark.parametrize(
    ("kind", "names", "told"),
    [
        ("PROMPT_TUNING", ["q.lora_A.default.weight"], "peft_type 'PROMPT_TUNING' is not supported"),
        ("LORA", ["q.lora_A.default.weight", "norm.weight"], "not part of a LORA adapter's file: "),
        ("LORA", ["q.ia3_l.default"], "not part of a LORA adapter's file: "),
        ("LORA", ["q.lora_A.one.weight", "q.lora_A.two.weight"], "several adapters (one, two)"),
    ],
)
def test_what_no_adapters_file_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, names: list[str], told: str
) -> None:
    where = checkpoint(tmp_path / "saved", {f"{PEFT}.{name}": array(2, 4) for name in names})
    config = tmp_path / "config"
    config.mkdir()
    (config / "adapter_config.json").write_text(json.dumps({"peft_type": kind}))
    status, said = export(capsys, where, tmp_path / "out", "--hf", config)
    assert (status, told in said) == (2, True), said


def test_an_adapter_needs_its_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of the base model alone cannot tell what an adapter is; one of another adapter is refused."""
    where = checkpoint(tmp_path / "saved", {f"{PEFT}.q.lora_A.default.weight": array(2, 4)})
    config = hf_folder(tmp_path / "config")
    status, said = export(capsys, where, tmp_path / "out", "--hf", config)
    assert (status, "pass --hf the folder with its adapter_config.json" in said) == (2, True), said
    (config / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    own = {f"{PEFT}.q.lora_A.weight": array(2, 4), f"{PEFT}.k.lora_A.weight": array(2, 4)}
    safetensors.numpy.save_file(own, config / "adapter_model.safetensors")
    status, said = export(capsys, where, tmp_path / "out", "--hf", config)
    assert (status, f"{PEFT}.k.lora_A.weight, which the run did not train" in said) == (2, True), said


def test_a_tensor_file_is_what_the_formats_own_library_reads(tmp_path: Path) -> None:
    """Of every type and shape, none and one element too."""
    arrays = {"a": array(3, 5), "b": np.full((), 2.0, np.float32), "c": np.empty((0, 4), np.float32), "d": array(7)}
    safetensors.numpy.save_file(arrays, tmp_path / "theirs")
    ours = read_tensors(tmp_path / "theirs")
    ours["e"] = Tensor("BF16", (2,), 4, lambda: b"\x80\x3f\x00\x40")
    write_tensors(tmp_path / "ours", ours)
    with safe_open(tmp_path / "ours", "numpy") as file:
        assert set(file.keys()) == {*arrays, "e"}
        for name, values in arrays.items():
            np.testing.assert_array_equal(file.get_tensor(name), values)


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """As any other damage; also where Python's own parser gives up in another way."""
    header = b"[" * 200_000
    (tmp_path / "deep").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UsageError, match=r"deep cannot be read .*nested too deeply"):
        read_tensors(tmp_path / "deep")
    with pytest.raises(UsageError, match=r"cannot read deep: .*nested too deeply"):
        loading._tensors((tmp_path / "deep").read_bytes(), "deep")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F32", [2, 4]), ("F32", [3]), ("BF16", [-4, -2]), ("F4", [1]), ("BOOL", [])]
)
def test_a_tensor_of_another_size_than_its_shape_has_is_refused(tmp_path: Path, dtype: str, shape: list[int]) -> None:
    """Read by its shape, it would be another tensor's bytes, or too few. A type that is not known here is taken."""
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, 16]}
    for name, kind in (("known", dtype), ("new", "F5")):
        header = json.dumps({"a": entry | {"dtype": kind, "shape": shape if kind == dtype else [5]}}).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    problem = re.escape(f"a tensor of type {dtype} and shape {tuple(shape)} cannot have 16 bytes")
    with pytest.raises(UsageError, match=f"known cannot be read .*{problem}"):
        read_tensors(tmp_path / "known")
    assert read_tensors(tmp_path / "new")["a"].nbytes == 16
