"""What Flyte's chart and Flyte itself take, as far as our values use it: a schema of our own.

The chart cannot be had from a package registry, so `helm template` is no test here. VALUES lists the keys of chart
`flyte-binary`, AppVersion 1.16.0, from the table in its README and its templates; a key ending in `*` is passed on as
it is. INLINE lists the keys of Flyte's own configuration that we may set under `configuration.inline`, each with the
kind of its value, from the `json` tags of the structs named beside them (flyteorg/flyte).
"""

import re
from collections.abc import Iterator
from typing import Any

_VALUES = """
nameOverride fullnameOverride commonLabels* commonAnnotations*
flyte-core-components.admin.disabled flyte-core-components.admin.disableScheduler
flyte-core-components.admin.disableClusterResourceManager flyte-core-components.admin.seedProjects*
flyte-core-components.admin.seedProjectsWithDetails*
flyte-core-components.propeller.disabled flyte-core-components.propeller.disableWebhook
flyte-core-components.dataCatalog.disabled
configuration.database.username configuration.database.password configuration.database.passwordPath
configuration.database.host configuration.database.port configuration.database.dbname configuration.database.options
configuration.storage.metadataContainer configuration.storage.userDataContainer configuration.storage.provider
configuration.storage.providerConfig.s3.region configuration.storage.providerConfig.s3.disableSSL
configuration.storage.providerConfig.s3.v2Signing configuration.storage.providerConfig.s3.endpoint
configuration.storage.providerConfig.s3.authType configuration.storage.providerConfig.s3.accessKey
configuration.storage.providerConfig.s3.secretKey
configuration.logging.level configuration.logging.plugins.kubernetes.enabled
configuration.logging.plugins.kubernetes.templateUri configuration.logging.plugins.custom*
configuration.auth.enabled configuration.co-pilot.image.repository configuration.co-pilot.image.tag
configuration.connectorService* configuration.propeller.createCRDs
configuration.propeller.literalOffloadingConfigEnabled
configuration.externalConfigMap configuration.externalSecretRef configuration.inline* configuration.inlineConfigMap
configuration.inlineSecretRef configuration.labels* configuration.annotations*
clusterResourceTemplates.externalConfigMap clusterResourceTemplates.inline* clusterResourceTemplates.inlineConfigMap
clusterResourceTemplates.labels* clusterResourceTemplates.annotations*
deployment.image.repository deployment.image.tag deployment.image.pullPolicy deployment.extraEnvVars*
deployment.extraEnvVarsConfigMap deployment.extraEnvVarsSecret deployment.command* deployment.args*
deployment.livenessProbe* deployment.readinessProbe* deployment.startupProbe* deployment.lifecycleHooks*
deployment.resources* deployment.podSecurityContext* deployment.securityContext*
deployment.waitForDB.image.repository deployment.waitForDB.image.tag deployment.waitForDB.image.pullPolicy
deployment.waitForDB.command* deployment.waitForDB.args* deployment.waitForDB.securityContext*
deployment.labels* deployment.annotations* deployment.podLabels* deployment.podAnnotations*
deployment.extraVolumeMounts* deployment.extraVolumes* deployment.sidecars* deployment.initContainers*
deployment.extraPodSpec*
service.type service.ports.http service.ports.grpc service.nodePorts.http service.nodePorts.grpc service.extraPorts*
ingress.create ingress.host ingress.ingressClassName ingress.tls* ingress.httpAnnotations* ingress.grpcAnnotations*
rbac.create rbac.labels* rbac.annotations* rbac.extraRules*
serviceAccount.create serviceAccount.name serviceAccount.annotations* serviceAccount.imagePullSecrets*
flyteconnector.enabled enabled_plugins.tasks*
"""
VALUES = _VALUES.split()

# Go's time.ParseDuration knows no days.
DURATION = r"^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTP]i?)?$"
NAME = r"^[a-z0-9]([-a-z0-9./]*[a-z0-9])?$"
URL = r"^https?://[^\s]+$"

INLINE: dict[str, str | type] = {
    "domains": list,                                                      # flyteadmin runtime/interfaces Domain
    "namespace_mapping.template": r"^\{\{ project \}\}-\{\{ domain \}\}$",
    "flyteadmin.k8sServiceAccount": NAME,                                 # ApplicationConfig
    "flyteadmin.maxParallelism": int,
    **{f"task_resources.{part}.{what}": QUANTITY                          # TaskResourceSet
       for part in ("defaults", "limits") for what in ("cpu", "memory", "gpu", "ephemeralStorage")},
    "catalog-cache.max-cache-age": DURATION,                              # nodes/task/catalog Config
    "propeller.workflow-reeval-duration": DURATION,                       # controller/config Config
    "propeller.downstream-eval-duration": DURATION,
    **{f"propeller.node-config.default-deadlines.{what}-deadline": DURATION  # controller/config NodeConfig
       for what in ("node-execution", "node-active", "workflow-active")},
    "plugins.k8s.default-pod-template-name": NAME,                        # flytek8s/config K8sPluginConfig
    "plugins.k8s.default-pod-template-resync": DURATION,
    "plugins.k8s.inject-finalizer": bool,
    "plugins.k8s.gpu-resource-name": NAME,
    "plugins.k8s.resource-tolerations": list,
    "plugins.k8s.default-env-vars": list,
    "storage.cache.max_size_mbs": int,                                    # flytestdlib/storage Config
    "storage.cache.target_gc_percent": int,
    "storage.signedURL.stowConfigOverride.endpoint": URL,
}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of everything that is not a map."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def unknown_values(values: dict[str, Any]) -> list[str]:
    """Keys that the chart does not know and Helm would drop without a word."""
    exact = {key for key in VALUES if not key.endswith("*")}
    open_ended = tuple(key.removesuffix("*") for key in VALUES if key.endswith("*"))
    return [f"the chart has no value {path}" for path, _ in leaves(values)
            if path not in exact and not any(path == key or path.startswith(f"{key}.") for key in open_ended)]


def after_helm(inline: Any) -> Any:
    """`configuration.inline` as Flyte reads it: Helm runs it as a template, where {{ "text" }} stands for text.

    Raises:
        ValueError: for anything else in braces, which Helm would take for a function of its own.
    """
    if isinstance(inline, dict):
        return {key: after_helm(value) for key, value in inline.items()}
    if isinstance(inline, list):
        return [after_helm(value) for value in inline]
    if isinstance(inline, str):
        done = re.sub(r'\{\{ "([^"]*)" \}\}', r"\1", inline)
        if "{{" in re.sub(r'\{\{ "[^"]*" \}\}', "", inline):
            raise ValueError(f"Helm would run {inline!r}: write it as {{{{ \"...\" }}}}")
        return done
    return inline


def wrong_inline(inline: dict[str, Any]) -> list[str]:
    """Keys of Flyte's configuration that are not in INLINE, or whose value is of another kind."""
    found = []
    for path, value in leaves(after_helm(inline)):
        kind = INLINE.get(path)
        if kind is None:
            found.append(f"Flyte's configuration has no {path}, or it is not listed")
        elif isinstance(kind, str):
            if isinstance(value, bool) or not re.search(kind, str(value)):
                found.append(f"{path}: {value!r} does not match {kind}")
        elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found.append(f"{path}: {value!r} is no {kind.__name__}")
    return found


def hours(duration: str) -> float:
    """A Go duration in hours."""
    if not re.search(DURATION, duration):
        raise ValueError(f"{duration!r} is no Go duration; days are written as hours")
    scale = {"ns": 1e-9 / 3600, "us": 1e-6 / 3600, "ms": 1e-3 / 3600, "s": 1 / 3600, "m": 1 / 60, "h": 1.0}
    return sum(float(number) * scale[unit] for number, unit in re.findall(r"([0-9.]+)(ns|us|ms|s|m|h)", duration))
