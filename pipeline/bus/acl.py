"""Redis users with the least rights that each party needs: the commands it sends, on the keys it uses. Pure.

It needs Redis 7, which has separate rights to read and to write a key (`%R~`), and selectors, which tie commands to
keys. On 6.2 a user that may read a key with one command may write it with any other of its commands.

Redis checks each command of a script against the rights of the user who runs it. So a learner may pass any key of the
run to EVALSHA, and still can do nothing in a script that it could not do outside. It may not send scripts of its own
(EVAL), since an endless one would block the server. A syncer loads the scripts.

`tests/pipeline/test_acl.py` makes every call of every party as its user, and tries what each may not do.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from diloco.pipeline.bus.keys import PREFIX

# User for learners of any name. It cannot write the syncer's keys, but it can change other learners' deltas.
SHARED_LEARNER = "learner"
# Commands that a connection needs, and those without a key that scripts call.
_CONNECT = "+ping +info +select +time +cluster|slots +command"
_READ = "+get +hget +hmget +hgetall +hkeys +hscan +xread +xrange +xrevrange +xlen +type +exists +pttl"
_SYNCER = (
    f"{_READ} +scan +getrange +set +setnx +unlink +persist +pexpire +hset +hsetnx +hdel +hincrby +xadd +xdel +xtrim "
    "+xinfo|groups +xgroup|create +xpending +xclaim +xack +xreadgroup +evalsha +script|exists +script|load"
)
_OPERATOR = "+acl|setuser +acl|getuser +acl|deluser +acl|save"
_CHUNKS = "+xadd +xread +xlen +type +pttl +pexpire"


@dataclass(frozen=True, slots=True)
class User:
    """A Redis user: its name, and its rights as ACL rules without a password."""

    name: str
    rules: str

    def line(self, password_sha256: str) -> str:
        """Return the user's line in an ACL file."""
        return f"user {self.name} on #{password_sha256} {self.rules}"


# Clients without a password can only PING, as `health`; nobody can log in as `default`, which is off. `default` still
# needs all rights, because Redis replays its append-only file as that user. Redis 7.0 drops what `default` may not do:
# without the rights it would lose everything that scripts have written (redis/redis#14541).
NOBODY = """\
user default off sanitize-payload ~* &* +@all
user health on nopass sanitize-payload resetchannels -@all +ping"""


def _rules(*selectors: tuple[str, Iterable[str]]) -> str:
    parts = [f"({commands} {' '.join(keys)})" for commands, keys in selectors]
    return " ".join(("sanitize-payload resetchannels -@all", _CONNECT, *parts))


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Patterns of key names (`pipeline.bus.keys`). Names of runs have no characters that are special in patterns."""

    run: str

    def of_run(self, *names: str, rights: str = "~") -> list[str]:
        return [f"{rights}{PREFIX}{{{self.run}}}:{name}" for name in names]

    def of_groups(self, *names: str, rights: str = "~") -> list[str]:
        return [f"{rights}{PREFIX}{{{self.run}:*}}:{name}" for name in names]

    def all(self) -> list[str]:
        return [*self.of_run("*"), *self.of_groups("*")]


def syncer(run: str = "*") -> User:
    """Return the user of a syncer, and of a `diloco run` on a Redis of its own: all keys of the run."""
    keys = _Patterns(run)
    return User("syncer", _rules((_SYNCER, keys.all())))


def learner(run: str = "*", learner_id: str | None = None) -> User:
    """Return the user of one learner, or with `learner_id` None, of learners of any name."""
    keys, own = _Patterns(run), learner_id or "*"
    read = "%R~"
    return User(
        SHARED_LEARNER if learner_id is None else f"{SHARED_LEARNER}-{learner_id}",
        _rules(
            ("+evalsha +script|exists", keys.all()),
            # Reading the syncer's keys.
            (
                _READ,
                [
                    *keys.of_run("spec", "wanted", "state", "syncers", rights=read),
                    *keys.of_groups("head:*", "global:*", "tape", rights=read),
                ],
            ),
            # Writing its own deltas.
            (f"{_CHUNKS} +xdel", keys.of_groups(f"deltas:*:{own}")),
            (_CHUNKS, keys.of_groups(f"delta:*:{own}:*")),
            ("+hsetnx +type", keys.of_groups("senders")),
            ("+xadd +type", keys.of_groups("arrivals")),
            # Keys that all learners may write (of `holder`, a named learner only its own). Readers validate these
            # values and trust none of them.
            ("+setnx", keys.of_run("spec")),
            ("+hget +hgetall +hscan +hset +persist +type", keys.of_run("learners", "seen")),
            ("+get +set +type", keys.of_run(f"holder:{own}")),
            ("+xadd", keys.of_run("events")),
            (
                "+get +set +unlink +pttl +pexpire +exists +type",
                keys.of_run("init-claim", "initial", "moments-wish", "moments-claim", "moments-offer"),
            ),
            (_CHUNKS, [*keys.of_groups("initial:*"), *keys.of_run("moments:*")]),
            (
                "+xinfo|groups +xgroup|create +xpending +xclaim +xack +xreadgroup +xadd +xdel +xlen +type +exists",
                keys.of_run("shards"),
            ),
            ("+hget +hset +hdel +persist +type +exists", keys.of_run("shard-positions")),
            ("+get +set +type", keys.of_run("shard-epoch")),
            ("+get +setnx", keys.of_run("data-order")),
        ),
    )


def acl_command(run: str, user: str) -> str:
    """Return the command that recreates the users of a run, with `user` among them."""
    kind, _, learner_id = user.partition("-")
    named = f" --learner {learner_id}" if kind == SHARED_LEARNER and learner_id else ""
    return (
        f"diloco acl --run {run}{named} --passwords FILE > new-users.acl (add --learner NAME for each of the run's "
        "learners, and --failover if servers take over from each other; FILE must be the current password file, "
        "otherwise new passwords are generated)"
    )


def evaluator(run: str = "*") -> User:
    """Return the user of the evaluator: it reads globals and writes evaluations."""
    keys, read = _Patterns(run), "%R~"
    return User(
        "evaluator",
        _rules(
            (
                _READ,
                [
                    *keys.of_run("spec", "state", rights=read),
                    *keys.of_groups("head:*", "global:*", "rest:*", rights=read),
                ],
            ),
            ("+xadd", keys.of_run("evaluations")),
        ),
    )


def viewer(run: str = "*") -> User:
    """Return the user of `diloco status`, `diloco tape` and dashboards: it reads all about a run except parameters."""
    keys, read = _Patterns(run), "%R~"
    about = ("spec", "state", "learners", "seen", "events", "evaluations", "syncers")
    of_fragments = ("head:*", "lease:*", "deltas:*", "senders", "arrivals", "tape")
    return User(
        "viewer",
        _rules(
            ("+evalsha", keys.all()),  # for the script that reads past very many names of senders
            (_READ, [*keys.of_run(*about, rights=read), *keys.of_groups(*of_fragments, rights=read)]),
        ),
    )


def operator(run: str = "*") -> User:
    """Return the user of `diloco runs`, `finish`, and of making users: an administrator with, in effect, all rights."""
    keys = _Patterns(run).all()
    rules = _rules((f"{_SYNCER} +memory|usage", keys))
    return User("operator", rules.replace(_CONNECT, f"{_CONNECT} {_OPERATOR}", 1))


def servers() -> list[User]:
    """Return the users for failover: replicas, sentinels, and the setup of a cluster. They have no rights on keys."""
    watches = (
        "allchannels -@all +ping +info +role +multi +exec +slaveof +subscribe +publish +config|rewrite "
        "+client|setname +client|kill +script|kill"
    )
    return [
        User("replica", "resetchannels -@all +ping +psync +replconf"),
        User("sentinel", watches),
        User("setup", "resetchannels -@all +ping +info +command +cluster"),
    ]


def users(run: str = "*", learners: Iterable[str] = ()) -> list[User]:
    """Return all users of a run, with one for learners of any name and one for each named learner."""
    return [
        syncer(run),
        learner(run),
        *(learner(run, name) for name in learners),
        evaluator(run),
        viewer(run),
        operator(run),
    ]
