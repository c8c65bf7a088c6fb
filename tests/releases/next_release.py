"""The release after this one, for tests of an upgrade: a copy of this tree that speaks one more wire format.

Until there is another release, this plays it. The copy has what a release adds: a setting in the spec, a field in the
messages of each party, in the tape and in heads, and a script whose text has changed, with the earlier text beside it.
"""

import re
import shutil
from pathlib import Path

from diloco.pipeline.bus.redis.calls import script
from diloco.pipeline.messages.wire import FORMAT

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
NEXT = FORMAT + 1
MARK = "trial_mark"
"""Name of every field that it adds: none may be in a run of this release's format."""
CHANGED = "offer"
"""The script that it changes: one of a learner's."""
_FIELD = f"    {MARK}: Annotated[int, Field(ge=0), Since({NEXT})] = 0\n"
_WIRE = "from diloco.pipeline.messages.wire import (\n"

CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "pipeline/messages/wire.py": ((r"^FORMAT = \d+$", f"FORMAT = {NEXT}"), (r"^OLDEST = \d+$", f"OLDEST = {FORMAT}")),
    "pipeline/messages/spec.py": (
        (re.escape(_WIRE), f"{_WIRE}    Since,\n"),
        (r'^    outer: OuterName = "nesterov"$', f'    outer: OuterName = "nesterov"\n{_FIELD}'),
    ),
    "pipeline/settings.py": (
        (
            r"^    def sync_spec\(self",
            f"    {MARK}: int = Field(0, ge=0, description='A new one')\n\n    def sync_spec(self",
        ),
    ),
    "pipeline/messages/delta.py": (
        (re.escape(_WIRE), f"{_WIRE}    Since,\n"),
        (r"^    layout: Digest$", f"    layout: Digest\n{_FIELD}"),
    ),
    "workers/exchange/publishing.py": ((r"DeltaHeader\(\n", f"DeltaHeader(\n            {MARK}=7,\n"),),
    "pipeline/messages/run.py": (
        (re.escape(_WIRE), f"{_WIRE}    Since,\n"),
        (r"^    outages: Count = 0$", f"    outages: Count = 0\n{_FIELD}"),
        (r"^    final: bool$", f"    final: bool\n{_FIELD}"),
        (r"^    base_rejected: TokenElements = 0$", f"    base_rejected: TokenElements = 0\n{_FIELD}"),
    ),
    "workers/training.py": ((r"LearnerReport\(\n", f"LearnerReport(\n            {MARK}=7,\n"),),
    "workers/exchange/evaluating.py": ((r"Evaluation\(\n?", f"Evaluation({MARK}=7, "),),
    "syncer/serving/lead.py": ((r"RunState\(\n", f"RunState(\n            {MARK}=7,\n"),),
    "pipeline/messages/tape.py": (
        (re.escape(_WIRE), f"{_WIRE}    Since,\n"),
        (r"^    merge_s: Seconds$", f"    merge_s: Seconds\n{_FIELD}"),
    ),
    "syncer/committing.py": ((r"return Committed\(\n", f"return Committed(\n            {MARK}=7,\n"),),
    "pipeline/messages/head.py": (
        (re.escape(_WIRE), f"{_WIRE}    Since,\n"),
        (r'^    rest: Text = ""$', f'    rest: Text = ""\n{_FIELD}'),
    ),
    "pipeline/bus/stored_values.py": (
        (
            r'^        "interval": b"%d" % commit.interval,$',
            f'        "interval": b"%d" % commit.interval,\n        "{MARK}": b"7",',
        ),
        (
            r'^            "interval": decode_count',
            f'            "{MARK}": decode_count("mark", fields.get(b"{MARK}")),\n            "interval": decode_count',
        ),
    ),
    f"pipeline/bus/redis/lua/{CHANGED}.lua": ((r"\A", f"-- Of wire format {NEXT}.\n"),),
}
"""File -> what is replaced in it, each found exactly once, and by what."""


class PatchFailed(AssertionError):
    """The tree has changed, and what makes the next release of it has not."""


def make(folder: Path) -> Path:
    """Copy this tree into a new folder as the next release; started from there, `python -m diloco` is that one.

    Raises:
        PatchFailed: a place to be changed is not there, or more than once.
    """
    left = shutil.ignore_patterns("__pycache__")
    for top in ("pipeline", "syncer", "workers", "diloco"):
        shutil.copytree(ROOT / top, folder / top, symlinks=True, ignore=left)
    for name, changes in CHANGES.items():
        text = (folder / name).read_text()
        for place, instead in changes:
            text, found = re.subn(place, lambda _, instead=instead: instead, text, flags=re.MULTILINE)
            if found != 1:
                raise PatchFailed(f"{name}: {place!r} is there {found} times: bring {__file__} up to date")
        (folder / name).write_text(text)
    earlier = folder / "pipeline/bus/redis/lua/earlier"
    earlier.mkdir(exist_ok=True)
    (earlier / f"{CHANGED}.lua").write_text(script(CHANGED).text)
    return folder
