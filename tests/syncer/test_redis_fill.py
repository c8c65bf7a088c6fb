"""A Redis that is nearly full is so for all who say it: one rule, with room for a round of the run's own payloads."""

import asyncio

import pytest
import structlog
from prometheus_client import CollectorRegistry

from diloco.doctor import checks
from diloco.doctor.facts import Run
from diloco.pipeline.bus.ports import BusInfo
from diloco.pipeline.bus.server import Server, fill, fill_of_run
from diloco.pipeline.fragments import layout_of
from diloco.pipeline.redis_memory import round_bytes
from diloco.pipeline.view.page.collector import Collector
from diloco.pipeline.view.status_reader import read_status
from diloco.syncer.run_metrics import RunMetrics
from diloco_studies.virtual.memory import MemoryBus
from diloco_studies.virtual.virtual_time import VirtualClock, in_virtual_time
from tests import samples
from tests.virtual_run import RUN, end, under_way

MB = 10**6


@pytest.mark.parametrize(
    ("used", "limit", "a_round", "level"),
    [
        (99 * MB, 0, 16 * MB, "ok"),
        (83 * MB, 100 * MB, 16 * MB, "ok"),
        (85 * MB, 100 * MB, 16 * MB, "warning"),  # 90 % would come when the next round has no room any more
        (85 * MB, 100 * MB, 2 * MB, "ok"),
        (91 * MB, 100 * MB, 2 * MB, "warning"),
        (91 * MB, 100 * MB, 0, "warning"),  # of what run is not known
        (70 * MB, 100 * MB, 60 * MB, "ok"),  # not for ever, where Redis is as small as the plan allows
        (76 * MB, 100 * MB, 60 * MB, "warning"),
    ],
)
def test_a_round_has_room_or_it_is_said(used: int, limit: int, a_round: float, level: str) -> None:
    assert fill(used, limit, a_round).level == level


def test_of_a_cluster_the_fullest_node_counts() -> None:
    """The sum has room; and a node takes its part of a round."""
    sync, elements = samples.sync_spec(codec="bf16", quorum=2), 10**6
    assert round_bytes(elements, 2, "bf16") == 12 * MB
    for used, level in ((84, "ok"), (89, "warning")):
        info = BusInfo("id", "7", 300 * MB, 120 * MB, nodes=1, node=(used * MB, 100 * MB))
        assert fill_of_run(info, elements, 0, sync).level == level
    info = BusInfo("id", "7", 300 * MB, 120 * MB, nodes=3, node=(89 * MB, 100 * MB))
    assert fill_of_run(info, elements, 0, sync).level == "ok"


@pytest.mark.parametrize("rounds_free", [0.9, 1.1])
@in_virtual_time
async def test_status_page_metric_log_and_doctor_say_it_together(rounds_free: float) -> None:
    """At 15 % free, which no share alone would tell; with a little more none of them says it."""
    world, party = await under_way(2)
    elements = layout_of(world.spec.tensors).elements
    a_round = round_bytes(elements, 2, world.spec.sync.codec)
    most = int(6 * a_round)
    used = int(most - rounds_free * a_round)

    async def info(_: MemoryBus) -> BusInfo:
        return BusInfo("id", "7.2", most, used)

    with pytest.MonkeyPatch.context() as patch, structlog.testing.capture_logs() as log:
        patch.setattr(MemoryBus, "info", info)
        said = [any("of its maxmemory" in one for one in (await read_status(world.bus, world.clock))["warnings"])]
        collector = Collector(MemoryBus(RUN, world.clock, world.store), VirtualClock())
        await collector.poll()
        said.append("% full" in collector.model.snapshot()["sentence"]["text"])
        registry = CollectorRegistry()
        registry.register(RunMetrics(collector.reading, VirtualClock(), lambda: True))
        said.append(bool(registry.get_sample_value("diloco_redis_nearly_full")))
        await asyncio.sleep(20)
        told = [one for one in log if "of its maxmemory" in one.get("detail", "")]
        said.append(len(told) == 1)
        run = Run(RUN, world.spec.sync, elements, 2, 0.1, (), live=2)
        node = Server("7.2", used_bytes=used, maxmemory_bytes=most)
        said += [one.level == "warning" for one in checks.fills([node], run)]
    assert said == [rounds_free < 1] * 5
    await end(*party)
