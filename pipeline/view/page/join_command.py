"""The command that starts a party of a run, to copy from the page. Pure. It never contains a secret."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from diloco.pipeline.bus.hosts import SENTINEL_SCHEMES, SENTINELS_LOGIN, HostPort, Hosts
from diloco.pipeline.tls import OPTIONS

ANYWHERE = ("", "0.0.0.0", "::", "*", "<this machine>")  # noqa: S104  # named, not listened on
HERE = ("localhost", "127.0.0.1", "::1")
HERE_ALONE = " on this page's machine"


@dataclass(frozen=True, slots=True)
class LearnerLaunch:
    """How a learner was started on this machine."""

    options: tuple[str, ...]
    """Command line options, including its name."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Its own environment variables, none of them secret."""
    folder: str = ""
    """The folder where it was started, if its settings depend on it."""


@dataclass(frozen=True, slots=True)
class RedisRoute:
    """How a party reaches a run's Redis."""

    url: str = ""
    """The URL without secrets, with words in capitals to be filled in; "" if unknown."""
    environ: Mapping[str, str] | None = None
    """Variables that a party needs. None: the URL is not secret, and may be a flag."""
    where: str = ""
    """From where the URL works, if not from everywhere, and what has to be filled in."""
    program: str = "diloco"
    """The program's name in a shell on this page's machine."""
    own: Mapping[str, LearnerLaunch] = field(default_factory=dict)
    """By learner: how it was started."""

    @classmethod
    def of(cls, url: str) -> "RedisRoute":
        """Create one from the page server's Redis URL, without its secrets; an empty one if the URL is malformed."""
        try:
            parts = urlsplit(url)
            hosts = () if parts.scheme == "unix" else Hosts.of(parts).hosts
        except ValueError:
            return cls()
        options = dict(parse_qsl(parts.query))
        fill, secret = "", bool(parts.password or options.get("password"))
        if secret:
            fill = ", with the password filled in" if not parts.username else ", with user and password filled in"
        login = f"{'USER' if parts.username else ''}:PASSWORD@" if secret else ""
        if parts.scheme == "unix":
            shown = f"unix://{login}{parts.path}"
            where = f"{HERE_ALONE}, as its user"
            where += " (other machines can join only a run that was started with --redis-port or --redis-url)"
        elif parts.scheme in ("redis", "rediss", *SENTINEL_SCHEMES):
            where = HERE_ALONE if any(host in HERE for host, _ in hosts) else ""
            if any(host in ANYWHERE for host, _ in hosts):
                hosts = tuple(HostPort("HOST" if host in ANYWHERE else host, port) for host, port in hosts)
                fill += ", with this page's machine for HOST"
            if any(name in options for name in SENTINELS_LOGIN):
                fill += ", and the sentinels' own login"
            shown = f"{parts.scheme}://{login}{','.join(map(str, hosts))}{parts.path.rstrip('/')}"
        else:
            return cls()
        files = {f"DILOCO_{name.upper()}": "FILE" for name, option in OPTIONS.items() if option in options}
        environ = ({"DILOCO_REDIS_URL": shown} if secret else {}) | files
        return cls(shown, environ if secret or files else None, where + fill + (", and your FILE" if files else ""))

    def start(self, party: str, run: str, again: str = "", own_loop: bool = False) -> tuple[str, str]:
        """Return (what a person has to start, if no command of this project does, otherwise ""; the command, or "").

        again: name of a learner to start again. own_loop: learners are the user's own programs.
        """
        if party == "learner" and own_loop and again not in self.own:
            named = f", with DILOCO_LEARNER_ID={again} (or learner_id={again!r})" if again else ""
            return f"your own program, in run {run!r}{named}", ""
        return "", self.command(party, run, again)

    def command(self, party: str, run: str, again: str = "") -> str:
        """Return the command that starts a party; `again` is the name of a learner to start again."""
        started = self.own.get(again, LearnerLaunch(("--learner-id", again)))
        environ = {**(self.environ or {}), **started.environ}
        told = [f"{name}={shlex.quote(value)}" for name, value in environ.items()]
        into = f"cd {shlex.quote(started.folder)} && " if started.folder else ""
        program = self.program if self.from_where(again).startswith(HERE_ALONE) else "diloco"
        words = [*told, program, party, "--run", run]
        if self.url and "DILOCO_REDIS_URL" not in environ:
            words += ["--redis-url", shlex.quote(self.url)]
        if again:
            words.append(shlex.join(started.options))
        if party == "syncer":
            words += ["--checkpoint-dir", "FOLDER"]
        return into + " ".join(words)

    def from_where(self, again: str = "") -> str:
        """Return where that command works. A learner that was started on this machine has its files here."""
        here = again in self.own and not self.where.startswith(HERE_ALONE)
        return (HERE_ALONE if here else "") + self.where
