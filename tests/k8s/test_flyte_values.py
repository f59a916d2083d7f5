"""Flyte's values: against a schema of our own (the chart itself cannot be had here), and against our manifests."""

import copy
import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import yaml

from tasks.contracts.config import RetentionConfig
from tests.k8s import manifests
from tests.k8s.flyte_schema import after_helm, hours, unknown_values, wrong_inline
from tests.k8s.manifests import K8S, Document, documents, rendered
from tests.k8s.test_kustomize import lifecycle_rules, needs_kubectl, one

FILES = {"gpu": ["values.yaml"], "dev": ["values.yaml", "values-dev.yaml"]}
"""Overlay -> the values files that go with it, in order."""


def merge(first: Any, second: Any) -> Any:
    """Helm's merge of values: maps key by key, all else replaced."""
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: merge(first[key], second[key]) if key in first and key in second else {**first, **second}[key]
                for key in {**first, **second}}
    return second


def load(overlay: str) -> dict[str, Any]:
    return reduce(merge, [yaml.safe_load((K8S / "flyte" / name).read_text()) for name in FILES[overlay]])


def inline(values: dict[str, Any]) -> dict[str, Any]:
    return after_helm(values["configuration"]["inline"])


@pytest.mark.parametrize("overlay", FILES)
def test_values_use_only_what_the_chart_and_flyte_know(overlay):
    values = load(overlay)
    assert unknown_values(values) == []
    assert wrong_inline(values["configuration"]["inline"]) == []


@pytest.mark.parametrize("plant", [
    {"configuration": {"database": {"user": "flyte"}}},
    {"configuration": {"storage": {"providerConfig": {"s3": {"v2_signing": False}}}}},
    {"deployment": {"resource": {}}},
    {"configuration": {"logging": {"plugins": {"kubernetes": {"template-uri": "x"}}}}},
    {"storage": {"container": "flyte"}},
])
def test_the_schema_finds_keys_that_the_chart_lacks(plant):
    assert len(unknown_values(merge(load("dev"), plant))) == 1


@pytest.mark.parametrize("plant", [
    {"catalog-cache": {"max-cache-age": "28d"}},
    {"catalog_cache": {"max-cache-age": "672h"}},
    {"propeller": {"workflow-reeval-duration": 1}},
    {"plugins": {"k8s": {"default-pod-template": "flowmill-cpu"}}},
    {"plugins": {"k8s": {"resource-tolerations": {"nvidia.com/gpu": []}}}},
    {"plugins": {"k8s": {"inject-finalizer": "yes"}}},
    {"task_resources": {"limits": {"memory": "512 GB"}}},
    {"namespace_mapping": {"template": "{{ \"{{ domain }}\" }}"}},
])
def test_the_schema_finds_what_flyte_would_not_read(plant):
    assert wrong_inline(merge(load("dev")["configuration"]["inline"], plant))


def test_braces_that_helm_would_run_are_refused():
    assert after_helm({"a": ['{{ "{{ project }}" }}']}) == {"a": ["{{ project }}"]}
    with pytest.raises(ValueError, match="Helm would run"):
        after_helm({"template": "{{ project }}-{{ domain }}"})


def test_durations_are_gos():
    assert hours("672h") == 28 * 24
    assert hours("1h30m") == 1.5
    with pytest.raises(ValueError, match="no Go duration"):
        hours("28d")


# --- caches and expiry


def cache_problems(values: dict[str, Any], rules: list[Document], trajectory_days: int) -> list[str]:
    """Flyte's cached references must die before the data they point to, and both at the time that recipes name."""
    age = hours(inline(values).get("catalog-cache", {}).get("max-cache-age", "0h"))
    days = min((rule["Expiration"]["Days"] for rule in rules if "Days" in rule.get("Expiration", {})), default=0)
    found = []
    if not age:
        found.append("max-cache-age is 0: cached references never expire, their data does")
    if age >= 24 * days:
        found.append(f"a cached reference lives {age} h, the bucket expires its data after {24 * days} h")
    if days != trajectory_days:
        found.append(f"the bucket expires after {days} days, retention.trajectory_days is {trajectory_days}")
    return found


@pytest.mark.parametrize("overlay", FILES)
def test_cached_references_die_before_their_data(overlay):
    assert cache_problems(load(overlay), lifecycle_rules(), RetentionConfig().trajectory_days) == []


def test_flytectls_demo_keeps_the_same_cache_age():
    demo = yaml.safe_load((K8S / "flyte/flytectl-demo.yaml").read_text())
    assert demo["catalog-cache"] == inline(load("dev"))["catalog-cache"]
    assert wrong_inline(demo) == []


@pytest.mark.parametrize(("age", "expires", "days"), [("720h", 30, 30), ("0h", 30, 30), ("672h", 20, 20),
                                                      ("672h", 30, 60)])
def test_the_cache_rule_finds_planted_violations(age, expires, days):
    values, rules = load("dev"), copy.deepcopy(lifecycle_rules())
    values["configuration"]["inline"]["catalog-cache"]["max-cache-age"] = age
    rules[0]["Expiration"]["Days"] = expires
    assert cache_problems(values, rules, days)


# --- values against manifests


def disagreements(values: dict[str, Any], docs: list[Document], secrets: list[Document]) -> list[str]:
    """Names in the values that the manifests lack."""
    found = []
    flyte, names = inline(values), {(document["kind"], document["metadata"].get("namespace"),
                                     document["metadata"]["name"]) for document in [*docs, *secrets]}
    projects = values["flyte-core-components"]["admin"]["seedProjects"]
    for project in projects:
        for domain in flyte["domains"]:
            namespace = re.sub(r"\{\{ project \}\}-\{\{ domain \}\}", f"{project}-{domain['id']}",
                               flyte["namespace_mapping"]["template"])
            found += [f"namespace {namespace} has no {kind} {name}" for kind, name in (
                ("ServiceAccount", flyte["flyteadmin"]["k8sServiceAccount"]),
                ("PodTemplate", flyte["plugins"]["k8s"]["default-pod-template-name"]), ("Secret", "flowmill-s3"))
                if (kind, namespace, name) not in names]
    services = {f"{document['metadata']['name']}.{document['metadata']['namespace']}.svc.cluster.local:{port['port']}"
                for document in docs if document["kind"] == "Service" for port in document["spec"]["ports"]}
    database, s3 = values["configuration"]["database"], values["configuration"]["storage"]["providerConfig"]["s3"]
    addresses = (f"{database['host']}:{database['port']}", s3["endpoint"].removeprefix("http://"))
    found += [f"no Service {address}" for address in addresses if address not in services]
    if ("Secret", "flyte", values["configuration"]["inlineSecretRef"]) not in names:
        found.append(f"no Secret {values['configuration']['inlineSecretRef']} in flyte")
    buckets = set(re.search(r"for bucket in ([a-z ]+);",
                            (K8S / "base/minio/bootstrap/bootstrap.sh").read_text())[1].split())
    found += [f"no bucket for {key}" for key in ("metadataContainer", "userDataContainer")
              if values["configuration"]["storage"][key] not in buckets]
    if values["deployment"]["extraPodSpec"]["priorityClassName"] not in {name for kind, _, name in names
                                                                         if kind == "PriorityClass"}:
        found.append("no such PriorityClass")
    environment = one(docs, "ConfigMap", "flowmill-environment")["data"]
    if environment["FLYTE_AWS_ENDPOINT"] != s3["endpoint"] or environment["AWS_REGION"] != s3["region"]:
        found.append("tasks use another S3 than Flyte")
    gpu = flyte["plugins"]["k8s"]["gpu-resource-name"]
    if f"requests.{gpu}" not in one(docs, "ResourceQuota", "flowmill-tasks")["spec"]["hard"]:
        found.append(f"the quota does not count {gpu}")
    wait = values["deployment"]["waitForDB"]["image"]
    postgres = manifests.pod_template(one(docs, "StatefulSet", "postgres"))["spec"]["containers"][0]["image"]
    if postgres.partition("@")[2] != wait["tag"].partition("@")[2]:
        found.append("Flyte waits with another Postgres image than the one that runs")
    return found


@needs_kubectl
@pytest.mark.parametrize("overlay", FILES)
def test_values_and_manifests_agree(overlay):
    assert disagreements(load(overlay), documents(rendered(overlay)), manifests.secret_keys()) == []


PLANTED: list[Callable[[dict[str, Any]], object]] = [
    lambda values: values["flyte-core-components"]["admin"]["seedProjects"].append("other"),
    lambda values: values["configuration"]["inline"]["domains"].append({"id": "production", "name": "production"}),
    lambda values: values["configuration"]["inline"]["flyteadmin"].update(k8sServiceAccount="default-task"),
    lambda values: values["configuration"]["inline"]["plugins"]["k8s"].update({"default-pod-template-name": "cpu"}),
    lambda values: values["configuration"]["database"].update(port=5433),
    lambda values: values["configuration"]["storage"]["providerConfig"]["s3"].update(endpoint="http://minio:9000"),
    lambda values: values["configuration"].update(inlineSecretRef="flyte-secrets"),
    lambda values: values["configuration"]["storage"].update(metadataContainer="flyte-data"),
    lambda values: values["deployment"]["waitForDB"]["image"].update(tag="15-alpine"),
    lambda values: values["deployment"]["extraPodSpec"].update(priorityClassName="high"),
]


@needs_kubectl
@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_disagreements_are_found(number):
    values = load("dev")
    PLANTED[number](values)
    assert disagreements(values, documents(rendered("dev")), manifests.secret_keys())


def test_no_key_is_in_the_values_and_the_secret_replaces_what_the_chart_insists_on():
    storage = load("gpu")["configuration"]["storage"]["providerConfig"]["s3"]
    secret = one(manifests.secret_keys(), "Secret", "flyte-config-secrets")["stringData"]
    assert storage["accessKey"] == storage["secretKey"] == "replaced-by-flyte-config-secrets"
    # The chart's own file of keys is 013-storage-secrets.yaml; Flyte reads files in the order of their names.
    names = [name for name, text in secret.items() if {"access_key_id", "secret_key"}
             == set(yaml.safe_load(text).get("storage", {}).get("stow", {}).get("config", {}))]
    assert names
    assert min(names) > "013-storage-secrets.yaml"
    assert "password" not in load("gpu")["configuration"]["database"]


def test_namespaces_that_flyte_makes_enforce_the_restricted_standard():
    for text in load("gpu")["clusterResourceTemplates"]["inline"].values():
        made = yaml.safe_load(text)
        assert made["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.parametrize("overlay", FILES)
def test_flytes_own_pod_passes_the_restricted_standard(overlay):
    deployment = load(overlay)["deployment"]
    pod = deployment["podSecurityContext"]
    assert pod["enabled"] is True
    assert pod["runAsNonRoot"] is True
    assert pod["seccompProfile"] == {"type": "RuntimeDefault"}
    for context in (deployment["securityContext"], deployment["waitForDB"]["securityContext"]):
        assert context == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert {*deployment["resources"]["requests"], *deployment["resources"]["limits"]} == {
        "cpu", "memory", "ephemeral-storage"}
