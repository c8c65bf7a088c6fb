"""Which learner of a run on this machine trains where: `--devices`. Pure.

Learners take the devices that were asked for in turn. A learner on a GPU sees that one alone, by CUDA_VISIBLE_DEVICES
of its process, and calls it "cuda".
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from diloco.pipeline.errors import UsageError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_GPU = re.compile(r"(?:cuda:)?(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one learner trains."""

    device: str
    """Its setting `device`."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of its process; None: as of this one."""
    name: str = ""
    """For people: the device as this process counts it."""

    @property
    def environ(self) -> dict[str, str]:
        """Variables of its process."""
        return {} if self.visible is None else {VISIBLE: self.visible}


def names(count: int, visible: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls so many GPUs, in torch's order; visible: its value, None: not set."""
    return list(map(str, range(count))) if visible is None else visible.split(",")[:count]


def assign(asked: str, learners: int, gpus: Sequence[str]) -> list[Place]:
    """A place for each learner.

    Args:
        asked: "auto" (all GPUs, or what a learner finds where there are none), "all" (GPUs), or devices with commas:
            "cuda:0,cuda:1", also "0,1"; "cpu"; "mps".
        learners: how many.
        gpus: names of those that are here, as `names`.

    Raises:
        UsageError: it is none of that, or a device is not here.
    """
    if asked == "auto" and not gpus:
        return [Place("auto")] * learners
    if asked in ("auto", "all"):
        asked = ",".join(f"cuda:{number}" for number in range(len(gpus)))
        if not gpus:
            raise UsageError("devices='all': this machine has no GPU that torch can use; --devices cpu takes the cores")
    places = [_place(asked, item, gpus) for item in asked.split(",")]
    return [places[number % len(places)] for number in range(learners)]


def told(places: Sequence[Place]) -> str:
    """A line for people; empty where there is nothing to tell: each learner takes what it finds, or the cores."""
    devices = list(dict.fromkeys(place.name for place in places))
    if devices in ([""], ["cpu"]):
        return ""
    if len(devices) == len(places):
        return f"a device for each learner: {', '.join(devices)}"
    return f"{len(places)} learners share {len(devices)} device{'s' * (len(devices) > 1)} in turn: {', '.join(devices)}"


def _place(asked: str, item: str, gpus: Sequence[str]) -> Place:
    if item in ("cpu", "mps"):
        return Place(item, "", item)
    numbers = [match and int(match[1]) for match in map(_GPU.fullmatch, item.split("+"))]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"devices={asked!r}: {item!r} is no device: give cuda:0,cuda:1 and so on, or all, cpu, mps or auto"
        )
    for number in numbers:
        if number is not None and number >= len(gpus):
            there = f"there are cuda:0 to cuda:{len(gpus) - 1}" if gpus else "torch can use no GPU"
            raise UsageError(f"devices={asked!r}: cuda:{number} is not on this machine: {there}")
    if len(numbers) > 1:
        raise UsageError(
            f"devices={asked!r}: {item} is a set of GPUs for one learner, which is a single process as yet: give each "
            "learner one GPU"
        )
    (number,) = numbers
    assert number is not None  # noqa: S101  # looked at above
    return Place("cuda", gpus[number], f"cuda:{number}")
