"""`diloco run`: starts all parties on this machine, watches them, and brings the run to its end.

How a run ends:

- by its budget: the syncer drains and finishes the run, and the other processes end by themselves;
- by Ctrl-C (or SIGTERM, or SIGHUP of a closed terminal): the launcher asks for the drain, the rest is the same;
- by a second Ctrl-C: everything is killed at once, without a report;
- by an error: a learner died at the start, or no syncer or no learner is left.
"""

import asyncio
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import typer

from diloco.doctor.start import wrong_for_run
from diloco.extras import need_extras
from diloco.launcher.devices import devices_line
from diloco.launcher.display import Screen
from diloco.launcher.finish import conclude, save_again
from diloco.launcher.folder import Folder, choose, goes_on, own_checkpoint, plain, resume
from diloco.launcher.launch import Child, ChildDied, Children, environment, places_of, threads_for
from diloco.launcher.locate import is_output
from diloco.launcher.option_checks import check, is_everywhere
from diloco.launcher.page import left_in, redis_route, reporting_bugs
from diloco.launcher.report import Origin, Outcome
from diloco.options import (
    CHOSEN_BY_LAUNCHER,
    OF_DEMO,
    OF_ONE_LEARNER,
    RunProcess,
    method_notes,
    reached_at,
    takes,
    with_preset,
)
from diloco.pipeline.bus.ports import START, Bus, BusInfo
from diloco.pipeline.bus.redis_streams import open_bus
from diloco.pipeline.bus.schema import decode_spec
from diloco.pipeline.errors import BusError, BusUnavailable, DilocoError, PeerError, UsageError
from diloco.pipeline.findings import Finding
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.messages.fragment import TapeRecord
from diloco.pipeline.messages.run import Event, Phase
from diloco.pipeline.process import logs, signals
from diloco.pipeline.process.interrupts import end_with
from diloco.pipeline.process.output import survive_closed_pipes
from diloco.pipeline.units import count
from diloco.pipeline.view.ledger_inputs import read_ledger_inputs
from diloco.pipeline.view.loss_curves import loss_curves
from diloco.pipeline.view.page.join_command import LearnerLaunch
from diloco.pipeline.view.status import LearnerStatus, Status
from diloco.pipeline.view.status_reader import StatusReader
from diloco.pipeline.waiting import first_of
from diloco.tape import read_archive, read_whole

TICK_S = 0.5
# Time without Redis, or without a syncer on another machine, after which the launcher gives up.
SILENT_BUS_S = 60.0
# Time for the last evaluation.
EVALUATE_S = 120.0
# Time after which a display that failed is tried again.
NOT_SHOWN_S = 60.0
# Added to a party's own time limit for its end, before it gets SIGTERM, and again before SIGKILL.
MARGIN_S = 15.0


# Notes for the user, by where a learner's moments came from. There is none for learners that begin with the run.
MOMENTS = {
    "checkpoint": "continues with its saved moments",
    "optimizer": "continues with the moments that its trainer loaded",
    "peer": "starts with the moments of another learner",
    "fresh": "starts with fresh moments and a learning-rate ramp",
}


class Launcher:
    """Starts, watches and ends the processes of one run on this machine."""

    def __init__(
        self,
        settings: RunProcess,
        folder: Folder,
        url: str,
        bus: Bus,
        children: Children,
        screen: Screen,
        others: dict[str, int],
    ) -> None:
        """`others`: pids by name of processes that are not watched as children, for run.json."""
        self._settings, self._folder, self._url = settings, folder, url
        self._bus, self._children, self._screen = bus, children, screen
        self._others = others
        self._page: str | None = None
        self.own: dict[str, LearnerLaunch] = {}
        """By learner: how it was started, so that the user can be told how to start it again."""
        self.route = redis_route(url, self.own)  # how such a learner reaches the run
        self._clock = bus.clock
        self._status = StatusReader(bus, self._clock, settings.liveness_s)
        self._progress: list[tuple[float, int]] = []
        self._drained_from_s: float | None = None
        self._unserved_since: float | None = None
        """When the launcher first saw no syncer, neither a child nor one elsewhere; None while there is one."""
        self._warnings: list[str] = []
        self._show_from_s = 0.0
        self._told: set[str] = set()  # incarnations whose moments were noted on the screen
        self.stopped = False
        self._made = folder.identity()
        """Identity of the output folder at the start, to which all processes write."""
        self._moved = False  # True once the folder was moved or deleted

    # --- start ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all processes."""
        config = ["--config", str(self._folder.settings.resolve())]
        secrets = {}
        if self._settings.http_token is not None:
            secrets["DILOCO_HTTP_TOKEN"] = self._settings.http_token.get_secret_value()
        syncer = ["--checkpoint-dir", str(self._folder.checkpoints), "--tape-dir", str(self._folder.tape)]
        if self._settings.record_deltas is not None:
            syncer += ["--record-deltas", str(self._folder.recording(self._settings.record_deltas))]
        if self._settings.resume is not None:
            syncer += ["--resume", str(self._settings.resume)]
        for number in range(self._settings.syncers):
            name = f"syncer-{number}" if self._settings.syncers > 1 else "syncer"
            port = self._settings.http_port and self._settings.http_port + number
            own = ["--syncer-id", name, "--http-port", str(port)]
            environ = environment(1, self._url_of(name)) | secrets
            self._children.start(name, ["syncer", *config, *own, *syncer], environ)
        places = places_of(self._settings)
        threads = threads_for(sum(place.ranks for place in places), self._settings.threads)
        for number, place in enumerate(places):
            name = f"learner-{number}"
            own = [*config, "--learner-id", name, "--threads", str(threads), "--device", place.device]
            own += ["--state-dir", str(self._folder.learners.resolve() / name)]
            environ = environment(threads, self._url_of(name)) | place.environ
            self._children.start(name, ["learner", *own], environ)
            folder = "" if is_everywhere(self._settings.data) else str(Path.cwd())
            self.own[name] = LearnerLaunch(tuple(own), place.environ, folder)
        if line := devices_line(places):
            self._screen.note(line)
        evaluator = ["evaluator", *config, "--threads", "1"]
        self._children.start("evaluator", evaluator, environment(1, self._url_of("evaluator")))
        self._note_place()

    def _url_of(self, name: str) -> str:
        """Return the URL by which a process reaches Redis; a subclass may give each process its own."""
        return self._url

    def _note_place(self) -> None:
        pids = self._others | self._children.pids()
        self._folder.write_run(self._url, self._settings, pids, self._page, self.own)

    def show_page(self, address: str) -> None:
        """Write the page's address to run.json, where other commands find it."""
        self._page = address
        self._note_place()

    # --- watch ------------------------------------------------------------------------------------

    async def watch(self, stop: asyncio.Event) -> None:
        """Watch the run until it is finished, or the time limit of its drain is over.

        Raises:
            ChildDied: the run cannot continue.
            BusError: Redis could not be reached or read for more than `SILENT_BUS_S`.
            PeerError: Redis has held something unreadable for more than `SILENT_BUS_S`.
        """
        silent_since: float | None = None
        while True:
            self._check_folder()
            try:
                status = await self._status.read()
                self._note(status)
                await self._check(status)
                asks = stop.is_set() and (
                    not self.stopped or status["phase"] == Phase.RUNNING
                )  # Redis may lose the request
                if asks and await self._ask_to_drain(self.stopped or bool(status["fragments"])):
                    self._children.kill()  # the run has not begun: there is nothing to drain
                    return
                silent_since = None
            except (BusError, PeerError) as error:  # Redis does not answer, or holds something unreadable
                if silent_since is None and not isinstance(error, BusUnavailable):
                    self._warn(f"Redis cannot be read: {error}")
                silent_since = silent_since or self._clock.now()
                if stop.is_set() and not self.stopped and isinstance(error, PeerError):
                    with suppress(BusError, PeerError):  # the run state may still be readable
                        await self._ask_to_drain(begun=True)
                if self._clock.now() > silent_since + SILENT_BUS_S:
                    raise
            else:
                if status["phase"] == Phase.FINISHED:
                    return
            ends_s = self._settings.drain_s + self._settings.leave_s + 2 * MARGIN_S
            ends_s += 2 * self._settings.lease_s  # time for another syncer to take over from one that died in the drain
            if self._drained_from_s is not None and self._clock.now() > self._drained_from_s + ends_s:
                self._warn("the run did not drain in time: sending SIGTERM to its processes")
                self._children.terminate()
                return
            # Only the first signal ends this tick early.
            await (asyncio.sleep(TICK_S) if stop.is_set() else first_of(stop, timeout_s=TICK_S))

    def _check_folder(self) -> None:
        """Recreate the output folder if it was moved or deleted, so that later files can be written.

        Settings and run.json are written too, so that the run is found there, unless the new folder is another run's.
        """
        if self._folder.identity() == self._made:
            return
        path = self._folder.path
        self._warn(
            f"the output folder {path} was moved or deleted: the run continues, and saves its last checkpoint there. "
            "There will be no report; earlier tape and logs are still in the original folder, if it exists"
        )
        self._folder.logs.mkdir(parents=True, exist_ok=True)
        if not is_output(path):
            self._folder.write_settings(self._settings)
            self._note_place()
        self._made, self._moved = self._folder.identity(), True

    def _note(self, status: Status) -> None:
        now = self._clock.now()
        if status["phase"] == Phase.RUNNING:
            self._drained_from_s = None  # Redis may lose the request to drain, which then starts again
        elif self._drained_from_s is None and status["phase"] in (Phase.DRAINING, Phase.CLOSING):
            self._drained_from_s = now
        if status["tokens"]:
            self._progress.append((self._clock.unix(), status["tokens"]))
        for learner in status["learners"]:
            if learner["step"]:
                self._tell_moments(learner)
                for child in self._children.named(learner["id"]):
                    child.under_way = True
        if status["evaluation"]:
            self._children["evaluator"].under_way = True
        if now >= self._show_from_s:
            self._show_from_s = now + NOT_SHOWN_S
            with reporting_bugs("the display", self._warn):
                self._screen.show(status)
                self._show_from_s = now

    def _tell_moments(self, learner: LearnerStatus) -> None:
        """Say where a learner's moments came from, once per incarnation that did not begin with the run."""
        words = MOMENTS.get(learner.get("moments", ""))
        if words and learner["incarnation"] not in self._told:
            self._screen.note(f"{learner['id']} {words}")
        self._told.add(learner["incarnation"])

    async def _check(self, status: Status) -> None:
        training = status["phase"] in ("waiting", Phase.RUNNING)
        await self._check_syncers(status)
        for child in (*self._children.named("learner-"), self._children["evaluator"]):
            if child.alive or child.reported:
                continue
            child.reported = True
            if child.expected_end or child.status in (
                0,
                signals.AGAIN_STATUS,
            ):  # it is done, or left because a signal asked it to
                continue
            if training and not child.under_way and not child.restarted:
                raise ChildDied(child.describe_end())
            self._warn(f"{child.name} {child.ending()}; its log: {child.log}")
            name = "evaluator_died" if child.name == "evaluator" else "learner_died"
            if training and child.name in self.own:
                self._screen.note(
                    f"start it again with: {self.route.command('learner', self._settings.run, child.name)}"
                )
            await self._event(name, child.name, child.ending())
        if training and not self._has_learner(status):
            raise ChildDied("there are no learners left. " + self._children.named("learner-")[-1].describe_end())

    async def _check_syncers(self, status: Status) -> None:
        """Warn of the death of a syncer if others can take its fragments over, and raise ChildDied if none is left."""
        ours = self._children.named("syncer")
        elsewhere = {one["id"] for one in status["syncers"]} - {child.name for child in ours}
        left = bool(elsewhere) or any(child.alive for child in ours)
        gone = [child for child in ours if not (child.alive or child.reported)]
        if left:
            self._unserved_since = None
        if status["phase"] == Phase.FINISHED or (left and not gone):
            return
        state = await self._bus.read_state()  # the syncers may have finished the run since the status was read
        if state is not None and state.phase is Phase.FINISHED:
            return
        if not left:
            # A syncer elsewhere may only be cut off for a moment, so it is waited for; our own are known to be dead.
            self._unserved_since = self._unserved_since or self._clock.now()
            if gone or self._clock.now() > self._unserved_since + SILENT_BUS_S:
                raise ChildDied((gone or ours)[-1].describe_end())
        for child in gone:
            child.reported = True
            self._warn(f"{child.name} {child.ending()}; its log: {child.log}")
            await self._event("syncer_died", child.name, child.ending())

    def _has_learner(self, status: Status) -> bool:
        """Return whether a learner is left: a child that runs, or a live one that joined from elsewhere."""
        ours = self._children.named("learner-")
        return any(child.alive for child in ours) or any(one["live"] for one in status["learners"])

    def _warn(self, text: str) -> None:
        self._warnings.append(text)
        self._screen.note(f"warning: {text}")

    async def _event(self, name: str, who: str, detail: str) -> None:
        await self._bus.add_event(Event(name=name, who=who, detail=detail[:500], unix_s=self._clock.unix()))

    async def _ask_to_drain(self, begun: bool) -> bool:
        """Ask the syncer to drain the run; return True if there is nothing yet to drain."""
        state = await self._bus.read_state()
        if state is None or not begun:
            self.stopped = True
            return True
        update = {"phase": Phase.DRAINING, "reason": "stopped by the user"}
        await self._bus.write_state(state.model_copy(update=update))
        self.stopped = True  # only after the write: if that failed, the next tick asks again
        self._screen.note("stopping: gathering the last deltas (Ctrl-C again stops everything at once)")
        return False

    # --- end ----------------------------------------------------------------------------------------

    async def wind_down(self) -> None:
        """Wait for all processes to end, in order, and name those waited for; stop those that exceed their limit."""
        leave_s, shutdown_s = self._settings.leave_s + MARGIN_S, self._settings.shutdown_s + MARGIN_S
        for children, awaited, limit_s, stopping_s in (
            (self._children.named("learner-"), "to publish, save and leave", leave_s, leave_s),
            (self._children.named("evaluator"), "to measure the last global loss", EVALUATE_S, MARGIN_S),
            (self._children.named("syncer"), "to save the last checkpoint", shutdown_s, shutdown_s),
        ):
            if there := [child.name for child in children if child.alive]:
                self._screen.note(f"waiting for {', '.join(there)} {awaited}")
            for left in await _gone(children, limit_s):
                self._warn(f"{left.name} was still running {limit_s:.0f} s after the run's end: sending SIGTERM")
                left.send(signal.SIGTERM)
            for left in await _gone(children, stopping_s):
                self._warn(f"{left.name} did not end after SIGTERM: sending SIGKILL")
                left.kill_group()
                left.expected_end = True
        for child in (*self._children.named("syncer"), self._children["evaluator"]):
            if child.status not in (0, signals.AGAIN_STATUS) and not (child.reported or child.expected_end):
                self._warn(f"{child.name} {child.ending()}; its log: {child.log}")

    async def gather(self, wall_s: float, origin: Origin | None) -> Outcome | None:
        """Read all that the report needs while Redis still runs; return None if the run has no fragments yet.

        Raises:
            DilocoError: Redis has lost the run, or the output folder was moved or deleted.
        """
        self._check_folder()
        if self._moved:
            raise DilocoError(
                f"the output folder {self._folder.path} was moved or deleted during the run, so there is no report. "
                f"The run has ended; what it saved since then is in {self._folder.checkpoints}"
            )
        data = await self._bus.read_spec()
        state = await self._bus.read_state()
        if data is None or state is None:
            if self._progress:
                where, logs = self._folder.checkpoints, self._folder.logs
                raise DilocoError(f"Redis has lost the run: what it saved is in {where}; the logs are in {logs}")
            return None
        status = await self._status.read()
        if not status["fragments"]:
            return None
        spec = decode_spec(self._bus.keys, data)
        layout = layout_of(spec.tensors)
        since_s = state.started_unix_s  # older records are of earlier parts, which the state counts
        records = [record for record in await self._tape() if record.unix_s >= since_s]
        ended = [child.name for child in self._children.named("learner-")]
        ledger_inputs = await read_ledger_inputs(self._bus, len(layout.fragments), self._settings.liveness_s, ended)
        return Outcome(
            settings=plain(self._settings),
            stopped=self.stopped,
            wall_s=wall_s,
            elapsed_s=status["elapsed_s"],
            outer_steps=status["outer_steps"],
            started_unix_s=state.started_unix_s,
            layout=layout,
            asked_interval=spec.sync.sync_interval,
            records=records,
            ledger_inputs=ledger_inputs,
            evaluations=[one for _, one in await self._all(self._bus.read_evaluations)],
            events=[one for _, one in await self._all(self._bus.read_events)],
            progress=self._progress,
            merged_share=status["merged_share"],
            goodput=status["goodput"],
            curves=loss_curves(await self._bus.read_reports(), self._clock.unix(), state.began_unix_s).values(),
            origin=origin,
            warnings=self._warnings,
        )

    async def _tape(self) -> list[TapeRecord]:
        try:
            return await read_whole(self._bus, self._folder.tape)
        except PeerError as error:  # a value of another kind at the tape's key
            self._warn(f"the report has only the tape's archive: {error}")
            return read_archive(self._folder.tape)

    async def _all(self, read: Any) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        while more := await read(found[-1][0] if found else START):
            found += more
        return found


async def _gone(children: Sequence[Child], limit_s: float) -> list[Child]:
    """Wait until all children have ended or the time is over, and return those that still run."""
    try:
        async with asyncio.timeout(limit_s):
            while any(child.alive for child in children):  # noqa: ASYNC110  # a process has no event to wait for
                await asyncio.sleep(0.1)
    except TimeoutError:
        pass
    return [child for child in children if child.alive]


def _wrong(settings: RunProcess, folder: Folder, info: BusInfo) -> list[Finding]:
    ranks = sum(place.ranks for place in places_of(settings))
    threads = threads_for(ranks, settings.threads)
    return wrong_for_run(settings, settings.model, folder.path, settings.learners, ranks, threads, info)


async def _run(settings: RunProcess, folder: Folder, origin: Origin | None, kind: type[Launcher]) -> Outcome | None:
    from diloco.pipeline.bus.embedded import EmbeddedRedis

    stop, task = asyncio.Event(), asyncio.current_task()
    assert task is not None  # noqa: S101  # this is a coroutine
    signals.install_signal_handlers(asyncio.get_running_loop(), stop, task.cancel)
    with ExitStack() as stack:
        named = settings.bus_url()
        if named is not None:
            url, others = named, {}
        else:
            password = settings.secret()
            embedded = EmbeddedRedis(
                port=settings.redis_port, host=settings.redis_bind, password=password, dies_with_us=True
            )
            url = stack.enter_context(embedded).url
            others = {"redis": embedded.pid} if embedded.pid else {}
            if password:
                url += f"?password={quote(password, safe='')}"
        async with open_bus(url, settings.run) as bus:
            own = goes_on(settings, folder.path) and not await bus.read_syncers()
            if await bus.read_spec() is not None and not own:
                raise UsageError(f"that Redis already has a run {settings.run!r}: choose another --run name")
            info = await bus.info()
            folder.make(settings, url)  # only after all checks that can refuse the run
            stack.callback(
                folder.mark_closing
            )  # called before the embedded Redis ends, so that readers see why it is gone
            began = time.monotonic()
            screen = stack.enter_context(Screen())
            children = stack.enter_context(Children(folder.logs))
            launcher = kind(settings, folder, url, bus, children, screen, others)
            launcher.start()
            screen.note(f"output folder {folder.path}")
            if origin is not None:
                screen.note(f"resumed from {origin.checkpoint}, after {count(origin.tokens)} tokens")
            for note in (*method_notes(settings), *(f"warning: {one}" for one in _wrong(settings, folder, info))):
                screen.note(note)
            if settings.redis_port is not None:
                where = reached_at(settings)
                launcher.route = redis_route(where, launcher.own)
                screen.note(f"others can join: DILOCO_REDIS_URL={where} diloco learner")
            async with left_in(folder.path, bus, settings, screen.note, launcher.route) as page:
                launcher.show_page(page)
                await launcher.watch(stop)
                wall_s = time.monotonic() - began
                await launcher.wind_down()
                if "redis" in others:  # this run's own, which ends with this process
                    await save_again(bus, folder, children.named("syncer"), screen.note)
            return await launcher.gather(wall_s, origin)


def main(settings: RunProcess, kind: type[Launcher] = Launcher) -> int:
    """Start one run, watch it to its end with a launcher of this kind, and return the exit status.

    Raises:
        DilocoError: something went wrong; no process is left running.
    """
    need_extras()
    logs.configure("warning")
    saved = own_checkpoint(settings) if kind is Launcher else None
    if saved is not None:
        budget = settings.tokens if "tokens" in settings.model_fields_set else saved.state.budget_tokens
        if saved.state.is_done(budget):
            done = f"the run in {settings.out} is finished, with {count(saved.state.tokens)} tokens"
            print(f"{done}. To train further, pass more --tokens; to start from scratch, pass --overwrite")
            return 0
        settings = settings.model_copy(update={"resume": str(saved.folder)})
    settings, origin = resume(settings)
    settings = with_preset(settings)
    check(settings)
    places_of(settings)
    folder = choose(settings)
    survive_closed_pipes(folder.launcher_log)
    if settings.method == "data-parallel":
        from diloco.launcher.baseline import run_baseline

        folder.make(settings)
        run = run_baseline(settings, folder)
    else:
        run = _run(settings, folder, origin, kind)
    try:
        outcome = asyncio.run(run)
    except asyncio.CancelledError as error:
        folder.mark_ended("stopped at once by a second signal")
        raise DilocoError(f"a second signal stopped everything at once; logs in {folder.logs}") from error
    if outcome is None:
        end_with(0)
        folder.mark_ended("stopped before its first step")
        print("stopped before the first step: there is nothing to save")
        return 0
    signals.ignore_end()
    conclude(outcome, settings, folder)
    return 0


@takes(RunProcess, omit=CHOSEN_BY_LAUNCHER, moved=OF_DEMO | OF_ONE_LEARNER)
def command(settings: RunProcess) -> None:
    """Train on this machine: an embedded Redis, a syncer, learners and an evaluator, one display and one report."""
    raise typer.Exit(main(settings))
