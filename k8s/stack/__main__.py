"""A run as on the cluster, without Kubernetes: `make stack`.

Starts S3, a database and MLflow on loopback, packages the workflows as `make package` does, runs a recipe with every
task inside the built `train` and `reward` images under the manifests' user, limits, read-only root and environment,
checks what came out, and tears everything down. Needs podman or docker and the images of `make images`.
"""

import argparse
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from k8s.stack import propeller, services
from k8s.stack.pod import ROOT, Cluster, StackError, find_engine

MARKER = ".flowmill-stack"
"""File in a folder that may be emptied, because a stack made it."""


def package_command(images: dict[str, str], output: Path, fast: bool) -> list[str]:
    """The command of `make package`; a test compares the two."""
    return [str(Path(sys.executable).with_name("pyflyte")), "--pkgs", "workflows", "package",
            *(part for name, image in images.items() for part in ("--image", f"{name}={image}")), "--source", ".",
            "--output", str(output), "--force", "--copy", "all" if fast else "none",
            "--in-container-source-path", "/workspace"]


def package(images: dict[str, str], output: Path, fast: bool = False) -> None:
    """Write the registrable package: tasks, workflow, launch plans; `fast`: and this folder's code."""
    done = subprocess.run(package_command(images, output, fast), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise StackError(f"packaging failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def text_literal(value: str) -> propeller.literals_pb2.Literal:
    """A string as Flyte passes it."""
    primitive = propeller.literals_pb2.Primitive(string_value=value)
    return propeller.literals_pb2.Literal(scalar=propeller.literals_pb2.Scalar(primitive=primitive))


class Stack:
    """S3, database and MLflow on loopback, and the packaged workflows; made by `started`."""

    def __init__(self, images: dict[str, str], cluster: Cluster, client: Any, package_: propeller.Package,
                 tracking_uri: str, mlflow: ExitStack, start_mlflow: Callable[[], None]) -> None:
        self.images, self.cluster, self.client, self.package = images, cluster, client, package_
        self.tracking_uri = tracking_uri
        self.stop_mlflow, self.start_mlflow = mlflow.close, start_mlflow

    def run(self, recipe: str, overrides: str, report: Callable[[str], None], num_pods: int = 2) -> propeller.Execution:
        """Run a recipe to its end under a new execution id.

        Raises:
            TaskFailed: a task failed for good.
        """
        execution = propeller.Execution(self.package, self.cluster, self.client, "flyte",
                                        f"stack{secrets.token_hex(4)}", "flowmill", "development", num_pods, report)
        execution.run("workflows.flowgrpo.flowgrpo",
                      {"recipe": text_literal(recipe), "overrides": text_literal(overrides)})
        return execution


@contextmanager
def started(images: dict[str, str], folder: Path, engine: str, report: Callable[[str], None],
            fast: bool = False) -> Iterator[Stack]:
    """Start the services, package the workflows, and tear everything down afterwards.

    Raises:
        StackError: an image is missing, or a service did not start.
    """
    from minio import Minio

    for name, image in images.items():
        if subprocess.run([engine, "image", "inspect", image], capture_output=True).returncode:
            raise StackError(f"image {image} ({name}) is not built: `make images` builds it, or name others with "
                             "--tag.")
    with ExitStack() as stack:
        s3_name, s3_address, access, secret = stack.enter_context(services.s3_server(folder / "s3"))
        database_name, database_uri = stack.enter_context(services.database(folder))
        port = services.free_port()
        keys = {"access_key_id": access, "secret_access_key": secret}
        cluster = Cluster(
            engine, folder,
            endpoints={"minio.flowmill.svc.cluster.local:9000": s3_address,
                       "mlflow.flowmill.svc.cluster.local:5000": f"127.0.0.1:{port}"},
            secrets={"flowmill-s3": keys, "mlflow": {"database_uri": database_uri, **keys}})
        cluster.remove_containers()
        stack.callback(cluster.remove_containers)
        client = Minio(s3_address, access, secret, secure=False, region="us-east-1")
        services.make_buckets(client)
        report(f"S3: {s3_name} at {s3_address}; database: {database_name}")
        mlflow = stack.enter_context(ExitStack())

        def start_mlflow() -> None:
            mlflow.enter_context(services.mlflow_server(cluster, images["mlflow"], port))

        start_mlflow()
        report(f"MLflow at http://127.0.0.1:{port}")
        package({name: images[name] for name in ("train", "reward")}, folder / "package.tgz", fast)
        found = propeller.Package.read(folder / "package.tgz")
        report(f"packaged {len(found.tasks)} tasks, {len(found.launch_plans)} launch plans")
        yield Stack(images, cluster, client, found, f"http://127.0.0.1:{port}", mlflow, start_mlflow)


def check(tracking_uri: str, execution: str, client: Any, report: Callable[[str], None]) -> None:
    """Say what a finished execution left in MLflow and in the store.

    Raises:
        StackError: not exactly one finished run, or rollout and update did not agree to the bit.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    from mlflow import MlflowClient

    mlflow = MlflowClient(tracking_uri)
    experiments = [item.experiment_id for item in mlflow.search_experiments()]
    runs = mlflow.search_runs(experiments, f"tags.`flyte.execution_id` = '{execution}'")
    if len(runs) != 1 or runs[0].info.status != "FINISHED":
        raise StackError(f"expected one FINISHED MLflow run of {execution}, found {[r.info.status for r in runs]}")
    run = runs[0]
    files = sorted(item.path for item in mlflow.list_artifacts(run.info.run_id))
    kinds: dict[str, int] = {}
    for item in client.list_objects("flowmill", prefix="store/manifests/", recursive=True):
        kind = item.object_name.split("/")[2]
        kinds[kind] = kinds.get(kind, 0) + 1
    report(f"MLflow run {run.info.run_name!r} {run.info.status}, {len(run.data.metrics)} metrics, files: "
           f"{', '.join(files)}")
    report(f"store: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    gap = run.data.metrics.get("update/first/log_prob_gap/max")
    if gap != 0:
        raise StackError(f"the gap between rollout and update is {gap}, expected exactly 0")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m k8s.stack", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="smoke")
    parser.add_argument("--overrides", default="")
    parser.add_argument("--registry", default="localhost", help="prefix of the images' names")
    parser.add_argument("--tag", default="0.1.0-cpu", help="tag of the images")
    parser.add_argument("--engine", default="", choices=("", "podman", "docker"))
    parser.add_argument("--folder", type=Path, default=ROOT / ".flowmill" / "stack",
                        help="data and logs; emptied at the start, kept at the end")
    parser.add_argument("--pods", type=int, default=2, help="containers side by side")
    parser.add_argument("--fast", action="store_true",
                        help="ship this folder's code as a fast registration does, instead of what the images hold")
    arguments = parser.parse_args(argv)
    images = {name: f"{arguments.registry}/flowmill-{name}:{arguments.tag}" for name in ("train", "reward", "mlflow")}
    folder = arguments.folder.resolve()
    if arguments.pods < 1:
        parser.error(f"--pods {arguments.pods}; expected at least 1")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
        parser.error(f"--folder {folder} holds other things, and it is emptied at the start; name a new one")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / MARKER).touch()
    begun = time.monotonic()

    def report(line: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {line}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with started(images, folder, find_engine(arguments.engine), report, arguments.fast) as stack:
            execution = stack.run(arguments.recipe, arguments.overrides, report, arguments.pods)
            in_all = sum(seconds for _, seconds in execution.timings)
            report(f"{len(execution.timings)} containers, {in_all:.0f} s in all")
            check(stack.tracking_uri, execution.name, stack.client, report)
    except StackError as error:
        print(f"stack: {error}\nlogs: {folder}/logs", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stack: interrupted; services and containers are removed\nlogs: {folder}/logs", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
