"""Serve the page of a run in progress, and leave it in the run's folder when it ends."""

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shlex import quote

import structlog

from diloco.launcher.locate import is_output
from diloco.pipeline.bus.ports import Bus
from diloco.pipeline.errors import DilocoError, UsageError
from diloco.pipeline.files.replacing import replace as replace_file
from diloco.pipeline.files.strict_json import dumps
from diloco.pipeline.files.writable import error_text
from diloco.pipeline.settings import HttpSettings
from diloco.pipeline.view.page.assets import one_file
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.page.join_command import LearnerLaunch, RedisRoute
from diloco.pipeline.view.page.model import Model
from diloco.pipeline.view.status import Status
from diloco.pipeline.view.status_reader import read_status
from diloco.pipeline.waiting import cancel

# The last model of a run's page, in its output folder.
MODEL_FILE = "page.json"
# The same as a page that needs no server.
PAGE_FILE = "report.html"
# Time between two polls of the run while no browser follows it: the page in the folder needs the whole history.
EVERY_S = 1.0
LAST_POLL_S = 5.0


@asynccontextmanager
async def served(
    bus: Bus, settings: HttpSettings, tell: Callable[[str], None], route: RedisRoute
) -> AsyncIterator[tuple[Collector, str]]:
    """Serve the page and `/metrics` of the bus's run during the block, and look at the run once more at its end.

    Yields the collector, which reads the run, and the page's address.

    route: how others reach the bus, which the page shows.

    Raises:
        UsageError: the server cannot listen on the address.
    """
    from diloco.syncer.metrics import registry_of
    from diloco.syncer.run_metrics import RunMetrics
    from diloco.syncer.serving.http import start_http

    clock = bus.clock
    collector = Collector(bus, clock, idle_s=EVERY_S, route=route)
    registry = registry_of(bus.keys.run)
    registry.register(RunMetrics(collector.reading, clock, lambda: True))

    async def status() -> Status:
        return await read_status(bus, clock)

    def ready() -> tuple[bool, str]:
        return True, "the page only watches the run"

    http, address = await start_http(status, ready, registry, collector.follow, settings, tell)
    collecting = asyncio.create_task(collector.run())
    try:
        yield collector, address
    finally:
        await cancel(collecting)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_POLL_S):
                await collector.poll()
        await http.cleanup()


def redis_route(url: str, own: Mapping[str, LearnerLaunch] | None = None) -> RedisRoute:
    """Return how a shell on this machine starts a party of the run at this URL; `own`: see `RedisRoute`."""
    program = Path(sys.argv[0]).resolve()
    if program.name != "diloco":
        started = f"{quote(sys.executable)} -m diloco"
    else:
        found = shutil.which("diloco")
        started = "diloco" if found and Path(found).resolve() == program else quote(str(program))
    return replace(RedisRoute.of(url), program=started, own={} if own is None else own)


@asynccontextmanager
async def left_in(
    folder: Path, bus: Bus, settings: HttpSettings, tell: Callable[[str], None], route: RedisRoute
) -> AsyncIterator[str]:
    """Serve the page on a free port (`served`), and leave its last model in a folder. Yields the page's address."""
    page_settings = settings.model_copy(update={"http_port": 0})  # the port of the settings is the syncer's
    watched = None
    try:
        async with served(bus, page_settings, tell, route) as (collector, address):
            watched = collector
            yield address
    finally:
        if watched is not None:
            with (
                reporting_bugs("the page", tell),
                suppress(FileNotFoundError),  # the folder may have been moved or deleted
            ):
                replace_file(folder / MODEL_FILE, [dumps(watched.model.snapshot()).encode() + b"\n"])


@contextmanager
def reporting_bugs(what: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Report a bug, or a failed read or write, in code that only displays a run, instead of ending the run."""
    try:
        yield
    except DilocoError:
        raise
    except OSError as error:
        tell(f"{what} failed: {error_text(error)}")
    except Exception as error:
        structlog.get_logger().error("not_shown", what=what, exc_info=error)
        tell(f"{what} could not be created: {type(error).__name__}: {error}")


def folder_of_page(file: Path) -> Path | None:
    """Return the output folder whose own page `write_page` would write to this file; None if there is none."""
    folder = file if file.is_dir() else file.parent if file.name == PAGE_FILE else None
    return folder if folder is not None and is_output(folder) else None


def write_page(model: Model, file: Path) -> str:
    """Write a run's page as one file, into a folder as `PAGE_FILE`, and return its address.

    Raises:
        UsageError: the file cannot be written.
    """
    file = file / PAGE_FILE if file.is_dir() else file
    try:
        page = one_file(model, f"diloco: {model['run']}").encode()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(page)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror or error}") from error
    except (UnicodeError, RecursionError) as error:
        raise UsageError(f"{file} cannot be written, because its data is damaged: {error}") from error
    return file.resolve().as_uri()
