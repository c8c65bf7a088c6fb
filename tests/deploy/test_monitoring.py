"""What can be said of `deploy/monitoring` without Prometheus and Grafana: the rest is in tests/prometheus."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from diloco.syncer.metrics import Metrics
from diloco.syncer.run_metrics import FIGURES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/monitoring"
BOARD = json.loads((FOLDER / "grafana/dashboards/diloco.json").read_text())
RULES = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"][0]["rules"]
CONFIG = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

plugins.register_default_plugins()


def told() -> set[str]:
    """Names of all series that a syncer has."""
    found = {"ALERTS"}
    for family in [*Metrics().registry.collect(), *(one.family() for one in FIGURES)]:
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        found |= {family.name + ending for ending in endings}
    return found


def expressions() -> list[str]:
    """Of the board's panels and annotations, and of all alerts."""
    panels = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    marks = [one["expr"] for one in BOARD["annotations"]["list"]]
    return [*panels, *marks, *(rule["expr"] for rule in RULES)]


def lost(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """What Grafana's types did not take over as it is."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            if key in theirs:
                yield from lost(value, theirs[key], f"{path}.{key}")
            elif value not in ("", [], {}, None):
                yield f"{path}.{key}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(*pair, f"{path}[{number}]")
    elif ours != theirs:
        yield f"{path}: {ours!r} became {theirs!r}"


def through_grafana(board: dict[str, Any]) -> list[str]:
    return list(lost(board, json.loads(JSONEncoder().encode(Dashboard.from_json(board)))))


def test_the_board_is_what_grafanas_types_have() -> None:
    """Every field, of panels, queries and options too, is one that Grafana's own types know; no other would be kept."""
    assert through_grafana(BOARD) == []


@pytest.mark.parametrize(
    "where", ["panels.1.options", "panels.0.fieldConfig.defaults", "panels.0.targets.0", "panels.0"]
)
def test_a_field_that_grafana_does_not_have_is_found(where: str) -> None:
    board = json.loads(json.dumps(BOARD))
    place: Any = board
    for key in where.split("."):
        place = place[int(key)] if isinstance(place, list) else place[key]
    place["misspelt"] = 1
    assert len(through_grafana(board)) == 1


def test_panels_lie_side_by_side_and_have_names_of_their_own() -> None:
    """None over another, none wider than the board; each says where its data come from by the board's variable."""
    panels = BOARD["panels"]
    assert BOARD["uid"] == "diloco"
    assert len({one["id"] for one in panels}) == len(panels)
    boxes = [one["gridPos"] for one in panels]
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for a, b in combinations(boxes, 2):
        aside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert aside or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    for one in panels:
        if one["type"] != "row":
            assert one["title"]
            assert one["datasource"] == DATASOURCE
            assert [target["datasource"] for target in one["targets"]] == [DATASOURCE] * len(one["targets"])
            assert len({target["refId"] for target in one["targets"]}) == len(one["targets"])
    assert [one["name"] for one in BOARD["templating"]["list"]] == ["datasource", "run"]


def test_board_and_alerts_name_series_that_there_are() -> None:
    """One that is renamed is noticed here. Each selector of the board is of the chosen run."""
    for expr in expressions():
        names = set(re.findall(r"\b(diloco_\w+|ALERTS)\b", re.sub(r'"[^"]*"', "", expr)))
        assert names or "up{" in expr, expr
        assert names <= told(), expr
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"]
            assert len(re.findall(r'run="\$run"', expr)) == len(re.findall(r"diloco_\w+\{", expr)), expr
            assert len(re.findall(r"diloco_\w+\{", expr)) == len(re.findall(r"diloco_\w+", expr)), expr


def test_no_figure_of_the_run_is_summed_over_syncers() -> None:
    """While the lead changes two syncers may tell it."""
    for expr in expressions():
        for name in re.findall(r"\bsum[^()]*\([^()]*\(?(diloco_\w+)", expr):
            assert not name.startswith(tuple(f"diloco_{kind}_" for kind in ("run", "learner", "fragment", "redis"))), (
                expr
            )


def test_every_alert_says_what_to_do_and_has_its_place_in_the_documents() -> None:
    page = (ROOT / "docs/howto/monitoring.md").read_text()
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert len(rule["annotations"]["description"].split()) > 15
        assert f"`{rule['alert']}`" in page
    assert len({rule["alert"] for rule in RULES}) == len(RULES) == 12


def mounted(service: str) -> dict[str, str]:
    """Where in the container -> what of the repository."""
    pairs = (volume.split(":") for volume in SERVICES[service]["volumes"])
    return {pair[1]: pair[0] for pair in pairs if pair[0].startswith("./")}


def test_prometheus_finds_its_files_its_syncers_and_their_token() -> None:
    """What the files name is where compose.yaml puts it: also the port of the syncers, and their token."""
    there = mounted("prometheus")
    (given,) = [one.partition("=")[2] for one in SERVICES["prometheus"]["command"] if one.startswith("--config.file=")]
    assert ROOT / there[given] == FOLDER / "prometheus.yml"
    for name in CONFIG["rule_files"]:
        assert (ROOT / there[str(Path(given).parent / name)]).samefile(FOLDER / name)
    (job,) = CONFIG["scrape_configs"]
    (dns,) = job["dns_sd_configs"]
    assert dns["names"] == ["syncer"]
    assert dns["port"] == SERVICES["syncer"]["environment"]["DILOCO_HTTP_PORT"]
    assert job["job_name"] == "diloco"  # the alert DilocoSyncerDown goes by it
    (folder,) = SERVICES["prometheus"]["tmpfs"]
    assert job["authorization"]["credentials_file"] == folder.partition(":")[0] + "/token"


@pytest.mark.parametrize("token", ["", "two words and a %s"])
def test_the_token_is_in_the_file_as_it_is(token: str, tmp_path: Path) -> None:
    """Read by nobody else; Prometheus is started with what compose.yaml says it is given."""
    command = [one.replace("$$", "$") for one in SERVICES["prometheus"]["entrypoint"]]
    command[2] = command[2].replace("/run/diloco", str(tmp_path)).replace("exec prometheus", "exec echo")
    environ = {"PATH": os.environ["PATH"], "DILOCO_HTTP_TOKEN": token}
    done = subprocess.run([*command, "--one", "--two words"], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "--one --two words\n"
    assert (tmp_path / "token").read_text() == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_grafana_does_not_start_without_a_password_of_ones_own() -> None:
    """It would be admin, admin."""
    sh, option, script = SERVICES["grafana"]["entrypoint"]
    script = script.replace("$$", "$").replace("exec /run.sh", "exec echo started")
    for password, status in (("", 1), ("secret", 0)):
        environ = {"PATH": os.environ["PATH"], "GF_SECURITY_ADMIN_PASSWORD": password}
        done = subprocess.run([sh, option, script], env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, "started" in done.stdout) == (status, not status)
        assert ("GRAFANA_ADMIN_PASSWORD" in done.stderr) == bool(status)


def test_grafana_finds_its_board_and_prometheus() -> None:
    there = mounted("grafana")
    provisioning = ROOT / there["/etc/grafana/provisioning"]
    (provider,) = yaml.safe_load((provisioning / "dashboards/diloco.yml").read_text())["providers"]
    assert (ROOT / there[provider["options"]["path"]] / "diloco.json").is_file()
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert source["type"] == DATASOURCE["type"]
    (port,) = SERVICES["prometheus"]["ports"]
    assert source["url"] == f"http://prometheus:{port.rpartition(':')[2]}"
    assert source["jsonData"]["timeInterval"] == CONFIG["global"]["scrape_interval"]


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_monitoring_comes_by_its_profile_pinned_and_for_this_machine_only(name: str) -> None:
    service = SERVICES[name]
    assert service["profiles"] == ["monitoring"]
    assert re.search(r":v?\d+\.\d+\.\d+$", service["image"])
    assert all(re.match(r"127\.0\.0\.1:\$\{\w+:-\d+\}:\d+$", port) for port in service["ports"])
    assert service["cap_drop"] == ["ALL"]
