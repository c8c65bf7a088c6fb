"""Assign the learners of a run on this machine to devices: `--devices`. Pure.

Learners take the given devices in turn. A learner on one GPU sees only this GPU, by CUDA_VISIBLE_DEVICES of its
process, and calls it "cuda". A learner on a set of GPUs, "0+1", has a rank on each, and calls them "cuda:0+cuda:1".
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.pipeline.errors import UsageError
from diloco.pipeline.units import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"(?:cuda:)?(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Place:
    """The device, or set of devices, on which one learner trains."""

    device: str
    """The learner's setting `device`."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of the learner's process; None: inherited from this process."""
    name: str = ""
    """Display name of the device, as this process numbers it."""

    @property
    def ranks(self) -> int:
        """Number of processes that train there as one learner."""
        return self.device.count("+") + 1

    @property
    def environ(self) -> dict[str, str]:
        """Variables of the learner's process."""
        return {} if self.visible is None else {VISIBLE: self.visible}


def names(count: int, visible: str | None) -> list[str]:
    """Return the names of `count` GPUs in CUDA_VISIBLE_DEVICES, in torch's order; visible: its value, None: not set."""
    return list(map(str, range(count))) if visible is None else visible.split(",")[:count]


def assign(asked: str, learners: int, gpus: Sequence[str]) -> list[Place]:
    """Return a place for each learner.

    Args:
        asked: "auto" (one GPU each; without GPUs each learner chooses), "all" (GPUs, divided among the learners), or
            devices separated by commas: "cuda:0,cuda:1", also "0,1"; "cpu"; "mps"; sets: "0+1,2+3", "cpu+cpu".
        learners: number of learners.
        gpus: names of the GPUs of this machine, from `names`.

    Raises:
        UsageError: `asked` is nothing like that, or this machine does not have such a device.
    """
    if asked == "auto" and not gpus:
        return [Place("auto")] * learners
    if asked in ("auto", "all"):
        if not gpus:
            raise UsageError("devices='all': torch cannot use a GPU on this machine; use --devices cpu")
        each, left = divmod(len(gpus), learners) if asked == "all" and learners < len(gpus) else (1, 0)
        if left:
            raise UsageError(
                f"devices='all': {len(gpus)} GPUs cannot be divided evenly among {learners} learners: list them, as "
                "in --devices 0+1,2+3"
            )
        numbers = [f"cuda:{number}" for number in range(len(gpus))]
        asked = ",".join("+".join(numbers[first : first + each]) for first in range(0, len(gpus), each))
    places = [_parse_place(asked, item, gpus) for item in asked.split(",")]
    return [places[number % len(places)] for number in range(learners)]


def devices_line(places: Sequence[Place]) -> str:
    """Return a readable line about the devices; empty if every learner trains on the CPU or chooses its own."""
    devices = list(dict.fromkeys(place.name for place in places))
    if devices in ([""], ["cpu"]):
        return ""
    if len(devices) == len(places):
        return f"one device per learner: {', '.join(devices)}"
    return f"{counted(len(places), 'learner')} share {counted(len(devices), 'device')} in turn: {', '.join(devices)}"


def _parse_place(asked: str, item: str, gpus: Sequence[str]) -> Place:
    if item == "mps" or set(item.split("+")) == {"cpu"}:
        return Place(item, "", item)
    numbers = [match and int(match[1]) for match in map(_GPU.fullmatch, item.split("+"))]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"devices={asked!r}: {item!r} is not a device: use cuda:0,cuda:1 and so on (0+1 for one learner), or all, "
            "cpu (cpu+cpu for one learner), mps or auto"
        )
    for number in numbers:
        if number is not None and number >= len(gpus):
            there = f"use cuda:0 to cuda:{len(gpus) - 1}" if gpus else "torch cannot use a GPU"
            raise UsageError(f"devices={asked!r}: cuda:{number} is not on this machine: {there}")
    here = [number for number in numbers if number is not None]
    each = "+".join(f"cuda:{rank}" for rank in range(len(here))) if len(here) > 1 else "cuda"
    return Place(each, ",".join(gpus[number] for number in here), "+".join(f"cuda:{number}" for number in here))
