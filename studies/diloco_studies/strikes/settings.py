"""What `diloco chaos` is asked to do to a run."""

from typing import Literal

from pydantic import Field

from diloco.options import RunProcess
from diloco.pipeline.settings import Settings
from diloco.pipeline.units import Span


class ChaosSettings(Settings):
    """What is done to a run under `diloco chaos`. Each kind of strike: PARTY:EVERY[/LENGTH], several with commas."""

    section = "Strikes"

    redis: Literal["one", "sentinel", "cluster"] = Field(
        "one",
        description="one: a server alone. sentinel: a primary with two replicas and three sentinels. cluster: three "
        "primaries with a replica each. Primaries are struck as redis-primary, sentinels as sentinel",
    )
    kill: str = Field(
        "learner:3s,syncer:7s,redis:20s",
        description="SIGKILL, and a restart after LENGTH (1s; redis-primary 6s; never: it stays dead). PARTY is "
        "learner, syncer or redis, EVERY is the mean time between strikes; 'none': a run without kills",
    )
    pause: str = Field("none", description="SIGSTOP, and SIGCONT after LENGTH (3s); same format as --kill")
    cut: str = Field(
        "none",
        description="Reset the connections to Redis, and allow none for LENGTH (2s); redis: those of all parties",
    )
    hang: str = Field(
        "none", description="Hold all bytes to and from Redis for LENGTH (2s); redis: those of all parties"
    )
    partition: str = Field(
        "none",
        description="Cut redis-primary off for LENGTH (8s) with a sentinel, a syncer and some learners: they reach "
        "only each other. Needs the right to create networks (root)",
    )
    lose_tail: bool = Field(
        False, description="A killed Redis restarts without its last second, as with appendfsync everysec"
    )


class ChaosProcess(RunProcess, ChaosSettings):
    """`diloco chaos`: a run of its own, and what is done to it."""

    method: Literal["decoupled", "paper"] = Field("decoupled", description="As for `diloco run`")
    syncers: int = Field(2, ge=1, le=64, description="Number of syncer processes; they share the fragments")
    checkpoint_every: Span = Field(0.0, description="Time between checkpoints; 0: only at the end")
    tokens: int | None = Field(  # type: ignore[assignment]  # set before anybody reads it
        None, ge=1, le=10**18, description="Budget: ends the run before --for is over (default: more than it can train)"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "debug", description="Minimum severity of log lines; the audit of the data shards needs debug"
    )


NOT_OF_CHAOS = frozenset(
    {
        *("redis_url", "redis_ca", "redis_cert", "redis_key", "redis_port", "redis_bind", "redis_password"),
        "json_report",
        "prompt",
        "resume",
        "record_deltas",
        "log_losses",
        "groups",
    }
)
"""Fields of `RunProcess` that `diloco chaos` sets itself or has no use for."""
