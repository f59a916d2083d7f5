"""The S3 bucket behind a store, through the minio client. In: named byte strings. Out: whole objects, or a clear error.

An object appears whole or not at all, so only order matters here: the manifest is written last.
"""

import io
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from tasks.contracts.errors import StoreError, StoreUnavailableError
from tasks.store.backend import Chunks, StoreHealth

if TYPE_CHECKING:
    from minio import Minio
    from minio.lifecycleconfig import Rule
    from urllib3 import PoolManager

_log = logging.getLogger(__name__)
_RETRY_DELAYS_S = (0.3, 1.0, 2.0, 3.0)
"""Longer than a server's restart, short enough to be watched."""
_PREFLIGHT_S = 5.0
_CALL_S = 1.5
"""Limit of one preflight request; a further one starts only while it still fits into `_PREFLIGHT_S`."""
_PART_BYTES = 64 << 20
"""One request below this size: a server took 30 MB in one part in half the time of minio's six parts of 5 MiB."""
_NO_OBJECT = frozenset({"NoSuchKey", "NoSuchObject", "ResourceNotFound"})
_RULE_ID = "flowmill-trajectories"
Result = TypeVar("Result")


class Bucket:
    """A prefix of an S3 bucket; endpoint and keys come from the environment, see `open_store`."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket = bucket
        self._base = f"{prefix}/" if prefix else ""
        self._endpoint = _env("FLOWMILL_S3_ENDPOINT", "FLYTE_AWS_ENDPOINT") or "https://s3.amazonaws.com"
        self._is_aws = urlsplit(self._endpoint).netloc.endswith("amazonaws.com")
        if urlsplit(self._endpoint).scheme not in ("http", "https"):
            raise StoreError(f"FLOWMILL_S3_ENDPOINT is {self._endpoint!r}; expected http://host:port or https://host.")

    def uri(self, path: str) -> str:
        return f"s3://{self.bucket}/{self._base}{path}"

    @cached_property
    def _pool(self) -> "PoolManager":
        # 60 s of silence, not 60 s in all: a large object may take longer.
        return self._make_pool(connect=3, read=60)

    @cached_property
    def _client(self) -> "Minio":
        return self._make_client(self._pool)

    def _make_pool(self, **timeout: float) -> "PoolManager":
        import certifi
        from urllib3 import PoolManager, Timeout

        # Retries are `_call`'s; two layers of them would multiply.
        return PoolManager(timeout=Timeout(**timeout), retries=False, maxsize=8, cert_reqs="CERT_REQUIRED",
                           ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where())

    def _make_client(self, pool: "PoolManager") -> "Minio":
        from minio import Minio
        from minio.credentials import IamAwsProvider

        key, secret = _env("AWS_ACCESS_KEY_ID", "FLYTE_AWS_ACCESS_KEY_ID"), _env(
            "AWS_SECRET_ACCESS_KEY", "FLYTE_AWS_SECRET_ACCESS_KEY")
        if not (key and secret) and (key or secret or not self._is_aws):
            raise StoreError(f"no key for the S3 endpoint {self._endpoint}: set AWS_ACCESS_KEY_ID and "
                             "AWS_SECRET_ACCESS_KEY (in a pod: from the cluster's secret).")
        url = urlsplit(self._endpoint)
        region = _env("AWS_REGION", "AWS_DEFAULT_REGION") or (None if self._is_aws else "us-east-1")
        try:
            return Minio(url.netloc + url.path.rstrip("/"), access_key=key, secret_key=secret,
                         secure=url.scheme == "https", session_token=_env("AWS_SESSION_TOKEN"), region=region,
                         http_client=pool, credentials=None if key else IamAwsProvider(http_client=pool))
        except ValueError as error:
            raise StoreError(
                f"FLOWMILL_S3_ENDPOINT is {self._endpoint!r}: {error}; expected http://host:port.") from None

    def _call(self, doing: str, action: Callable[[], Result], delays_s: Sequence[float] | None = None) -> Result:
        """Run `action`, again after each delay while the failure looks temporary, then raise what to do."""
        from minio.error import MinioException
        from urllib3.exceptions import HTTPError

        delays_s = _RETRY_DELAYS_S if delays_s is None else delays_s
        for attempt in range(len(delays_s) + 1):
            try:
                return action()
            except (MinioException, HTTPError, OSError, ValueError) as error:
                if attempt == len(delays_s) or not _is_temporary(error):
                    raise self._explained(doing, getattr(error, "code", None), error, attempt + 1) from error
                _log.warning("%s at %s failed (%s); trying again in %.1f s", doing, self._endpoint, error,
                             delays_s[attempt])
                time.sleep(delays_s[attempt])
        raise AssertionError("unreachable")

    def _explained(self, doing: str, code: str | None, error: Exception | None, attempts: int) -> StoreError:
        from urllib3.exceptions import ProtocolError, SSLError

        text = str(error)
        make_bucket = f"aws s3 mb s3://{self.bucket}" + ("" if self._is_aws else f" --endpoint-url {self._endpoint}")
        advice = {
            "NoSuchBucket": f"bucket {self.bucket!r} does not exist; create it: `{make_bucket}`",
            "InvalidAccessKeyId": "the access key is not known there; check AWS_ACCESS_KEY_ID",
            "SignatureDoesNotMatch": "the secret does not belong to the access key; check AWS_SECRET_ACCESS_KEY",
            "AccessDenied": f"the key may not do this; it needs s3:ListBucket on {self.bucket!r} and s3:GetObject, "
                            f"s3:PutObject, s3:DeleteObject on {self.uri('*')}",
            "RequestTimeTooSkewed": "this machine's clock is off; set it",
        }.get(code or "")
        if advice is None and "use region" in text:
            advice = f"the bucket is in another region; set AWS_REGION ({text})"
        elif advice is None and isinstance(error, SSLError):
            advice = (f"its certificate is not trusted ({text}); name its CA's file in SSL_CERT_FILE"
                      if "CERTIFICATE" in text.upper() else
                      f"it does not speak TLS ({text}); FLOWMILL_S3_ENDPOINT probably should start with http://")
        elif advice is None and self._endpoint.startswith("http://") and (
                "HTTPS server" in text or code == "BadRequest" or (isinstance(error, ProtocolError) and attempts == 1)):
            advice = f"it refuses plain HTTP ({text}); FLOWMILL_S3_ENDPOINT probably should start with https://"
        kind = StoreUnavailableError if advice is None and error is not None and _is_temporary(error) else StoreError
        if advice is None:
            advice = (f"{text}. After {attempts} attempt(s): check that the endpoint is up and reachable from here "
                      "(FLOWMILL_S3_ENDPOINT)")
        return kind(f"{doing}: S3 endpoint {self._endpoint}, bucket {self.bucket!r}: {advice}. Then rerun: "
                          "everything stored before is kept.")

    def write(self, items: Sequence[tuple[str, Chunks]], delete_first: str | None = None) -> None:
        """Upload in order; `delete_first`, the manifest that is being replaced, goes first."""
        if delete_first:
            self.delete(delete_first)
        for path, chunks in items:
            data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._call(f"writing {self.uri(path)}", lambda path=path, data=data: self._client.put_object(
                self.bucket, self._base + path, io.BytesIO(data), len(data), part_size=_PART_BYTES))

    def create(self, path: str, data: bytes) -> bytes:
        """Write `path` unless it exists, and return what it then holds: all racers get the same."""
        def put_if_absent() -> None:
            # minio's put_object cannot send a condition; a presigned URL takes one as a further header.
            url = self._client.presigned_put_object(self.bucket, self._base + path, timedelta(minutes=5))
            status = self._pool.request("PUT", url, body=data, headers={"If-None-Match": "*"}).status
            if status not in (200, 409, 412):
                # A server without conditional writes: then the last of several first users wins.
                self._client.put_object(self.bucket, self._base + path, io.BytesIO(data), len(data))

        self._call(f"writing {self.uri(path)}", put_if_absent)
        stored = self.read(path)
        if stored is None:
            raise StoreError(f"{self.uri(path)} was written and is not there; something else empties this bucket.")
        return bytes(stored)

    def read(self, path: str) -> bytearray | None:
        def get() -> bytearray:
            response = self._client.get_object(self.bucket, self._base + path)
            try:
                return bytearray(response.read())
            finally:
                response.close()
                response.release_conn()

        return self._unless_missing(f"reading {self.uri(path)}", get)

    def size(self, path: str) -> int | None:
        return self._unless_missing(f"reading {self.uri(path)}",
                                    lambda: self._client.stat_object(self.bucket, self._base + path).size)

    def _unless_missing(self, doing: str, action: Callable[[], Result]) -> Result | None:
        from minio.error import S3Error

        def attempt() -> Result | None:
            try:
                return action()
            except S3Error as error:
                if error.code in _NO_OBJECT:
                    return None
                raise

        return self._call(doing, attempt)

    def list(self, folder: str) -> list[str]:
        def names() -> list[str]:
            found = self._client.list_objects(self.bucket, prefix=f"{self._base}{folder}/", recursive=True)
            return sorted(str(item.object_name).removeprefix(self._base) for item in found if not item.is_dir)

        return self._call(f"listing {self.uri(folder)}", names)

    def delete(self, path: str) -> None:
        self._unless_missing(f"deleting {self.uri(path)}",
                             lambda: self._client.remove_object(self.bucket, self._base + path))

    def delete_folder(self, folder: str) -> None:
        for path in self.list(folder):
            self.delete(path)

    def preflight(self) -> StoreHealth:
        found: list[StoreHealth | Exception] = []

        def check() -> None:
            try:
                found.append(self._check())
            except Exception as error:
                found.append(error)

        # A thread, because no socket timeout covers a dead name server or eight addresses that each time out.
        thread = threading.Thread(target=check, daemon=True)
        thread.start()
        thread.join(_PREFLIGHT_S - 0.2)
        if not found:
            raise self._explained(f"opening the store {self.uri('')}", None,
                                  TimeoutError(f"no answer within {_PREFLIGHT_S:.0f} s"), 1)
        if isinstance(found[0], Exception):
            raise found[0]
        return found[0]

    def _check(self) -> StoreHealth:
        """One request that must work, two that inform; each gets at most `_CALL_S`, all together `_PREFLIGHT_S`."""
        start = time.monotonic()
        client, doing = self._make_client(self._make_pool(total=_CALL_S)), f"opening the store {self.uri('')}"

        def informed(what: str, action: Callable[[], Result]) -> Result | None:
            if time.monotonic() - start > _PREFLIGHT_S - _CALL_S - 0.4:
                return None
            try:
                return self._call(what, action, delays_s=())
            except StoreError as error:
                _log.info("%s", error)
                return None

        def exists() -> bool:
            from minio.error import S3Error

            try:
                return client.bucket_exists(self.bucket)
            except S3Error as error:
                if error.code != "AccessDenied":
                    raise
            # HEAD has no body to say why; a GET tells a wrong key from a missing right.
            next(iter(client.list_objects(self.bucket, prefix=self._base)), None)
            return True

        if not self._call(doing, exists, delays_s=()):
            raise self._explained(doing, "NoSuchBucket", None, 1)
        versioning = informed("reading the bucket's versioning",
                              lambda: client.get_bucket_versioning(self.bucket).status == "Enabled")
        rules = informed("reading the bucket's lifecycle", lambda: _rules(client, self.bucket)) or []
        warnings = []
        if versioning is False:
            warnings.append(f"bucket {self.bucket!r} has no versioning: an artifact that is overwritten or deleted by "
                            f"mistake is lost. Turn it on: `aws s3api put-bucket-versioning --bucket {self.bucket} "
                            "--versioning-configuration Status=Enabled`.")
        for rule in rules:
            prefix = _prefix_of(rule)
            if rule.status == "Enabled" and _expires(rule) and prefix is not None and self._base.startswith(prefix):
                warnings.append(f"lifecycle rule {rule.rule_id!r} of bucket {self.bucket!r} expires everything under "
                                f"{prefix!r}, manifests too: runs will not resume. Narrow it to "
                                f"{self._base}trajectories/.")
        days = [rule.expiration.days for rule in rules if rule.status == "Enabled" and rule.expiration
                and rule.expiration.days and _prefix_of(rule) == f"{self._base}trajectories/"]
        return StoreHealth(self.uri("").rstrip("/"), versioning, days[0] if days else None, tuple(warnings))

    def ensure_lifecycle(self, days: int) -> bool:
        """Set the one rule of this prefix; rules that others made stay as they are."""
        from minio.commonconfig import ENABLED, Filter
        from minio.lifecycleconfig import (
            AbortIncompleteMultipartUpload,
            Expiration,
            LifecycleConfig,
            NoncurrentVersionExpiration,
            Rule,
        )

        prefix = f"{self._base}trajectories/"
        rules = self._call("reading the bucket's lifecycle", lambda: _rules(self._client, self.bucket))
        if any(rule.status == ENABLED and _prefix_of(rule) == prefix and rule.expiration
               and rule.expiration.days == days for rule in rules):
            return False
        # With versioning, expiry only hides the current version; the second part frees the space.
        rule_id = f"{_RULE_ID}-{self._base.strip('/') or 'root'}"[:255]
        rule = Rule(ENABLED, rule_filter=Filter(prefix=prefix), rule_id=rule_id,
                    expiration=Expiration(days=days), noncurrent_version_expiration=NoncurrentVersionExpiration(1),
                    abort_incomplete_multipart_upload=AbortIncompleteMultipartUpload(1))
        others = [other for other in rules if other.rule_id != rule.rule_id and _prefix_of(other) != prefix]
        self._call("setting the bucket's lifecycle (needs s3:PutLifecycleConfiguration)",
                   lambda: self._client.set_bucket_lifecycle(self.bucket, LifecycleConfig([*others, rule])))
        return True


def _env(*names: str) -> str | None:
    return next((os.environ[name] for name in names if os.environ.get(name)), None)


def _rules(client: "Minio", bucket: str) -> "list[Rule]":
    config = client.get_bucket_lifecycle(bucket)
    return list(config.rules) if config else []


def _expires(rule: "Rule") -> bool:
    """Whether the rule expires current data; others free old versions or delete markers only."""
    return bool(rule.expiration and (rule.expiration.days or rule.expiration.date))


def _prefix_of(rule: "Rule") -> str | None:
    """The prefix a rule is for, "" = the whole bucket; None if it chooses by tags, which flowmill does not set."""
    chosen = rule.rule_filter
    return None if chosen and (chosen.tag or chosen.and_operator) else (chosen and chosen.prefix) or ""


def _is_temporary(error: Exception) -> bool:
    from minio.error import InvalidResponseError, S3Error, ServerError
    from urllib3.exceptions import HTTPError

    if isinstance(error, S3Error):  # 5xx, and 429 = slow down
        return error.response.status >= 500 or error.response.status == 429
    if isinstance(error, InvalidResponseError):
        return "Response code: 5" in str(error)
    return isinstance(error, ServerError | HTTPError | OSError)
