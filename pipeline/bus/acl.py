"""Redis users with no more rights than their party needs: which commands it sends, on which keys. Pure.

Needs Redis 7: rights to read and to write apart (`%R~`), and selectors, which tie commands to keys. On 6.2 whoever may
read a key with some command may write it with any other that the user has.

What a script does is checked command by command against the user who runs it. So a learner may name any key of the run
to EVALSHA, and still do nothing in a script that it could not do outside. It may not send scripts of its own (EVAL):
one without an end would stop the server. A syncer loads the scripts.

`tests/pipeline/test_acl.py` makes every call of every party as its user, and tries what each may not do.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from diloco.pipeline.bus.keys import PREFIX

SHARED_LEARNER = "learner"
"""User for learners of any name: kept from all that is the syncer's, not from each other's deltas."""
_CONNECT = "+ping +info +select +time +cluster|slots +command"
"""What a connection needs, and what scripts ask without a key."""
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
        """A line of an ACL file."""
        return f"user {self.name} on #{password_sha256} {self.rules}"


NOBODY = """\
user default off sanitize-payload ~* &* +@all
user health on nopass sanitize-payload resetchannels -@all +ping"""
"""Who has no password may ask whether the server is there, as `health`, and that is all: `default` is nobody's login.

It has all rights, since Redis reads its append-only file again as `default`. What that one may not do, 7.0 throws away:
all that scripts have written (redis/redis#14541).
"""


def _rules(*selectors: tuple[str, Iterable[str]]) -> str:
    parts = [f"({commands} {' '.join(keys)})" for commands, keys in selectors]
    return " ".join(("sanitize-payload resetchannels -@all", _CONNECT, *parts))


@dataclass(frozen=True, slots=True)
class _Patterns:
    """Patterns of key names (`pipeline.bus.keys`); a run's name has no character that patterns give a meaning."""

    run: str

    def of_run(self, *names: str, rights: str = "~") -> list[str]:
        return [f"{rights}{PREFIX}{{{self.run}}}:{name}" for name in names]

    def of_groups(self, *names: str, rights: str = "~") -> list[str]:
        return [f"{rights}{PREFIX}{{{self.run}:*}}:{name}" for name in names]

    def all(self) -> list[str]:
        return [*self.of_run("*"), *self.of_groups("*")]


def syncer(run: str = "*") -> User:
    """A syncer, and a `diloco run` on a Redis of its own: all keys of the run."""
    keys = _Patterns(run)
    return User("syncer", _rules((_SYNCER, keys.all())))


def learner(run: str = "*", learner_id: str | None = None) -> User:
    """A learner; with an id only under that one, else under any."""
    keys, own = _Patterns(run), learner_id or "*"
    read = "%R~"
    return User(
        SHARED_LEARNER if learner_id is None else f"{SHARED_LEARNER}-{learner_id}",
        _rules(
            ("+evalsha +script|exists", keys.all()),
            # What is the syncer's, to read.
            (
                _READ,
                [
                    *keys.of_run("spec", "wanted", "state", "syncers", rights=read),
                    *keys.of_groups("head:*", "global:*", "update:*", "tape", rights=read),
                ],
            ),
            # Its deltas.
            (f"{_CHUNKS} +xdel", keys.of_groups(f"deltas:*:{own}")),
            (_CHUNKS, keys.of_groups(f"delta:*:{own}:*")),
            ("+hsetnx +type", keys.of_groups("senders")),
            ("+xadd +type", keys.of_groups("arrivals")),
            # What learners share: nobody's word is taken for more than it is worth.
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
    """What makes the users of a run anew, this one among them."""
    kind, _, learner_id = user.partition("-")
    named = f" --learner {learner_id}" if kind == SHARED_LEARNER and learner_id else ""
    return (
        f"diloco acl --run {run}{named} --passwords FILE > new-users.acl (with --learner NAME for each of the run's "
        "learners, --failover where servers take over from each other, and for FILE that of the passwords in use: else "
        "these are made anew)"
    )


def evaluator(run: str = "*") -> User:
    """The evaluator: reads globals, writes evaluations."""
    keys, read = _Patterns(run), "%R~"
    return User(
        "evaluator",
        _rules(
            (
                _READ,
                [
                    *keys.of_run("spec", "state", rights=read),
                    *keys.of_groups("head:*", "global:*", "rest:*", "update:*", rights=read),
                ],
            ),
            ("+xadd", keys.of_run("evaluations")),
        ),
    )


def viewer(run: str = "*") -> User:
    """`diloco status`, `diloco tape`, dashboards: read what is about the run, not the parameters."""
    keys, read = _Patterns(run), "%R~"
    about = ("spec", "state", "learners", "seen", "events", "evaluations", "syncers")
    of_fragments = ("head:*", "lease:*", "deltas:*", "senders", "arrivals", "tape")
    return User(
        "viewer",
        _rules(
            ("+evalsha", keys.all()),  # to read past very many names of senders
            (_READ, [*keys.of_run(*about, rights=read), *keys.of_groups(*of_fragments, rights=read)]),
        ),
    )


def operator(run: str = "*") -> User:
    """`diloco runs`, `finish`, and making users: an administrator, who could make one without limits."""
    keys = _Patterns(run).all()
    rules = _rules((f"{_SYNCER} +memory|usage", keys))
    return User("operator", rules.replace(_CONNECT, f"{_CONNECT} {_OPERATOR}", 1))


def servers() -> list[User]:
    """Users of servers that take over from each other: replicas, sentinels, and who sets up. They reach no key."""
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
    """All users of a run: one for learners of any name, and one for each named learner."""
    return [
        syncer(run),
        learner(run),
        *(learner(run, name) for name in learners),
        evaluator(run),
        viewer(run),
        operator(run),
    ]
