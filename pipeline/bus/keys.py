"""Every Redis key name, in one place.

All keys of a fragment group share the hash tag ``{run:n}``, its tape included, so that a commit touches only one
cluster slot. Keys of the whole run share ``{run}``. Fragment p is in group ``g = p mod G``; G = 1 unless Redis is a
cluster, where G is the number of fragments. `cluster_slots.numbers` chooses the number n of each group so that the
groups are spread evenly over the slots; it is 0 if G = 1.
"""

import re
from dataclasses import dataclass

from diloco.pipeline.bus.cluster_slots import numbers

PREFIX = "diloco:"
_RUN = re.compile(rf"{PREFIX}\{{([A-Za-z0-9._-]{{1,64}})(?::[0-9]+)?\}}:")


def run_of(key: bytes | str | None) -> str:
    """Return the run that a key belongs to; "" if it is not a key of this project."""
    name = key.decode(errors="replace") if isinstance(key, bytes) else key or ""
    return found[1] if (found := _RUN.match(name)) else ""


@dataclass(frozen=True, slots=True)
class RunKeys:
    """Keys of one run with `groups` fragment groups."""

    run: str
    groups: int = 1

    def group(self, fragment: int) -> int:
        """Group of a fragment."""
        return fragment % self.groups

    def _of_run(self, name: str) -> str:
        return f"{PREFIX}{{{self.run}}}:{name}"

    def _of_group(self, group: int, name: str) -> str:
        return f"{PREFIX}{{{self.run}:{numbers(self.run, self.groups)[group]}}}:{name}"

    # --- the whole run ---------------------------------------------------------------------------
    @property
    def spec(self) -> str:
        """The run's spec (msgpack `Spec`), set once."""
        return self._of_run("spec")

    @property
    def wanted(self) -> str:
        """Settings that a syncer wants for a run without a spec (msgpack `Wanted`); expires."""
        return self._of_run("wanted")

    @property
    def state(self) -> str:
        """Hash: `rank` (position of the phase in `Phase`) and `blob` (msgpack `RunState`)."""
        return self._of_run("state")

    @property
    def learners(self) -> str:
        """Hash: `learner/incarnation` -> last msgpack `LearnerReport`."""
        return self._of_run("learners")

    @property
    def seen(self) -> str:
        """Hash: `learner/incarnation` -> server time of that report, in ms."""
        return self._of_run("seen")

    def holder(self, learner: str) -> str:
        """`generation incarnation` of the process that holds this learner's id: only its reports are accepted.

        Each learner has a key of its own, so that one with its own Redis user cannot be displaced by another learner.
        """
        return self._of_run(f"holder:{learner}")

    @property
    def events(self) -> str:
        """Stream of msgpack `Event`: joins, leaves, failures."""
        return self._of_run("events")

    @property
    def evaluations(self) -> str:
        """Stream of msgpack `Evaluation`."""
        return self._of_run("evaluations")

    @property
    def shards(self) -> str:
        """Stream of data shards with the consumer group `learners`."""
        return self._of_run("shards")

    @property
    def shard_positions(self) -> str:
        """Hash: shard entry id -> last saved position in that shard."""
        return self._of_run("shard-positions")

    @property
    def shard_epoch(self) -> str:
        """Number of epochs put on the queue so far."""
        return self._of_run("shard-epoch")

    @property
    def data_order(self) -> str:
        """The data order of the shards (msgpack `DataOrder`)."""
        return self._of_run("data-order")

    @property
    def syncers(self) -> str:
        """Hash: nonce of a syncer -> `until saved name page`, separated by blanks.

        until: server time in ms until which it counts as live; saved: tokens of its checkpoint, 0 if it has none; page:
        where it serves the page, missing if it serves none.
        """
        return self._of_run("syncers")

    @property
    def init_claim(self) -> str:
        """Nonce of the learner that may upload version 0; expires."""
        return self._of_run("init-claim")

    @property
    def initial(self) -> str:
        """msgpack `InitialUpload`: a complete upload of version 0; expires."""
        return self._of_run("initial")

    @property
    def moments_wish(self) -> str:
        """msgpack `MomentsWish`: a learner asks for an inner optimizer's moments; expires."""
        return self._of_run("moments-wish")

    @property
    def moments_claim(self) -> str:
        """Nonce of the learner that uploads its moments; expires."""
        return self._of_run("moments-claim")

    @property
    def moments_offer(self) -> str:
        """Key of the `MomentsOffer` (msgpack) that announces a complete upload of moments; expires."""
        return self._of_run("moments-offer")

    def moments_payload(self, p: int, name: str, nonce: str) -> str:
        """Stream of the chunks of one moment of fragment p; expires."""
        return self._of_run(f"moments:{p}:{name}:{nonce}")

    # --- one fragment (all in the slot of its group) -------------------------------------------------
    def deltas(self, p: int, learner: str) -> str:
        """Stream of one learner's headers for a fragment: one `DeltaHeader` per entry.

        Each learner has a stream of its own, so that no other learner can trim, block or forge the headers of one that
        has its own Redis user.
        """
        return self._of_group(self.group(p), f"deltas:{p}:{learner}")

    def senders(self, group: int) -> str:
        """Hash whose field names are the learners that offered a header in the group.

        If there are very many, syncers remove those that have no header pending; the next offer adds a name again.
        """
        return self._of_group(group, "senders")

    def arrivals(self, group: int) -> str:
        """Stream whose single entry names the newest sender; its only purpose is to wake the owners' blocking reads."""
        return self._of_group(group, "arrivals")

    def delta_payload(self, p: int, learner: str, incarnation: str, serial: int) -> str:
        """Stream of a delta's chunks; expires."""
        return self._of_group(self.group(p), f"delta:{p}:{learner}:{incarnation}.{serial}")

    def head(self, p: int) -> str:
        """Hash: the `Head` of fragment p."""
        return self._of_group(self.group(p), f"head:{p}")

    def lease(self, p: int) -> str:
        """The owner's nonce, with an expiry."""
        return self._of_group(self.group(p), f"lease:{p}")

    def global_payload(self, p: int, version: int, nonce: str) -> str:
        """Stream of a global fragment's chunks."""
        return self._of_group(self.group(p), f"global:{p}:{version}:{nonce}")

    def rest_payload(self, p: int, version: int, nonce: str) -> str:
        """Stream of the low-order halves that make a bf16 global's float32 values exact; no learner reads it."""
        return self._of_group(self.group(p), f"rest:{p}:{version}:{nonce}")

    def momentum_payload(self, p: int, version: int, nonce: str) -> str:
        """Stream of an outer momentum's chunks."""
        return self._of_group(self.group(p), f"momentum:{p}:{version}:{nonce}")

    def initial_payload(self, p: int, nonce: str) -> str:
        """Stream of one fragment's chunks of an upload of version 0; expires."""
        return self._of_group(self.group(p), f"initial:{p}:{nonce}")

    def tape(self, group: int) -> str:
        """Stream of a group's event tape: one `TapeRecord` per entry."""
        return self._of_group(group, "tape")
