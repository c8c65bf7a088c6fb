"""Learners as a JobSet in a queue of Kueue and as TrainJobs of Kubeflow: what holds beside `test_kubernetes.py`."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.test_kubernetes import FOLDER, Resource, built, named, pods, validate

QUEUE = "kueue.x-k8s.io/queue-name"


def job_of(resource: Resource, name: str) -> Resource:
    """The spec of a replicated job's Jobs; resource: a JobSet, or the template of a TrainingRuntime."""
    (found,) = [one for one in resource["spec"]["replicatedJobs"] if one["name"] == name]
    return found


def trainjobs() -> list[Resource]:
    return list(yaml.safe_load_all((FOLDER / "trainjob/learners.yaml").read_text()))


def variable(container: Resource, name: str) -> Any:
    (found,) = [one for one in container["env"] if one["name"] == name]
    return found["valueFrom"]["fieldRef"]["fieldPath"]


def test_a_learner_of_the_jobset_is_replaced_alone_and_keeps_its_id(tmp_path: Path) -> None:
    """A Job of one pod for each, with the restarts of the work queue. No policy of the JobSet restarts all."""
    jobset = named(built("jobset", tmp_path / "one"), "JobSet", "run")
    (same,) = [one for one in built("gpu", tmp_path / "two") if one["metadata"]["name"] == "learner"]
    learners = job_of(jobset, "learner")
    assert learners["replicas"] > 1
    job = learners["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (1, 1)
    assert {name: job[name] for name in ("podFailurePolicy", "backoffLimit")} == {
        name: same["spec"][name] for name in ("podFailurePolicy", "backoffLimit")
    }
    assert "failurePolicy" not in jobset["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert variable(container, "DILOCO_LEARNER_ID") == "metadata.labels['batch.kubernetes.io/job-name']"


def test_a_trainjob_is_a_learner_whose_pods_restart_together(tmp_path: Path) -> None:
    """As Kubeflow's webhook wants its runtime: names, the label, one replica. A disruption does not count."""
    resources = built("trainjob", tmp_path)
    runtime = named(resources, "TrainingRuntime", "learner")["spec"]["template"]
    node = job_of(runtime, "node")
    assert node["replicas"] == 1
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["template"]["spec"]["backoffLimit"] == 0
    assert {rule["action"] for rule in node["template"]["spec"]["podFailurePolicy"]["rules"]} == {"FailJob"}
    (rule,) = runtime["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    assert variable(container, "DILOCO_LEARNER_ID") == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"
    trained = trainjobs()
    assert len(trained) > 1
    for one in trained:
        validate(one)
        spec = one["spec"]
        assert spec["runtimeRef"] == {"kind": "TrainingRuntime", "name": "learner"}
        assert str(spec["trainer"]["numProcPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_queue_is_the_one_that_they_ask_for_and_counts_what_they_request(tmp_path: Path) -> None:
    flavor, cluster, local = yaml.safe_load_all((FOLDER / "jobset/queue.yaml").read_text())
    for one in (flavor, cluster, local):
        validate(one)
    (group,) = cluster["spec"]["resourceGroups"]
    (counted,) = group["flavors"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    assert counted["name"] == flavor["metadata"]["name"]
    assert [one["name"] for one in counted["resources"]] == group["coveredResources"]
    jobset, trainjob = (built(overlay, tmp_path / overlay) for overlay in ("jobset", "trainjob"))
    queued = [named(jobset, "JobSet", "run"), *trainjobs()]
    assert {one["metadata"]["labels"][QUEUE] for one in queued} == {local["metadata"]["name"]}
    assert {one["metadata"]["namespace"] for one in queued} == {local["metadata"]["namespace"]}
    for resources in (jobset, trainjob):
        (container,) = pods(resources)["learner"]["spec"]["containers"]
        asked = container["resources"]
        assert (asked["requests"] | asked["limits"]).keys() <= set(group["coveredResources"])


def test_what_a_custom_resource_does_not_have_is_found(tmp_path: Path) -> None:
    """A field of its own, and one of a pod within it."""
    jobset = named(built("jobset", tmp_path), "JobSet", "run")
    other, pod = deepcopy(jobset), deepcopy(jobset)
    other["spec"]["replicatedJobs"][0]["replica"] = 2
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        validate(other)
    pod["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(pod)
