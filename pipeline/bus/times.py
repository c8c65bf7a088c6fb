"""Times of the bus, in seconds: of its calls, of its nodes, and how long what is written there lives. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BusTimes:
    """All times of the bus; no setting changes them."""

    # Connections and calls.
    connect_s: float = 5.0  # opening a connection: several lost packets are sent again within it
    silent_s: float = 10.0  # a connection whose peer acknowledges nothing is lost: a failed machine sends no FIN or RST
    call_s: float = 10.0  # one call: only a server that hangs takes as long; what must be known sooner has other limits
    payload_call_s: float = 60.0  # one call that moves chunks, over a slow link
    block_s: float = 1.0  # a blocking read of what is not there yet; it adds to the call's limit
    poll_s: float = 0.2  # between two polls where no read can block: of streams in several slots, for a new primary
    warn_s: float = 60.0  # between two warnings of the same event, at least

    # Nodes: sentinels' primaries, and those of a cluster.
    refresh_s: float = 2.0  # between two lookups: a primary that failed silently is left that soon after it is replaced
    ask_s: float = 1.0  # one answer of one node in a lookup; short, since several are asked at once and most answer
    rest_s: float = 0.1  # for the others, once most have answered
    next_primary_s: float = 15.0  # a new party waits for a primary: sentinels need some seconds to replace one

    # A server that a run starts (`EmbeddedRedis`).
    server_start_s: float = 10.0  # until it answers
    server_stop_s: float = 5.0  # from the request to end until it is killed

    # Lifetimes of what parties write.
    staged_ttl_s: float = 120.0  # a staged payload whose commit never comes; twice the time of its recording
    replaced_ttl_s: float = 120.0  # a payload that no head names any more, so that pulls in progress can finish
    pulled_ttl_s: float = 60.0  # a payload lives on for this from each read of a pull that takes several
    moments_ttl_s: float = 120.0  # a wish, claim or offer of moments at most, whatever its learner wrote

    # Liveness and agreement.
    live_s: float = 5.0  # a learner silent for longer is not live, unless the run's state says another time
    other_spec_s: float = 10.0  # another spec counts only then: after a loss of data a syncer may put the run's back


BUS_TIMES = BusTimes()
