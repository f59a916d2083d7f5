"""Monitoring: the rules fire when they should and only then, the dashboard asks for metrics that exist."""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.contracts.config import ROOT

FOLDER = ROOT / "k8s" / "monitoring"
PROMETHEUS = {"up", "ALERTS"}
FLYTE = {f"flyte:propeller:all:{name}" for name in (
    # flyteorg/flyte flytepropeller/pkg/controller: workflow/executor.go
    "workflow:success_duration_unlabeled_ms_count", "workflow:failure_duration_unlabeled_ms_count",
    "workflow:acceptance_latency_unlabeled_ms", "workflow:workflow_aborted_unlabeled",
    # handler.go
    "round:system_error_unlabeled", "round:panic_unlabeled", "round:round_time_unlabeled_ms",
    # workers.go
    "round:error_count", "free_workers_count",
    # composite_workqueue.go and flytestdlib/promutils/workqueue.go
    "main_depth", "main_unfinished_work_s")}
MINIO = {f"minio_{name}" for name in (  # minio/minio docs/metrics/prometheus/list.md
    "cluster_capacity_usable_free_bytes", "cluster_capacity_usable_total_bytes", "cluster_usage_total_bytes",
    "cluster_drive_offline_total", "s3_requests_total", "s3_requests_4xx_errors_total", "s3_requests_5xx_errors_total",
    "s3_requests_rejected_auth_total", "s3_traffic_received_bytes", "s3_traffic_sent_bytes")}
KUBE = {f"kube_{name}" for name in (
    # kubernetes/kube-state-metrics docs/metrics/workload: pod-metrics.md
    "pod_status_phase", "pod_container_status_waiting_reason", "pod_container_status_terminated_reason",
    # cronjob-metrics.md, deployment-metrics.md
    "cronjob_created", "cronjob_status_last_successful_time", "deployment_status_replicas_available")}
MLFLOW = {"mlflow_http_request_total", "mlflow_http_request_duration_seconds_bucket"}  # a running mlflow 3.17.2
KNOWN = PROMETHEUS | FLYTE | MINIO | KUBE | MLFLOW


def metrics_of(query: str) -> set[str]:
    """Names of the metrics in a PromQL expression."""
    query = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", query)
    query = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", "", query)
    words = re.findall(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", query)
    return set(words) - {"or", "and", "unless", "bool", "offset", "by"} - {
        word for word in words if re.fullmatch(r"\d*[smhd]", word)}


@cache
def documents() -> list[dict[str, Any]]:
    """What `kubectl apply -k k8s/monitoring` would send."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl, which builds the folder")
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [item for item in documents() if item["kind"] == kind]


def rule_groups() -> list[dict[str, Any]]:
    return yaml.safe_load((FOLDER / "rules.yaml").read_text())["spec"]["groups"]


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in rule_groups() for rule in group["rules"]}


def dashboard() -> dict[str, Any]:
    return json.loads((FOLDER / "dashboard.json").read_text())


def queries() -> list[tuple[str, str]]:
    """(panel, PromQL) of the dashboard."""
    return [(panel["title"], target["expr"]) for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def promtool(*arguments: str | Path) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool, of the Debian package prometheus")
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("query", "names"), [
    ('sum by (phase) (kube_pod_status_phase{namespace=~"a|b",phase="Pending"}) > 3', {"kube_pod_status_phase"}),
    ("histogram_quantile(0.5, sum by (le) (rate(a_bucket[$__rate_interval])))", {"a_bucket"}),
    ("time() - x:y:z_s{a=\"b\"} > 3600 unless on (namespace, cronjob) b offset 30m == 1", {"x:y:z_s", "b"}),
    ("max(a) / max(b) < 0.1 or absent(up) or vector(0)", {"a", "b", "up"}),
])
def test_names_of_metrics_are_found_in_a_query(query, names):
    assert metrics_of(query) == names


def test_the_folder_builds_into_monitors_rules_and_a_dashboard():
    assert sorted(item["kind"] for item in documents()) == [
        "ConfigMap", "PrometheusRule", "Service", "ServiceMonitor", "ServiceMonitor", "ServiceMonitor"]
    assert {item["metadata"]["namespace"] for item in documents() if item["kind"] != "Service"} == {"monitoring"}


def test_grafana_finds_the_dashboard():
    (config,) = of_kind("ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config["data"]["flowmill.json"]) == dashboard()


def test_every_panel_has_a_place_of_its_own_and_a_title():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [(x, y) for panel in panels for place in [panel["gridPos"]]
             for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert all(panel["title"] for panel in panels)


def test_the_dashboard_asks_for_metrics_that_exist():
    unknown = {title: metrics_of(query) - KNOWN for title, query in queries()}
    assert {title: names for title, names in unknown.items() if names} == {}
    assert all(metrics_of(query) for _, query in queries())


def test_the_dashboard_answers_about_every_service():
    asked = set().union(*(metrics_of(query) for _, query in queries()))
    assert KNOWN - asked <= {"minio_cluster_drive_offline_total", "kube_cronjob_created"}


def test_the_rules_ask_for_metrics_that_exist():
    assert {name: metrics_of(rule["expr"]) - KNOWN for name, rule in alerts().items()
            if metrics_of(rule["expr"]) - KNOWN} == {}


def test_every_alert_says_how_bad_it_is_and_what_to_do():
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert len(rule["annotations"]["summary"]) > 10, name
        assert len(rule["annotations"]["description"]) > 30, name


def test_every_alert_is_seen_firing_and_silent():
    tests = yaml.safe_load((FOLDER / "rules.test.yaml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == set(alerts())
    assert {check["alertname"] for check in checks if not check["exp_alerts"]} == set(alerts())


def test_promtool_runs_the_rules(tmp_path):
    (tmp_path / "rules.plain.yaml").write_text(yaml.safe_dump({"groups": rule_groups()}))
    shutil.copy(FOLDER / "rules.test.yaml", tmp_path)
    promtool("check", "rules", tmp_path / "rules.plain.yaml")
    promtool("test", "rules", tmp_path / "rules.test.yaml")


def test_promtool_understands_the_dashboards_queries(tmp_path):
    rules = [{"record": f"query:{number}", "expr": query.replace("$__rate_interval", "5m")}
             for number, (_, query) in enumerate(queries())]
    path = tmp_path / "queries.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", "--lint=none", path)


def test_monitors_find_a_service_with_that_port():
    base = [item for path in sorted((ROOT / "k8s" / "base").rglob("*.yaml"))
            for item in yaml.safe_load_all(path.read_text())]
    made = [item for item in base if isinstance(item, dict) and item.get("kind") == "Service"]
    if not made:
        pytest.skip("needs the Services of k8s/base")
    for monitor in of_kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        found = [item for item in [*made, *of_kind("Service")] if wanted <= item["metadata"]["labels"].items()]
        assert found, monitor["metadata"]["name"]
        for endpoint in monitor["spec"]["endpoints"]:
            for service in found:
                assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
