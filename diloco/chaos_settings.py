"""What `diloco chaos` is asked to do to a run; `diloco_studies.strikes` does it."""

from typing import Literal

from pydantic import Field

from diloco.pipeline.settings import Settings


class ChaosSettings(Settings):
    """What is done to a run under `diloco chaos`. Each kind of strike: PARTY:EVERY[/LENGTH], several with commas."""

    redis: Literal["one", "sentinel", "cluster"] = Field(
        "one",
        description="one: a server alone. sentinel: a primary with two replicas and three sentinels. cluster: three "
        "primaries with a replica each. Those are struck as redis-primary, and the sentinels as sentinel",
    )
    kill: str = Field(
        "learner:3s,syncer:7s,redis:20s",
        description="SIGKILL, and a restart after LENGTH (1s; redis-primary 6s; never: it stays dead). PARTY is "
        "learner, syncer or redis, EVERY the mean time between two strikes; 'none' for a run without",
    )
    pause: str = Field("none", description="SIGSTOP, and SIGCONT after LENGTH (3s); written as --kill")
    cut: str = Field("none", description="Reset the connections to Redis, none for LENGTH (2s); redis: everybody's")
    hang: str = Field("none", description="Hold all bytes to and from Redis for LENGTH (2s); redis: everybody's")
    partition: str = Field(
        "none",
        description="Cut redis-primary off for LENGTH (8s) with a sentinel, a syncer and some learners: they reach "
        "each other and nobody else. Needs the right to make networks (root)",
    )
    lose_tail: bool = Field(
        False, description="A killed Redis comes back without its last second, as with appendfsync everysec"
    )
