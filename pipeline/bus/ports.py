"""The two interfaces that the protocol needs from outside: a bus and a clock. Adapters: `redis_streams`, `memory`.

The bus is split into small protocols, one for each concern; `Bus` combines them. The contract of each method is
documented here and nowhere else: adapters subclass these protocols and inherit the docstrings. Every adapter keeps
these promises (the contract tests run on all of them):

- Each method either performs one atomic step on the bus or only reads. When a method raises `BusUnavailable`, its step
  may or may not have happened; when it raises any other `BusError`, nothing was changed.
- Headers of one learner and fragment, and entries of one group's tape, are read in the order in which they were
  written.
- Blocking reads (`block_s`) return as soon as there is something to return, or an empty list when the time is over.
  They never hold up other calls.
- An owner's writes (`OwnerWrites`) check the lease nonce and the head inside the same atomic step.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diloco.pipeline.bus.commits import Commit, Refusal, Republication
from diloco.pipeline.bus.keys import RunKeys
from diloco.pipeline.messages.fragment import DeltaHeader, Head, Rewound, TapeRecord, WindowChanged, WindowView
from diloco.pipeline.messages.moments import MomentsOffer, MomentsWish
from diloco.pipeline.messages.run import Evaluation, Event, InitialUpload, LearnerReport, RunState, SeenReport
from diloco.pipeline.messages.shards import ClaimedShard, DataOrder, Shard, ShardQueue
from diloco.pipeline.messages.spec import Spec, Wanted
from diloco.pipeline.messages.wire import MAX_LEASE_S
from diloco.pipeline.payload.codec import Encoded

# Cursor before the first entry of any stream.
START = "0"


class Clock(Protocol):
    """An injected clock. `sleep` and all timeouts go through the event loop, and `now` reads the loop's time."""

    def now(self) -> float:
        """Return monotonic seconds (the event loop's time)."""

    def unix(self) -> float:
        """Return wall-clock seconds, only for display and for other machines."""


@dataclass(frozen=True, slots=True)
class Offered:
    """A header on its learner's stream. `header` is None if the entry is not acceptable; `problem` says why."""

    entry_id: str
    """`ms-seq:mark@learner`, or `ms-seq@learner` if the entry is not acceptable."""
    header: DeltaHeader | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class MomentsBoard:
    """The state of the exchange of optimizer moments."""

    wish: MomentsWish | None
    """The request of a learner, if no upload has answered it yet."""
    claimed: bool
    """True if a peer is answering the request."""
    offer: MomentsOffer | None
    """The complete upload of a peer; it remains after the peer has left, until it expires."""


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """An entry of a group's event tape."""

    group: int
    entry_id: str
    record: TapeRecord


@dataclass(frozen=True, slots=True)
class BusInfo:
    """What the server reports about itself; on a cluster, the sum or the union over its primaries."""

    server_id: str
    """Identifies the server process: it changes when the server is restarted."""
    version: str
    maxmemory_bytes: int
    used_bytes: int
    cluster: bool = False
    nodes: int = 1
    """Number of nodes that hold keys: 1, or a cluster's primaries."""
    warnings: tuple[str, ...] = field(default=())
    """Problems to mend, e.g. an eviction policy that may drop keys."""
    takes_writes: bool = True
    """False if every node refuses writes because it has lost the replicas that min-replicas-to-write asks for."""
    up_s: float = math.inf
    """Seconds since a single server was started; inf if unknown, and for a cluster."""
    received_bytes: int = 0
    """Bytes received from all clients since the start, clients of other runs included."""
    sent_bytes: int = 0
    node: tuple[int, int] | None = None
    """(used, maxmemory) in bytes of the fullest node among those with a limit; None if no node has a limit."""
    backlogs_bytes: int = 0
    """Part of `maxmemory_bytes` that the replication backlogs take once they are full."""

    @property
    def fullest(self) -> tuple[int, int]:
        """(used, maxmemory) in bytes of the fullest node; without one, `used_bytes` and `maxmemory_bytes`."""
        return self.node or (self.used_bytes, self.maxmemory_bytes)


class Keyed(Protocol):
    """The base of every part of the bus: it is bound to one run."""

    keys: RunKeys


class Connection(Keyed, Protocol):
    """The connection to the server."""

    clock: Clock
    """Its `unix` follows the server's wall clock, so that times written by different parties can be compared."""

    def use_spec(self, spec: Spec) -> None:
        """Take the run's fragment groups from its spec; called once the spec is known."""

    async def info(self) -> BusInfo:
        """Return what the server reports about itself."""

    async def close(self) -> None:
        """Close all connections; calls in flight end with `BusUnavailable`."""


class SpecAndState(Keyed, Protocol):
    """The run's spec, which all parties agree on, and the run's state."""

    async def propose_spec(self, spec: bytes) -> bytes:
        """Set the spec if there is none; return the spec that is now on the bus."""

    async def read_spec(self) -> bytes | None:
        """Return the spec, or None before the first proposal."""

    async def offer_wanted(self, wanted: Wanted, ttl_s: float) -> Wanted:
        """Publish for `ttl_s` the settings wanted for a run without a spec, or prolong them; return those in force."""

    async def read_wanted(self) -> Wanted | None:
        """Return the settings wanted for a run without a spec; None if none were published or they expired."""

    async def replace_spec(self, spec: bytes, instead_of: bytes) -> bool:
        """Replace the spec if the bus still has `instead_of`; return whether it was replaced."""

    async def write_state(self, state: RunState) -> RunState:
        """Set the run's state unless that would move its phase backwards; return the state that is now on the bus."""

    async def begin_again(self, state: RunState) -> bool:
        """Move a finished run back to an earlier phase; return False, and change nothing, if it is not finished."""

    async def read_state(self) -> RunState | None:
        """Return the run's state, or None before the syncer first wrote it."""

    async def delete_run(self) -> None:
        """Delete all keys of the run."""


class Reports(Keyed, Protocol):
    """The last report of each learner incarnation."""

    async def write_report(self, report: LearnerReport) -> RunState | None:
        """Replace the report of this learner's incarnation unless the stored one is newer; return the run's state.

        The first incarnation that reports a generation holds the learner's id. No other incarnation can take the id
        until one reports a greater generation.

        Raises:
            LearnerReplaced: another incarnation holds the id. Nothing has changed.
        """

    async def put_back_report(self, seen: SeenReport) -> None:
        """Restore a report that the bus has lost, with its age.

        A restored report is not a sign of life and does not hold the learner's id. A report of the same incarnation
        that is on the bus is kept.
        """

    async def read_reports(self) -> list[SeenReport]:
        """Return the last report of every incarnation that ever reported, with ages by the server's clock.

        If this user has the rights, entries larger than any report are deleted, and when there are too many reports
        (`stored_reports.have_surplus`) those that matter least are deleted too.
        """


class RunLogs(Keyed, Protocol):
    """Events and evaluations, in the order in which they were written."""

    async def add_event(self, event: Event) -> None:
        """Append to the run's events (capped at about 10,000)."""

    async def trim_events(self) -> None:
        """Cap the events: a learner may have appended any number by its own commands, and every viewer reads all."""

    async def read_events(self, after: str = START, limit: int = 1000) -> list[tuple[str, Event]]:
        """Return the events after an entry id, oldest first."""

    async def add_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation (capped at about 100,000)."""

    async def read_evaluations(self, after: str = START, limit: int = 1000) -> list[tuple[str, Evaluation]]:
        """Return the evaluations after an entry id, oldest first."""


class InitialUploads(Keyed, Protocol):
    """The upload of version 0, by one learner at a time."""

    async def claim_initial(self, nonce: str, ttl_s: float) -> bool:
        """Claim the right to upload version 0, or prolong a claim held under the same nonce; return whether it is held.

        If another learner holds the claim, its remaining time is limited to `ttl_s`.
        """

    async def finish_initial(self, upload: InitialUpload, ttl_s: float) -> bool:
        """Announce a complete upload if the claim is still held; return False if it lapsed."""

    async def read_initial(self) -> InitialUpload | None:
        """Return the complete upload of version 0, or None."""


class MomentsExchange(Keyed, Protocol):
    """The exchange of an inner optimizer's moments: a learner asks, and one peer at a time answers."""

    async def ask_moments(self, wish: MomentsWish, ttl_s: float) -> None:
        """Ask for a peer's moments; if another learner's request is pending, that request serves both."""

    async def read_moments(self) -> MomentsBoard:
        """Return the pending request, whether a peer is answering it, and the complete offer if there is one.

        Any learner may write to these keys. An unreadable value counts as absent, and nothing stays longer than two
        minutes.
        """

    async def claim_moments(self, nonce: str, ttl_s: float) -> bool:
        """Claim the right to upload moments, or prolong a claim of the same nonce; return whether it is held."""

    async def finish_moments(self, offer: MomentsOffer, ttl_s: float) -> bool:
        """Announce a complete upload and end request and claim; return False, and do nothing, if the claim lapsed."""


class PayloadStore(Keyed, Protocol):
    """Payloads, chunk by chunk."""

    async def write_chunks(self, key: str, first: int, chunks: Sequence[Encoded], ttl_s: float) -> None:
        """Append the encoded chunks `first`, `first`+1 ... in one bounded pipeline and (re)set the expiry.

        A chunk that already exists is not changed. A retry after `BusUnavailable` or `BusFull`, when the first few
        chunks may already exist, is therefore safe.

        Raises:
            PayloadIncomplete: the chunk before `first` is missing (the payload expired): start over.
        """

    async def count_chunks(self, key: str) -> int:
        """Return how many chunks a payload has so far; 0 if it does not exist."""

    async def read_chunks(
        self, key: str, first: int, limit: int, chunk_bytes: int, block_s: float = 0.0, extend_s: float = 0.0
    ) -> list[bytes | memoryview]:
        """Return at most `limit` chunks from index `first` on; wait up to `block_s` for the first of them.

        Args:
            key: of the payload.
            first: index of the first chunk to read.
            limit: maximum number of chunks.
            chunk_bytes: size of a chunk's data, from the spec.
            block_s: how long to wait; 0 returns what exists now.
            extend_s: minimum remaining lifetime of an expiring payload, so that a slow pull can finish.

        Raises:
            BadPayload: the chunks are larger than `chunk_bytes` allows.
        """

    async def expire_soon(self, key: str, ttl_s: float) -> None:
        """Limit the remaining lifetime of an expiring payload to `ttl_s`; a committed payload is not touched."""


class Heads(Keyed, Protocol):
    """The current head of every fragment, read-only."""

    async def read_heads(self, fragments: Sequence[int]) -> list[Head | None]:
        """Return heads in the order asked for; None for a fragment that has no head yet."""


class Tape(Keyed, Protocol):
    """The event tape: one for each group of fragments."""

    async def tape_end(self) -> dict[int, str]:
        """Return the cursor after the last entry of each group's tape; groups whose server is down are left out."""

    async def read_tape(
        self, cursors: Mapping[int, str], block_s: float = 0.0, limit: int = 1000, away: set[int] | None = None
    ) -> list[TapeEntry]:
        """Return the entries after the cursors (group -> entry id), in order within a group.

        An entry that is unreadable is logged and skipped, so an empty list means that there are no more entries.

        away: receives the groups whose server did not answer. If it is None, a silent server is an error unless the
            others have entries.
        """

    async def trim_tape(self, group: int, before: str) -> None:
        """Drop tape entries older than an id, once they are archived."""


class Offers(Keyed, Protocol):
    """Headers of deltas: learners offer them, the fragment's owner reads them."""

    async def offer(self, header: DeltaHeader, renews: str = "") -> str:
        """Append a header to its learner's stream of the fragment; return its name, `ms-seq:mark@learner`.

        renews: name of an earlier header in that stream, which is deleted in the same step if it still exists.
        """

    async def read_offers(
        self, fragment: int, after: Mapping[str, str] | None = None, block_s: float = 0.0, limit: int = 256
    ) -> list[Offered]:
        """Return the pending headers by learner, at most `limit` of each, in the order in which they came.

        The call waits up to `block_s` for the first one. If this user has the rights, it also cleans the list of
        senders: it removes entries that cannot be a learner's name and, if very many names are new, those that have no
        header pending.

        Args:
            fragment: its id.
            after: learner -> entry id (`ms-seq`) of its last known header; other learners are read from the start.
            block_s: how long to wait; 0 returns what exists now.
            limit: maximum number of headers of each learner.
        """


class FragmentLeases(Keyed, Protocol):
    """Leases on fragments: their holder owns the fragment until the lease expires."""

    async def acquire_lease(self, fragment: int, nonce: str, ttl_s: float, max_s: float = MAX_LEASE_S) -> bool:
        """Take a fragment's lease if it is free, or prolong one held under the same nonce; return whether it is held.

        If another holder's lease would last longer than `max_s`, or never expires, it is shortened to `ttl_s`.
        """

    async def release_lease(self, fragment: int, nonce: str) -> None:
        """Release the lease if it is still held under this nonce."""

    async def read_leases(self, fragments: Sequence[int]) -> list[str | None]:
        """Return the nonces under which leases are held, in the order asked for; None for a free lease."""


class SyncerBoard(Keyed, Protocol):
    """The list of live syncers."""

    page: str = ""
    """Where this process serves the run's page, for display; announced with its syncer."""

    async def announce_syncer(self, nonce: str, name: str, ttl_s: float, saved_tokens: int = 0) -> tuple[str, ...]:
        """Announce a syncer as live for another `ttl_s`; return the nonces of all live syncers, sorted.

        saved_tokens: tokens in the checkpoint that it would restore to a bus without the run; 0 if it has none.
        """

    async def withdraw_syncer(self, nonce: str) -> None:
        """Remove a syncer from the list."""

    async def read_syncers(self) -> dict[str, str]:
        """Return nonce -> name of all live syncers, sorted by nonce."""

    async def read_pages(self) -> dict[str, str]:
        """Return name -> page of the live syncers that serve one; a page that cannot be displayed is left out."""

    async def read_savers(self) -> Sequence[tuple[int, str, str]]:
        """Return (tokens, nonce, name) of the live syncers that have a checkpoint to restore, most tokens last."""


class OwnerWrites(Keyed, Protocol):
    """Writes reserved to the holder of a fragment's lease. Lease and head are checked in the same atomic step."""

    async def commit(self, commit: Commit) -> None:
        """Move the head: exactly once, or not at all.

        Raises:
            LeaseLost, HeadMoved, PayloadIncomplete: nothing was changed.
        """

    async def republish(self, fragment: int, anew: Republication) -> None:
        """Make a head name other payloads of the same version; window, counters and tape do not change.

        Raises:
            LeaseLost, HeadMoved (or there is no head), PayloadIncomplete: nothing was changed.
        """

    async def refuse(self, fragment: int, refusal: Refusal) -> None:
        """Delete refused headers and payloads and record why; do nothing if none of the headers exists any more.

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
        """Publish the window's state in the head, and append `record` to the tape if it is given.

        expected: (version, digest) the head must have.

        Raises:
            LeaseLost, HeadMoved (or there is no head): nothing was changed.
        """


class WorkQueue(Keyed, Protocol):
    """A queue of data shards that learners share."""

    async def propose_data_order(self, order: DataOrder) -> DataOrder:
        """Set the data order of the run's shards if there is none; return the order that is now on the bus."""

    async def read_data_order(self) -> DataOrder | None:
        """Return the data order of the run's shards, or None before the first proposal."""

    async def fill_shards(self, epoch: int, shards: Sequence[Shard], counted: int | None = None) -> bool:
        """Queue an epoch's shards if exactly `epoch` epochs were queued before; return False if somebody else did.

        counted: the bus's epoch count, if it has lost some epochs; afterwards the count is `epoch` + 1.
        """

    async def count_epochs(self) -> int:
        """Return the number of epochs queued so far."""

    async def claim_shard(self, consumer: str, silent_s: float, known: Collection[str] = ()) -> ClaimedShard | None:
        """Take a shard, with its last saved position; return None if there is none to take.

        The order is: first a shard that the consumer holds without knowing it (the answer to its claim was lost), then
        the oldest shard whose holder is gone, then the next unheld one. A holder is gone when it has released
        its shards, or has not reported for `silent_s` by the server's clock. A holder that never reported is gone once
        it has held the shard for that long. An unreadable entry is returned as a shard without blocks; remove it with
        `finish_shard`.

        Args:
            consumer: `learner.incarnation`.
            silent_s: time without a report after which a holder is gone.
            known: entry ids that the consumer knows it holds.
        """

    async def save_position(self, consumer: str, entry_id: str, position: int) -> None:
        """Save how far a shard was read, if the consumer is its holder. A position never goes back."""

    async def finish_shard(self, consumer: str, entry_id: str) -> None:
        """Acknowledge that a shard was read to its end, if the consumer is its holder."""

    async def release_shards(self, consumer: str) -> None:
        """Release all shards that the consumer holds: the next claims take them before any new shard."""

    async def read_shards(self) -> ShardQueue:
        """Return the shards not yet acknowledged, held ones included, for a checkpoint; skip unreadable entries.

        Raises:
            BadMessage: there are more entries than learners queue.
        """

    async def restore_shards(self, queue: ShardQueue) -> None:
        """Put a checkpoint's shard queue on an empty bus."""

    async def delete_data(self) -> None:
        """Delete the queue and its order."""


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
    """The complete bus: Redis or its in-memory twin. A function that needs less takes only the protocols it uses."""
