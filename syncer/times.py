"""Times of a syncer, in seconds: polls, waits, retries. Pure."""

from dataclasses import dataclass

from diloco.pipeline.retry import Backoff


@dataclass(frozen=True, slots=True)
class SyncerTimes:
    """All times of a syncer that are not settings; those that follow from a lease's length are in `serving.leases`."""

    # Looks at the bus.
    watch_s: float = 0.25  # between two reads of reports and state; so soon the end of the budget is noticed
    poll_s: float = 0.1  # for what a starting run waits for: a spec, version 0, another syncer's checkpoint
    scripts_s: float = 2.0  # between two checks of the scripts: without one, a call of a learner fails until then
    server_s: float = 5.0  # between two checks of the server's memory and settings, and of the spec
    repair_s: float = 10.0  # between two checks that the payloads named by a head are there

    # Tries.
    retry_s: float = 1.0  # after an outage; it never grows: a syncer can do nothing else, and should notice the end
    fragment_retry: Backoff = Backoff(0.1, 2.0)  # of a fragment, which may have failed for a reason of its own
    download_retry_s: float = 0.2  # of a download; well below the shortest deadline of an upload
    flooded_s: float = 0.1  # a learner's headers are not read for this after a flood was cut: more of it may follow
    not_finite_pause_s: float = 30.0  # at most, between two merges whose outcome is not finite

    # The window. Its other times are measured.
    first_grace_s: float = 2.0  # the grace before there are estimates
    max_grace_s: float = 60.0  # a step of the slowest machines in serious use; slower learners get into some windows
    first_upload_s: float = 30.0  # the deadline of uploads before one was measured
    shown_merge_s: float = 1.0  # a merge that takes as long is shown on the head, which costs a write
    min_upload_s: float = 1.0  # the shortest deadline: machines are busy. A learner killed in it delays a merge

    # Beginning, and putting back.
    announced_s: float = 3.0  # syncers that are started together announce their checkpoints within this
    trained_first_s: float = (
        60.0  # fresh parameters wait for a party that claims, perhaps falsely, to have trained ones
    )

    # Checkpoints and the tape.
    checkpoint_again_s: float = 60.0  # a failed checkpoint is tried again, unless the usual interval is shorter
    checkpoint_retry: Backoff = Backoff(1.0, 8.0)  # of one read for it; a failover is shorter than all of its waits
    abandoned_s: float = 3600.0  # without a write to a checkpoint; no fragment takes as long, no clock is as wrong
    disk_s: float = 60.0  # of one recording: half of the lifetime of the staged payloads that its commit then needs
    tape_kept_s: float = 600.0  # the tape's oldest entries stay on the bus for this, where no lead archives it

    # HTTP.
    http_head_s: float = 5.0  # until the head of a request is there
    http_status_s: float = 10.0  # until the bus has delivered a status
    http_connection_s: float = 20.0  # of a connection, though its client may not read the answer
    http_stream_s: float = 600.0  # of a stream of the page's events; the page then asks again
    http_write_s: float = 10.0  # of one write to a stream, until its client counts as gone
    reading_s: float = (
        15.0  # an older reading is left out of the metrics: Redis does not answer then, and other metrics show that
    )


TIMES = SyncerTimes()
