"""Check settings that a learner of several ranks cannot train with, before its processes are started. Pure."""

from diloco.pipeline.errors import UsageError


def check_set(ranks: int, batch: int, sharding: str, compiled: bool) -> None:
    """Check that this many ranks can form one learner of the built-in trainer.

    Raises:
        UsageError: names the setting that prevents it.
    """
    if batch % ranks:
        raise UsageError(
            f"batch={batch}: a learner with {ranks} ranks divides each batch among them; use a number of ranks that "
            f"divides it, or, for a new run, --batch {ranks * -(-batch // ranks)}"
        )
    if ranks > 1 and sharding == "fsdp" and compiled:
        raise UsageError(
            "--compile with DILOCO_SHARDING=fsdp: a sharded model cannot be compiled; leave out one of them"
        )
