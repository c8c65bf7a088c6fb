"""Small, valid protocol objects that tests build on; every field can be overridden."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash

from diloco.pipeline.bus.commits import Commit
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.fragments import FragmentLayout
from diloco.pipeline.messages.fragment import (
    NOTHING_MERGED,
    Committed,
    Contribution,
    DeltaHeader,
    Head,
    RefusalReason,
    Rejected,
    WindowView,
)
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish, OptimizerKind
from diloco.pipeline.messages.run import Evaluation, LearnerReport, Phase, RunState, SeenReport
from diloco.pipeline.messages.spec import Spec, SyncSpec, TensorSpec
from diloco.pipeline.messages.wire import Codec
from diloco.pipeline.payload.codec import DTYPES, Vector, as_bytes, payload_digest
from diloco.pipeline.payload.quantize import KINDS, Quantized, encode
from diloco.pipeline.transfer.globals import push_global
from diloco.syncer.merging.merge import Contributions, Sum, delta_norms
from diloco.syncer.merging.outer import Outer, OuterStep, State, Stepped
from diloco.workers.rounds import Rounds
from diloco_studies.virtual.virtual_time import inline

IDLE = WindowView(state="idle", attempt=0, members=(), expected=0, reason="", deadline_unix_s=None)


def sync_spec(**given: Any) -> SyncSpec:
    values: dict[str, Any] = {
        "fragments": 2,
        "sync_interval": 4,
        "quorum": 1,
        "overlap_steps": 1,
        "grace_gamma": 0.5,
        "codec": "fp32",
        "merge": "rda",
        "outer_lr": 1.0,
        "outer_momentum": 0.9,
        "tokens": 10_000,
        "groups": 1,
        "chunk_bytes": 1024,
        "first_interval": 0,
        "doubling": 1,
        "outer_warmup": 0,
        "weights": "tokens",
        "global_codec": "fp32",
        "outer": "nesterov",
        "delta_clip": 0.0,
    }
    return SyncSpec(**{**values, **given})


def tensor(name: str, shape: tuple[int, ...], fragment: int = 0, rule: str = "rda") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="float32", rule=rule, fragment=fragment)


def spec(**given: Any) -> Spec:
    """Two fragments of 600 and 200 elements (3/4 and 1/4 of the model), unless told otherwise."""
    tensors = given.pop("tensors", (tensor("a", (20, 30)), tensor("b", (150,), 1), tensor("c", (50,), 1, "mean")))
    return Spec(sync=sync_spec(**given), tensors=tensors, trainer={"model": "tiny"})


def report(learner: str = "l0", **given: Any) -> LearnerReport:
    values: dict[str, Any] = {
        "learner": learner,
        "incarnation": "0" * 8,
        "step": 10,
        "tokens": 1000,
        "overwritten": 0,
        "published": 0,
        "versions": (0, 0),
        "loss": 2.5,
        "tokens_per_s": 100.0,
        "step_s": 0.1,
        "step_s_median": 0.1,
        "blocked_s": 0.0,
        "wall_s": 10.0,
        "left": False,
        "host": "host",
        "device": "cpu",
        "pull_s": 0.02,
    }
    return LearnerReport(**{**values, **given})


def virtual_report(
    rounds: Rounds, learner: str, incarnation: str, step_s: float, left: bool, tokens_per_s: float = 0.0
) -> LearnerReport:
    """Of a learner of virtual time: its counts, with a step time that is every step's."""
    counts = rounds.counts
    return report(
        learner,
        incarnation=incarnation,
        step=counts.steps,
        tokens=counts.tokens,
        overwritten=counts.overwritten,
        published=counts.published,
        versions=rounds.versions,
        loss=None,
        tokens_per_s=tokens_per_s,
        step_s=step_s,
        step_s_median=step_s,
        wall_s=0.0,
        left=left,
        host="",
        part_unix_s=counts.part_unix_s,
        pull_s=0.0,
    )


def seen(learner: str = "l0", age_s: float = 0.5, **given: Any) -> SeenReport:
    return SeenReport(report=report(learner, **given), age_s=age_s)


def run_state(**given: Any) -> RunState:
    values: dict[str, Any] = {
        "phase": Phase.RUNNING,
        "tokens": 0,
        "base_tokens": 0,
        "budget_tokens": 10_000,
        "started_unix_s": 1000.0,
        "reason": "training",
        "manifest": (),
    }
    return RunState(**{**values, **given})


def head(fragment: int = 0, **given: Any) -> Head:
    values: dict[str, Any] = {
        "fragment": fragment,
        "version": 0,
        "digest": bytes([fragment]) * 16,
        "payload": "payload",
        "chunks": 1,
        "momentum": "",
        "previous_digest": None,
        "window": IDLE,
        "merged": (),
        "merged_deltas": 0,
        "merged_tokens": 0,
        "rejected_tokens": 0,
    }
    return Head(**{**values, **given})


def header(learner: str = "l0", **given: Any) -> DeltaHeader:
    values: dict[str, Any] = {
        "learner": learner,
        "incarnation": "0" * 8,
        "fragment": 0,
        "base_version": 0,
        "base_digest": bytes(16),
        "attempt": 0,
        "steps": 4,
        "tokens": 400,
        "due": True,
        "codec": "fp32",
        "chunks": 3,
        "layout": bytes(16),
        "step_s": 0.1,
        "pull_s": 0.02,
    }
    values |= given
    values.setdefault("serial", 1000 * values["base_version"] + values["attempt"])  # one delta a base and attempt
    return DeltaHeader(**values)


def committed(**given: Any) -> Committed:
    """A record of the tape: version 0 of fragment 0, merged of nothing, unless told otherwise."""
    values: dict[str, Any] = {"fragment": 0, "version": 0, "digest": bytes(16), "reason": "test", "syncer": "s"}
    return Committed(**{**NOTHING_MERGED, **values, "unix_s": 0.0, **given})


def contribution(learner: str = "l0", **given: Any) -> Contribution:
    """Of a merge of its own, unless told otherwise."""
    values: dict[str, Any] = {"incarnation": "0" * 8, "base_version": 0, "attempt": 0, "steps": 4, "tokens": 400}
    values |= {"learner": learner, "weight": 1.0, "norm": 1.0}
    return Contribution(**values | given)


def rejected(learner: str = "l0", **given: Any) -> Rejected:
    told: dict[str, Any] = {"lost_tokens": 0, "reason": RefusalReason.NON_FINITE, "detail": "NaN", "unix_s": 1.0}
    return Rejected(**{**Rejected.of(header(), (0, 0), **told).model_dump(), "learner": learner, **given})


def evaluation(**given: Any) -> Evaluation:
    values: dict[str, Any] = {"loss": 2.5, "tokens": 900, "versions": (1, 2), "unix_s": 1.0, "elapsed_s": 9.0}
    return Evaluation(**values | {"final": False} | given)


async def commit(
    bus: Bus,
    fragment: int,
    version: int,
    theta: np.ndarray,
    *,
    momentum: np.ndarray | None = None,
    expected: tuple[int, bytes] | None = None,
    merged_tokens: int = 0,
    nonce: str = "ab" * 8,
    chunk_bytes: int = 1024,
    global_codec: str = "fp32",
) -> bytes:
    """Move a fragment's head to these values, as its owner would; returns the digest."""
    assert await bus.acquire_lease(fragment, nonce, 1e6)
    sync = sync_spec(chunk_bytes=chunk_bytes, global_codec=global_codec)
    published = await push_global(bus, fragment, version, f"{version:08x}", theta, sync, 60, inline, momentum)
    digest = payload_digest(as_bytes(theta), chunk_bytes)
    record = committed(fragment=fragment, version=version, digest=digest)
    await bus.commit(
        Commit(
            nonce=nonce,
            expected=expected,
            published=published,
            window=IDLE,
            merged=(),
            record=record,
            merged_tokens=merged_tokens,
        )
    )
    return digest


def moments_wish(learner: str = "l0") -> MomentsWish:
    return MomentsWish(learner=learner, kind=moments_offer().kind)


def moments_offer(**given: Any) -> MomentsOffer:
    values: dict[str, Any] = {
        "learner": "l0",
        "nonce": "ab" * 8,
        "layout": bytes(16),
        "kind": OptimizerKind(optimizer="torch.AdamW", moments=("exp_avg", "exp_avg_sq"), numbers=("step",)),
        "numbers": ((30.0, 30.0, 30.0),),
        "steps": 30,
        "began_unix_s": 1000.0,
    }
    return MomentsOffer(**{**values, **given})


def on_wire(values: npt.NDArray[np.float32], codec: Codec) -> Vector:
    """A vector (elements,) in its wire format."""
    return Quantized(encode(values, codec), len(values), codec) if codec in KINDS else values.astype(DTYPES[codec])


def encode_chunks(array: npt.NDArray[Any], chunk_bytes: int) -> Iterator[bytes]:
    """Flat array (elements,) to encoded `Chunk`s, lazily, as msgpack writes them."""
    data = as_bytes(array)
    count = -(-len(data) // chunk_bytes)
    total = xxhash.xxh3_128()
    for index in range(count):
        piece = data[index * chunk_bytes : (index + 1) * chunk_bytes]
        digest = xxhash.xxh3_128_digest(piece)
        total.update(digest)
        last = total.digest() if index == count - 1 else None
        packed: bytes = msgpack.packb({"index": index, "data": piece, "digest": digest, "total": last})
        yield packed


def contributions(layout: FragmentLayout, deltas: Sequence[Any], shares: Sequence[float]) -> Contributions:
    """Deltas (elements,) that are not clipped."""
    return Contributions(deltas, [delta_norms(layout, one) for one in deltas], shares, [1.0] * len(deltas))


def outer_step(
    sync: SyncSpec, outer: tuple[float, float], before: State, layout: FragmentLayout, *deltas: Any, shares: Any = None
) -> Stepped:
    """A step that merges these deltas, in equal shares unless told otherwise. outer: learning rate and momentum."""
    given = contributions(layout, deltas, [1.0] * len(deltas) if shares is None else shares)
    return OuterStep(Sum(layout), given, sync, Outer(*outer), before).take()
