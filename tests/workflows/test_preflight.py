"""Preflight: each endpoint that cannot be used is named with what to do, against real servers and dead ports."""

import datetime
import http.server
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tasks.contracts.config import ROOT
from tests.fixtures_s3 import s3_server  # noqa: F401
from tests.workflows.test_reconcile import FlyteAdmin, free_port, run_program
from workflows import preflight


@pytest.fixture(autouse=True)
def nothing_is_set(tmp_path, monkeypatch):
    """No endpoint in the environment, and a home without Flyte's config file."""
    from flytekit.configuration.file import get_config_file

    for name in list(os.environ):
        if name.startswith(("FLYTE", "FLOWMILL_", "MLFLOW_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    get_config_file.cache_clear()
    yield
    get_config_file.cache_clear()


@pytest.fixture
def check(capsys) -> Callable[..., tuple[int, dict[str, str]]]:
    """Function: run preflight; (exit status, check -> its line)."""

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        started, code = time.monotonic(), preflight.main(list(arguments))
        assert time.monotonic() - started < 10
        lines = capsys.readouterr().out.splitlines()
        return code, {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}

    return run


@pytest.fixture
def certificate(tmp_path) -> tuple[bytes, bytes]:
    """(key, certificate) for 127.0.0.1, signed by itself; also as files key.pem and certificate.pem."""
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(1).not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
            .add_extension(x509.BasicConstraints(True, None), True).sign(key, hashes.SHA256()))
    pair = (key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                              serialization.NoEncryption()), made.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "key.pem").write_bytes(pair[0])
    (tmp_path / "certificate.pem").write_bytes(pair[1])
    return pair


class Mlflow:
    """An http server that answers as MLflow does: {path: (status, body)}."""

    def __init__(self, answers: dict[str, tuple[int, str]], tls: Path | None = None) -> None:
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.headers.append(dict(self.headers))
                status, body = answers.get(self.path, (404, "not found"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls / "certificate.pem", tls / "key.pem")
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self._server.handle_error = lambda *_: None
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


SEARCH = "/api/2.0/mlflow/experiments/search"
HEALTHY = {"/health": (200, "OK"), SEARCH: (200, json.dumps({"experiments": []}))}


@pytest.fixture
def serve() -> Iterator[Callable[..., Any]]:
    """Function: start a server of a class; all are stopped at the end."""
    made: list[Any] = []

    def start(kind: Callable[..., Any], *arguments: Any) -> Any:
        made.append(kind(*arguments))
        return made[-1]

    yield start
    for server in made:
        server.stop()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


# ---- all together ----------------------------------------------------------------------------------------------------


def test_all_is_ok(check, serve, s3_server, monkeypatch):  # noqa: F811
    flyte, mlflow = serve(FlyteAdmin), serve(Mlflow, HEALTHY)
    s3_server.client().make_bucket("preflight-ok")
    for name, value in {**s3_server.env, "FLYTE_ENDPOINT": flyte.endpoint, "FLOWMILL_STORE": "s3://preflight-ok/store",
                        "MLFLOW_TRACKING_URI": f"http://127.0.0.1:{mlflow.port}"}.items():
        monkeypatch.setenv(name, value)
    code, lines = check()
    assert code == 0
    assert lines["flyte"] == (f"ok: {flyte.endpoint} (plain), version v1.16.8, project flowmill, domain development")
    assert lines["store"].startswith("ok: s3://preflight-ok/store")
    assert lines["mlflow"] == f"ok: http://127.0.0.1:{mlflow.port}"


def test_everything_dead_is_said_line_by_line_within_ten_seconds():
    ports = {name: free_port() for name in ("flyte", "store", "mlflow")}
    code, out, err, seconds = run_program(
        "workflows.preflight", FLYTE_ENDPOINT=f"127.0.0.1:{ports['flyte']}", FLOWMILL_STORE="s3://bucket/store",
        FLOWMILL_S3_ENDPOINT=f"http://127.0.0.1:{ports['store']}", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
        MLFLOW_TRACKING_URI=f"http://127.0.0.1:{ports['mlflow']}")
    assert (code, err) == (1, "")
    assert [line[:14] for line in out.splitlines()] == ["flyte  FAILED:", "store  FAILED:", "mlflow FAILED:"]
    for line, (name, port) in zip(out.splitlines(), ports.items(), strict=True):
        assert f"127.0.0.1:{port}" in line, name
    assert "kubectl -n flyte port-forward svc/flyte-binary-grpc 8089" in out
    assert "kubectl -n flowmill port-forward svc/mlflow 5000" in out
    assert seconds < 10


def test_servers_that_never_answer_are_said_within_ten_seconds(silent):
    code, out, _, seconds = run_program(
        "workflows.preflight", FLYTE_ENDPOINT=f"127.0.0.1:{silent}", FLOWMILL_STORE="s3://bucket/store",
        FLOWMILL_S3_ENDPOINT=f"http://127.0.0.1:{silent}", AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b",
        MLFLOW_TRACKING_URI=f"http://127.0.0.1:{silent}")
    assert code == 1
    assert out.count("FAILED") == 3
    assert [line[:6].strip() for line in out.splitlines() if "takes connections and does not answer" in line] == [
        "flyte", "mlflow"]
    assert seconds < 10


def test_only_what_is_asked_for_is_checked(check):
    code, lines = check("--only", "store,mlflow")
    assert code == 0
    assert lines.keys() == {"store", "mlflow"}
    assert lines["store"].startswith("skipped: FLOWMILL_STORE is not set")
    assert lines["mlflow"].startswith("skipped: MLFLOW_TRACKING_URI is no server")


@pytest.mark.parametrize("only", ["flite", "", "flyte,s3"])
def test_an_unknown_check_is_refused(only, capsys):
    with pytest.raises(SystemExit) as caught:
        preflight.main(["--only", only])
    assert caught.value.code == 2
    assert "expected some of flyte, store, mlflow" in capsys.readouterr().err


def test_a_check_that_hangs_or_breaks_does_not_hold_up_the_others():
    def broken() -> str:
        raise KeyError("a")

    started = time.monotonic()
    results = preflight.run_checks(
        {"slow": lambda: time.sleep(30) or "", "broken": broken, "good": lambda: "fine"}, limit_s=0.5)
    assert time.monotonic() - started < 5
    assert results["good"] == "fine"
    assert isinstance(results["broken"], KeyError)
    assert "no answer within" in str(results["slow"])
    assert not preflight.report(results)


def test_the_program_ends_although_a_check_hangs():
    code = ("import time\nfrom workflows import preflight\n"
            "print(preflight.run_checks({'slow': lambda: time.sleep(30) or ''}, limit_s=0.1))")
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - started < 15
    assert "no answer within" in done.stdout


# ---- Flyte -----------------------------------------------------------------------------------------------------------


def test_without_an_endpoint_it_says_how_to_name_one(check):
    code, lines = check("--only", "flyte")
    assert code == 1
    assert "set FLYTE_ENDPOINT=host:port" in lines["flyte"]
    assert "flytectl config init" in lines["flyte"]


def test_flytes_config_file_is_read(check, serve, tmp_path):
    flyte = serve(FlyteAdmin)
    (tmp_path / ".flyte").mkdir()
    (tmp_path / ".flyte" / "config.yaml").write_text(
        f"admin:\n  endpoint: dns:///{flyte.endpoint}\n  insecure: true\n")
    code, lines = check("--only", "flyte")
    assert (code, lines["flyte"][:4]) == (0, "ok: ")
    assert flyte.endpoint in lines["flyte"]


def test_an_endpoint_in_dns_form_works(check, serve, monkeypatch):
    monkeypatch.setenv("FLYTE_ENDPOINT", f"dns:///{serve(FlyteAdmin).endpoint}")
    assert check("--only", "flyte")[0] == 0


def test_a_missing_project_or_domain_is_named(check, serve, monkeypatch):
    monkeypatch.setenv("FLYTE_ENDPOINT", serve(FlyteAdmin).endpoint)
    code, lines = check("--only", "flyte", "--project", "paint")
    assert code == 1
    assert "has no project 'paint': create it with `flytectl create project --id paint" in lines["flyte"]
    code, lines = check("--only", "flyte", "--domain", "test")
    assert code == 1
    assert "has no domain 'test'; it has development, staging, production" in lines["flyte"]


def test_flyte_asked_in_plain_text_that_speaks_tls(check, serve, certificate, monkeypatch):
    monkeypatch.setenv("FLYTE_ENDPOINT", serve(FlyteAdmin, certificate).endpoint)
    code, lines = check("--only", "flyte")
    assert code == 1
    assert "it speaks TLS and was asked in plain text; add --tls" in lines["flyte"]


def test_flyte_asked_for_tls_that_does_not_speak_it(check, serve, monkeypatch):
    monkeypatch.setenv("FLYTE_ENDPOINT", serve(FlyteAdmin).endpoint)
    code, lines = check("--only", "flyte", "--tls")
    assert code == 1
    assert "it does not speak TLS and was asked to; leave --tls out" in lines["flyte"]


def test_a_certificate_of_flyte_that_is_not_trusted_and_how_to_trust_it(
        check, serve, certificate, tmp_path, monkeypatch):
    monkeypatch.setenv("FLYTE_ENDPOINT", serve(FlyteAdmin, certificate).endpoint)
    code, lines = check("--only", "flyte", "--tls")
    assert code == 1
    assert "its certificate is not trusted" in lines["flyte"]
    assert "FLYTE_PLATFORM_CA_CERT_FILE_PATH" in lines["flyte"]
    monkeypatch.setenv("FLYTE_PLATFORM_CA_CERT_FILE_PATH", str(tmp_path / "certificate.pem"))
    code, lines = check("--only", "flyte", "--tls")
    assert (code, "(TLS)" in lines["flyte"]) == (0, True)


def test_another_server_at_flytes_port(check, serve, monkeypatch):
    monkeypatch.setenv("FLYTE_ENDPOINT", f"127.0.0.1:{serve(Mlflow, HEALTHY).port}")
    code, lines = check("--only", "flyte")
    assert code == 1
    assert "does not answer as Flyte Admin" in lines["flyte"]
    other = serve(FlyteAdmin)
    other.refuses = grpc.StatusCode.UNIMPLEMENTED
    monkeypatch.setenv("FLYTE_ENDPOINT", other.endpoint)
    assert "it speaks gRPC and is not Flyte Admin" in check("--only", "flyte")[1]["flyte"]


def test_an_endpoint_written_as_a_url_is_refused(check, monkeypatch):
    monkeypatch.setenv("FLYTE_ENDPOINT", "http://127.0.0.1:8089")
    code, lines = check("--only", "flyte")
    assert code == 1
    assert "expected host:port of the gRPC port" in lines["flyte"]


def test_a_flyte_that_asks_for_a_login_is_no_failure_but_one_that_refuses_a_client_is(check, serve, monkeypatch):
    flyte = serve(FlyteAdmin)
    monkeypatch.setenv("FLYTE_ENDPOINT", flyte.endpoint)
    flyte.refuses = grpc.StatusCode.UNAUTHENTICATED
    code, lines = check("--only", "flyte")
    assert code == 0
    assert "asks for a login, which pyflyte does; project not checked" in lines["flyte"]
    flyte.refuses = grpc.StatusCode.PERMISSION_DENIED
    code, lines = check("--only", "flyte")
    assert code == 1
    assert "the token may not do this" in lines["flyte"]


# ---- the store -------------------------------------------------------------------------------------------------------


def test_the_stores_own_words_are_shown(check, s3_server, monkeypatch):  # noqa: F811
    s3_server.client().make_bucket("preflight-store")
    for name, value in {**s3_server.env, "FLOWMILL_STORE": "s3://preflight-store/store"}.items():
        monkeypatch.setenv(name, value)
    assert check("--only", "store")[0] == 0
    for name, value, words in (
            ("AWS_SECRET_ACCESS_KEY", "wrong", "the secret does not belong to the access key"),
            ("AWS_ACCESS_KEY_ID", "wrong", "the access key is not known there"),
            ("FLOWMILL_STORE", "s3://preflight-missing/store", "bucket 'preflight-missing' does not exist; create it"),
            ("FLOWMILL_S3_ENDPOINT", s3_server.endpoint.replace("http:", "https:"), "it does not speak TLS")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            code, lines = check("--only", "store")
        assert code == 1
        assert lines["store"].startswith("FAILED: "), name
        assert words in lines["store"]


def test_a_folder_as_the_store(check, tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWMILL_STORE", str(tmp_path / "store"))
    code, lines = check("--only", "store")
    assert (code, lines["store"].startswith("ok: ")) == (0, True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLOWMILL_STORE", str(tmp_path / "file" / "store"))
    assert check("--only", "store")[0] == 1


# ---- MLflow ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answers", "words"), [
    ({}, "something answers there that is not MLflow"),
    ({"/health": (200, "OK")}, "something answers there that is not MLflow"),
    ({"/health": (200, "OK"), SEARCH: (200, "[]")}, "something answers there that is not MLflow"),
    ({"/health": (200, "<html>"), SEARCH: (200, "<html>")}, "something answers there that is not MLflow"),
    ({"/health": (200, "OK"), SEARCH: (500, "no database")}, "is up, its API is not (500: no database)"),
    ({"/health": (200, "OK"), SEARCH: (401, "You are not authenticated")}, "set MLFLOW_TRACKING_USERNAME"),
    ({"/health": (200, "OK"), SEARCH: (403, "Invalid Host header - possible DNS rebinding attack detected")},
     "to its --allowed-hosts"),
])
def test_an_mlflow_that_is_not_well(check, serve, monkeypatch, answers, words):
    uri = f"http://127.0.0.1:{serve(Mlflow, answers).port}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    code, lines = check("--only", "mlflow")
    assert code == 1
    assert f"MLflow at {uri}" in lines["mlflow"]
    assert words in lines["mlflow"]


def test_the_login_of_mlflow_is_sent(check, serve, monkeypatch):
    server = serve(Mlflow, HEALTHY)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.port}/")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "abc")
    assert check("--only", "mlflow")[0] == 0
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "ann")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    assert check("--only", "mlflow")[0] == 0
    sent = [headers["Authorization"] for headers in server.headers]
    assert sent == ["Bearer abc"] * 2 + ["Basic YW5uOnNlY3JldA=="] * 2


def test_mlflow_with_tls_and_without(check, serve, certificate, tmp_path, monkeypatch):
    plain, secure = serve(Mlflow, HEALTHY), serve(Mlflow, HEALTHY, tmp_path)
    for uri, words in ((f"https://127.0.0.1:{plain.port}", "it does not speak TLS; MLFLOW_TRACKING_URI probably"),
                       (f"http://127.0.0.1:{secure.port}", "it speaks TLS and was asked in plain text"),
                       (f"https://127.0.0.1:{secure.port}", "its certificate is not trusted")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        code, lines = check("--only", "mlflow")
        assert code == 1
        assert words in lines["mlflow"]
    monkeypatch.setenv("MLFLOW_TRACKING_SERVER_CERT_PATH", str(tmp_path / "certificate.pem"))
    assert check("--only", "mlflow")[0] == 0
