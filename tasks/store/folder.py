"""The local folder (or mounted volume) behind a store. In: named byte strings. Out: whole files, or nothing at all."""

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tasks.contracts.errors import StoreError
from tasks.store.backend import TEMP_PREFIX, Chunks, StoreHealth


class Folder:
    """A local folder, or a mounted volume."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def uri(self, path: str) -> str:
        return str(self.root / path)

    @contextmanager
    def _errors(self, doing: str, num_bytes: int = 0) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                free = shutil.disk_usage(self.root).free
                raise StoreError(
                    f"{doing}: the disk is full. It needs {num_bytes} bytes, {free} are free in {self.root}. Free some "
                    "space, lower retention.keep_iterations, or move the folder and point FLOWMILL_STORE at it; then "
                    "rerun: everything stored before is kept.") from error
            raise StoreError(f"{doing} in {self.root}: {error}. Make the folder usable for user {os.getuid()}, or "
                             "point FLOWMILL_STORE at another one; then rerun.") from error

    def write(self, items: Sequence[tuple[str, Chunks]], delete_first: str | None = None) -> None:
        """Stage every file beside its target, then rename them in order: a full disk is met before anything changes.

        No fsync: the page cache survives kill -9, which is what a lost pod or an impatient user does. After a power
        loss a file may be torn; its SHA-256 then tells, and the stage is rerun. An fsync would cost more than the rest.
        """
        staged: list[tuple[Path, Path]] = []
        num_bytes = sum(len(chunk) for _, chunks in items for chunk in chunks)
        with self._errors(f"writing {items[-1][0]}", num_bytes):
            try:
                for path, chunks in items:
                    target = self.root / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    staged.append((_temp_beside(target), target))
                    with open(staged[-1][0], "xb") as file:
                        file.writelines(chunks)
                if delete_first:
                    self.delete(delete_first)
                for temp, target in staged:
                    os.replace(temp, target)
            except BaseException:
                for temp, _ in staged:
                    temp.unlink(missing_ok=True)
                raise

    def create(self, path: str, data: bytes) -> bytes:
        """Write `path` unless it exists, and return what it then holds: all racers get the same."""
        target = self.root / path
        temp = _temp_beside(target)
        with self._errors(f"writing {path}", len(data)):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                temp.write_bytes(data)
                # A link, unlike a rename, fails when the target exists, and unlike open("x") never shows half a file.
                os.link(temp, target)
            except FileExistsError:
                pass
            finally:
                temp.unlink(missing_ok=True)
            return target.read_bytes()

    def read(self, path: str) -> bytearray | None:
        with self._errors(f"reading {path}"):
            try:
                with open(self.root / path, "rb") as file:
                    data = bytearray(os.fstat(file.fileno()).st_size)
                    del data[file.readinto(data):]
                    return data
            except (FileNotFoundError, NotADirectoryError):
                return None

    def size(self, path: str) -> int | None:
        with self._errors(f"reading {path}"):
            try:
                return (self.root / path).stat().st_size
            except (FileNotFoundError, NotADirectoryError):
                return None

    def list(self, folder: str) -> list[str]:
        with self._errors(f"listing {folder}"):
            return sorted((Path(parent) / name).relative_to(self.root).as_posix()
                          for parent, _, names in os.walk(self.root / folder) for name in names
                          if not name.startswith(TEMP_PREFIX))

    def delete(self, path: str) -> None:
        with self._errors(f"deleting {path}"):
            (self.root / path).unlink(missing_ok=True)

    def delete_folder(self, folder: str) -> None:
        with self._errors(f"deleting {folder}"):
            if (self.root / folder).exists():
                shutil.rmtree(self.root / folder)

    def preflight(self) -> StoreHealth:
        self.write([("preflight", [b""])])
        self.delete("preflight")
        return StoreHealth(uri=str(self.root))

    def ensure_lifecycle(self, days: int) -> bool:
        return False


def _temp_beside(target: Path) -> Path:
    return target.with_name(f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(4)}")
