"""Artifacts: tensors and bytes in, one manifest out, in a local folder or an S3 bucket.

In: what a stage made. Out: a `Manifest` and the typed ref that travels over the Flyte edge to the next stage.

    manifests/<kind>/<key>.json     written last; the artifact exists once this does. Never expires.
    <kind>/<key>/<file>             the data. `<name>.safetensors` for tensors; may expire or be dropped.
    store.json                      the store's id;   spool/, runs/: free-form small files.

Leaves out what an artifact means (the stages know), which ones to drop (retention) and any cache of its own.
"""

import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import Field, ValidationError

from tasks.contracts.config import ROOT, StrictModel, digest_of
from tasks.contracts.errors import ArtifactGoneError, StoreError
from tasks.contracts.refs import SCHEMA_VERSION, ArtifactRef
from tasks.store.backend import Backend, Chunks, StoreHealth, checked
from tasks.store.bucket import Bucket
from tasks.store.folder import Folder
from tasks.store.tensors import decode, encode

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FileEntry", "Manifest", "Store", "StoreHealth", "open_store"]
_log = logging.getLogger(__name__)
_SUFFIX = ".safetensors"
Ref = TypeVar("Ref", bound=ArtifactRef)


class FileEntry(StrictModel):
    """One data file of an artifact."""

    sha256: str
    bytes: int


class Manifest(StrictModel):
    """What one artifact is. ``digest`` covers the files' names and SHA-256s and `meta`; `stats` are outside it."""

    kind: str
    key: str
    schema_version: int = SCHEMA_VERSION
    count: int
    files: dict[str, FileEntry]
    meta: dict[str, Any]
    """Deterministic JSON that belongs to the artifact."""
    stats: dict[str, Any]
    """Timings and other numbers about the making; a number that is not finite is stored as null."""
    created_s: float
    """Unix time."""
    digest: str
    uri: str = Field(default="", exclude=True)
    """Where the data lies; filled in on reading, so that a store can be moved."""

    def ref(self, cls: type[Ref] = ArtifactRef) -> Ref:
        """The typed reference to this artifact."""
        return cls(kind=self.kind, key=self.key, uri=self.uri, schema_version=self.schema_version, count=self.count,
                   digest=self.digest)


def open_store(uri: str | None = None) -> "Store":
    """The store at `uri`, else at FLOWMILL_STORE, else in `.flowmill/store` of the project.

    Args:
        uri: ``s3://bucket/prefix`` or a folder. S3 reads FLOWMILL_S3_ENDPOINT (default AWS), AWS_ACCESS_KEY_ID,
            AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN and AWS_REGION, or Flyte's own FLYTE_AWS_* names. On AWS without
            keys the pod's role is used.

    Raises:
        StoreError: S3 cannot be used; said within 5 s (see `Store.preflight`).
    """
    uri = uri or os.environ.get("FLOWMILL_STORE") or str(ROOT / ".flowmill" / "store")
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        return Store(Folder(Path(rest if separator else uri).expanduser().absolute()))
    if scheme != "s3":
        raise StoreError(f"store {uri!r}: expected s3://bucket/prefix or a folder; {scheme}:// is not supported.")
    bucket, _, prefix = rest.partition("/")
    store = Store(Bucket(bucket, prefix.strip("/")))
    for warning in store.preflight().warnings:
        _log.warning("%s", warning)
    return store


class Store:
    """Artifacts by (kind, key). Make one with `open_store`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def uri(self) -> str:
        """The store's root: a folder or ``s3://bucket/prefix``."""
        return self._backend.uri("").rstrip("/")

    @cached_property
    def id(self) -> str:
        """Random id, made at the store's first use; a wiped store gets a new one. Part of Flyte cache keys."""
        data = self._backend.read("store.json")
        if data is None:
            data = self._backend.create("store.json", json.dumps({"id": secrets.token_hex(8)}).encode())
        try:
            return str(json.loads(data)["id"])
        except (ValueError, KeyError, TypeError):
            raise StoreError(f"{self._backend.uri('store.json')} is not readable; expected {{\"id\": ...}}. Delete it "
                             "to get a new id: cached stages then run again.") from None

    def preflight(self) -> StoreHealth:
        """Check that the store can be used; S3 within 5 s.

        Raises:
            StoreError: folder not writable; endpoint down or speaking TLS/plain when the other was asked for; key
                refused; bucket missing.
        """
        return self._backend.preflight()

    def ensure_lifecycle(self, days: int) -> bool:
        """Let S3 expire trajectories, and nothing else, after `days`; True if a rule was written. Local: no effect."""
        if days < 1:
            raise StoreError(f"lifecycle of {days} days; expected at least 1.")
        return self._backend.ensure_lifecycle(days)

    def put(self, kind: str, key: str, *, files: Mapping[str, "Mapping[str, Tensor] | bytes"], count: int,
            meta: Mapping[str, Any], stats: Mapping[str, Any]) -> Manifest:
        """Store one artifact; it exists once this returns and not before, also after kill -9.

        A second put of a key with the same content changes nothing. With other content the last one stays, and a ref
        to the first is refused on loading.

        Args:
            files: name -> tensors (stored as ``<name>.safetensors``) or bytes (stored under the name as given).
            count: Samples, or tensors for weights.
            meta: JSON, part of the digest. stats: JSON, not part of it.

        Raises:
            StoreError: full disk, S3 failing for seconds, bad name, `meta` that is not JSON.
        """
        folder, manifest_path = _data_folder(kind, key), _manifest_path(kind, key)
        items: list[tuple[str, Chunks]] = []
        entries: dict[str, FileEntry] = {}
        for name, content in sorted(files.items()):
            if name.endswith(_SUFFIX):
                raise StoreError(f"{kind}/{key}: file name {name!r}; {_SUFFIX} is added to tensors and kept for them.")
            if isinstance(content, bytes):
                file_name, chunks = name, [content]
            else:
                file_name, chunks = name + _SUFFIX, encode(f"{folder}/{name}", content)
            sha256 = hashlib.sha256()
            for chunk in chunks:
                sha256.update(chunk)
            items.append((checked(f"{folder}/{file_name}"), chunks))
            entries[file_name] = FileEntry(sha256=sha256.hexdigest(), bytes=sum(len(chunk) for chunk in chunks))
        try:
            plain_meta = json.loads(json.dumps(dict(meta), allow_nan=False, sort_keys=True))
            plain_stats = json.loads(json.dumps(dict(stats)), parse_constant=lambda _: None)
        except (TypeError, ValueError) as error:
            raise StoreError(f"{kind}/{key}: meta and stats must be JSON, and meta finite: {error}.") from None
        manifest = Manifest(kind=kind, key=key, count=count, files=entries, meta=plain_meta, stats=plain_stats,
                            created_s=round(time.time(), 3), digest=_digest(entries, plain_meta),
                            uri=self._backend.uri(folder))
        items.append((manifest_path, [manifest.model_dump_json(indent=1).encode()]))
        old = self._backend.read(manifest_path)
        # An older manifest must not stand beside half of the new data.
        is_stale = old is not None and not _has_digest(old, manifest.digest)
        self._backend.write(items, delete_first=manifest_path if is_stale else None)
        return manifest

    def find(self, kind: str, key: str) -> Manifest | None:
        """The manifest, or None if the artifact was never completed. Its data may have expired: see `has_data`.

        Raises:
            StoreError: the manifest is corrupt, or of another schema version.
        """
        path = _manifest_path(kind, key)
        data = self._backend.read(path)
        if data is None:
            return None
        where = self._backend.uri(path)
        try:
            raw = json.loads(data)
            version = raw["schema_version"]
            if version != SCHEMA_VERSION:
                raise StoreError(f"manifest {where} has schema version {version}, this code reads {SCHEMA_VERSION}. "
                                 "Use the flowmill that wrote it, or delete it and rerun the stage that made it.")
            manifest = Manifest.model_validate({**raw, "uri": self._backend.uri(_data_folder(kind, key))})
            found, expected = (manifest.kind, manifest.key, manifest.digest), (
                kind, key, _digest(manifest.files, manifest.meta))
            if found != expected:
                raise ValueError(f"it says {found}, its content gives {expected}")
        except (ValueError, KeyError, TypeError) as error:
            why = f"{error.error_count()} wrong fields" if isinstance(error, ValidationError) else str(error)
            raise StoreError(
                f"manifest {where} is corrupt ({why}). Delete it and rerun the stage that made it.") from None
        return manifest

    def load(self, artifact: ArtifactRef | Manifest, name: str) -> "dict[str, Tensor]":
        """Read one file of tensors, verified against its SHA-256 and the ref's digest.

        Args:
            artifact: A ref, or the manifest that `find` or `put` gave.
            name: The name given to `put`.

        Returns:
            Tensors on the CPU. Each tensor has memory of its own, 64-byte aligned like any new tensor:
            matrix libraries may round differently on other alignments, and a resumed run must give the same bits.

        Raises:
            ArtifactGoneError: the manifest is there, the data is not.
            StoreError: no such artifact or file; the data is corrupt; the ref is for other content.
        """
        return decode(self._verified(artifact, name + _SUFFIX))

    def load_bytes(self, artifact: ArtifactRef | Manifest, name: str) -> bytes:
        """Read one file as it lies in the store (tensors: ``<name>.safetensors``); verified, raises as `load`."""
        return bytes(self._verified(artifact, name))

    def _verified(self, artifact: ArtifactRef | Manifest, file_name: str) -> bytearray:
        manifest = self.manifest(artifact)
        entry = manifest.files.get(file_name)
        if entry is None:
            raise StoreError(f"artifact {manifest.kind}/{manifest.key} has no file {file_name!r}; it has "
                             f"{', '.join(sorted(manifest.files)) or 'none'}.")
        path = f"{_data_folder(manifest.kind, manifest.key)}/{file_name}"
        data = self._backend.read(path)
        manifest_uri = self._backend.uri(_manifest_path(manifest.kind, manifest.key))
        if data is None:
            raise ArtifactGoneError(
                f"artifact {manifest.kind}/{manifest.key} is gone: {self._backend.uri(path)} does not exist, though "
                "its manifest does. Data expires by the bucket's lifecycle rule or by retention.keep_iterations. Make "
                f"it again: `pyflyte run --overwrite-cache ...` with the same inputs, or delete {manifest_uri} and "
                "rerun.")
        got = hashlib.sha256(data).hexdigest()
        if got != entry.sha256:
            raise StoreError(
                f"{self._backend.uri(path)} is corrupt: expected {entry.bytes} bytes of SHA-256 {entry.sha256}, got "
                f"{len(data)} bytes of {got}. Delete {manifest_uri} and rerun the stage that made it.")
        return data

    def has_data(self, artifact: ArtifactRef | Manifest) -> bool:
        """Whether every file is there in its full size; contents are verified by `load`."""
        manifest = artifact if isinstance(artifact, Manifest) else self.find(artifact.kind, artifact.key)
        if manifest is None or manifest.digest != artifact.digest:
            return False
        folder = _data_folder(manifest.kind, manifest.key)
        return all(self._backend.size(f"{folder}/{name}") == entry.bytes for name, entry in manifest.files.items())

    def drop_data(self, kind: str, key: str) -> None:
        """Delete the data and keep the manifest, so that a resumed run still knows what was made."""
        self._backend.delete_folder(_data_folder(kind, key))

    def keys(self, kind: str) -> list[str]:
        """Keys of all artifacts of a kind, sorted; those without data too."""
        folder = f"manifests/{checked(kind)}/"
        return [path.removeprefix(folder).removesuffix(".json") for path in self._backend.list(folder[:-1])]

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write one small file, atomically, such as ``spool/metrics/3.json``."""
        self._backend.write([(checked(path), [data])])

    def read_bytes(self, path: str) -> bytes | None:
        """A file's content, or None if there is none."""
        data = self._backend.read(checked(path))
        return None if data is None else bytes(data)

    def list(self, prefix: str) -> list[str]:
        """Paths of all files under the folder `prefix`, sorted, relative to the store."""
        return self._backend.list(checked(prefix.rstrip("/")))

    def delete(self, path: str) -> None:
        """Delete one file; one that is not there is no error."""
        self._backend.delete(checked(path))

    def manifest(self, artifact: ArtifactRef | Manifest) -> Manifest:
        """The manifest of a ref, checked against the ref's digest.

        Raises:
            StoreError: no such artifact, or it was made again with other content.
        """
        if isinstance(artifact, Manifest):
            return artifact
        manifest = self.find(artifact.kind, artifact.key)
        where = self._backend.uri(_manifest_path(artifact.kind, artifact.key))
        if manifest is None:
            raise StoreError(f"no artifact {artifact.kind}/{artifact.key} in {self.uri}: {where} does not exist; the "
                             f"ref says {artifact.uri}. Point FLOWMILL_STORE at the store that made it, or rerun with "
                             "`pyflyte run --overwrite-cache ...`.")
        if manifest.digest != artifact.digest:
            raise StoreError(f"artifact {artifact.kind}/{artifact.key}: the ref has digest {artifact.digest}, {where} "
                             f"has {manifest.digest}. It was made again with other content; rerun the stages after it.")
        return manifest


def _data_folder(kind: str, key: str) -> str:
    if "/" in kind or "/" in key:
        raise StoreError(f"artifact kind {kind!r}, key {key!r}: neither may hold a '/'.")
    return checked(f"{kind}/{key}")


def _manifest_path(kind: str, key: str) -> str:
    return f"manifests/{_data_folder(kind, key)}.json"


def _has_digest(manifest: bytearray, digest: str) -> bool:
    try:
        return json.loads(manifest)["digest"] == digest
    except (ValueError, KeyError, TypeError):
        return False


def _digest(files: Mapping[str, FileEntry], meta: Mapping[str, Any]) -> str:
    return digest_of({"files": {name: entry.sha256 for name, entry in files.items()}, "meta": meta})
