"""The two things the protocol needs from outside: a bus and a clock. Adapters: `redis_streams`, `memory`.

The bus is small protocols, one for each idea, and `Bus` is their sum. What a method promises is said here and nowhere
else: adapters inherit these protocols with their docstrings. Promises that every adapter keeps (the contract tests run
on all of them):

- Each method is one atomic step on the bus, or reads only. A method that raises `BusUnavailable` may or may
  not have happened; one that raises any other `BusError` has changed nothing.
- Headers of one learner and fragment, and entries of one group's tape, are read in the order they were written.
- Blocking reads (`block_s`) return early with what is there, or an empty list when the time is over; they
  never hold up other calls.
- An owner's writes (`OwnerWrites`) check the lease nonce and the head inside the same atomic step.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diloco.pipeline.bus.commits import Commit, Refusal, Republication
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.messages.delta import DeltaHeader
from diloco.pipeline.messages.head import Head, WindowView
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import Evaluation, Event, InitialUpload, LearnerReport, RunState, SeenReport
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard, ShardQueue
from diloco.pipeline.messages.spec import Spec, Wanted
from diloco.pipeline.messages.tape import Rewound, TapeRecord, WindowChanged
from diloco.pipeline.messages.wire import MOST_LEASE_S
from diloco.pipeline.payload.codec import Encoded

START = "0"
"""Cursor before the first entry of any stream."""


class Clock(Protocol):
    """Time, injected. `sleep` and all timeouts belong to the event loop, whose time this is."""

    def now(self) -> float:
        """Monotonic seconds (the event loop's time)."""

    def unix(self) -> float:
        """Wall-clock seconds, for people and other machines only."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A header on its learner's stream. `header` is None where it cannot be taken; `problem` says why."""

    entry_id: str
    """`ms-seq:mark@learner`; of a header that cannot be taken `ms-seq@learner`."""
    header: DeltaHeader | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MomentsBoard:
    """Where a wish for moments stands."""

    wish: MomentsWish | None
    """A learner asks, and nobody has answered yet."""
    claimed: bool
    """A peer has taken it up."""
    offer: MomentsOffer | None
    """What a peer uploaded; it lives on after the peer has left."""


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """An entry of a group's event tape."""

    group: int
    entry_id: str
    record: TapeRecord


@dataclass(frozen=True, slots=True)
class BusInfo:
    """What the server says about itself."""

    server_id: str
    """Changes when the server was restarted."""
    version: str
    maxmemory_bytes: int
    used_bytes: int
    cluster: bool = False
    nodes: int = 1
    """Those that hold keys: a cluster's primaries."""
    warnings: tuple[str, ...] = field(default=())
    """E.g. an eviction policy that may drop keys."""
    takes_writes: bool = True
    """Some node does; False: none has a replica that is in touch with it, as it was told to have."""
    up_s: float = math.inf
    """Since a single server was started; inf: not told."""
    received_bytes: int = 0
    """From all its clients since it was started, those of other runs too."""
    sent_bytes: int = 0
    node: tuple[int, int] | None = None
    """(used, maxmemory) of the node that is fullest, of those with a limit; None: of a single one, as above."""
    backlogs_bytes: int = 0
    """What the backlogs of replicas take of `maxmemory_bytes` once they are full."""

    @property
    def fullest(self) -> tuple[int, int]:
        """The same where there is one node too."""
        return self.node or (self.used_bytes, self.maxmemory_bytes)


class Keyed(Protocol):
    """What every part of the bus has: it is bound to one run."""

    keys: RunKeys


class Connection(Keyed, Protocol):
    """The way to the server."""

    clock: Clock
    """Of the wall, it is the server's: times that one party writes are compared with what another one's clock says."""

    def use_spec(self, spec: Spec) -> None:
        """Take the run's fragment groups from its spec; called once that is known."""

    async def info(self) -> BusInfo:
        """Ask the server about itself."""

    async def close(self) -> None:
        """Close all connections; calls in flight end with `BusUnavailable`."""


class SpecAndState(Keyed, Protocol):
    """What all parties of the run agree on, and where the run stands."""

    async def propose_spec(self, spec: bytes) -> bytes:
        """Set the spec if there is none; returns the spec that holds."""

    async def read_spec(self) -> bytes | None:
        """The spec, or None before the first proposal."""

    async def offer_wanted(self, wanted: Wanted, ttl_s: float) -> Wanted:
        """Say for so long what is wanted of a run without a spec, or again; returns what holds."""

    async def read_wanted(self) -> Wanted | None:
        """What was said, until it expires."""

    async def replace_spec(self, spec: bytes, instead_of: bytes) -> bool:
        """Put a spec in the place of another, if that is the one that holds."""

    async def write_state(self, state: RunState) -> RunState:
        """Set the run's state unless that would move its phase backwards; returns the state that holds."""

    async def begin_again(self, state: RunState) -> bool:
        """Set the state of a finished run, to an earlier phase; False: it is not finished, and stays as it is."""

    async def read_state(self) -> RunState | None:
        """The run's state, or None before the syncer first wrote it."""

    async def delete_run(self) -> None:
        """Delete all that the bus has of the run."""


class Reports(Keyed, Protocol):
    """What learners last said about themselves."""

    async def write_report(self, report: LearnerReport) -> RunState | None:
        """Replace the report of this learner's incarnation, unless by an older one; returns the run's state.

        The first report of a generation holds the learner's id; until a greater one comes, only its incarnation does.

        Raises:
            LearnerReplaced: another incarnation holds the id. Nothing has changed.
        """

    async def put_back_report(self, seen: SeenReport) -> None:
        """Keep a report that the bus has lost, as old as it is: no sign of life, and no hold on the learner's id.

        One of the same incarnation that is there stays.
        """

    async def read_reports(self) -> list[SeenReport]:
        """Last report of every incarnation that ever reported, with ages by the server's clock.

        What is larger than any can be goes from the bus, where this user may, and if they are too many
        (`stored_reports.are_too_many`) those that matter least.
        """


class RunLogs(Keyed, Protocol):
    """Events and evaluations, in the order in which they were written."""

    async def add_event(self, event: Event) -> None:
        """Append to the run's events (capped at about 10,000)."""

    async def trim_events(self) -> None:
        """Cap the events: a learner may have added any number of them past us, and whoever looks reads all."""

    async def read_events(self, after: str = START, limit: int = 1000) -> list[tuple[str, Event]]:
        """Events after an entry id, oldest first."""

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation (capped at about 100,000)."""

    async def read_evaluations(self, after: str = START, limit: int = 1000) -> list[tuple[str, Evaluation]]:
        """Evaluations after an entry id, oldest first."""


class InitialUploads(Keyed, Protocol):
    """Version 0: one learner at a time may upload it."""

    async def claim_initial(self, nonce: str, ttl_s: float) -> bool:
        """Win (or keep, same nonce: prolongs it) the right to upload version 0; another's has `ttl_s` more at most."""

    async def finish_initial(self, upload: InitialUpload, ttl_s: float) -> bool:
        """Announce a complete upload, if the claim is still held; False if it lapsed."""

    async def read_initial(self) -> InitialUpload | None:
        """The complete upload of version 0, if there is one."""


class MomentsExchange(Keyed, Protocol):
    """An inner optimizer's moments: a learner asks, and one peer at a time answers."""

    async def ask_moments(self, wish: MomentsWish, ttl_s: float) -> None:
        """Wish for a peer's moments; while somebody else's wish is there, that one serves both."""

    async def read_moments(self) -> MomentsBoard:
        """Whether somebody asks, whether a peer answers, and the complete offer, if there is one.

        Any learner may write there: what cannot be read is as good as none, and nothing stays longer than two minutes.
        """

    async def claim_moments(self, nonce: str, ttl_s: float) -> bool:
        """Win (or keep, same nonce: prolongs it) the right to upload moments."""

    async def finish_moments(self, offer: MomentsOffer, ttl_s: float) -> bool:
        """Announce a complete upload, if the claim is still held, and end wish and claim; False if it lapsed."""


class PayloadStore(Keyed, Protocol):
    """Payloads, chunk by chunk."""

    async def write_chunks(self, key: str, first: int, chunks: Sequence[Encoded], ttl_s: float) -> None:
        """Append encoded chunks `first`, `first`+1 ... in one bounded pipeline and (re)set the expiry.

        A chunk that is already there is left as it is, so that a retry after `BusUnavailable` or `BusFull` (the
        first of the chunks may be there) is safe.

        Raises:
            PayloadIncomplete: the chunk before `first` is not there (the payload expired): start over.
        """

    async def count_chunks(self, key: str) -> int:
        """How many chunks a payload has so far; 0 where there is none."""

    async def read_chunks(
        self, key: str, first: int, limit: int, chunk_bytes: int, block_s: float = 0.0, extend_s: float = 0.0
    ) -> list[bytes | memoryview]:
        """Chunks from index `first` on, at most `limit`; waits up to `block_s` for the first of them.

        extend_s: if the payload is about to expire, let it live at least this long (a slow pull ends).

        Raises:
            BadPayload: they are larger than chunks of `chunk_bytes`, the spec's, can be.
        """

    async def expire_soon(self, key: str, ttl_s: float) -> None:
        """Let a payload that is about to expire live so long at most; one that a commit made stay, stays."""


class Heads(Keyed, Protocol):
    """The present truth about every fragment, to read."""

    async def read_heads(self, fragments: Sequence[int]) -> list[Head | None]:
        """Heads in the order asked for; None where a fragment has none yet."""


class Tape(Keyed, Protocol):
    """The event tape: one for each group of fragments."""

    async def tape_end(self) -> dict[int, str]:
        """Cursor after the last entry of each group's tape; of several servers, those that answer."""

    async def read_tape(
        self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000, away: set[int] | None = None
    ) -> list[TapeEntry]:
        """Entries after the cursors (group -> entry id), in order within a group.

        away: told the groups whose server did not answer. Without it that is an error if the others have nothing.
        """

    async def trim_tape(self, group: int, before: str) -> None:
        """Drop tape entries older than an id, once archived."""


class Offers(Keyed, Protocol):
    """Headers of deltas: learners offer them, the fragment's owner reads them."""

    async def offer(self, header: DeltaHeader, renews: str = "") -> str:
        """Append a header to its learner's stream of the fragment; returns its name, `ms-seq:mark@learner`.

        renews: name of an earlier one of that stream, which goes in the same step if it is still there.
        """

    async def read_offers(
        self, fragment: int, after: Mapping[str, str] | None = None, block_s: float = 0.0, limit: int = 256
    ) -> list[Offered]:
        """Headers by learner, of each in the order in which they came and at most `limit`. What is there is pending.

        Waits up to `block_s` for the first one. What is no learner's name goes from the list of senders, if this user
        may, and where very many are new, those that have nothing pending.

        Args:
            fragment: id.
            after: learner -> entry id (`ms-seq`) of the last header that is known; the others' are read from the start.
            block_s: 0: what is there now.
            limit: for each learner.
        """


class FragmentLeases(Keyed, Protocol):
    """Who owns which fragment, for how long."""

    async def acquire_lease(self, fragment: int, nonce: str, ttl_s: float, most_s: float = MOST_LEASE_S) -> bool:
        """Take a fragment's lease if nobody holds it, or prolong one held under the same nonce.

        Another's that would last for longer than `most_s`, or for ever, ends after `ttl_s`.
        """

    async def release_lease(self, fragment: int, nonce: str) -> None:
        """Give the lease back, if it is still ours."""

    async def read_leases(self, fragments: Sequence[int]) -> list[str | None]:
        """The nonces under which leases are held, in the order asked for; None where one is free."""


class SyncerBoard(Keyed, Protocol):
    """Which syncers are here."""

    async def announce_syncer(self, nonce: str, name: str, ttl_s: float, saved_tokens: int = 0) -> tuple[str, ...]:
        """Say that a syncer is here for another `ttl_s`; returns the nonces of all that are, in order.

        saved_tokens: of the checkpoint that it would put on a bus that has nothing of the run; 0: it has none.
        """

    async def withdraw_syncer(self, nonce: str) -> None:
        """Say that a syncer is gone."""

    async def read_syncers(self) -> dict[str, str]:
        """Nonce -> name of all syncers that are here, in order of the nonces."""

    async def read_savers(self) -> Sequence[tuple[int, str, str]]:
        """(tokens of its checkpoint, nonce, name) of those that would put one on the bus, the most tokens last."""


class OwnerWrites(Keyed, Protocol):
    """What only the holder of a fragment's lease writes. Lease and head are checked in the same atomic step."""

    async def commit(self, commit: Commit) -> None:
        """Move the head: exactly once, or not at all.

        Raises:
            LeaseLost, HeadMoved, PayloadIncomplete: nothing was changed.
        """

    async def republish(self, fragment: int, anew: Republication) -> None:
        """Have a head name other payloads of the same version; window, counters and tape stay as they are.

        Raises:
            LeaseLost, HeadMoved (or there is no head), PayloadIncomplete: nothing was changed.
        """

    async def refuse(self, fragment: int, refusal: Refusal) -> None:
        """Delete refused headers and payloads and record why; none of the headers is there: nothing is done.

        Raises:
            LeaseLost, HeadMoved (or there is no head): nothing was changed.
        """

    async def write_window(
        self,
        fragment: int,
        nonce: str,
        expected: tuple[int, bytes],
        window: WindowView,
        record: WindowChanged | Rewound | None,
    ) -> None:
        """Publish the window's state in the head, and on the tape if a record is given.

        expected: (version, digest) the head must have.

        Raises:
            LeaseLost, HeadMoved (or there is no head): nothing was changed.
        """


class WorkQueue(Keyed, Protocol):
    """Data shards that learners take turns to read."""

    async def propose_data_order(self, order: DataOrder) -> DataOrder:
        """The order that the run's shards are of: this one if there is none yet."""

    async def read_data_order(self) -> DataOrder | None:
        """The order that the run's shards are of, or None before the first proposal."""

    async def fill_shards(self, epoch: int, shards: Sequence[Shard], counted: int | None = None) -> bool:
        """Queue an epoch's shards if exactly `epoch` epochs were queued before; False: somebody else did.

        counted: how many the bus counts, if it has lost some of them; `epoch` + 1 are queued afterwards.
        """

    async def count_epochs(self) -> int:
        """Epochs queued so far."""

    async def claim_shard(self, consumer: str, silent_s: float, known: Collection[str] = ()) -> ClaimedShard | None:
        """Take a shard, with its last saved position; None when there is none to take.

        In this order: one that the consumer holds without knowing it (the answer to its claim was lost), the oldest
        whose holder is gone, the next that nobody holds. A holder is gone when it has released its shards, or has not
        reported for `silent_s` (by the server's clock; one that never reported: has held the shard for that long).
        An entry that cannot be read comes as a shard without blocks: take it off with `finish_shard`.

        Args:
            consumer: `learner.incarnation`.
            silent_s: a holder not heard from for this long is gone.
            known: entry ids that the consumer knows it holds.
        """

    async def save_position(self, consumer: str, entry_id: str, position: int) -> None:
        """Remember how far a shard was read; nothing unless this is its holder. A position never goes back."""

    async def finish_shard(self, consumer: str, entry_id: str) -> None:
        """Acknowledge: the shard was read to its end; nothing unless this is its holder."""

    async def release_shards(self, consumer: str) -> None:
        """Give back all that the consumer holds: whoever claims next takes it, before anything else."""

    async def read_shards(self) -> ShardQueue:
        """Shards not yet acknowledged, held ones included, for a checkpoint; without what cannot be read.

        Raises:
            BadMessage: there are more entries than learners queue.
        """

    async def restore_shards(self, queue: ShardQueue) -> None:
        """Put a checkpoint's shard queue on an empty bus."""

    async def delete_data(self) -> None:
        """Delete the queue and its order, whatever is there."""


class Bus(
    Connection,
    SpecAndState,
    Reports,
    RunLogs,
    InitialUploads,
    MomentsExchange,
    PayloadStore,
    Heads,
    Tape,
    Offers,
    FragmentLeases,
    SyncerBoard,
    OwnerWrites,
    WorkQueue,
    Protocol,
):
    """All of it: Redis, or its in-memory twin. Whoever needs less takes the parts that it needs."""
