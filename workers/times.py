"""Times of a learner and its evaluators, in seconds: polls, waits, retries, lifetimes. Pure."""

from dataclasses import dataclass

from diloco.pipeline.retry import Backoff


@dataclass(frozen=True, slots=True)
class LearnerTimes:
    """All times of a learner that are not settings, except those among its ranks (`workers.ranks`)."""

    # Tries.
    retry: Backoff = Backoff(0.1, 2.0)  # of one call, pull or header, after an outage or for a fragment that failed
    reach_retry: Backoff = Backoff(0.1, 5.0)  # of a connection to a Redis that is not there; it may stay away for hours

    # Looks.
    poll_s: float = 0.1  # at the bus, for what this learner waits for: a head, an offer, another process's report
    slow_poll_s: float = 1.0  # where a poll costs more: for peers' wishes in training, for weights by new connections
    evaluator_poll_s: float = 0.5  # of an evaluator, at the run's state, which is small
    look_s: float = 5.0  # at all heads and at the spec, though no record says that they changed
    warn_look_s: float = 10.0  # for what is only told: Redis lacks scripts, no syncer is there (it may be restarting)
    check_s: float = 0.2  # of a training thread that waits: whether a signal came, or the exchange thread has ended

    # Joining.
    id_silent_s: float = 1.0  # a process under the same id is dead; three reports could have come
    joining_told_s: float = 3.0  # until the log says what joining waits for
    initial_claim_ttl_s: float = 10.0  # the claim to version 0; if its learner dies, another one begins then
    others_trained_s: float = 40.0  # fresh parameters wait for trained ones: longer than trained learners wait
    heads_lost_s: float = 15.0  # a live syncer puts heads back within this; then learners upload what they adopted

    # Reporting.
    report_s: float = 0.3  # between two reports, if nothing else calls for one
    min_report_s: float = 0.05  # between two reports at least; a header's report in that time tells the news too
    scripts_told_s: float = 1200.0  # until missing scripts are told again: a status looks back an hour

    # Publishing and pulling.
    payload_ttl_s: float = 600.0  # a delta or first parameters not taken by any syncer
    renewed_ttl_s: float = 10.0  # a payload whose delta was renewed, so that a syncer that reads it can finish
    newest_s: float = 60.0  # for all globals at once, past outages and past the last merges of a run that ends

    # Moments from peers.
    moments_unclaimed_s: float = 5.0  # a newcomer waits for a peer to claim its wish: five looks of a peer
    moments_wait_s: float = 30.0  # and in all; its wish lives as long
    moments_upload_s: float = 40.0  # a peer's copy and upload; the newcomer has begun fresh by then
    moments_claim_ttl_s: float = 3.0  # a peer's claim; if it dies, another one begins while the newcomer waits
    moments_offer_ttl_s: float = 60.0  # an offer, which other newcomers may use too
    # Longer than upload and offer together, so that what is announced can be read. No longer than two offers: the first
    # one's payloads are gone when the upload for a third begins, so none pile up however often learners join.
    moments_payload_ttl_s: float = 2 * moments_offer_ttl_s

    # Shards.
    dead_s: float = 10.0  # a silent learner's shards go to others, and its trained values are not waited for
    dry_s: float = 2.0  # for a shard, once, before old data is read again; a loader may draw many batches at its start

    # State folder and leaving.
    losses_s: float = 0.25  # between two writes of losses
    goodbye_s: float = 2.0  # the last report; a quarter of the time to leave if that is more
    thread_end_s: float = 10.0  # for the exchange thread's end, which may wait for a call in flight


TIMES = LearnerTimes()
