"""The store in a local folder. `test_store_s3.py` repeats the claims that matter on a real S3 server."""

import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tasks.contracts.config import ROOT
from tasks.contracts.errors import ArtifactGoneError, StoreError
from tasks.contracts.refs import ArtifactRef, TrajectoryRef
from tasks.store import Store, open_store
from tests.fixtures_s3 import meet_before_making_an_id


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def tensors() -> dict[str, torch.Tensor]:
    return {"latents": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4), "ids": torch.tensor([7, 8])}


def put(store: Store, key: str = "k", content: bytes = b"hello", **changes):
    arguments = {"files": {"batch": tensors(), "note.txt": content}, "count": 2, "meta": {"kind": "image"}, "stats": {}}
    return store.put("trajectories", key, **(arguments | changes))


def data_file(store: Store, name: str, key: str = "k") -> Path:
    return Path(store.uri) / "trajectories" / key / name


def test_what_was_put_is_loaded(store):
    manifest = put(store, stats={"seconds": 1.5, "kl": float("nan")})
    found = open_store(store.uri).find("trajectories", "k")
    assert found == manifest.model_copy(update={"stats": {"seconds": 1.5, "kl": None}})
    ref = found.ref(TrajectoryRef)
    assert (ref.kind, ref.key, ref.count, ref.uri) == ("trajectories", "k", 2, f"{store.uri}/trajectories/k")
    loaded = store.load(ref, "batch")
    assert loaded.keys() == tensors().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert store.load_bytes(found, "note.txt") == b"hello"
    assert store.has_data(ref)
    assert store.keys("trajectories") == ["k"]


def test_what_was_never_put_is_not_found(store):
    assert store.find("trajectories", "k") is None
    assert store.keys("trajectories") == []
    ref = ArtifactRef(kind="trajectories", key="k", uri="elsewhere", count=0, digest="0")
    assert not store.has_data(ref)
    with pytest.raises(StoreError, match=r"no artifact trajectories/k .*FLOWMILL_STORE"):
        store.load(ref, "batch")
    manifest = put(store)
    for load, name in ((store.load, "other"), (store.load_bytes, "other"), (store.load, "note.txt")):
        with pytest.raises(StoreError, match=rf"no file '{name}.*'; it has batch\.safetensors, note\.txt"):
            load(manifest, name)
    assert store.manifest(manifest.ref()) == store.manifest(manifest) == manifest


def test_a_tensor_file_is_what_safetensors_reads(store):
    shared = torch.arange(12.0)
    given = {"f32": torch.randn(3, 5), "f64": torch.randn(2).double(), "bf16": torch.randn(3).bfloat16(),
             "f16": torch.randn(1, 3).half(), "i64": torch.tensor(-5), "i32": torch.tensor([1, -2], dtype=torch.int32),
             "u8": torch.arange(7, dtype=torch.uint8), "bool": torch.tensor([True, False, True]),
             "empty": torch.zeros(0, 4), "transposed": torch.arange(6.0).reshape(2, 3).T, "whole": shared,
             "part": shared[3:7], "grad": torch.ones(2, requires_grad=True),
             "f8": torch.ones(3).to(torch.float8_e4m3fn)}
    manifest = put(store, files={"all": given})
    theirs = safetensors.torch.load(data_file(store, "all.safetensors").read_bytes())
    ours = store.load(manifest, "all")
    assert theirs.keys() == ours.keys() == given.keys()
    for name, tensor in given.items():
        for read in (theirs[name], ours[name]):
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape), name
            assert torch.equal(read.float(), tensor.detach().float()), name
    assert all(tensor.data_ptr() % 64 == 0 for tensor in ours.values())
    ours["whole"].zero_()
    assert ours["part"].tolist() == [3, 4, 5, 6]


def test_the_digest_depends_on_content_and_meta_only(store):
    first = put(store, stats={"seconds": 1})
    shuffled = dict(reversed(tensors().items()))
    same = put(store, "other", stats={"seconds": 2}, files={"note.txt": b"hello", "batch": shuffled})
    assert same.digest == first.digest
    assert same.files == first.files
    assert put(store, "c", content=b"hellp").digest != first.digest
    assert put(store, "d", meta={"kind": "video"}).digest != first.digest
    assert put(store, "e", files={"batch": tensors(), "note.md": b"hello"}).digest != first.digest
    # Worked by hand from the documented rule, so that another machine's digests agree.
    one = store.put("rewards", "k", files={"a": b"x"}, count=1, meta={"b": 1}, stats={})
    rule = '{"files":{"a":"' + hashlib.sha256(b"x").hexdigest() + '"},"meta":{"b":1}}'
    assert one.digest == hashlib.sha256(rule.encode()).hexdigest()


@pytest.mark.parametrize("damage", ["flip", "truncate", "extend", "empty"])
def test_damaged_data_is_refused_with_both_digests(store, damage):
    manifest = put(store)
    path = data_file(store, "batch.safetensors")
    data = path.read_bytes()
    path.write_bytes({"flip": data[:-1] + bytes([data[-1] ^ 1]), "truncate": data[:-1], "extend": data + b"\0",
                      "empty": b""}[damage])
    with pytest.raises(StoreError, match="corrupt") as caught:
        store.load(manifest.ref(), "batch")
    for part in (str(path), manifest.files[path.name].sha256, hashlib.sha256(path.read_bytes()).hexdigest(),
                 "manifests/trajectories/k.json", "rerun"):
        assert part in str(caught.value)
    assert not isinstance(caught.value, ArtifactGoneError)
    assert store.has_data(manifest) == (damage == "flip")


@pytest.mark.parametrize(("change", "message"), [
    (lambda raw: {**raw, "schema_version": 99}, "schema version 99, this code reads 1"),
    (lambda raw: {**raw, "meta": {"kind": "video"}}, "corrupt"),
    (lambda raw: {**raw, "key": "other"}, "corrupt"),
    (lambda raw: {**raw, "surprise": 1}, "corrupt"),
    (lambda raw: [], "corrupt"),
    (lambda raw: None, "corrupt"),
])
def test_a_damaged_manifest_is_refused_by_name(store, change, message):
    ref = put(store).ref()
    path = Path(store.uri) / "manifests/trajectories/k.json"
    changed = change(json.loads(path.read_text()))
    path.write_text(json.dumps(changed) if changed is not None else path.read_text()[:50])
    for action in (lambda: store.find("trajectories", "k"), lambda: store.load(ref, "batch")):
        with pytest.raises(StoreError, match=message) as caught:
            action()
        assert str(path) in str(caught.value)
        assert "elete it" in str(caught.value)
    put(store)
    assert store.has_data(ref)


def test_gone_data_says_how_to_make_it_again(store):
    manifest = put(store)
    put(store, "kept")
    store.drop_data("trajectories", "k")
    store.drop_data("trajectories", "k")
    assert store.find("trajectories", "k") == manifest
    assert not store.has_data(manifest)
    assert store.has_data(store.find("trajectories", "kept"))
    with pytest.raises(ArtifactGoneError, match=r"trajectories/k is gone.*lifecycle.*pyflyte run --overwrite-cache"):
        store.load(manifest.ref(), "batch")
    put(store)
    assert store.load_bytes(manifest.ref(), "note.txt") == b"hello"


def test_a_ref_to_replaced_content_is_refused(store):
    old = put(store).ref()
    new = put(store, content=b"other").ref()
    assert store.load_bytes(new, "note.txt") == b"other"
    assert not store.has_data(old)
    with pytest.raises(StoreError, match=old.digest):
        store.load_bytes(old, "note.txt")


def test_concurrent_puts_of_one_key_are_harmless(tmp_path, monkeypatch):
    meet_before_making_an_id(monkeypatch, 8)
    stores = [open_store(str(tmp_path)) for _ in range(8)]
    manifests, ids = [None] * 8, [None] * 8

    def work(index: int) -> None:
        ids[index] = Store.id.func(stores[index])  # Python 3.11's cached_property lets one thread in at a time
        manifests[index] = put(stores[index], content=b"x" * 300_000)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 1
    assert len({manifest.digest for manifest in manifests}) == 1
    assert stores[0].load_bytes(manifests[0].ref(), "note.txt") == b"x" * 300_000
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".tmp-")]


def test_a_wiped_store_has_a_new_id(tmp_path):
    first = open_store(str(tmp_path)).id
    assert first
    assert open_store(str(tmp_path)).id == first
    (tmp_path / "store.json").unlink()
    assert open_store(str(tmp_path)).id != first
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(StoreError, match=r"store\.json is not readable"):
        _ = open_store(str(tmp_path)).id


KILLER = """
import os, signal, sys, time
from pathlib import Path
from tasks.store import open_store

root, old = Path(sys.argv[1]), sys.argv[2] == "replace"

def put(store, fill, size=300_000):
    store.put("trajectories", "k", files={name: fill * size for name in "abc"}, count=3, meta={}, stats={})

def child(folder, point, size=300_000):
    store = open_store(str(folder))
    put(store, b"o") if old else None
    store.put("trajectories", "before", files={"a": b"a"}, count=1, meta={}, stats={})
    pid = os.fork()
    if pid == 0:
        seen = 0
        def hook(event, args):
            nonlocal seen
            if event in ("open", "os.rename", "os.remove", "os.mkdir") and str(folder) in str(args[0]):
                seen += 1
                if seen == point:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        put(store, b"n", size)
        os._exit(0)
    if point == 0:
        time.sleep(0.001 * int(folder.name.split("-")[1]))
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for point in range(1, 99):  # dies before its 1st, 2nd, ... step, until it gets through
    code = child(root / f"step-{point}", point)
    print(f"step-{point}", code)
    if code == 0:
        break
for delay_ms in (1, 3, 9, 27):  # dies inside a write
    print(f"time-{delay_ms}", child(root / f"time-{delay_ms}", 0, size=30_000_000))
"""


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_a_put_killed_anywhere_leaves_nothing_that_looks_complete(tmp_path, mode):
    done = subprocess.run([sys.executable, "-c", KILLER, str(tmp_path), mode], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    codes = dict(line.split() for line in done.stdout.splitlines())
    steps = [int(code) for name, code in codes.items() if name.startswith("step")]
    assert steps[-1] == 0
    assert set(steps[:-1]) == {-signal.SIGKILL}
    assert len(steps) > 8  # 4 files are opened and renamed
    seen = set()
    for name, code in codes.items():
        store = open_store(str(tmp_path / name))
        manifest = store.find("trajectories", "k")
        if manifest is not None:
            assert store.has_data(manifest)
            contents = {store.load_bytes(manifest, file)[:1] for file in "abc"}
            assert len(contents) == 1
        seen.add(contents.pop() if manifest else None)
        assert manifest or code != "0"
        assert store.load_bytes(store.find("trajectories", "before"), "a") == b"a"
        assert set(store.keys("trajectories")) <= {"k", "before"}
        put(store)
        assert store.load_bytes(store.find("trajectories", "k"), "note.txt") == b"hello"
    assert seen == ({None, b"n"} if mode == "new" else {None, b"o", b"n"})


def test_a_full_disk_says_what_was_needed_and_loses_nothing(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)],
                                           capture_output=True).returncode:
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        store = open_store(str(disk / "store"))
        before = put(store, "before", content=b"x" * 1_000_000)
        old = put(store, "old")
        for key in ("new", "old"):
            with pytest.raises(StoreError, match="disk is full") as caught:
                put(store, key, content=b"y" * 2_500_000, files={"a": b"y" * 2_500_000, "b": b"y" * 2_500_000})
            text = str(caught.value)
            assert caught.value.__cause__.errno == errno.ENOSPC
            needed = int(text.split("It needs ")[1].split()[0])
            assert 5_000_000 < needed < 5_001_000  # both files and a manifest
            assert str(disk) in text
            assert "keep_iterations" in text
            free = int(text.split("bytes, ")[1].split()[0])
            assert 2_500_000 < free < 3_200_000  # the temporary files are gone
        with pytest.raises(StoreError, match="disk is full"):
            store.write_bytes("spool/big", b"z" * 5_000_000)
        assert not [path for path in disk.rglob("*") if path.name.startswith(".tmp-")]
        assert store.find("trajectories", "new") is None
        assert store.load_bytes(before.ref(), "note.txt") == b"x" * 1_000_000
        assert store.load_bytes(old.ref(), "note.txt") == b"hello"
        store.drop_data("trajectories", "before")
        put(store, "new", content=b"y" * 3_000_000)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_spool_files(store):
    assert store.read_bytes("spool/a/1.json") is None
    assert store.list("spool") == []
    store.write_bytes("spool/a/1.json", b"1")
    store.write_bytes("spool/a/2.json", b"2")
    store.write_bytes("spool/b", b"")
    store.write_bytes("spool/a/1.json", b"one")
    assert store.list("spool") == ["spool/a/1.json", "spool/a/2.json", "spool/b"]
    assert store.list("spool/a/") == ["spool/a/1.json", "spool/a/2.json"]
    assert store.read_bytes("spool/a/1.json") == b"one"
    assert store.read_bytes("spool/b") == b""
    store.delete("spool/a/1.json")
    store.delete("spool/a/1.json")
    assert store.list("spool") == ["spool/a/2.json", "spool/b"]


@pytest.mark.parametrize("path", ["../x", "spool/../../x", "/etc/x", "", ".", "spool//x", "spool\\..\\x",
                                  "spool/.tmp-1", "spool/\0"])
def test_paths_that_leave_the_store_are_refused(store, path):
    for action in (lambda: store.write_bytes(path, b""), lambda: store.read_bytes(path), lambda: store.delete(path),
                   lambda: store.list(path), lambda: store.find("trajectories", path), lambda: store.keys(path),
                   lambda: store.find(path, "k"), lambda: store.drop_data("trajectories", path),
                   lambda: put(store, path), lambda: put(store, files={path: b""})):
        with pytest.raises(StoreError, match=r"refused|neither may hold"):
            action()
    assert not Path(store.uri).exists()


def test_what_cannot_be_stored_is_refused_before_anything_is_written(store):
    for changes, message in (({"meta": {"a": object()}}, "must be JSON"),
                             ({"meta": {"a": float("nan")}}, "must be JSON"),
                             ({"files": {"a.safetensors": b""}}, "safetensors"),
                             ({"files": {"a": {"x": torch.zeros(2).to(torch.complex128)}}}, "'x' of torch.complex128")):
        with pytest.raises(StoreError, match=message):
            put(store, **changes)
    assert store.keys("trajectories") == []


def test_the_store_is_chosen_by_argument_then_environment_then_project(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWMILL_STORE", str(tmp_path / "env"))
    assert open_store(str(tmp_path / "given")).uri == str(tmp_path / "given")
    assert open_store(f"file://{tmp_path}/given").uri == str(tmp_path / "given")
    assert open_store().uri == str(tmp_path / "env")
    monkeypatch.delenv("FLOWMILL_STORE")
    assert open_store().uri == str(ROOT / ".flowmill" / "store")
    with pytest.raises(StoreError, match="gs:// is not supported"):
        open_store("gs://bucket/x")


def test_preflight_of_a_folder(tmp_path):
    store = open_store(str(tmp_path / "new"))
    assert store.preflight().warnings == ()
    assert list((tmp_path / "new").iterdir()) == []
    assert store.ensure_lifecycle(3) is False
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="FLOWMILL_STORE"):
        open_store(str(tmp_path / "file")).preflight()


def test_errors_survive_pickling(store):
    manifest = put(store)
    store.drop_data("trajectories", "k")
    for action in (lambda: store.load(manifest, "batch"), lambda: store.read_bytes("../x")):
        with pytest.raises(StoreError) as caught:
            action()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again)) == (type(caught.value), str(caught.value))


def test_importing_the_store_imports_neither_torch_nor_minio():
    heavy = "{'torch', 'minio', 'safetensors', 'numpy', 'urllib3', 'flytekit'}"
    code = f"import sys, tasks.store; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
