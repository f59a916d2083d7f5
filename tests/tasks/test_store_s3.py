"""The store on a real S3 server (SeaweedFS), and on stand-ins for failures that one cannot be made to show."""

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from k8s.stack.seaweedfs import S3Server
from tasks.contracts.config import ROOT
from tasks.contracts.errors import ArtifactGoneError, StoreError, StoreUnavailableError
from tasks.contracts.refs import TrajectoryRef
from tasks.store import Store, open_store
from tests.fixtures_s3 import meet_before_making_an_id, s3_server  # noqa: F401

BUCKET = "flowmill-test"


@pytest.fixture
def server(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:  # noqa: F811
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    if not s3_server.client().bucket_exists(BUCKET):
        s3_server.client().make_bucket(BUCKET)
    return s3_server


@pytest.fixture
def store(server: S3Server, request: pytest.FixtureRequest) -> Store:
    return open_store(f"s3://{BUCKET}/{request.node.name.replace('[', '-').strip(']')}")


def put(store: Store, key: str = "k", content: bytes = b"hello"):
    return store.put("trajectories", key, files={"batch": {"x": torch.arange(6.0)}, "note.txt": content}, count=2,
                     meta={"a": 1}, stats={})


def object_name(store: Store, path: str) -> str:
    return f"{store.uri.removeprefix(f's3://{BUCKET}/')}/{path}"


def test_what_was_put_is_loaded_and_dropped(store, tmp_path):
    manifest = put(store)
    assert open_store(store.uri).find("trajectories", "k") == manifest
    assert manifest.digest == put(open_store(str(tmp_path))).digest
    ref = manifest.ref(TrajectoryRef)
    assert ref.uri == f"{store.uri}/trajectories/k"
    assert torch.equal(store.load(ref, "batch")["x"], torch.arange(6.0))
    assert store.load_bytes(ref, "note.txt") == b"hello"
    put(store, "kept")
    assert store.has_data(ref)
    store.drop_data("trajectories", "k")
    store.drop_data("trajectories", "k")
    assert not store.has_data(ref)
    with pytest.raises(ArtifactGoneError, match="pyflyte run --overwrite-cache"):
        store.load(ref, "batch")
    assert store.keys("trajectories") == ["k", "kept"]
    assert store.has_data(store.find("trajectories", "kept"))
    assert store.find("trajectories", "never") is None


def test_replaced_content_is_found_and_its_old_ref_refused(store):
    old, new = put(store).ref(), put(store, content=b"other").ref()
    assert store.load_bytes(new, "note.txt") == b"other"
    with pytest.raises(StoreError, match=old.digest):
        store.load(old, "batch")


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"?"])
def test_damaged_data_is_refused(store, server, damage):
    import io

    manifest = put(store)
    name = object_name(store, "trajectories/k/batch.safetensors")
    data = damage(server.client().get_object(BUCKET, name).read())
    server.client().put_object(BUCKET, name, io.BytesIO(data), len(data))
    with pytest.raises(StoreError, match=r"corrupt: expected .* got .* Delete s3://.*manifests/trajectories/k\.json"):
        store.load(manifest.ref(), "batch")


def test_spool_files(store):
    assert store.read_bytes("spool/1") is None
    store.write_bytes("spool/1", b"one")
    store.write_bytes("spool/sub/2", b"")
    store.write_bytes("spool2/3", b"")
    assert store.list("spool") == ["spool/1", "spool/sub/2"]
    assert (store.read_bytes("spool/1"), store.read_bytes("spool/sub/2")) == (b"one", b"")
    store.delete("spool/1")
    store.delete("spool/1")
    assert store.list("spool") == ["spool/sub/2"]
    with pytest.raises(StoreError, match="refused"):
        store.write_bytes("../other-prefix/x", b"")


def test_all_first_users_of_a_store_get_one_id(store, monkeypatch):
    meet_before_making_an_id(monkeypatch, 6)
    stores = [open_store(store.uri) for _ in range(6)]
    ids: list[str] = []
    # Python 3.11's cached_property lets one thread in at a time, so go round it.
    threads = [threading.Thread(target=lambda one=one: ids.append(Store.id.func(one))) for one in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 6
    assert set(ids) == {open_store(store.uri).id}


def test_the_lifecycle_rule_is_for_trajectories_only_and_keeps_other_rules(store, server):
    from minio.commonconfig import ENABLED, Filter
    from minio.lifecycleconfig import Expiration, LifecycleConfig, Rule

    client = server.client()
    theirs = Rule(ENABLED, rule_filter=Filter(prefix="logs/"), rule_id="theirs", expiration=Expiration(days=30))
    client.set_bucket_lifecycle(BUCKET, LifecycleConfig([theirs]))
    try:
        assert store.preflight().trajectories_expire_days is None
        assert store.ensure_lifecycle(5) is True
        assert store.ensure_lifecycle(5) is False
        assert store.ensure_lifecycle(3) is True
        other = open_store(f"{store.uri}-other")
        assert other.ensure_lifecycle(9) is True
        prefix = object_name(store, "").rstrip("/")
        rules = {rule.rule_filter.prefix: rule.expiration.days for rule in client.get_bucket_lifecycle(BUCKET).rules}
        assert rules == {"logs/": 30, f"{prefix}/trajectories/": 3, f"{prefix}-other/trajectories/": 9}
        assert store.preflight().trajectories_expire_days == 3
        assert not [text for text in store.preflight().warnings if "lifecycle" in text]
        everything = Rule(ENABLED, rule_filter=Filter(prefix=""), rule_id="all", expiration=Expiration(days=30))
        client.set_bucket_lifecycle(BUCKET, LifecycleConfig([everything]))
        assert any("'all'" in text and "manifests" in text for text in store.preflight().warnings)
        with pytest.raises(StoreError, match="at least 1"):
            store.ensure_lifecycle(0)
    finally:
        client.delete_bucket_lifecycle(BUCKET)


def test_versioning_that_is_off_is_a_warning(server):
    from minio.versioningconfig import VersioningConfig

    server.client().make_bucket("flowmill-versions")
    health = open_store("s3://flowmill-versions/p").preflight()
    assert health.versioning is False
    assert any("put-bucket-versioning" in text for text in health.warnings)
    server.client().set_bucket_versioning("flowmill-versions", VersioningConfig("Enabled"))
    assert open_store("s3://flowmill-versions/p").preflight().versioning is True


def test_the_clusters_lifecycle_rules_are_understood(server, monkeypatch):
    """One expires trajectories, the other frees what runs have deleted; neither touches what is still wanted."""
    from minio.commonconfig import ENABLED, Filter
    from minio.lifecycleconfig import Expiration, NoncurrentVersionExpiration, Rule

    path = ROOT / "k8s/base/minio/bootstrap/lifecycle.json"
    rules = [Rule(ENABLED, rule_id=rule["ID"], rule_filter=Filter(prefix=rule["Filter"]["Prefix"]),
                  expiration=Expiration(
                      days=rule["Expiration"].get("Days"),
                      expired_object_delete_marker=rule["Expiration"].get("ExpiredObjectDeleteMarker")),
                  noncurrent_version_expiration=NoncurrentVersionExpiration(
                      rule["NoncurrentVersionExpiration"]["NoncurrentDays"]))
             for rule in json.loads(path.read_text())["Rules"]]
    monkeypatch.setattr("tasks.store.bucket._rules", lambda *_: rules)
    health = open_store(f"s3://{BUCKET}/store").preflight()
    assert health.trajectories_expire_days == 30
    assert not [text for text in health.warnings if "lifecycle" in text]
    assert open_store(f"s3://{BUCKET}/store").ensure_lifecycle(30) is False


@contextmanager
def raises_soon(*parts: str, kind: type[StoreError] = StoreError) -> Iterator[None]:
    """A StoreError of that very class that survives pickling, holds every part and comes within 5 s."""
    start = time.monotonic()
    with pytest.raises(StoreError) as caught:
        yield
    assert time.monotonic() - start < 5
    assert type(caught.value) is kind
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert not [part for part in parts if part not in str(caught.value)], str(caught.value)


def test_a_wrong_key_is_named(server, monkeypatch):
    with monkeypatch.context() as change:
        change.setenv("AWS_ACCESS_KEY_ID", "nobody")
        with raises_soon("AWS_ACCESS_KEY_ID", server.endpoint):
            open_store(f"s3://{BUCKET}/p")
    with monkeypatch.context() as change:
        change.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with raises_soon("AWS_SECRET_ACCESS_KEY", server.endpoint):
            open_store(f"s3://{BUCKET}/p")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with raises_soon("no key", "AWS_ACCESS_KEY_ID"):
        open_store(f"s3://{BUCKET}/p")


def test_flytes_own_variables_are_understood(server, monkeypatch):
    for name, value in {"ENDPOINT": server.endpoint, "ACCESS_KEY_ID": server.access_key,
                        "SECRET_ACCESS_KEY": server.secret_key}.items():
        monkeypatch.setenv(f"FLYTE_AWS_{name}", value)
    for name in server.env:
        monkeypatch.delenv(name)
    assert open_store(f"s3://{BUCKET}/flyte").find("trajectories", "k") is None


def test_a_missing_bucket_says_how_to_create_it_and_is_not_made(server):
    with raises_soon("'no-such-bucket' does not exist", "aws s3 mb s3://no-such-bucket --endpoint-url"):
        open_store("s3://no-such-bucket/p")
    assert not server.client().bucket_exists("no-such-bucket")
    with raises_soon("invalid bucket name"):
        open_store("s3://x/p")


def test_a_bad_endpoint_says_so(server, monkeypatch):
    later = StoreUnavailableError
    for endpoint, kind, parts in (
            ("http://127.0.0.1:9", later, ("refused", "FLOWMILL_S3_ENDPOINT")),
            (server.endpoint.replace("http:", "https:"), StoreError, ("does not speak TLS", "http://")),
            ("127.0.0.1:9000", StoreError, ("expected http://host:port",)),
            ("http://127.0.0.1:9000/path", StoreError, ("expected http://host:port",)),
            ("http://no-such-host.invalid:9000", later, ("resolve", "FLOWMILL_S3_ENDPOINT"))):
        monkeypatch.setenv("FLOWMILL_S3_ENDPOINT", endpoint)
        with raises_soon(endpoint, *parts, kind=kind):
            open_store(f"s3://{BUCKET}/p")


def test_an_endpoint_that_never_answers_is_given_up_within_5_s(server, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("FLOWMILL_S3_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with raises_soon("timed out", "FLOWMILL_S3_ENDPOINT", kind=StoreUnavailableError):
            open_store(f"s3://{BUCKET}/p")


def test_a_name_server_that_never_answers_is_given_up(server, monkeypatch):
    monkeypatch.setattr("tasks.store.bucket._PREFLIGHT_S", 1.0)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(6))
    with raises_soon("no answer within 1 s", "FLOWMILL_S3_ENDPOINT", kind=StoreUnavailableError):
        open_store(f"s3://{BUCKET}/p")


@contextmanager
def stand_in(answer: Callable[[BaseHTTPRequestHandler, int], None]) -> Iterator[str]:
    """An HTTP server whose n-th answer `answer` gives; yields its endpoint."""
    count = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            nonlocal count
            count += 1
            answer(self, count)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes, length: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", "application/xml" if body.startswith(b"<") else "text/plain")
    handler.send_header("Content-Length", str(len(body) if length is None else length))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(body)


def test_plain_http_to_a_tls_endpoint_is_explained(server, monkeypatch):
    answer = b"Client sent an HTTP request to an HTTPS server."
    with stand_in(lambda handler, _: reply(handler, 400, answer)) as endpoint:
        monkeypatch.setenv("FLOWMILL_S3_ENDPOINT", endpoint)
        with raises_soon("refuses plain HTTP", "https://"):
            open_store(f"s3://{BUCKET}/p")


def test_failures_that_pass_are_retried(store, monkeypatch):
    slow_down = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"

    def answer(handler: BaseHTTPRequestHandler, count: int) -> None:
        if count == 1:
            reply(handler, 503, slow_down)
        elif count == 2:
            reply(handler, 200, b"hel", length=5)  # the connection breaks off inside the body
        else:
            reply(handler, 200, b"hello")

    monkeypatch.setattr("tasks.store.bucket._RETRY_DELAYS_S", (0.01, 0.01))
    with stand_in(answer) as endpoint:
        monkeypatch.setattr(store._backend, "_endpoint", endpoint)
        assert store.read_bytes("spool/x") == b"hello"
    with stand_in(lambda handler, _: reply(handler, 503, slow_down)) as endpoint:
        monkeypatch.setattr(store._backend, "_endpoint", endpoint)
        del store._backend.__dict__["_client"]
        with raises_soon("SlowDown", "After 3 attempt(s)", endpoint, kind=StoreUnavailableError):
            store.read_bytes("spool/x")


KILLER = """
import os, signal, sys, time
import minio
from tasks.store import open_store

def child(key, step, delay_s=0.0, size=3_000_000):
    pid = os.fork()
    if pid == 0:
        seen, real = 0, minio.Minio.put_object
        def put_object(*arguments, **options):
            nonlocal seen
            seen += 1
            if seen == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)
        minio.Minio.put_object = put_object
        files = {name: b"n" * size for name in "abc"}
        open_store(sys.argv[1]).put("policies", key, files=files, count=3, meta={}, stats={})
        os._exit(0)
    if delay_s:
        time.sleep(delay_s)
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for step in (1, 2, 3, 4, 5):
    print(f"step-{step}", child(f"step-{step}", step))
for delay_ms in (30, 60, 120):
    print(f"time-{delay_ms}", child(f"time-{delay_ms}", 0, delay_ms / 1000, 20_000_000))
"""


def test_a_put_killed_anywhere_leaves_nothing_that_looks_complete(store):
    done = subprocess.run([sys.executable, "-c", KILLER, store.uri], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    codes = dict(line.split() for line in done.stdout.splitlines())
    assert [codes[f"step-{step}"] for step in range(1, 6)] == ["-9"] * 4 + ["0"]
    for key, code in codes.items():
        manifest = store.find("policies", key)
        assert (manifest is not None) == (code == "0") or key.startswith("time")
        if manifest is not None:
            assert [store.load_bytes(manifest, name)[:1] for name in "abc"] == [b"n"] * 3
    assert "step-5" in store.keys("policies")


def test_a_server_that_dies_in_mid_run_loses_nothing_and_is_waited_for(store, server, monkeypatch):
    before = put(store, "before")
    server.stop()
    restart = threading.Thread(target=server.start)
    try:
        with monkeypatch.context() as change:
            change.setattr("tasks.store.bucket._RETRY_DELAYS_S", (0.1, 0.2))
            for action in (lambda: put(store), lambda: store.load(before, "batch"), lambda: store.keys("trajectories")):
                with raises_soon(server.endpoint, "After 3 attempt(s)", "rerun", "kept", kind=StoreUnavailableError):
                    action()
            # SeaweedFS takes 3 to 10 s to come back, longer than the real delays add up to.
            change.setattr("tasks.store.bucket._RETRY_DELAYS_S", (0.3,) * 60)
            restart.start()
            put(store, "after")
    finally:
        if restart.ident is None:
            restart.start()
        restart.join()
    assert store.load_bytes(store.find("trajectories", "after"), "note.txt") == b"hello"
    assert store.load_bytes(before.ref(), "note.txt") == b"hello"
    assert store.find("trajectories", "k") is None
