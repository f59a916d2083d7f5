"""Preflight: `python -m workflows.preflight` says which endpoint cannot be used from here, and what to do.

In: the environment (README, "Where things go") and flytekit's own configuration. Out: one line a check, within 10 s;
exit status 0 only if each is ok. Next: `make register`, `pyflyte run --remote`. Left out: whether a run would succeed
(the task `plan` checks that from inside the cluster, which may see other addresses than this machine does).
"""

import argparse
import os
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from tasks import metrics
from tasks.contracts.errors import FlowmillError
from tasks.store import open_store

if TYPE_CHECKING:
    from flytekit.configuration import PlatformConfig
    from grpc import RpcError

LIMIT_S = 9.0
"""All checks together; importing them takes the rest of the 10 s."""
CALL_S = 2.5
_PROBE_S = 1.0
_SILENT = f"it takes connections and does not answer within {CALL_S} s: see its log and its load"
_NO_LOGIN = {"clientsecret", "client_credentials", "basic", "externalcommand", "external_process"}
"""flytekit's ways to get a token without a person."""


class UnusableError(FlowmillError):
    """An endpoint cannot be used; says what to do."""


class Skipped(Exception):
    """There is nothing to check; says why."""


# ---- Flyte -----------------------------------------------------------------------------------------------------------


def flyte_platform(tls: bool = False) -> "PlatformConfig":
    """Where Flyte Admin is: FLYTE_ENDPOINT (plain unless `tls`), else as pyflyte finds it.

    Raises:
        UnusableError: nothing names an endpoint.
    """
    from flytekit.configuration import PlatformConfig
    from flytekit.configuration.file import get_config_file

    platform, endpoint = PlatformConfig.auto(), os.environ.get("FLYTE_ENDPOINT")
    if endpoint:
        if endpoint.startswith(("http://", "https://")):
            raise UnusableError(f"FLYTE_ENDPOINT is {endpoint!r}; expected host:port of the gRPC port, without http. "
                                "For TLS add --tls (`make ... TLS=1`).")
        return replace(platform, endpoint=endpoint, insecure=not tls)
    if get_config_file(None) is None and not os.environ.get("FLYTE_PLATFORM_URL"):
        raise UnusableError("no endpoint of Flyte Admin is set: set FLYTE_ENDPOINT=host:port, or write "
                            "~/.flyte/config.yaml with `flytectl config init --host host:port`.")
    return replace(platform, insecure=platform.insecure and not tls)


def flyte_admin(platform: "PlatformConfig") -> Any:
    """Stub of Flyte's AdminService. Give each call a `timeout`; what it raises is for `flyte_trouble` to explain.

    flytekit's channel, for its certificates and tokens, but not its client: that one retries what is down and keeps
    neither status nor reason. A login by browser is never started.
    """
    from flyteidl.service.admin_pb2_grpc import AdminServiceStub
    from flytekit.clients.auth_helper import get_channel, upgrade_channel_to_authenticated

    channel = get_channel(platform)
    return AdminServiceStub(channel if _wants_login(platform) else upgrade_channel_to_authenticated(platform, channel))


def grpc_code(error: "RpcError") -> Any:
    """The status of a failed call."""
    return getattr(error, "code", lambda: None)()


def flyte_trouble(platform: "PlatformConfig", error: "RpcError") -> UnusableError:
    """What a failed call to Flyte Admin means and what to do."""
    from grpc import StatusCode

    code = grpc_code(error)
    details = " ".join(str(getattr(error, "details", lambda: error)()).split())[:300]
    advice = f"{getattr(code, 'name', code)}: {details}; see its log"
    if code is StatusCode.UNAUTHENTICATED:
        advice = ("it asks for a token: name a client and its secret in ~/.flyte/config.yaml (authType: ClientSecret) "
                  "or FLYTE_CREDENTIALS_CLIENT_ID and FLYTE_CREDENTIALS_CLIENT_SECRET")
    elif code is StatusCode.PERMISSION_DENIED:
        advice = f"the token may not do this ({details}); give its client the right"
    elif code is StatusCode.UNIMPLEMENTED:
        advice = ("it speaks gRPC and is not Flyte Admin; check host and port (flyte-binary: service "
                  "flyte-binary-grpc, port 8089)")
    elif code in (StatusCode.UNAVAILABLE, StatusCode.DEADLINE_EXCEEDED, StatusCode.UNKNOWN):
        host, port = _host_and_port(platform.endpoint, 80 if platform.insecure else 443)
        found = _probe(host, port)
        if found == "nothing":
            advice = f"nothing answers there ({details}). Is it up? {_reach(host, 'flyte', 'flyte-binary-grpc', 8089)}"
        elif found == "silence":
            advice = f"{_SILENT}; is it the gRPC port?"
        elif platform.insecure and found == "TLS":
            advice = ("it speaks TLS and was asked in plain text; add --tls (`make ... TLS=1`), or `insecure: false` "
                      "in the config file")
        elif not platform.insecure and found == "plain":
            advice = ("it does not speak TLS and was asked to; leave --tls out, or put `insecure: true` in the config "
                      "file")
        elif not platform.insecure and "CERTIFICATE" in details.upper():
            advice = (f"its certificate is not trusted ({details}); name its CA's file as admin.caCertFilePath in "
                      "the config file or in FLYTE_PLATFORM_CA_CERT_FILE_PATH")
        else:
            advice = f"something listens there and does not answer as Flyte Admin ({details}); it wants the gRPC port"
    return UnusableError(f"Flyte Admin at {_place(platform)}: {advice}.")


def check_flyte(project: str, domain: str, tls: bool) -> str:
    """Flyte Admin answers, and the project with its domain is there."""
    from flyteidl.admin.project_pb2 import ProjectGetRequest
    from flyteidl.admin.version_pb2 import GetVersionRequest
    from grpc import RpcError, StatusCode

    platform = flyte_platform(tls)
    admin = flyte_admin(platform)
    try:
        version = admin.GetVersion(GetVersionRequest(), timeout=CALL_S).control_plane_version.Version or "unknown"
        found = admin.GetProject(ProjectGetRequest(id=project), timeout=CALL_S)
    except RpcError as error:
        code = grpc_code(error)
        if code is StatusCode.UNAUTHENTICATED and _wants_login(platform):
            return f"{_place(platform)} answers and asks for a login, which pyflyte does; project not checked"
        if code is StatusCode.NOT_FOUND:
            raise UnusableError(
                f"Flyte Admin at {_place(platform)} has no project {project!r}: create it with `flytectl create "
                f"project --id {project} --name {project}`, or name another with --project.") from error
        raise flyte_trouble(platform, error) from error
    domains = [item.id for item in found.domains]
    if domain not in domains:
        raise UnusableError(f"Flyte Admin at {_place(platform)}: project {project!r} has no domain {domain!r}; it has "
                            f"{', '.join(domains) or 'none'}. Name one with --domain.")
    return f"{_place(platform)}, version {version}, project {project}, domain {domain}"


def _wants_login(platform: "PlatformConfig") -> bool:
    return str(getattr(platform.auth_mode, "value", platform.auth_mode)).lower() not in _NO_LOGIN


def _place(platform: "PlatformConfig") -> str:
    return f"{platform.endpoint} ({'plain' if platform.insecure else 'TLS'})"


# ---- the store and MLflow --------------------------------------------------------------------------------------------


def check_store() -> str:
    """The artifacts' store can be used; its own messages say what to do."""
    if not os.environ.get("FLOWMILL_STORE"):
        raise Skipped("FLOWMILL_STORE is not set; runs on this machine keep artifacts in .flowmill/store")
    store = open_store()
    health = store.preflight()
    facts = [store.uri]
    if health.versioning is not None:
        facts.append(f"versioning {'on' if health.versioning else 'off'}")
    if health.trajectories_expire_days is not None:
        facts.append(f"trajectories expire after {health.trajectories_expire_days} days")
    return ", ".join(facts)


def check_mlflow() -> str:
    """MLflow's server is healthy and its API and database answer."""
    uri = metrics.tracking_uri().rstrip("/")
    if not uri.startswith(("http://", "https://")):
        raise Skipped(f"MLFLOW_TRACKING_URI is no server; runs on this machine write to {uri}")
    # Not MLflow's client: importing it takes seconds, and it hides the server's own words.
    import requests

    verify: bool | str = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or (
        os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() not in ("true", "1"))
    user, token = os.environ.get("MLFLOW_TRACKING_USERNAME"), os.environ.get("MLFLOW_TRACKING_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token and not user else {}
    auth = (user, os.environ.get("MLFLOW_TRACKING_PASSWORD", "")) if user else None
    common: dict[str, Any] = {"timeout": CALL_S, "verify": verify, "headers": headers, "auth": auth}
    try:
        health = requests.get(f"{uri}/health", **common)
        answer = requests.post(f"{uri}/api/2.0/mlflow/experiments/search", json={"max_results": 1}, **common)
        found = answer.json() if answer.ok else None
    except (requests.RequestException, ValueError) as error:
        raise _mlflow_trouble(uri, f"{type(error).__name__}: {error}") from error
    if answer.status_code in (401, 403):
        if "host" in answer.text.lower():
            raise UnusableError(f"MLflow at {uri} refuses this address of it ({_short(answer.text)}): add "
                                f"{urlsplit(uri).netloc} to its --allowed-hosts.")
        raise UnusableError(f"MLflow at {uri} refuses the login ({answer.status_code}): set MLFLOW_TRACKING_USERNAME "
                            "and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN.")
    if isinstance(found, dict) and health.ok:
        return uri
    if health.ok and answer.status_code >= 500:
        raise UnusableError(f"MLflow at {uri} is up, its API is not ({answer.status_code}: {_short(answer.text)}): "
                            "see its log; is its database up?")
    raise _mlflow_trouble(uri, f"/health {health.status_code}, API {answer.status_code}: {_short(answer.text)}")


def _mlflow_trouble(uri: str, reason: str) -> UnusableError:
    host, port = _host_and_port(uri, 443 if uri.startswith("https") else 80)
    found = _probe(host, port)
    if found == "nothing":
        advice = f"nothing answers there ({_short(reason)}). Is it up? {_reach(host, 'flowmill', 'mlflow', 5000)}"
    elif found == "silence" or "ReadTimeout" in reason:
        advice = _SILENT
    elif uri.startswith("http://") and found == "TLS":
        advice = "it speaks TLS and was asked in plain text; MLFLOW_TRACKING_URI probably should start with https://"
    elif uri.startswith("https://") and found == "plain":
        advice = "it does not speak TLS; MLFLOW_TRACKING_URI probably should start with http://"
    elif "CERTIFICATE" in reason.upper():
        advice = (f"its certificate is not trusted ({_short(reason)}); name its CA's file in "
                  "MLFLOW_TRACKING_SERVER_CERT_PATH")
    else:
        advice = f"something answers there that is not MLflow ({_short(reason)}); check host, port and path"
    return UnusableError(f"MLflow at {uri}: {advice}.")


# ---- all together ----------------------------------------------------------------------------------------------------


def _short(text: str) -> str:
    return " ".join(text.split())[:200]


def _reach(host: str, namespace: str, service: str, port: int) -> str:
    """How a machine outside the cluster gets to a service."""
    inside = " That name is known inside the cluster only." if ".svc" in host else ""
    return f"From outside the cluster: `kubectl -n {namespace} port-forward svc/{service} {port}`.{inside}".rstrip(".")


def _host_and_port(endpoint: str, port: int) -> tuple[str, int]:
    url = urlsplit(endpoint if endpoint.startswith("http") else "//" + endpoint.rsplit("/", 1)[-1])
    try:
        return url.hostname or "localhost", url.port or port
    except ValueError:
        return url.hostname or "localhost", port


def _probe(host: str, port: int) -> Literal["nothing", "silence", "plain", "TLS"]:
    """What a server speaks, by offering it TLS."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        plain = socket.create_connection((host, port), timeout=_PROBE_S)
    except OSError:
        return "nothing"
    with plain:
        try:
            context.wrap_socket(plain, server_hostname=host).close()
        except TimeoutError:
            return "silence"
        except (OSError, ValueError):
            return "plain"
    return "TLS"


def run_checks(checks: Mapping[str, Callable[[], str]], limit_s: float = LIMIT_S) -> dict[str, str | Exception]:
    """Each check's message or what it raised, all at the same time; one that does not end counts as failed."""
    results: dict[str, str | Exception] = {}

    def run(name: str, check: Callable[[], str]) -> None:
        try:
            results[name] = check()
        except Exception as error:
            results[name] = error

    # Daemons, because no time-out covers a name server that does not answer; such a thread ends with the program.
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in checks.items()]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = UnusableError(f"no answer within {limit_s:.0f} s: is the name server reachable, does a firewall drop "
                         "packets?")
    return {name: results.get(name, late) for name in checks}


def report(results: Mapping[str, str | Exception]) -> bool:
    """Print one line a check; whether all are ok."""
    for name, result in results.items():
        if isinstance(result, Skipped):
            print(f"{name:7}skipped: {result}")
        elif isinstance(result, Exception):
            what = result if isinstance(result, FlowmillError) else f"{type(result).__name__}: {result}"
            print(f"{name:7}FAILED: {' '.join(str(what).split())}")
        else:
            print(f"{name:7}ok: {result}")
    return all(isinstance(result, str | Skipped) for result in results.values())


def main(arguments: list[str] | None = None) -> int:
    """The program; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m workflows.preflight",
                                     description="Say which endpoint cannot be used from here, and what to do.")
    names = ("flyte", "store", "mlflow")
    parser.add_argument("--only", default=",".join(names), help="what to check, separated by commas: %(default)s")
    parser.add_argument("--project", default="flowmill")
    parser.add_argument("--domain", default="development")
    parser.add_argument("--tls", action="store_true", help="Flyte Admin at FLYTE_ENDPOINT speaks TLS")
    options = parser.parse_args(arguments)
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    if not wanted or set(wanted) - set(names):
        parser.error(f"--only {options.only!r}: expected some of {', '.join(names)}")
    checks = {"flyte": lambda: check_flyte(options.project, options.domain, options.tls), "store": check_store,
              "mlflow": check_mlflow}
    return 0 if report(run_checks({name: checks[name] for name in names if name in wanted})) else 1


if __name__ == "__main__":
    sys.exit(main())
