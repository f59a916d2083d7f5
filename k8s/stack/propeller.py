"""Runs a packaged workflow as Flyte does on a cluster, one container a task, on this machine.

In: what `pyflyte package` wrote. Out: the workflow's outputs. Every task gets its inputs as `inputs.pb` from S3 and
leaves `outputs.pb`, `futures.pb` (a dynamic task's nodes) or `error.pb` there, exactly as under Flyte: the images'
entry point, the registered command line and the literals are the real ones. Left out: Flyte's cache, recovery, timeouts
and branches; a node that this cannot run is refused by name.
"""

import dataclasses
import io
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from flyteidl.admin.launch_plan_pb2 import LaunchPlan
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.admin.workflow_pb2 import WorkflowSpec
from flyteidl.core import literals_pb2
from flyteidl.core.dynamic_job_pb2 import DynamicJobSpec
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.tasks_pb2 import Resources

from k8s.stack.pod import Cluster, StackError

Literals = dict[str, literals_pb2.Literal]
_START = ("", "start-node")


class TaskFailed(StackError):
    """A task failed for good. `.node` names it; the message is the error that its container left."""

    def __init__(self, node: str, message: str) -> None:
        super().__init__(f"{node}: {message}")
        self.node, self.message = node, message


@dataclasses.dataclass
class Package:
    """What `pyflyte package` wrote, by name."""

    tasks: dict[str, Any]
    workflows: dict[str, Any]
    launch_plans: dict[str, Any]
    code: bytes = b""
    """The code that a fast registration ships, a .tar.gz; empty = the code is baked into the images."""

    @classmethod
    def read(cls, path: Path) -> "Package":
        found = cls({}, {}, {})
        with tarfile.open(path) as archive:
            for member in archive:
                data = archive.extractfile(member)
                kind = member.name.rsplit("_", 1)[-1]
                if data is None:
                    continue
                if member.name.endswith(".tar.gz"):
                    found.code = data.read()
                elif kind == "1.pb":
                    task = TaskSpec.FromString(data.read())
                    found.tasks[task.template.id.name] = task.template
                elif kind == "2.pb":
                    workflow = WorkflowSpec.FromString(data.read())
                    found.workflows[workflow.template.id.name] = workflow.template
                elif kind == "3.pb":
                    plan = LaunchPlan.FromString(data.read())
                    found.launch_plans[plan.id.name] = plan.spec
        return found


class Execution:
    """One execution of a launch plan."""

    def __init__(self, package: Package, cluster: Cluster, s3: Any, bucket: str, name: str, project: str, domain: str,
                 num_pods: int, report: Callable[[str], None]) -> None:
        """Args:
            s3: A minio client. bucket: Where Flyte's metadata and raw data go.
            name: The execution's id. num_pods: Containers that run side by side.
            report: Called with one line for each thing that happens.
        """
        self.package, self.cluster, self.s3, self.bucket, self.name = package, cluster, s3, bucket, name
        self.project, self.domain, self.report = project, domain, report
        self.timings: list[tuple[str, float]] = []
        """(node, seconds from the engine's start of the container to its end) of each container."""
        self._slots = threading.Semaphore(num_pods)
        self._stopped = threading.Event()
        self._code = f"code/{name}.tar.gz"
        if package.code:
            self._put(self._code, package.code)

    def run(self, launch_plan: str, inputs: Mapping[str, literals_pb2.Literal]) -> Literals:
        """Run a launch plan to its end; on failure run the workflow's failure node first.

        Raises:
            TaskFailed: a task failed for good.
        """
        plan = self.package.launch_plans[launch_plan]
        defaults = {name: item.default for name, item in plan.default_inputs.parameters.items()}
        known = {**defaults, **plan.fixed_inputs.literals, **inputs}
        workflow = self.package.workflows[plan.workflow_id.name]
        try:
            return self._graph(workflow.nodes, workflow.outputs, known, self.package.tasks)
        except TaskFailed as error:
            if workflow.HasField("failure_node"):
                self.report(f"{error.node} failed; running the workflow's failure node")
                resolved = {item.var: _resolve(item.binding, {"": known}) for item in workflow.failure_node.inputs}
                try:
                    self._task(workflow.failure_node, resolved, self.package.tasks)
                except TaskFailed as other:
                    self.report(f"the failure node failed too: {other}")
            raise

    def _graph(self, nodes: Sequence[Any], outputs: Sequence[Any], inputs: Literals,
               tasks: Mapping[str, Any]) -> Literals:
        """Run nodes as soon as what they wait for is there; the first failure starts no more and is raised."""
        done: dict[str, Literals] = {name: dict(inputs) for name in _START}
        waiting = {node.id: node for node in nodes if node.id not in ("start-node", "end-node")}
        with ThreadPoolExecutor(max(1, len(waiting))) as pool:
            running: dict[Any, str] = {}
            while waiting or running:
                for node_id, node in list(waiting.items()):
                    needs = set(node.upstream_node_ids) | {name for item in node.inputs
                                                           for name in _promised(item.binding)}
                    if needs - set(_START) <= done.keys():
                        resolved = {item.var: _resolve(item.binding, done) for item in node.inputs}
                        running[pool.submit(self._task, node, resolved, tasks)] = node_id
                        del waiting[node_id]
                if not running:
                    raise StackError(f"nodes {sorted(waiting)} wait for each other")
                try:
                    finished = wait(running, return_when=FIRST_COMPLETED).done
                except KeyboardInterrupt:  # else leaving the pool would wait for the whole run
                    self._stopped.set()
                    self.cluster.remove_containers()
                    raise
                for future in finished:
                    node_id = running.pop(future)
                    error = future.exception()
                    if error is not None:
                        waiting.clear()
                        wait(running)
                        raise error
                    done[node_id] = future.result()
        return {item.var: _resolve(item.binding, done) for item in outputs}

    def _task(self, node: Any, inputs: Literals, tasks: Mapping[str, Any]) -> Literals:
        if node.WhichOneof("target") != "task_node":
            raise StackError(f"node {node.id}: a {node.WhichOneof('target')} cannot be run here, only tasks")
        template = tasks[node.task_node.reference_id.name]
        where = f"metadata/{self.name}/{node.id}/data"
        self._put(f"{where}/inputs.pb", literals_pb2.LiteralMap(literals=inputs).SerializeToString())
        retries = node.metadata.retries.retries if node.metadata.HasField("retries") else 0
        for attempt in range(retries + 1):
            prefix = f"{where}/{attempt}"
            with self._slots:
                if self._stopped.is_set():
                    raise TaskFailed(node.id, "the run was interrupted")
                code = self._container(node, template, where, prefix, attempt)
            error = self._get(f"{prefix}/error.pb")
            futures, outputs = self._get(f"{prefix}/futures.pb"), self._get(f"{prefix}/outputs.pb")
            if error is not None:
                document = ErrorDocument.FromString(error).error
                if document.kind == ContainerError.RECOVERABLE and attempt < retries:
                    self.report(f"{node.id}: attempt {attempt + 1} failed and may be tried again")
                    continue
                raise TaskFailed(node.id, document.message)
            if code == 0 and futures is not None:
                job = DynamicJobSpec.FromString(futures)
                return self._graph(job.nodes, job.outputs, inputs, {**tasks, **{task.id.name: task
                                                                                for task in job.tasks}})
            if code == 0 and outputs is not None:
                return dict(literals_pb2.LiteralMap.FromString(outputs).literals)
            if attempt < retries:  # the container was lost: killed, out of memory
                self.report(f"{node.id}: attempt {attempt + 1} ended with exit code {code} and no result; again")
                continue
            raise TaskFailed(node.id, f"the container ended with exit code {code} and left no result"
                                      f"{' (137: killed, most often out of memory)' if code == 137 else ''}; its log "
                                      f"is {self._log(node.id, attempt)}")
        raise AssertionError("unreachable")

    def _container(self, node: Any, template: Any, where: str, prefix: str, attempt: int) -> int:
        """Run one attempt of a task in its image; the exit code."""
        overrides, spec = node.task_node.overrides, self.cluster.pod_template(template.metadata.pod_template_name)
        container = next(item for item in spec["containers"] if item["name"] == "default")
        resources = overrides.resources if overrides.resources.limits else template.container.resources
        names = {Resources.CPU: "cpu", Resources.MEMORY: "memory"}
        limits = {names[entry.name]: entry.value for entry in resources.limits if entry.name in names}
        shared = (overrides if overrides.HasField("extended_resources") else template).extended_resources.shared_memory
        values = {
            "{{.input}}": f"s3://{self.bucket}/{where}/inputs.pb",
            "{{.outputPrefix}}": f"s3://{self.bucket}/{prefix}",
            "{{.rawOutputDataPrefix}}": f"s3://{self.bucket}/raw/{self.name}/{node.id}-{attempt}",
            "{{.checkpointOutputPrefix}}": f"s3://{self.bucket}/raw/{self.name}/{node.id}-{attempt}/checkpoint",
            "{{.prevCheckpointPrefix}}": '""',
            "{{ .remote_package_path }}": f"s3://{self.bucket}/{self._code}"}
        environment = self.cluster.environment(container)
        environment |= {item.key: item.value for item in template.container.env}
        environment |= {secret.env_var: self.cluster.secret(secret.group, secret.key)
                        for secret in template.security_context.secrets}
        environment |= {"FLYTE_INTERNAL_EXECUTION_ID": self.name, "FLYTE_INTERNAL_EXECUTION_PROJECT": self.project,
                        "FLYTE_INTERNAL_EXECUTION_DOMAIN": self.domain, "FLYTE_ATTEMPT_NUMBER": str(attempt),
                        "FLYTE_INTERNAL_TASK_NAME": template.id.name}
        pod = f"{self.name}-{node.id}-{attempt}"
        log = self._log(node.id, attempt)
        log.parent.mkdir(parents=True, exist_ok=True)
        image = overrides.container_image or template.container.image
        # By file: command lines are seen by everyone, and a Secret is among the values.
        env_file = log.with_suffix(".env")
        env_file.touch(mode=0o600)
        env_file.write_text("".join(f"{name}={value}\n" for name, value in sorted(environment.items())))
        command = [self.cluster.engine, "run", "--rm", f"--env-file={env_file}",
                   *self.cluster.options(pod, spec, container, limits, shared.size_limit),
                   image, *template.container.command,
                   *(values.get(argument, argument) for argument in template.container.args)]
        started = time.monotonic()
        try:
            with log.open("wb") as output:
                code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode
        finally:
            env_file.unlink()
        seconds = time.monotonic() - started
        self.timings.append((node.id, seconds))
        self.report(f"{_title(node):18s} {image.rsplit('/', 1)[-1]:40s} {seconds:5.1f} s  exit {code}")
        return code

    def _log(self, node: str, attempt: int) -> Path:
        return self.cluster.scratch / "logs" / f"{self.name}-{node}-{attempt}.log"

    def _put(self, path: str, data: bytes) -> None:
        self.s3.put_object(self.bucket, path, io.BytesIO(data), len(data))

    def _get(self, path: str) -> bytes | None:
        from minio.error import S3Error

        try:
            response = self.s3.get_object(self.bucket, path)
        except S3Error as error:
            if error.code == "NoSuchKey":
                return None
            raise
        try:
            return response.read()
        finally:
            response.close()
            response.release_conn()


def _title(node: Any) -> str:
    """A node's name as the console shows it."""
    return node.id if "-" in node.id else f"{node.id} {node.metadata.name}"


def _promised(binding: Any) -> set[str]:
    """Nodes whose outputs a binding needs."""
    kind = binding.WhichOneof("value")
    if kind == "promise":
        return {binding.promise.node_id}
    if kind in ("collection", "map"):
        inner = binding.collection.bindings if kind == "collection" else binding.map.bindings.values()
        return {name for item in inner for name in _promised(item)}
    return set()


def _resolve(binding: Any, outputs: Mapping[str, Literals]) -> literals_pb2.Literal:
    """The literal that a binding stands for."""
    match binding.WhichOneof("value"):
        case "scalar":
            return literals_pb2.Literal(scalar=binding.scalar)
        case "collection":
            items = [_resolve(item, outputs) for item in binding.collection.bindings]
            return literals_pb2.Literal(collection=literals_pb2.LiteralCollection(literals=items))
        case "map":
            items = {key: _resolve(item, outputs) for key, item in binding.map.bindings.items()}
            return literals_pb2.Literal(map=literals_pb2.LiteralMap(literals=items))
        case "promise" if not binding.promise.attr_path:
            return outputs[binding.promise.node_id][binding.promise.var]
        case other:
            raise StackError(f"a binding of kind {other!r} (attribute path {binding.promise.attr_path}) cannot be "
                             "resolved here")
