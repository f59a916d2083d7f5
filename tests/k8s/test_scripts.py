"""The scripts that run inside the cluster, with stand-ins for the programs they call.

MinIO's client and server cannot be had from a package registry, so what `mc` answers is taken from its documentation;
Postgres's script runs against a real server where one is installed.
"""

import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.k8s.manifests import K8S

BOOTSTRAP = K8S / "base/minio/bootstrap"
FAKE_MC = """#!/bin/sh
echo "$*" >> "$MC_LOG"
case "$*" in
    "$MC_FAILS"*) echo "mc: <ERROR> $MC_ANSWER" >&2; exit 1 ;;
    "ilm rule import"*) cat > "$MC_LOG.lifecycle" ;;
esac
"""
ATTACHED = ("Unable to make user/group policy association. The specified policy change is already in effect. "
            "(Specified policy update has no net effect).")


def bootstrap(folder: Path, fails: str = "nothing",
              answer: str = "") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script with an `mc` that fails on one command; gives what it did and the commands it gave."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "mc").write_text(FAKE_MC)
    (tools / "mc").chmod(0o755)
    (tools / "sleep").write_text("#!/bin/sh\n")
    (tools / "sleep").chmod(0o755)
    script = (BOOTSTRAP / "bootstrap.sh").read_text().replace("/bootstrap/", f"{BOOTSTRAP}/")
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "MC_LOG": str(folder / "log"), "MC_FAILS": fails,
                   "MC_ANSWER": answer, "S3_ENDPOINT": "http://minio:9000", "ROOT_USER": "root", "ROOT_PASSWORD": "p",
                   **{f"{user}_{part}": f"{user}-{part}" for user in ("TASK", "FLYTE", "MLFLOW")
                      for part in ("KEY", "SECRET")}}
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    return done, (folder / "log").read_text().splitlines()


def test_bootstrap_makes_buckets_users_and_the_lifecycle(tmp_path):
    done, calls = bootstrap(tmp_path)
    assert done.returncode == 0, done.stderr
    assert [call for call in calls if call.startswith("mb")] == [
        f"mb --ignore-existing store/{bucket}" for bucket in ("flowmill", "flyte", "mlflow")]
    assert "version enable store/flowmill" in calls
    assert (tmp_path / "log.lifecycle").read_text() == (BOOTSTRAP / "lifecycle.json").read_text()
    for user in ("task", "flyte", "mlflow"):
        assert f"admin policy create store flowmill-{user} {BOOTSTRAP}/policy-{user}.json" in calls
        assert f"admin user add store {user.upper()}-KEY {user.upper()}-SECRET" in calls
        assert f"admin policy attach store flowmill-{user} --user {user.upper()}-KEY" in calls


def test_bootstrap_may_run_again(tmp_path):
    done, calls = bootstrap(tmp_path, "admin policy attach", ATTACHED)
    assert done.returncode == 0, done.stderr
    assert len([call for call in calls if "attach" in call]) == 3


@pytest.mark.parametrize("step", ["mb", "version", "ilm rule import", "admin policy create", "admin user add",
                                  "admin policy attach"])
def test_bootstrap_stops_where_a_step_fails(tmp_path, step):
    done, calls = bootstrap(tmp_path, step, "Access Denied.")
    assert done.returncode != 0
    assert "Access Denied." in done.stderr
    assert calls[-1].startswith(step), "nothing is done after the step that failed"


def test_bootstrap_says_what_to_look_at_when_minio_does_not_answer(tmp_path):
    done, calls = bootstrap(tmp_path, "alias set", "connection refused")
    assert done.returncode == 1
    assert "is the pod minio-0 ready, is Secret minio-root right?" in done.stderr
    assert len(calls) == 60


def test_bootstrap_calls_nothing_that_the_image_of_mc_lacks():
    # The image is built on a minimal system: no grep, no sed, no jq.
    script = (BOOTSTRAP / "bootstrap.sh").read_text()
    code = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    assert not re.search(r"(^|[|;&(]\s*|\s)(grep|sed|awk|jq|curl|seq|tr|cut)\s", code)


# --- Postgres


def postgres_programs() -> Path | None:
    """Folder of initdb and pg_ctl, of the newest server installed; None if there is none."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders else None


@pytest.fixture(scope="module")
def postgres() -> Iterator[dict[str, str]]:
    """Environment that reaches a new server. It does not start as root: then it is nobody's."""
    programs = postgres_programs()
    if programs is None:
        pytest.skip("PostgreSQL is missing: Debian's package postgresql brings it")
    folder = Path(tempfile.mkdtemp(prefix="flowmill-postgres-"))
    owner = {"user": "nobody", "cwd": folder} if os.geteuid() == 0 else {"cwd": folder}
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    subprocess.run([programs / "initdb", "-D", folder / "data", "-U", "postgres", "--auth-host=scram-sha-256",
                    "--no-sync"], check=True, capture_output=True, **owner)
    control = [programs / "pg_ctl", "-D", folder / "data", "-w"]
    subprocess.run([*control, "-o", f"-k {folder} -p {port} -c listen_addresses=127.0.0.1", "-l", folder / "log",
                    "start"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **owner)
    yield {"PATH": f"{programs}:/usr/bin:/bin", "PGHOST": str(folder), "PGPORT": str(port),
           "POSTGRES_USER": "postgres", "POSTGRES_DB": "postgres"}
    subprocess.run([*control, "-m", "immediate", "stop"], check=True, capture_output=True, **owner)
    shutil.rmtree(folder, ignore_errors=True)


def test_the_init_script_gives_every_role_its_own_database_and_no_other(postgres):
    script = [shutil.which("sh"), K8S / "base/postgres/init/10-databases.sh"]
    passwords = {"mlflow": "it's $1 \"x\"", "flyte": "other"}
    environment = {**postgres, **{f"{role.upper()}_PASSWORD": value for role, value in passwords.items()}}
    for _ in range(2):
        subprocess.run(script, env=environment, check=True, capture_output=True)

    def query(role: str, database: str, password: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["psql", "-h", "127.0.0.1", "-U", role, "-d", database, "-Atc",
                               "create table if not exists t (a int); select current_user"],
                              env={**postgres, "PGHOST": "127.0.0.1", "PGPASSWORD": password}, capture_output=True,
                              text=True)

    for role, password in passwords.items():
        assert query(role, role, password).stdout.splitlines()[-1] == role
    assert "permission denied" in query("flyte", "mlflow", passwords["flyte"]).stderr
    assert "authentication failed" in query("flyte", "flyte", "wrong").stderr
