"""What a place that holds a store must do: keep named byte strings. Met by `folder.Folder` and `bucket.Bucket`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tasks.contracts.errors import StoreError

TEMP_PREFIX = ".tmp-"
"""Names of files being written; never listed."""
Chunks = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class StoreHealth:
    """What `Store.preflight` found. None = not known, or a local folder."""

    uri: str
    versioning: bool | None = None
    trajectories_expire_days: int | None = None
    warnings: tuple[str, ...] = ()


class Backend(Protocol):
    """Named byte strings; every method raises StoreError when the place behind it fails."""

    def uri(self, path: str) -> str: ...
    def write(self, items: Sequence[tuple[str, Chunks]], delete_first: str | None = None) -> None: ...
    def create(self, path: str, data: bytes) -> bytes: ...
    def read(self, path: str) -> bytearray | None: ...
    def size(self, path: str) -> int | None: ...
    def list(self, folder: str) -> list[str]: ...
    def delete(self, path: str) -> None: ...
    def delete_folder(self, folder: str) -> None: ...
    def preflight(self) -> StoreHealth: ...
    def ensure_lifecycle(self, days: int) -> bool: ...


def checked(path: str) -> str:
    """`path` itself, if it stays inside the store.

    Raises:
        StoreError: absolute, ``..``, empty parts, backslash, or a name kept for files being written.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") or part.startswith(TEMP_PREFIX) or "\\" in part or "\0" in part for part in parts):
        raise StoreError(f"store path {path!r} is refused: expected names joined by single '/', relative to the store, "
                         f"without '..', '\\' or names that start with {TEMP_PREFIX!r}.")
    return path
