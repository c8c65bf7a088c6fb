"""Alerts and board on a real Prometheus, which scrapes a real run (`tests/prometheus/local.py`)."""

import asyncio
import math
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from prometheus_client import generate_latest
from pydantic import SecretStr

from diloco.pipeline.bus.embedded import free_port
from diloco.pipeline.settings import HttpSettings
from diloco.pipeline.view.page.last_poll import Reading
from diloco.syncer.metrics import Metrics
from diloco.syncer.run_metrics import RunMetrics
from diloco.syncer.serving.http import start_http
from tests import HANGING_S, samples
from tests.deploy.test_monitoring import BOARD, FOLDER, RULES, expressions
from tests.parties import Parties, wait_for
from tests.prometheus.local import LocalPrometheus, config_for, promtool, why_not
from tests.serving import no_events
from tests.syncer.test_run_metrics import At, poll

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one"),
]

HERE = Path(__file__).parent
TOKEN = "correct-horse"  # noqa: S105  # made up
SMALL = ["--model", "nano", "--seq-len", "64", "--batch", "4", "--sync-interval", "6", "--threads", "1"]


def test_promtool_finds_nothing_in_rules_and_configuration(tmp_path: Path) -> None:
    promtool("check", "rules", FOLDER / "rules.yml")
    (tmp_path / "rules.yml").write_text((FOLDER / "rules.yml").read_text())
    promtool("check", "config", config_for(tmp_path, ["127.0.0.1:8080"], TOKEN))
    promtool("check", "config", "--syntax-only", FOLDER / "prometheus.yml")


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    """On planted series: a healthy hour with a change of the lead fires none. Each alert stands for itself there."""
    assert "SUCCESS" in promtool("test", "rules", HERE / "rules_test.yml")
    tested = (HERE / "rules_test.yml").read_text()
    assert all(f'alertname="{rule["alert"]}",alertstate="firing"' in tested for rule in RULES)


def test_promtool_finds_nothing_in_what_a_syncer_tells() -> None:
    """Names, units and help texts are as Prometheus would have them."""
    metrics, reading = Metrics("r"), Reading()
    reading.see(poll([samples.seen("l0"), samples.seen("l1")]))
    metrics.registry.register(RunMetrics(reading, At(), lambda: True))
    promtool("check", "metrics", given=generate_latest(metrics.registry))


@pytest.mark.parametrize(("given", "error"), [("", ""), (TOKEN, ""), ("another", "401 Unauthorized")])
async def test_a_syncer_is_scraped_with_its_token_and_without_one(tmp_path: Path, given: str, error: str) -> None:
    """The same configuration does for both: an empty token is none. A wrong one is told on Prometheus' target page."""

    async def status() -> dict[str, Any]:
        return {}

    settings = HttpSettings(http_port=0, http_token=SecretStr(TOKEN) if given else None)
    runner, _ = await start_http(status, lambda: (True, ""), Metrics("r").registry, no_events, settings)
    try:
        target = f"127.0.0.1:{runner.addresses[0][1]}"
        prometheus = LocalPrometheus(tmp_path / "prometheus", free_port(), [target], given)
        await asyncio.to_thread(prometheus.__enter__)
        try:
            async with asyncio.timeout(HANGING_S):
                while not (found := await asyncio.to_thread(prometheus.values, "up")):
                    await asyncio.sleep(0.2)
            assert [value for _, value in found] == [0 if error else 1]
            assert error in (await asyncio.to_thread(prometheus.targets))[target]
        finally:
            await asyncio.to_thread(prometheus.__exit__, None, None, None)
    finally:
        await runner.cleanup()


def asked(expr: str) -> str:
    """An expression of the board or of an alert for a test of a minute, which has data whether or not it holds."""
    expr = expr.replace("$__rate_interval", "10s").replace('run="$run"', 'run="watched"')
    expr = re.sub(r"\[\d+m\]|\[1h\]", "[10s]", expr).replace("offset 15m", "").replace("offset 5m", "")
    return re.sub(r" (>=|==|>|<) ", r" \1 bool ", " ".join(expr.split())).replace(" unless ", " and ")


def test_a_real_run_has_data_for_board_and_alerts_and_one_below_its_quorum_is_noticed(tmp_path: Path) -> None:
    """Two syncers, three learners and an evaluator. Every expression of the board and of every alert has data, figures
    of the run are there once, and no alert is up. Then two learners are killed: the alert is pending, then fires, and
    says how many learners a merge needs. With a learner more it ends."""
    ports = [free_port(), free_port()]
    targets = [f"127.0.0.1:{port}" for port in ports]
    given = {"run": "watched", "tokens": "1B", "fragments": 4, "quorum": 2, "outer_warmup": 2, "http_token": TOKEN}
    with Parties(tmp_path, **given, eval_tokens=2048, eval_every="2s") as run:
        with redis.Redis.from_url(run.url) as client:
            client.config_set("maxmemory", "500mb")

        def learner(name: str) -> subprocess.Popen[bytes]:
            return run.diloco(name, "learner", "--learner-id", name, "--pace", "150ms", *SMALL)

        for number, port in enumerate(ports):
            run.diloco(f"syncer-{number}", "syncer", "--http-port", port)
        learners = [learner(name) for name in ("one", "two", "three")]
        run.diloco("evaluator", "evaluator", "--threads", "1")
        with LocalPrometheus(tmp_path / "p", free_port(), targets, TOKEN) as prometheus:
            waiting = {expr for expr in map(asked, expressions()) if "ALERTS" not in expr}
            assert len(waiting) > 40

            def all_have_data() -> bool:
                for expr in list(waiting):
                    if any(not math.isnan(value) for _, value in prometheus.values(expr)):
                        waiting.remove(expr)
                return not waiting

            def shown() -> str:
                return f"no data: {waiting}\n{prometheus.alerts()}\n{run.shown()}"

            wait_for(all_have_data, shown=shown)
            steady(prometheus)

            for one in learners[:2]:
                one.kill()
                one.wait()
            name = "DilocoQuorumUnreachable"
            states = [wait_for(lambda: prometheus.alerts().get(name), shown=shown)["state"]]
            fired = wait_for(lambda: (one := prometheus.alerts()[name])["state"] == "firing" and one, shown=shown)
            assert states == ["pending"]
            assert fired["labels"]["run"] == "watched"
            assert fired["annotations"]["summary"].startswith("Run watched: a merge needs 2 learners")
            (mark,) = BOARD["annotations"]["list"]
            assert prometheus.values(asked(mark["expr"]))

            learner("four")
            wait_for(lambda: name not in prometheus.alerts(), shown=shown)


def steady(prometheus: LocalPrometheus) -> None:
    """Of a run in which all is well."""
    assert set(prometheus.targets().values()) == {""}
    for once in ("run_trained_tokens", 'run_tokens{fate="merged"}', "redis_used_bytes", "run_syncers"):
        assert [value for _, value in prometheus.values(f"count(diloco_{once})")] == [1], once
    for sums, total in (("leads", 1), ("served_fragments", 4)):
        assert [value for _, value in prometheus.values(f"sum(diloco_{sums})")] == [total]
    learners = {labels["learner"] for labels, _ in prometheus.values("diloco_learner_steps_total")}
    assert learners == {"one", "two", "three"}
    ((_, merged),) = prometheus.values('diloco_run_tokens{fate="merged"}')
    assert merged > 0
    ((_, rate),) = prometheus.values('rate(diloco_learner_steps_total{learner="one"}[10s])')
    assert 0 < rate < 1 / 0.15 + 1
    firing = {name for name, one in prometheus.alerts().items() if one["state"] == "firing"}
    assert firing == set(), firing


def test_ranges_and_waits_of_the_alerts_are_shortened_for_the_run_above() -> None:
    """Or it would wait for minutes, and say nothing."""
    rules = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]
    assert any("[1m]" in rule["expr"] for rule in rules)
    assert all(re.fullmatch(r"\d+m", rule.get("for", "1m")) for rule in rules)
