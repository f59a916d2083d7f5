"""Registration: what `make register` sends, against a gRPC server that takes it as Flyte Admin does, and S3's part."""

import hashlib
import http.server
import io
import re
import shlex
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from flyteidl.admin.launch_plan_pb2 import (
    ACTIVE,
    INACTIVE,
    LaunchPlan,
    LaunchPlanClosure,
    LaunchPlanCreateResponse,
    LaunchPlanList,
    LaunchPlanUpdateResponse,
)
from flyteidl.admin.task_pb2 import TaskCreateResponse
from flyteidl.admin.workflow_pb2 import Workflow, WorkflowCreateResponse
from flyteidl.core.identifier_pb2 import LAUNCH_PLAN
from flyteidl.service import dataproxy_pb2, dataproxy_pb2_grpc
from flytekit.configuration import SerializationSettings

from tests.runs import ROOT
from tests.workflows.checkout import Checkout, Made, new_checkout
from tests.workflows.test_preflight import certificate  # noqa: F401
from tests.workflows.test_reconcile import FlyteAdmin, free_port

TASKS = {
    *(f"tasks.{name}" for name in ("rollout.rollout", "reward.reward", "advantage.advantage", "update.update",
                                   "eval.evaluate")),
    *(f"workflows.tracking.{name}" for name in ("plan", "record", "record_evaluation", "finish", "fail")),
    "workflows.iteration.train"}
LOOP = "workflows.iteration.train"
WORKFLOW = "workflows.flowgrpo.flowgrpo"
RECIPES = {path.stem for path in (ROOT / "workflows" / "recipes").glob("*.yaml")} - {"base"}
LAUNCH_PLANS = {WORKFLOW, "flowgrpo_nightly", *(f"flowgrpo_{name}" for name in RECIPES)}


class Registry(FlyteAdmin, dataproxy_pb2_grpc.DataProxyServiceServicer):
    """Flyte Admin that keeps what is registered, and a place that takes the code's upload.

    As Flyte 1.16 does, it refuses a workflow before its tasks, a launch plan before its workflow, and other content
    under a name and version that it has (INVALID_ARGUMENT; the same content is ALREADY_EXISTS).
    """

    def __init__(self, tls: tuple[bytes, bytes] | None = None) -> None:
        super().__init__(tls)
        self.kept: dict[str, dict[tuple[str, str, str, str], Any]] = {"task": {}, "workflow": {}, "launch plan": {}}
        """Kind -> (project, domain, name, version) -> specification."""
        self.states: dict[tuple[str, str, str, str], Any] = {}
        """Launch plan -> state; missing = never set, which is inactive."""
        self.uploads: list[tuple[str, bytes]] = []
        """(path, content) of each PUT."""
        self.answers: Counter[str] = Counter()
        """`create task: OK` and so on -> how often."""
        self.upload_status = 200
        dataproxy_pb2_grpc.add_DataProxyServiceServicer_to_server(self, self._server)
        registry = self

        class Bucket(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                registry.uploads.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(registry.upload_status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._bucket = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
        threading.Thread(target=self._bucket.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        super().stop()
        self._bucket.shutdown()
        self._bucket.server_close()

    def CreateUploadLocation(self, request: Any, context: Any) -> Any:
        path = f"/flyte/{request.project}/{request.domain}/{request.content_md5.hex()}/{request.filename}"
        return dataproxy_pb2.CreateUploadLocationResponse(
            signed_url=f"http://127.0.0.1:{self._bucket.server_address[1]}{path}?signature=a", native_url=f"s3:/{path}")

    def _keep(self, kind: str, request: Any, context: Any, needs: set[tuple[str, str, str, str]], where: str) -> None:
        missing = needs - self.kept[where].keys() if where else set()
        key, status = key_of(request.id), "OK"
        if missing:
            status = "INVALID_ARGUMENT"
        elif key in self.kept[kind]:
            status = "ALREADY_EXISTS" if self.kept[kind][key] == request.spec else "INVALID_ARGUMENT"
        self.answers[f"create {kind}: {status}"] += 1
        if status != "OK":
            context.abort(grpc.StatusCode[status], f"{kind} {key}: {missing or 'is here'}")
        self.kept[kind][key] = request.spec

    def CreateTask(self, request: Any, context: Any) -> Any:
        self._check(context)
        self._keep("task", request, context, set(), "")
        return TaskCreateResponse()

    def CreateWorkflow(self, request: Any, context: Any) -> Any:
        self._keep("workflow", request, context, {key_of(item) for item in tasks_of(request.spec.template)}, "task")
        return WorkflowCreateResponse()

    def CreateLaunchPlan(self, request: Any, context: Any) -> Any:
        self._keep("launch plan", request, context, {key_of(request.spec.workflow_id)}, "workflow")
        return LaunchPlanCreateResponse()

    def _launch_plan(self, key: tuple[str, str, str, str]) -> LaunchPlan:
        made = LaunchPlan(spec=self.kept["launch plan"][key], closure=LaunchPlanClosure(state=self.states.get(key, 0)))
        made.id.project, made.id.domain, made.id.name, made.id.version = key
        made.id.resource_type = LAUNCH_PLAN
        return made

    def GetWorkflow(self, request: Any, context: Any) -> Any:
        made, template = Workflow(id=request.id), self.kept["workflow"][key_of(request.id)].template
        made.closure.compiled_workflow.primary.template.CopyFrom(template)
        for reference in tasks_of(template):
            made.closure.compiled_workflow.tasks.add().template.CopyFrom(self.kept["task"][key_of(reference)].template)
        return made

    def GetLaunchPlan(self, request: Any, context: Any) -> Any:
        if key_of(request.id) not in self.kept["launch plan"]:
            context.abort(grpc.StatusCode.NOT_FOUND, "missing entity")
        return self._launch_plan(key_of(request.id))

    def ListLaunchPlans(self, request: Any, context: Any) -> Any:
        wanted = (request.id.project, request.id.domain, request.id.name)
        found = [key for key in self.kept["launch plan"] if key[:3] == wanted]
        return LaunchPlanList(launch_plans=[self._launch_plan(key) for key in reversed(found)][:request.limit])

    def UpdateLaunchPlan(self, request: Any, context: Any) -> Any:
        key = key_of(request.id)
        if request.state == ACTIVE:
            self.states |= {other: INACTIVE for other in self.states if other[:3] == key[:3]}
        self.states[key] = request.state
        return LaunchPlanUpdateResponse()

    def versions(self) -> set[str]:
        return {key[3] for kept in self.kept.values() for key in kept}

    def names(self, kind: str) -> set[str]:
        return {key[2] for key in self.kept[kind]}

    def is_untouched(self) -> bool:
        """Nothing was sent that would change anything."""
        return not (self.answers or self.uploads or self.states or any(self.kept.values()))


def tasks_of(workflow: Any) -> list[Any]:
    """Identifiers of the tasks that a workflow's nodes name."""
    nodes = (*workflow.nodes, workflow.failure_node)
    return [node.task_node.reference_id for node in nodes if node.HasField("task_node")]


def key_of(identifier: Any) -> tuple[str, str, str, str]:
    return identifier.project, identifier.domain, identifier.name, identifier.version


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Checkout:
    return new_checkout(tmp_path_factory.mktemp("register"))


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Registry]]:
    """Function: start a registry; all are stopped at the end."""
    made: list[Registry] = []

    def start(tls: tuple[bytes, bytes] | None = None) -> Registry:
        made.append(Registry(tls))
        return made[-1]

    yield start
    for registry in made:
        registry.stop()


@pytest.fixture(scope="module", params=["all", "none"])
def registered(request, checkout, serve) -> tuple[str, Registry, Made]:
    """(COPY, what has been sent, what was printed) of one `make register`."""
    registry = serve()
    made = checkout.make("register", f"COPY={request.param}", "REGISTRY=registry.example.org/team", "TAG=1.2",
                         FLYTE_ENDPOINT=registry.endpoint)
    assert made.code == 0, made.output
    return request.param, registry, made


def test_everything_arrives_once_in_the_project_and_domain_under_one_version(registered, checkout):
    copy, registry, made = registered
    assert registry.names("task") == TASKS
    assert registry.names("workflow") == {WORKFLOW}
    assert registry.names("launch plan") == LAUNCH_PLANS
    assert registry.answers == {"create task: OK": len(TASKS), "create workflow: OK": 1,
                                "create launch plan: OK": len(LAUNCH_PLANS)}
    assert {key[:2] for kept in registry.kept.values() for key in kept} == {("flowmill", "development")}
    (version,) = registry.versions()
    if copy == "all":
        assert f"Computed version is {version}" in made.output
    else:
        assert version == f"1.2-{checkout.commit()}"
    assert f"Successfully registered {len(TASKS) + 1 + len(LAUNCH_PLANS)} entities" in made.output


def test_every_task_has_its_image_its_commit_and_its_command(registered, checkout):
    copy, registry, _ = registered
    for (*_, name, _version), spec in registry.kept["task"].items():
        container = spec.template.container
        image = "reward" if name == "tasks.reward.reward" else "train"
        assert container.image == f"registry.example.org/team/flowmill-{image}:1.2", name
        environment = {item.key: item.value for item in container.env}
        assert environment.pop("FLOWMILL_COMMIT") == checkout.commit(), name
        assert environment.keys() == ({"_F_SS_C"} if name == LOOP else set()), name
        arguments = list(container.args)
        module, _, function = name.rpartition(".")
        assert arguments[-4:] == ["task-module", module, "task-name", function]
        start = arguments[:arguments.index("pyflyte-execute")]
        if copy == "none":
            assert start == [], name
        else:
            assert start == ["pyflyte-fast-execute", "--additional-distribution",
                             "s3:/" + registry.uploads[0][0].partition("?")[0], "--dest-dir", "/workspace", "--"], name


def test_the_loop_knows_what_its_stages_are_registered_as(registered, checkout):
    """A dynamic task makes its stages' specifications on the cluster, from settings in its environment."""
    copy, registry, _ = registered
    ((key, spec),) = [item for item in registry.kept["task"].items() if item[0][2] == LOOP]
    packed = {item.key: item.value for item in spec.template.container.env}["_F_SS_C"]
    settings = SerializationSettings.from_transport(packed)
    assert (settings.project, settings.domain, settings.version) == (key[0], key[1], key[3])
    images = {image.name: image.full for image in settings.image_config.images or ()}
    assert {name: images[name] for name in ("train", "reward")} == {
        name: f"registry.example.org/team/flowmill-{name}:1.2" for name in ("train", "reward")}
    assert settings.env == {"FLOWMILL_COMMIT": checkout.commit()}
    fast = settings.fast_serialization_settings
    assert bool(fast and fast.enabled) == (copy == "all")
    if copy == "all":
        assert fast is not None
        assert fast.destination_dir == "/workspace"
        assert fast.distribution_location == "s3:/" + registry.uploads[0][0].partition("?")[0]


def test_the_code_is_uploaded_whole_if_it_is_to_travel_and_not_at_all_if_not(registered, checkout):
    copy, registry, _ = registered
    if copy == "none":
        assert registry.uploads == []
        return
    ((path, content),) = registry.uploads
    assert path.startswith(f"/flyte/flowmill/development/{hashlib.md5(content).hexdigest()}/fast")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        sent = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    code = {name for name in checkout.git("ls-files", "tasks", "workflows").splitlines()
            if Path(name).name not in ("README.md", "study.py", "_pretrain_tiny_text.py")}
    assert sent.keys() - {".dockerignore"} == code, "flytekit's matcher always keeps .dockerignore"
    assert {name: hashlib.md5(data).digest() for name, data in sent.items()} == {
        name: hashlib.md5((checkout.folder / name).read_bytes()).digest() for name in sent}


def test_every_launch_plan_runs_as_the_service_account_of_the_manifests(registered):
    _, registry, _ = registered
    manifests = [document for path in (ROOT / "k8s" / "base").rglob("*.yaml")
                 for document in yaml.safe_load_all(path.read_text())]
    accounts = {document["metadata"]["name"] for document in manifests
                if isinstance(document, dict) and document.get("kind") == "ServiceAccount"}
    for key, spec in registry.kept["launch plan"].items():
        assert spec.security_context.run_as.k8s_service_account == "flowmill-task", key
        assert spec.workflow_id.version == key[3]
    assert "flowmill-task" in accounts


def test_the_nightly_plan_is_at_two_and_nothing_is_activated_unasked(registered):
    _, registry, made = registered
    schedules = {key[2]: spec.entity_metadata.schedule.cron_schedule.schedule
                 for key, spec in registry.kept["launch plan"].items() if spec.entity_metadata.HasField("schedule")}
    assert schedules == {"flowgrpo_nightly": "0 2 * * *"}
    assert registry.states == {}
    assert "Activated" not in made.output


def test_the_same_code_again_is_no_error_and_adds_nothing(registered, checkout):
    copy, registry, _ = registered
    before = {kind: dict(kept) for kind, kept in registry.kept.items()}
    registry.answers.clear()
    made = checkout.make("register", f"COPY={copy}", "REGISTRY=registry.example.org/team", "TAG=1.2",
                         FLYTE_ENDPOINT=registry.endpoint)
    assert made.code == 0, made.output
    assert registry.kept == before
    assert registry.answers.keys() == {f"create {kind}: ALREADY_EXISTS" for kind in registry.kept}


@pytest.mark.parametrize("registered", ["none"], indirect=True)
def test_other_content_under_a_version_that_is_taken_is_an_error(registered, checkout):
    _, registry, _ = registered
    before, (version,) = {kind: dict(kept) for kind, kept in registry.kept.items()}, registry.versions()
    made = checkout.make("register", "COPY=none", f"VERSION={version}", "TAG=other", FLYTE_ENDPOINT=registry.endpoint)
    assert made.code != 0
    assert registry.kept == before, "what is registered never changes"


def test_changed_code_is_another_version_and_another_project_is_what_was_asked_for(tmp_path, serve):
    registry, checkout = serve(), new_checkout(tmp_path)
    registry.projects = {"paint": ("staging",)}
    for _ in range(2):
        made = checkout.make("register", "PROJECT=paint", "DOMAIN=staging", FLYTE_ENDPOINT=registry.endpoint)
        assert made.code == 0, made.output
        with (checkout.folder / "tasks" / "sde.py").open("a") as file:
            file.write("\n# changed\n")
    assert len(registry.versions()) == 2
    assert {key[:2] for kept in registry.kept.values() for key in kept} == {("paint", "staging")}
    assert [path.split("/")[2:4] for path, _ in registry.uploads] == [["paint", "staging"]] * 2
    commits = {key[3]: spec.template.container.env[0].value for key, spec in registry.kept["task"].items()}
    assert set(commits.values()) == {checkout.commit(), f"{checkout.commit()}-dirty"}


# ---- where it is sent ------------------------------------------------------------------------------------------------


def test_an_endpoint_that_is_down_is_one_clear_line_and_an_error(checkout):
    endpoint = f"127.0.0.1:{free_port()}"
    made = checkout.make("register", FLYTE_ENDPOINT=endpoint)
    assert made.code != 0
    (line,) = [line for line in made.output.splitlines() if line.startswith("flyte ")]
    assert line.startswith(f"flyte  FAILED: Flyte Admin at {endpoint} (plain): nothing answers there")
    assert "kubectl -n flyte port-forward svc/flyte-binary-grpc 8089" in line
    assert "pyflyte" not in made.output
    assert "Traceback" not in made.output


def test_without_any_endpoint_it_says_how_to_name_one(checkout):
    made = checkout.make("register")
    assert made.code != 0
    assert "set FLYTE_ENDPOINT=host:port" in made.output
    assert "pyflyte" not in made.output


def test_nothing_is_sent_to_a_flyte_that_lacks_the_project(checkout, serve):
    registry = serve()
    made = checkout.make("register", "PROJECT=paint", FLYTE_ENDPOINT=registry.endpoint)
    assert made.code != 0
    assert "has no project 'paint': create it with `flytectl create project --id paint" in made.output
    assert registry.is_untouched()


def test_the_endpoint_wins_over_pyflytes_own_settings(checkout, serve, tmp_path):
    registry, other = serve(), serve()
    file = tmp_path / "config.yaml"
    file.write_text(f"admin:\n  endpoint: dns:///{other.endpoint}\n  insecure: false\n")
    made = checkout.make("register", "COPY=none", FLYTE_ENDPOINT=f"dns:///{registry.endpoint}",
                         FLYTE_PLATFORM_URL=other.endpoint, FLYTE_PLATFORM_INSECURE="false", FLYTECTL_CONFIG=str(file))
    assert made.code == 0, made.output
    assert registry.names("task") == TASKS
    assert other.is_untouched()


def test_without_the_endpoint_flytes_config_file_says_where(checkout, serve, tmp_path):
    registry = serve()
    file = tmp_path / "config.yaml"
    file.write_text(f"admin:\n  endpoint: dns:///{registry.endpoint}\n  insecure: true\n")
    made = checkout.make("register", "COPY=none", FLYTECTL_CONFIG=str(file))
    assert made.code == 0, made.output
    assert registry.names("task") == TASKS


def test_tls_reaches_the_check_and_the_registration(checkout, serve, certificate, tmp_path):  # noqa: F811
    registry = serve(certificate)
    trusted = {"FLYTE_ENDPOINT": registry.endpoint,
               "FLYTE_PLATFORM_CA_CERT_FILE_PATH": str(tmp_path / "certificate.pem")}
    made = checkout.make("register", "COPY=none", **trusted)
    assert made.code != 0
    assert "it speaks TLS and was asked in plain text" in made.output
    assert registry.is_untouched()
    made = checkout.make("register", "COPY=none", "TLS=1", **trusted)
    assert made.code == 0, made.output
    assert registry.names("task") == TASKS


def test_a_clients_secret_is_not_printed(checkout, serve):
    made = checkout.make("register", "COPY=none", FLYTE_ENDPOINT=serve().endpoint,
                         FLYTE_CREDENTIALS_CLIENT_ID="robot", FLYTE_CREDENTIALS_CLIENT_SECRET="open sesame")
    assert made.code == 0, made.output
    assert "sesame" not in re.sub(r"\s+", " ", made.output)


def test_an_upload_that_is_refused_is_an_error_and_nothing_is_registered(checkout, serve):
    registry = serve()
    registry.upload_status = 403
    made = checkout.make("register", FLYTE_ENDPOINT=registry.endpoint)
    assert made.code != 0
    assert "403" in made.output
    assert not registry.answers


# ---- the schedule ----------------------------------------------------------------------------------------------------


def readme_command(start: str) -> list[str]:
    """The command of k8s/README.md that begins so."""
    (found,) = [line for line in (ROOT / "k8s" / "README.md").read_text().splitlines() if line.startswith(start)]
    return shlex.split(found, comments=True)


def test_the_manuals_command_activates_one_version_of_the_nightly_plan_alone(checkout, serve):
    registry = serve()
    environment = {"FLYTE_PLATFORM_URL": registry.endpoint, "FLYTE_PLATFORM_INSECURE": "true"}
    for version in ("1", "2"):
        made = checkout.make("register", "COPY=none", f"VERSION={version}", FLYTE_ENDPOINT=registry.endpoint)
        assert made.code == 0, made.output
    program, *arguments = readme_command(".venv/bin/pyflyte launchplan")
    assert arguments.pop() == "VERSION"
    pyflyte = checkout.program(Path(program).name)
    plans = [("flowmill", "development", "flowgrpo_nightly", version) for version in ("1", "2")]
    for named, states in ((["1"], {plans[0]: ACTIVE}),  # without a version it is the latest, which takes over
                          ([], {plans[0]: INACTIVE, plans[1]: ACTIVE})):
        made = checkout.run(pyflyte, *arguments, *named, **environment)
        assert made.code == 0, made.output
        assert registry.states == states
    arguments = ["--deactivate" if item == "--activate" else item for item in arguments]
    assert checkout.run(pyflyte, *arguments, **environment).code == 0
    assert registry.states == dict.fromkeys(plans, INACTIVE)
