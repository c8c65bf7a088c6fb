"""What can be said of `deploy/kubernetes` without a cluster: it is valid, what it names is there, and it fits the code.

Overlays are built by kubectl, where there is one. Without it the files are looked at as they lie there, unpatched.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from diloco.acl import variable
from diloco.pipeline.bus import acl
from diloco.pipeline.process.signals import AGAIN_STATUS
from diloco.pipeline.redis_memory import MACHINE_TIMES
from diloco.pipeline.settings import LearnerSettings, SyncerSettings, defaults
from tests.docker.test_compose_files import KNOWN

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
WORK_QUEUES = ("cpu", "gpu", "gpus")
OVERLAYS = (*WORK_QUEUES, "jobset", "trainjob")
VERSIONS = ("1.31", "1.37")
CUSTOM = "monitoring.coreos.com/v1"
"""No schema of Kubernetes' own."""
CRDS = json.loads(Path(__file__).with_name("crds.json").read_text())
"""Schemas of custom resources, by apiVersion and kind."""
SECRETS = {"redis-users": {"users.acl"}, "redis-passwords": {variable(user.name) for user in acl.users()}}
"""That docs/howto/kubernetes.md has made, with their keys."""

Resource = dict[str, Any]


def as_they_lie() -> list[Resource]:
    """All resources of the files, with the generated ConfigMaps."""
    files = [file for folder in ("base", "monitoring") for file in sorted((FOLDER / folder).glob("*.yaml"))]
    found = [one for file in files if file.stem != "kustomization" for one in yaml.safe_load_all(file.read_text())]
    base = yaml.safe_load((FOLDER / "base/kustomization.yaml").read_text())
    for made in base["configMapGenerator"]:
        data = dict(line.split("=", 1) for line in made["literals"])
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": made["name"]}, "data": data})
    return found


def built(overlay: str, folder: Path) -> list[Resource]:
    """An overlay with the monitoring part, as kubectl makes it."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    file = folder / overlay / "kustomization.yaml"
    file.write_text(file.read_text() + "components: [../monitoring]\n")
    return kustomized(folder / overlay)


def kustomized(overlay: Path) -> list[Resource]:
    """An overlay's resources, as kubectl makes them."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl: the files are looked at unpatched")
    done = subprocess.run([kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(params=["files", *OVERLAYS], scope="module")
def resources(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Resource]:
    return as_they_lie() if request.param == "files" else built(request.param, tmp_path_factory.mktemp("overlay"))


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = [one for one in resources if one["kind"] == kind and one["metadata"]["name"] == name]
    return found


def pods(resources: list[Resource]) -> dict[str, Resource]:
    """Template of each workload's pods, by what they are."""
    templates = [one for one in everywhere(resources, "template") if "containers" in one.get("spec", {})]
    return {one["metadata"]["labels"]["app.kubernetes.io/name"]: one for one in templates}


def strict(schema: Any) -> Any:
    """The schema without room for fields that it does not name."""
    if isinstance(schema, dict):
        schema = {key: strict(value) for key, value in schema.items()}
        return {"additionalProperties": False} | schema if "properties" in schema else schema
    return [strict(one) for one in schema] if isinstance(schema, list) else schema


def validate(one: Resource) -> None:
    """Against the schemas of Kubernetes in old and new versions, or of the custom resource, and of Jobs within it."""
    kind = f"{one['apiVersion']} {one['kind']}"
    if kind in CRDS:
        known = {"apiVersion": {}, "kind": {}, "metadata": {}}
        jsonschema.validate(one, strict(CRDS[kind] | {"properties": CRDS[kind]["properties"] | known}))
        for job in (job for jobs in everywhere(one, "replicatedJobs") for job in jobs):
            head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
            validate(head | {"spec": job["template"]["spec"]})
    elif one["apiVersion"] != CUSTOM:
        for version in VERSIONS:
            kubernetes_validate.validate(one, version, strict=True)


def everywhere(value: Any, key: str) -> Iterator[Any]:
    """Values of this key, at any depth."""
    if isinstance(value, dict):
        if key in value:
            yield value[key]
        value = list(value.values())
    for one in value if isinstance(value, list) else ():
        yield from everywhere(one, key)


def selects(selector: Resource, labels: dict[str, str]) -> bool:
    whole = selector.get("matchLabels", {}).items() <= labels.items()
    return whole and all(labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", []))


def test_all_of_it_is_valid(resources: list[Resource]) -> None:
    """Strictly: no field that does not exist, at any depth, in old and new versions of Kubernetes."""
    for one in resources:
        validate(one)
    keys = [(one["kind"], one["metadata"]["name"]) for one in resources]
    assert len(set(keys)) == len(keys)
    assert set(pods(resources)) == {"redis", "syncer", "learner", "evaluator"}


def test_what_does_not_exist_is_found(resources: list[Resource]) -> None:
    """The schemas are strict: a misspelt field of a probe is refused."""
    syncer = deepcopy(named(resources, "Deployment", "syncer"))
    syncer["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(syncer, VERSIONS[0], strict=True)


def test_every_name_is_of_something(resources: list[Resource]) -> None:
    """ConfigMaps, Secrets with their keys, claims, volumes, ports, containers, and pods of each selector."""
    maps = {one["metadata"]["name"] for one in resources if one["kind"] == "ConfigMap"}
    claims = {one["metadata"]["name"] for one in resources if one["kind"] == "PersistentVolumeClaim"}
    labels = {name: template["metadata"]["labels"] for name, template in pods(resources).items()}
    for one in resources:
        assert {given["name"] for given in everywhere(one, "configMapRef")} <= maps
        assert {given["claimName"] for given in everywhere(one, "persistentVolumeClaim")} <= claims
        for given in everywhere(one, "secretKeyRef"):
            assert given["key"] in SECRETS[given["name"]]
        assert {given["secretName"] for given in everywhere(one, "secret")} <= SECRETS.keys()
        if one["kind"] == "Service":
            assert any(one["spec"]["selector"].items() <= have.items() for have in labels.values())
        for key in ("selector", "podSelector", "labelSelector"):
            for selector in everywhere(one, key):
                outside = "kube-dns" in str(selector) or one["kind"] == "Service"
                assert outside or any(selects(selector, have) for have in labels.values()), selector
    for template in pods(resources).values():
        spec = template["spec"]
        (container,) = spec["containers"]
        ports = {port["name"] for port in container.get("ports", [])}
        assert {given["port"] for given in everywhere(container, "httpGet")} <= ports
        volumes = {volume["name"] for volume in spec["volumes"]} | {"data"}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    http = {port["name"] for port in pods(resources)["syncer"]["spec"]["containers"][0]["ports"]}
    if any(one["kind"] == "PodMonitor" for one in resources):
        ends = named(resources, "PodMonitor", "syncer")["spec"]["podMetricsEndpoints"]
        assert {end["port"] for end in ends} <= http
        assert all({"targetLabel": "job", "replacement": "diloco"} in end["relabelings"] for end in ends), "alerts' job"


def test_every_variable_is_a_setting_and_given_once(resources: list[Resource]) -> None:
    """One that is renamed is noticed here, not by a pod that ignores it."""
    text = yaml.safe_dump(resources)
    assert set(re.findall(r"DILOCO_[A-Z_]+", text)) <= KNOWN
    for template in pods(resources).values():
        names = [one["name"] for one in template["spec"]["containers"][0].get("env", [])]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("resources", ["files", *WORK_QUEUES], indirect=True)
def test_learners_are_a_work_queue_and_a_stop_costs_nothing(resources: list[Resource]) -> None:
    """No completions. Disruptions, and the status of whoever was asked to end, do not count as failures; another
    status does."""
    for name in ("learner", "evaluator"):
        job = named(resources, "Job", name)["spec"]
        assert "completions" not in job
        assert job["template"]["spec"]["restartPolicy"] == "Never"
        assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"Ignore"}
        disrupted, asked = job["podFailurePolicy"]["rules"]
        assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        (container,) = job["template"]["spec"]["containers"]
        assert asked["onExitCodes"] == {"containerName": container["name"], "operator": "In", "values": [AGAIN_STATUS]}
    assert named(resources, "Job", "learner")["spec"]["parallelism"] > 1


def test_pods_are_ended_later_than_their_processes_give_up(resources: list[Resource]) -> None:
    """A syncer has time to checkpoint, a learner to publish. A new syncer is ready before an old one goes."""
    given_up_s = max(defaults(SyncerSettings)["shutdown_s"], defaults(LearnerSettings)["leave_s"])
    for template in pods(resources).values():
        assert template["spec"]["terminationGracePeriodSeconds"] > 2 * given_up_s
    syncer = named(resources, "Deployment", "syncer")["spec"]
    assert syncer["replicas"] > 1
    assert syncer["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    assert syncer["minReadySeconds"] >= 2 * defaults(SyncerSettings)["lease_s"]


def test_pods_have_no_rights_that_they_do_not_need(resources: list[Resource]) -> None:
    """As the namespace asks for: `restricted`. Memory is bounded."""
    namespace = named(resources, "Namespace", "diloco")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for template in pods(resources).values():
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        rights = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == rights
        assert "memory" in container["resources"]["limits"]
    assert {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]} in [
        one["spec"] for one in resources if one["kind"] == "NetworkPolicy"
    ]


def test_redis_has_memory_and_disk_for_a_rewrite_of_all_that_it_holds(resources: list[Resource]) -> None:
    """Its append-only file is rewritten once it has doubled, while a round replaces what is in it: there are two of it,
    the new one, and what is written meanwhile."""
    (container,) = pods(resources)["redis"]["spec"]["containers"]
    (disk,) = named(resources, "StatefulSet", "redis")["spec"]["volumeClaimTemplates"]
    command, limit = container["command"], container["resources"]["limits"]["memory"]
    held = int(command[command.index("--maxmemory") + 1].removesuffix("gb"))  # of 2^30, as Gi
    assert int(limit.removesuffix("Gi")) >= MACHINE_TIMES * held
    assert int(disk["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) >= 4 * held


def test_an_overlay_gives_its_learners_the_gpus_that_they_use(tmp_path: Path) -> None:
    """As many as the device names."""
    for overlay in OVERLAYS:
        (container,) = pods(built(overlay, tmp_path / overlay))["learner"]["spec"]["containers"]
        (device,) = [one["value"] for one in container["env"] if one["name"] == "DILOCO_DEVICE"]
        assert int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) == device.count("cuda")


def test_the_overlays_of_the_page_are_built(tmp_path: Path) -> None:
    """A learner's folder is named after its id, so that variable comes first; Prometheus sends the syncer's token."""
    page = (FOLDER.parents[1] / "docs/howto/kubernetes.md").read_text()
    overlays = re.findall(r"```yaml\n(resources: \[\.\./.*?)```", page, re.DOTALL)
    assert len(overlays) == 3
    for number, text in enumerate(overlays):
        shutil.copytree(FOLDER, tmp_path / str(number))
        mine = tmp_path / str(number) / "mine"
        mine.mkdir()
        (mine / "kustomization.yaml").write_text(text)
        resources = kustomized(mine)
        for one in resources:
            validate(one)
        for container in everywhere(resources, "containers"):
            names = [one["name"] for one in container[0].get("env", ())]
            if "DILOCO_STATE_DIR" in names:
                assert names.index("DILOCO_LEARNER_ID") < names.index("DILOCO_STATE_DIR")
        assert ("http-token" in yaml.dump(resources)) is ("monitoring" in text)
