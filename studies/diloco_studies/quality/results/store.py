"""Results in a folder, one file a run, named by what decides the result: settings, data and code.

So a run that was done is never done again, for whichever experiment, and a result of other code is never taken for
one of this code.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import typer
import xxhash

from diloco.launcher.option_checks import check_data
from diloco.pipeline.errors import UsageError
from diloco.pipeline.files.strict_json import dumps
from diloco.workers.trainer.data.text import open_text
from diloco_studies.quality.english import FOLDER as ENGLISH
from diloco_studies.quality.packages import FOLDER as PACKAGES
from diloco_studies.quality.results.source import code_digest
from diloco_studies.quality.results.summary import RunSummary, summary_of
from diloco_studies.quality.settings import LabRun

Result = dict[str, Any]


def told_digest(run: LabRun) -> str:
    """Of all that a run is told."""
    return _digest(run, "")


def settings_digest(run: LabRun) -> str:
    """Of all that a run is told, and of the data it finds."""
    return _digest(run, f" {data_fingerprint(run)}")


def _digest(run: LabRun, more: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{dumps(run.relevant(), sort_keys=True)}{more}".encode())


def data_fingerprint(run: LabRun) -> str:
    """Of a run's data, as they are on this machine; nothing where they come with a library."""
    return _text_fingerprint(run.data) if run.task == "text" else ""


def look_again() -> None:
    """Forget what the data were: they may have changed since this process looked."""
    _text_fingerprint.cache_clear()


@cache
def _text_fingerprint(data: str) -> str:
    for folder, command in ((PACKAGES, "packages"), (ENGLISH, "english")):
        if Path(data) == folder and not folder.exists():
            raise UsageError(f"data={data!r}: no such folder here", f"create it with `diloco lab {command}`")
    check_data(data)
    return open_text(data).fingerprint


def code_of(run: LabRun) -> str:
    """Digest of the code that decides a run's result."""
    return code_digest("diloco_studies.quality.decoupled" if run.decoupled else "diloco_studies.quality.synchronous")


class Store:
    """A folder of results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, run: LabRun) -> Path:
        """Where a run's result lies, or would."""
        return self.folder / f"{settings_digest(run)}-{code_of(run)}.json"

    def read(self, run: LabRun, any_code: bool = False) -> Result | None:
        """A run's result, or None. `any_code`: the newest of another code, if there is none of this one.

        Warns of a file that is no whole result, and passes it over.
        """
        own = self.path(run)
        found = self.folder.glob(f"{settings_digest(run)}-*.json" if any_code else own.name)
        for file in sorted(found, key=lambda one: (one == own, one.stat().st_mtime), reverse=True):
            try:
                result: Result = json.loads(file.read_bytes())
                summary_of(result, "")
            except (OSError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
                typer.echo(
                    f"warning: {file} is not a complete result, so its run counts as not done ({error!r})", err=True
                )
            else:
                return result
        return None

    def summary(self, run: LabRun, any_code: bool = False) -> RunSummary | None:
        """What tables need of a run's result; as `read`."""
        result = self.read(run, any_code)
        return None if result is None else summary_of(result, told_digest(run))

    def write(self, run: LabRun, result: Result) -> None:
        """Keep a result; whole, or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(run)
        partial = path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(dumps(result))
        partial.replace(path)
