"""Checkpoints: what is saved comes back, and what is damaged is named."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from structlog.testing import capture_logs

from diloco.pipeline.bus.commits import Refusal
from diloco.pipeline.bus.schema import MAX_OPEN_SHARDS
from diloco.pipeline.errors import BadPayload, UsageError
from diloco.pipeline.files.sums import write_sums
from diloco.pipeline.messages.run import Phase
from diloco.pipeline.messages.shards import DataOrder, Shard, ShardQueue
from diloco.pipeline.messages.spec import Spec
from diloco.pipeline.payload.codec import as_bytes, decode, encode, payload_digest
from diloco.pipeline.transfer.payloads import pull
from diloco.syncer.checkpoints.loading import Checkpoint, load_checkpoint
from diloco.syncer.checkpoints.places import Folder, place_of
from diloco.syncer.checkpoints.restoring import restore_checkpoint
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, inline, run_virtual
from tests import samples
from tests.saving import save_checkpoint

NONCE = "ab" * 8
RNG = np.random.default_rng(0)
THETA = [RNG.standard_normal(600).astype(np.float32), RNG.standard_normal(200).astype(np.float32)]
MOMENTUM = RNG.standard_normal(600).astype(np.float32)
ORDER = DataOrder(length=30, seed=7)


async def trained(spec: Spec, momentum: np.ndarray | None = MOMENTUM) -> MemoryBus:
    """A bus with a run on it: fragment 0 at version 3, fragment 1 at version 5, one shard half read."""
    bus = MemoryBus("r", VirtualClock())
    await bus.propose_spec(encode(spec))
    await bus.write_state(samples.run_state(tokens=900))
    await bus.write_report(samples.report(tokens=1000, overwritten=77))
    await bus.propose_data_order(ORDER)
    await bus.fill_shards(0, [Shard(epoch=0, index=i, start=10 * i, stop=10 * i + 10) for i in range(3)])
    claimed = await bus.claim_shard("l0.00", 10)
    await bus.finish_shard("l0.00", claimed.entry_id)
    claimed = await bus.claim_shard("l0.00", 10)
    await bus.save_position("l0.00", claimed.entry_id, 4)
    await samples.commit(bus, 0, 3, THETA[0], momentum=momentum, merged_tokens=800)
    await samples.commit(bus, 1, 5, THETA[1], merged_tokens=700)
    return bus


async def lose(bus: MemoryBus, fragment: int, tokens: int) -> None:
    """A delta with so many tokens is refused."""
    (head,) = await bus.read_heads([fragment])
    expected = head.version, head.digest
    await bus.refuse(fragment, Refusal(NONCE, expected, (), (), (), tokens))


def save(directory: Path, times: int = 1, spec: Spec | None = None, **given) -> list[Path]:
    async def main() -> list[Path]:
        spec_ = spec or samples.spec()
        bus = await trained(spec_, **given)
        return [Path(str(await save_checkpoint(bus, spec_, place_of(directory), inline))) for _ in range(times)]

    return run_virtual(main())


def folder_of(place: Path) -> Path:
    return Path(str(load_checkpoint(place).folder))


def globals_of(checkpoint: Checkpoint) -> list[bytes]:
    return [checkpoint.fragment(p)[0].tobytes() for p in range(len(checkpoint.fragments))]


def momenta_of(checkpoint: Checkpoint) -> list[bytes | None]:
    found = (checkpoint.fragment(p)[1] for p in range(len(checkpoint.fragments)))
    return [None if momentum is None else momentum.tobytes() for momentum in found]


def file_of(folder: Path, fragment: int) -> Path:
    """The file with a fragment's vectors."""
    (found,) = folder.glob(f"fragment-{fragment:04d}-*.safetensors")
    return found


def restore(checkpoint: Checkpoint, spec: Spec, bus: MemoryBus | None = None) -> MemoryBus:
    async def main() -> MemoryBus:
        empty = bus or MemoryBus("again", VirtualClock())
        for p in range(spec.sync.fragments):
            assert await empty.acquire_lease(p, NONCE, 1e9)
        await restore_checkpoint(empty, checkpoint, spec, NONCE, "s", VirtualClock(), inline)
        return empty

    return run_virtual(main())


def test_files_are_plain_safetensors_of_a_fragment_each(tmp_path):
    """Anybody can read a checkpoint without this project: flat vectors, and tensors in the spec's order; all zeros are
    absent.
    """
    (path,) = save(tmp_path)
    assert path.name.startswith("checkpoint-1000-")  # the reports' tokens are newer than the state's
    first, second = (safetensors.numpy.load_file(file_of(path, p)) for p in (0, 1))
    assert (set(first), set(second)) == ({"globals", "momentum"}, {"globals"})
    np.testing.assert_array_equal(first["globals"], THETA[0])
    np.testing.assert_array_equal(first["momentum"], MOMENTUM)
    np.testing.assert_array_equal(second["globals"], THETA[1])
    state = json.loads((path / "state.json").read_text())
    assert state["fragments"][1]["version"] == 5
    assert state["fragments"][1]["digest"] == payload_digest(as_bytes(THETA[1]), 1024).hex()
    assert state["overwritten"] == 77


def test_a_momentum_of_zeros_is_not_written(tmp_path):
    """Whether kept as zeros or not at all."""
    for n, momentum in enumerate((None, np.zeros_like(MOMENTUM))):
        (path,) = save(tmp_path / str(n), momentum=momentum)
        assert set(safetensors.numpy.load_file(file_of(path, 0))) == {"globals"}
        assert momenta_of(load_checkpoint(path)) == [None, None]


def test_what_was_saved_is_loaded(tmp_path):
    """Spec, run state, data order, shard queue with positions, globals and momentum, bit for bit."""
    (path,) = save(tmp_path / "checkpoints")
    for where in (path, tmp_path / "checkpoints", tmp_path):
        loaded = load_checkpoint(where)
        assert Path(str(loaded.folder)) == path
        assert loaded.spec == samples.spec()
        assert loaded.state == samples.run_state(tokens=1000)
        assert [saved.merged_tokens for saved in loaded.fragments] == [800, 700]
        shards = [(Shard(epoch=0, index=i, start=10 * i, stop=10 * i + 10), 4 if i == 1 else 0) for i in (1, 2)]
        assert loaded.shards == ShardQueue(epochs=1, open=tuple(shards))
        assert loaded.data_order == ORDER
        assert globals_of(loaded) == [t.tobytes() for t in THETA]
        assert momenta_of(loaded) == [MOMENTUM.tobytes(), None]


def test_a_run_without_clipping_is_one_after_its_checkpoint_too(tmp_path):
    """Infinity is a number that a checkpoint knows again."""
    spec = samples.spec().model_copy(update={"trainer": {"clip": float("inf")}})
    (path,) = save(tmp_path, spec=spec)
    assert load_checkpoint(path).spec.trainer == {"clip": float("inf")}


def test_a_restored_run_goes_on_where_it_was(tmp_path):
    """Versions, payloads, momentum, tokens and shards are those of the checkpoint; the next merge is version + 1."""
    save(tmp_path)
    spec = samples.spec(tokens=20_000)
    bus = restore(load_checkpoint(tmp_path), spec)

    async def look():
        assert decode(Spec, await bus.read_spec()) == spec
        heads = await bus.read_heads([0, 1])
        assert [head.version for head in heads] == [3, 5]
        assert [head.merged_tokens for head in heads] == [800, 700]
        assert (await pull(bus, heads[0].payload, 600, "fp32", 1024)).array().tobytes() == THETA[0].tobytes()
        assert (await pull(bus, heads[0].momentum, 600, "fp32", 1024)).array().tobytes() == MOMENTUM.tobytes()
        assert heads[1].momentum == ""
        state = await bus.read_state()
        assert (state.phase, state.tokens, state.base_tokens) == (Phase.RUNNING, 1000, 1000)
        assert state.budget_tokens == 20_000
        assert (await bus.read_shards()).open[0][1] == 4
        assert await bus.read_data_order() == ORDER
        expected = (heads[0].version, heads[0].digest)
        await samples.commit(bus, 0, 4, THETA[0], expected=expected, nonce=NONCE)
        assert (await bus.read_heads([0]))[0].version == 4

    run_virtual(look())


def test_a_restore_onto_another_runs_values_of_the_same_version_is_refused(tmp_path):
    """An interrupted restore of this checkpoint is gone on with, also in other chunks."""
    save(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    for chunk_bytes in (1024, 512):
        spec = samples.spec(tokens=20_000, chunk_bytes=chunk_bytes)
        bus = restore(checkpoint, spec)
        restore(checkpoint, spec, bus)
    others = MemoryBus("again", VirtualClock())
    run_virtual(samples.commit(others, 1, 5, -THETA[1]))
    with pytest.raises(UsageError, match="the run has already been started"):
        restore(checkpoint, samples.spec(tokens=20_000), others)


def test_parts_of_a_tensor_are_joined_by_their_rows(tmp_path):
    """Whatever the ids of the fragments that they lie in."""
    whole = samples.tensor("e", (40, 20), rule="mean")
    parts = [whole.model_copy(update={"rows": rows, "fragment": p}) for p, rows in ((1, (0, 10)), (0, (10, 40)))]
    save(tmp_path, spec=samples.spec(tensors=tuple(parts)))
    found = load_checkpoint(tmp_path).tensors()["e"]
    assert (found.shape, bytes(found.read())) == ((40, 20), THETA[1].tobytes() + THETA[0].tobytes())


def test_kinds_of_lost_tokens_outlast_any_number_of_resumes(tmp_path):
    """What was overwritten and what was rejected is summed up over the parts, in token-elements."""
    for part in range(3):
        bus = MemoryBus("again", VirtualClock()) if part else run_virtual(trained(samples.spec()))
        if part:
            checkpoint = load_checkpoint(tmp_path)
            restore(checkpoint, samples.spec(tokens=20_000), bus)
            state = run_virtual(bus.read_state())
            assert (state.base_overwritten, state.base_rejected) == (part * 77, part * (5 * 600 + 6 * 200))
            run_virtual(bus.write_report(samples.report(tokens=1000, overwritten=77)))
        for p, lost in ((0, 5), (1, 6)):
            run_virtual(lose(bus, p, lost))
        run_virtual(save_checkpoint(bus, samples.spec(tokens=20_000), place_of(tmp_path), inline))
    assert load_checkpoint(tmp_path).state.tokens == 3000


def test_a_checkpoint_without_a_data_order_leaves_it_to_the_learners(tmp_path):
    """The order that the first learner proposes stands."""
    (path,) = save(tmp_path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"data_order": None}))
    write_sums(path)
    checkpoint = load_checkpoint(tmp_path)
    bus = restore(checkpoint, checkpoint.spec)
    other = DataOrder(length=31, seed=None)
    assert checkpoint.data_order is None
    assert run_virtual(bus.propose_data_order(other)) == other


def test_other_chunks_and_no_momentum_are_no_hindrance(tmp_path):
    """Sync settings may change on resume; digests follow the new chunk size, momentum goes where mu is 0."""
    save(tmp_path)
    spec = samples.spec(chunk_bytes=2048, outer_momentum=0.0)
    bus = restore(load_checkpoint(tmp_path), spec)

    async def look():
        head, _ = await bus.read_heads([0, 1])
        assert head.momentum == ""
        assert (await pull(bus, head.payload, 600, "fp32", 2048)).digest == head.digest

    run_virtual(look())


def test_a_used_run_is_refused(tmp_path):
    """Nothing is overwritten by a resume."""
    save(tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    other = (samples.tensor("a", (20, 30)), samples.tensor("z", (200,), 1))
    with pytest.raises(UsageError, match="a different model"):
        restore(checkpoint, samples.spec(tensors=other))

    async def used(run_spec: Spec) -> MemoryBus:
        bus = MemoryBus("again", VirtualClock())
        await bus.propose_spec(encode(run_spec))
        for p in (0, 1):
            await samples.commit(bus, p, 0, THETA[p], nonce=NONCE)
        return bus

    with pytest.raises(UsageError, match="--run"):
        restore(checkpoint, checkpoint.spec, run_virtual(used(checkpoint.spec)))
    with pytest.raises(UsageError, match="a different spec"):
        restore(checkpoint, checkpoint.spec, run_virtual(used(samples.spec(quorum=2))))


PLANTED = ["spec", "data_order", "shard_epoch", "shard_positions", "counted", "another order"]


@pytest.mark.parametrize("planted", PLANTED)
def test_what_a_learner_puts_there_first_keeps_no_checkpoint_from_being_restored(tmp_path, planted):
    """Redis is empty, and a learner's user may write these keys: they give way, and the data are the checkpoint's."""
    save(tmp_path)
    checkpoint, bus = load_checkpoint(tmp_path), MemoryBus("again", VirtualClock())
    if planted == "another order":
        run_virtual(bus.propose_data_order(DataOrder(length=30, seed=8)))
    elif planted == "counted":
        bus.store.values |= {bus.keys.shard_epoch: b"5", bus.keys.shards: b"garbage"}
    else:
        garbage = {b"1-1": b"x"} if planted == "shard_positions" else b"garbage"
        bus.store.values[getattr(bus.keys, planted)] = garbage
    restore(checkpoint, checkpoint.spec, bus)

    async def found() -> tuple[bytes | None, DataOrder | None, ShardQueue]:
        return await bus.read_spec(), await bus.read_data_order(), await bus.read_shards()

    assert run_virtual(found()) == (encode(checkpoint.spec), checkpoint.data_order, checkpoint.shards)


def test_the_newest_three_are_kept_and_latest_names_the_newest(tmp_path):
    """Disk use is bounded; two checkpoints at the same tokens do not replace one another."""
    paths = save(tmp_path, times=5)
    assert (tmp_path / "latest").read_text().splitlines() == [path.name for path in reversed(paths[-3:])]
    assert {p.name for p in tmp_path.iterdir()} == {"latest", *(p.name for p in paths[-3:])}
    assert folder_of(tmp_path) == paths[-1]


@pytest.mark.parametrize("broken", ["fragment-0001", "SHA256SUMS", "state.json", "latest"])
def test_a_failed_save_leaves_the_one_before(tmp_path, monkeypatch, broken):
    """A disk that is full at any file: `latest` still names a whole checkpoint, and nothing half is left."""
    (before,) = save(tmp_path)
    write = Folder.write

    def fail(self, name, parts):
        if name.startswith(broken):
            raise OSError("no space left on device")
        write(self, name, parts)

    with monkeypatch.context() as patched:
        patched.setattr(Folder, "write", fail)
        with pytest.raises(OSError, match="no space"):
            save(tmp_path)
    assert folder_of(tmp_path) == before
    assert {p.name for p in tmp_path.iterdir()} == {"latest", before.name}


def test_a_head_that_moves_while_it_is_read_is_read_again(tmp_path):
    """A checkpoint never mixes the global of one version with the momentum or version of another."""

    async def main():
        spec = samples.spec()
        bus = await trained(spec)
        read_heads, moved = bus.read_heads, []

        async def read_then_move(fragments):
            heads = await read_heads(fragments)
            if list(fragments) == [0] and not moved:
                moved.append(True)
                await samples.commit(
                    bus, 0, 4, -THETA[0], momentum=-MOMENTUM, expected=(3, heads[0].digest)
                )  # the old momentum is deleted
            return heads

        bus.read_heads = read_then_move
        return await save_checkpoint(bus, spec, place_of(tmp_path), inline)

    run_virtual(main())
    loaded = load_checkpoint(tmp_path)
    assert loaded.fragments[0].version == 4
    assert globals_of(loaded)[0] == (-THETA[0]).tobytes()
    assert momenta_of(loaded)[0] == (-MOMENTUM).tobytes()


def test_a_damaged_payload_is_no_endless_loop(tmp_path):
    """The head stands still and its payload is gone: that is an error, and no checkpoint."""

    async def main():
        spec = samples.spec()
        bus = await trained(spec)
        (head,) = await bus.read_heads([1])
        bus.store.delete(head.payload)
        await save_checkpoint(bus, spec, place_of(tmp_path), inline)

    with pytest.raises(BadPayload):
        run_virtual(main())
    assert not list(tmp_path.iterdir())


DAMAGED = {
    "positions by the thousand": lambda bus: bus.store.hset(
        bus.keys.shard_positions, {f"{at}-1": b"1" for at in range(MAX_OPEN_SHARDS + 1)}
    ),
    "an order that is none": lambda bus: bus.store.values.update({bus.keys.data_order: b"\xc1"}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_data_queue_that_a_learner_has_damaged_costs_no_fragment(tmp_path, damage):
    """It is saved as none, and the log says so once; the run is resumed, and its data are read from their start."""

    async def main() -> None:
        spec = samples.spec()
        bus = await trained(spec)
        DAMAGED[damage](bus)
        with capture_logs() as logs:
            await save_checkpoint(bus, spec, place_of(tmp_path), inline)
        (told,) = [line for line in logs if line["event"] == "data_queue_not_saved"]
        assert told["log_level"] == "warning"
        assert bus.keys.shard_epoch in told["keys"]

    run_virtual(main())
    checkpoint = load_checkpoint(tmp_path)
    assert globals_of(checkpoint) == [one.tobytes() for one in THETA]
    assert (checkpoint.shards, checkpoint.data_order) == (ShardQueue(epochs=0, open=()), None)
    bus = restore(checkpoint, samples.spec(tokens=20_000))
    assert run_virtual(bus.count_epochs()) == 0


def test_a_run_without_a_version_cannot_be_saved(tmp_path):
    """Said in words."""
    bus, place = MemoryBus("r", VirtualClock()), place_of(tmp_path)
    with pytest.raises(UsageError, match="no state yet"):
        run_virtual(save_checkpoint(bus, samples.spec(), place, inline))
    run_virtual(bus.write_state(samples.run_state()))
    with pytest.raises(UsageError, match="no version yet"):
        run_virtual(save_checkpoint(bus, samples.spec(), place, inline))


def rewrite(path: Path, change) -> None:
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda s: s.pop("format"), "format: missing"),
        (lambda s: s["fragments"][0].update(version=-1), r"fragments\.0\.version"),
        (lambda s: s["fragments"][0].update(file="../secret.safetensors"), r"fragments\.0\.file"),
        (lambda s: s["spec"]["sync"].pop("quorum"), r"spec\.sync\.quorum"),
    ],
)
def test_what_is_wrong_with_a_manifest_is_named(tmp_path, change, complaint):
    """By its field."""
    (path,) = save(tmp_path)
    rewrite(path / "state.json", change)
    with pytest.raises(UsageError, match=rf"state\.json: {complaint}"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("said", [0, 2, True, 1.0, "1", None, 10**30])
def test_a_manifest_of_another_format_is_refused_with_both_numbers(tmp_path, said):
    """Whatever Python takes for 1."""
    (path,) = save(tmp_path)
    rewrite(path / "state.json", lambda s: s.update(format=said))
    told = f"state.json: format {said!r} cannot be read by this build, which reads 1: a different build may have"
    with pytest.raises(UsageError, match=re.escape(told)):
        load_checkpoint(tmp_path)


def flip(path: Path) -> None:
    """One bit of the last byte: of a tensor, or of a number."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage", "complaint"),
    [
        ("momentum", flip, "its digest differs"),
        ("momentum", Path.unlink, "is missing"),
        ("globals", flip, "its digest differs"),
        ("globals", Path.unlink, "is missing|cannot be read"),
        ("globals", lambda path: path.write_bytes(path.read_bytes()[:-400]), "digest|cannot be read"),
        ("state.json", lambda path: rewrite(path, lambda s: s["run"].update(tokens=1)), "its digest differs"),
        ("SHA256SUMS", Path.unlink, "is missing"),
        ("SHA256SUMS", lambda path: path.write_text("nothing\n"), "is not a digest"),
        ("SHA256SUMS", lambda path: path.write_text(""), "does not list (globals|fragment)"),
        ("SHA256SUMS", lambda path: path.write_text(path.read_text().splitlines()[0] + "\n"), "does not list"),
        ("SHA256SUMS", lambda path: path.write_text("\u00e9" + path.read_text()[1:]), "its digest differs"),
    ],
)
def test_no_file_of_a_checkpoint_can_be_damaged_unseen(tmp_path, file, damage, complaint):
    """A flipped bit, a missing file, one cut short: the file is named, and what to do."""
    (path,) = save(tmp_path)
    fragment = {"momentum": 0, "globals": 1}.get(file)
    found = path / file if fragment is None else file_of(path, fragment)
    damage(found)
    with pytest.raises(UsageError, match=complaint) as error:
        load_checkpoint(tmp_path)
    assert found.name in str(error.value) or found.name == "SHA256SUMS"


@pytest.mark.parametrize("named", [b"\xff\xfe", b"../elsewhere", b""])
def test_a_latest_that_names_no_folder_beside_it_is_refused_and_replaced_by_the_next_save(tmp_path, named):
    """Bytes that are no text, or a path to another run's."""
    (path,) = save(tmp_path)
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    path.rename(elsewhere)
    named = named.replace(b"elsewhere", elsewhere.name.encode())
    (tmp_path / "latest").write_bytes(named)
    with pytest.raises(UsageError, match="latest names"):
        load_checkpoint(tmp_path)
    save(tmp_path)
    load_checkpoint(tmp_path)


def test_the_digests_are_those_of_sha256sum(tmp_path):
    """Anybody can check a checkpoint without this project."""
    (path,) = save(tmp_path)
    done = subprocess.run(
        ["/usr/bin/env", "sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(": OK") == 3


def test_what_is_not_finite_is_not_saved(tmp_path):
    """The checkpoint before stays the newest."""
    (before,) = save(tmp_path)
    with pytest.raises(BadPayload, match="fragment 0 version 3 is not finite"):
        save(tmp_path, momentum=np.full_like(MOMENTUM, np.nan))
    assert folder_of(tmp_path) == before


def test_a_pointer_to_a_checkpoint_that_is_gone_names_those_that_are_there(tmp_path):
    """A person can choose."""
    first, second = save(tmp_path, times=2)
    shutil.rmtree(second)
    with pytest.raises(UsageError, match=f"choose one of {first.name}"):
        load_checkpoint(tmp_path)
    assert folder_of(first) == first


def test_folders_that_are_no_checkpoint_are_refused(tmp_path):
    """Nothing there, a pointer to nothing, bytes that are not safetensors, bytes that are not JSON."""
    with pytest.raises(UsageError, match="has no checkpoint yet"):
        load_checkpoint(tmp_path)
    with pytest.raises(UsageError, match="no such checkpoint or folder"):
        load_checkpoint(tmp_path / "nothing")
    with pytest.raises(UsageError, match="the checkpoint's name is empty"):
        load_checkpoint("")
    with pytest.raises(UsageError, match="is a file, and a checkpoint is a folder"):
        load_checkpoint(__file__)
    (tmp_path / "latest").write_text("checkpoint-7\n")
    with pytest.raises(UsageError, match="checkpoint-7"):
        load_checkpoint(tmp_path)
    (path,) = save(tmp_path)
    file_of(path, 0).write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="its digest differs"):
        load_checkpoint(path)
    (path / "state.json").write_bytes(b"\xff{")
    with pytest.raises(UsageError, match="state"):
        load_checkpoint(path)
