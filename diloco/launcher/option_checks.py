"""Refuse settings that contradict each other, or name what does not exist, before anything is begun."""

from importlib.util import find_spec
from pathlib import Path

from diloco.options import DemoProcess, RunProcess, unused_by_baseline
from diloco.pipeline.errors import UsageError, missing
from diloco.pipeline.settings import EvaluatorProcess, check_outer
from diloco.workers.trainer.models.hf_config import HfModel, read_hf
from diloco.workers.trainer.models.sizes import check_size


def check(settings: RunProcess) -> None:
    """Check the settings of `diloco run` that only make sense together.

    Raises:
        UsageError: some do not; the message names them. Or the current folder was deleted.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the current folder was deleted: change to another one") from None
    if (model := check_model_name(settings.model)) is not None:
        from diloco.workers.trainer.data.tokenized import check_model  # imports transformers and torch

        check_model(model, settings.data, settings.seq_len)
    if settings.method == "data-parallel":
        if unused := unused_by_baseline(settings):
            needs, them = ("needs", "it") if len(unused) == 1 else ("need", "them")
            ways = "; ".join(unused)
            raise UsageError(f"{ways} {needs} a different --method: the data-parallel baseline does not use {them}")
    elif settings.quorum > settings.learners and settings.redis_url is None and settings.redis_port is None:
        smaller = "" if settings.resume is not None else "a smaller --quorum or "  # a resumed run keeps its quorum
        raise UsageError(
            f"quorum={settings.quorum}: with learners={settings.learners} there would never be a merge, and others "
            f"cannot join; pass more --learners or {smaller}--redis-port so that others can join"
        )
    if settings.method != "data-parallel":
        check_outer(settings)
    whose = (
        ""
        if settings.resume is None
        else (" (this path comes from the resumed run; pass --data if the data has moved)")
    )
    check_data(settings.data, whose)
    if settings.http_port and settings.http_port + settings.syncers - 1 > 65535:
        raise UsageError(
            f"http_port={settings.http_port}: each syncer takes the next port, and the last would be "
            "above 65535: use a lower one"
        )
    if settings.redis_url is not None and settings.redis_port is not None:
        raise UsageError(
            "--redis-port is for the embedded Redis, but --redis-url sets a different one: leave out one of them"
        )


def check_model_name(model: str) -> HfModel | None:
    """Return the transformers model that a setting names; None if it names a built-in size.

    Raises:
        UsageError: the setting names neither.
    """
    if (found := read_hf(model)) is None:
        check_size(model)
    return found


def check_data(data: str, whose: str = "") -> None:
    """Check that the text exists that a setting names, and can be one, as far as this is quickly seen.

    whose: says in the message where the setting is from.

    Raises:
        UsageError: it does not exist, cannot be trained on, or needs a package that is not installed.
    """
    if data == "stdlib":
        return
    if _file(data).exists():
        from diloco.workers.trainer.data.text import check_start  # imports numpy

        check_start(_file(data))
        return
    from diloco.workers.trainer.data.text_sources import DATA_SET  # imports numpy

    if not data.startswith(DATA_SET):
        remedy = "give an existing one or hf:OWNER/NAME, or leave it out to use stdlib"
        raise UsageError(f"data={data!r}: no such file or folder here{whose}", remedy)
    if find_spec("datasets") is None:
        raise UsageError(missing("datasets", "data", f"data={data!r}"))


def is_everywhere(data: str) -> bool:
    """Return whether a setting `data` means the same text in every current folder."""
    return data == "stdlib" or Path(data).is_absolute() or not _file(data).exists()


def _file(data: str) -> Path:
    """Return the file or folder that a setting `data` names, if it names one."""
    return Path(data.partition(",column=")[0])


def check_evaluator(settings: EvaluatorProcess) -> None:
    """Check the settings of `diloco evaluator`.

    Raises:
        UsageError: they name what does not exist.
    """
    if settings.model is not None:  # a settings file for all parties of a run may name a size, which the spec has too
        check_model_name(settings.model)
    if settings.data is not None:
        check_data(settings.data)


def check_demo(settings: DemoProcess) -> None:
    """Check the settings of `diloco demo`.

    Raises:
        UsageError: some contradict each other; the message names them.
    """
    if settings.method == "data-parallel":
        raise UsageError(
            "`diloco demo` needs a different --method: the data-parallel baseline stops when a process dies"
        )
    if settings.learners < 2:
        raise UsageError("`diloco demo` needs --learners 2 or more: it shows that the others continue")
    if settings.kill_learner >= settings.learners:
        raise UsageError(f"kill_learner={settings.kill_learner}: use a number from 0 to {settings.learners - 1}")
    if settings.restart_at <= settings.kill_at:
        raise UsageError(f"restart_at={settings.restart_at} must come after kill_at={settings.kill_at}")
