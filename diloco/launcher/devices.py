"""Which learner of a run on this machine trains where: `--devices`. Pure.

Learners take the devices that were asked for in turn. A learner on a GPU sees that one alone, by CUDA_VISIBLE_DEVICES
of its process, and calls it "cuda". One on a set of them, "0+1", has a rank on each, and calls them "cuda:0+cuda:1".
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
    """Where one learner trains."""

    device: str
    """Its setting `device`."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES of its process; None: as of this one."""
    name: str = ""
    """For people: the device as this process counts it."""

    @property
    def ranks(self) -> int:
        """Processes that train there as one learner."""
        return self.device.count("+") + 1

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
        asked: "auto" (a GPU for each, or what a learner finds where there are none), "all" (GPUs, divided among the
            learners), or devices with commas: "cuda:0,cuda:1", also "0,1"; "cpu"; "mps"; sets: "0+1,2+3", "cpu+cpu".
        learners: how many.
        gpus: names of those that are here, as `names`.

    Raises:
        UsageError: it is none of that, or a device is not here.
    """
    if asked == "auto" and not gpus:
        return [Place("auto")] * learners
    if asked in ("auto", "all"):
        if not gpus:
            raise UsageError("devices='all': this machine has no GPU that torch can use; --devices cpu takes the cores")
        each, left = divmod(len(gpus), learners) if asked == "all" and learners < len(gpus) else (1, 0)
        if left:
            raise UsageError(
                f"devices='all': {len(gpus)} GPUs cannot be divided among {learners} learners evenly: name them, as in "
                "--devices 0+1,2+3"
            )
        numbers = [f"cuda:{number}" for number in range(len(gpus))]
        asked = ",".join("+".join(numbers[first : first + each]) for first in range(0, len(gpus), each))
    places = [_place(asked, item, gpus) for item in asked.split(",")]
    return [places[number % len(places)] for number in range(learners)]


def told(places: Sequence[Place]) -> str:
    """A line for people; empty where there is nothing to tell: each learner takes what it finds, or the cores."""
    devices = list(dict.fromkeys(place.name for place in places))
    if devices in ([""], ["cpu"]):
        return ""
    if len(devices) == len(places):
        return f"a device for each learner: {', '.join(devices)}"
    return f"{counted(len(places), 'learner')} share {counted(len(devices), 'device')} in turn: {', '.join(devices)}"


def _place(asked: str, item: str, gpus: Sequence[str]) -> Place:
    if item == "mps" or set(item.split("+")) == {"cpu"}:
        return Place(item, "", item)
    numbers = [match and int(match[1]) for match in map(_GPU.fullmatch, item.split("+"))]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise UsageError(
            f"devices={asked!r}: {item!r} is no device: give cuda:0,cuda:1 and so on (0+1 for one learner), or all, "
            "cpu (cpu+cpu for one learner), mps or auto"
        )
    for number in numbers:
        if number is not None and number >= len(gpus):
            there = f"there are cuda:0 to cuda:{len(gpus) - 1}" if gpus else "torch can use no GPU"
            raise UsageError(f"devices={asked!r}: cuda:{number} is not on this machine: {there}")
    here = [number for number in numbers if number is not None]
    each = "+".join(f"cuda:{rank}" for rank in range(len(here))) if len(here) > 1 else "cuda"
    return Place(each, ",".join(gpus[number] for number in here), "+".join(f"cuda:{number}" for number in here))
