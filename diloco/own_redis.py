"""`diloco redis`: start a Redis for the parties of a run on a machine that has none installed."""

import asyncio

import typer

from diloco.options import RedisProcess, reached_at, takes
from diloco.pipeline.bus.embedded import EmbeddedRedis
from diloco.pipeline.process import signals
from diloco.pipeline.waiting import first_of

# Interval at which the command checks that the server still answers.
LOOK_S = 1.0


async def _serve(settings: RedisProcess) -> None:
    stop = signals.stop_event()
    with EmbeddedRedis(
        port=settings.redis_port,
        host=settings.redis_bind,
        password=settings.secret(),
        dies_with_us=True,
        users=settings.redis_users,
    ) as server:
        typer.echo(f"until Ctrl-C, all parties reach it with: export DILOCO_REDIS_URL={reached_at(settings)}")
        while not stop.is_set():
            server.answers()
            await first_of(stop, timeout_s=LOOK_S)


@takes(RedisProcess)
def command(settings: RedisProcess) -> None:
    """Start a Redis for the parties of a run, here and on other machines: the same server that `diloco run` embeds.

    It keeps nothing on disk. After a restart, the syncers and learners that are still running restore what it has lost;
    without them a run continues from its checkpoint.

    Examples: diloco redis --redis-bind 192.168.1.10; diloco redis --redis-bind 192.168.1.10 --redis-users users.acl
    """
    asyncio.run(_serve(settings))
