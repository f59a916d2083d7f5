"""SM partitions: the planner's arithmetic, the ladder's reasons, roles on a pretended device and on a GPU."""

import dataclasses
import logging
import os
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from flowmill_kernels.partition import (
    CudaDevice,
    Granularity,
    Mps,
    PartitionError,
    Partitions,
    Role,
    Surroundings,
    choose,
    find_mps,
    granularity,
    plan,
)
from flowmill_kernels.partition.device import Made
from flowmill_kernels.partition.guard import StrayWorkError, StreamGuard
from hypothesis import given
from hypothesis import strategies as st

HOPPER = granularity((9, 0))


# Planner -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("capability", "wanted"), [((8, 0), (4, 2)), ((8, 9), (4, 2)), ((9, 0), (8, 8)),
                                                    ((10, 0), (8, 8)), ((12, 0), (8, 8)), ((7, 5), (2, 2))])
def test_granularity_is_the_published_one(capability: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert granularity(capability) == Granularity(*wanted)


def test_old_gpus_have_no_partitions() -> None:
    with pytest.raises(PartitionError, match=r"5\.2 has no SM partitions"):
        granularity((5, 2))


@pytest.mark.parametrize(("roles", "total", "wanted", "spare"), [
    ({"rollout": 96, "reward": 36}, 132, [96, 36], 0),  # 16 slots and 4 SMs over: measured to work on an H200
    ({"rollout": 96, "reward": 32}, 132, [96, 32], 4),
    ({"rollout": 0.75, "reward": 0.25}, 132, [100, 32], 0),  # 99 and 33 asked: the left-over 4 to who lacks more
    ({"a": 0.5, "b": 0.5}, 132, [68, 64], 0),
    ({"a": 132}, 132, [132], 0),
    ({"a": 1.0}, 132, [132], 0),
    ({"a": 1, "b": 1}, 132, [8, 8], 116),
    ({"a": 20}, 132, [20], 112),  # two slots and the left-over 4
    ({"a": 100, "b": 32}, 132, [100, 32], 0),
])
def test_grants_on_an_h200(roles: dict, total: int, wanted: list[int], spare: int) -> None:
    planned = plan(roles, total, HOPPER)
    assert [g.num_sms for g in planned.grants] == wanted
    assert planned.spare == spare
    assert str(planned.total) in str(planned)


def test_a_floor_is_kept_at_the_others_expense() -> None:
    planned = plan([Role("a", 120), Role("b", 8, floor=9)], 132, HOPPER)
    assert planned["b"].num_sms >= 9
    assert planned["a"].num_sms + planned["b"].num_sms <= 132


@pytest.mark.parametrize(("num_slots", "remainder"), [(16, 4), (15, 12), (14, 20), (13, 28)])
@pytest.mark.parametrize("asks", [(96, 36), (36, 96)])
def test_any_die_of_132_sms_meets_96_and_36_exactly(num_slots: int, remainder: int, asks: tuple[int, int]) -> None:
    planned = plan(dict(zip("ab", asks, strict=True)), 132, HOPPER, num_slots=num_slots, remainder=remainder)
    assert tuple(g.num_sms for g in planned.grants) == asks
    assert planned.spare == 0


@pytest.mark.parametrize(("roles", "die", "wanted", "spare"), [
    ({"a": 0.5, "b": 0.5}, (15, 12), [68, 64], 0),  # 7 slots and the 12, and 8 slots
    ({"a": 0.5, "b": 0.5}, (14, 20), [68, 64], 0),
    ({"a": 96, "b": 32}, (15, 12), [92, 32], 8),  # nobody gets more than asked; 4 short for either
    ({"a": 64, "b": 64}, (10, 4), [44, 40], 48),  # 84 SMs in all that the driver gives
    ({"a": 8, "b": 12}, (1, 12), [8, 12], 112),  # the left-over alone is a partition
    ([Role("a", 120), Role("b", 8, floor=9)], (16, 4), [120, 12], 0),
])
def test_grants_on_other_dies(roles: object, die: tuple[int, int], wanted: list[int], spare: int) -> None:
    planned = plan(roles, 132, HOPPER, num_slots=die[0], remainder=die[1])  # type: ignore[arg-type]
    assert [g.num_sms for g in planned.grants] == wanted
    assert planned.spare == spare


def test_floors_that_a_die_cannot_keep_are_refused() -> None:
    roles = [Role("a", 60, floor=56), Role("b", 60, floor=56)]
    assert [g.num_sms for g in plan(roles, 132, HOPPER).grants] == [60, 56]
    with pytest.raises(PartitionError, match="12 slots and 4 SMs over"):
        plan(roles, 132, HOPPER, num_slots=12, remainder=4)


AMPERE = granularity((8, 0))
sizes = st.sampled_from([(108, AMPERE), (128, AMPERE), (132, HOPPER), (148, HOPPER), (188, HOPPER)])


@given(sizes, st.lists(st.integers(1, 60), min_size=1, max_size=5), st.booleans(), st.integers(0, 3))
def test_plans_are_disjoint_within_the_gpu_and_close_to_what_was_asked(
        gpu: tuple[int, Granularity], shares: list[int], fractions: bool, lost: int) -> None:
    total, grain = gpu
    num_slots = total // grain.slot - lost  # a die whose clusters have room for fewer
    left = total - num_slots * grain.slot
    asked: dict[str, int | float] = {f"r{i}": s for i, s in enumerate(shares)}
    if fractions:
        asked = {name: s / sum(shares) for name, s in asked.items()}
    elif sum(shares) > total:
        with pytest.raises(PartitionError, match="together"):
            plan(asked, total, grain, num_slots=num_slots)
        return
    planned = plan(asked, total, grain, num_slots=num_slots)
    assert plan(asked, total, grain, num_slots=num_slots, remainder=left) == planned
    used = [slot for g in planned.grants for slot in g.slots]
    assert len(used) == len(set(used))
    assert not used or max(used) < num_slots
    assert sum(g.remainder for g in planned.grants) <= 1
    assert sum(g.num_sms for g in planned.grants) + planned.spare == total
    for g in planned.grants:
        assert g.num_sms >= grain.slot
        over = left if fractions and g.remainder else 0
        assert g.num_sms < max(g.asked + 1e-6, grain.slot) + max(over, 1e-6)
        assert g.num_sms == len(g.slots) * grain.slot + (left if g.remainder else 0)
    # Slots and the remainder are the only steps, so nobody lacks more than one of each.
    worst = max(g.asked - g.num_sms for g in planned.grants)
    assert worst < grain.slot + left
    if planned.spare - (0 if any(g.remainder for g in planned.grants) else left) >= grain.slot:
        # Nobody goes short while a whole slot lies idle.
        assert all(g.asked - g.num_sms < grain.slot for g in planned.grants)


@pytest.mark.parametrize(("roles", "match"), [
    ({"a": 140}, "role 'a' asks for 140 SMs, but the GPU has 132"),
    ({"a": 100, "b": 40}, r"together \(a 100, b 40\)"),
    ({"a": 0}, "must be positive"),
    ({"a": 1.5}, "fraction must lie in"),
    ({"a": True}, "share must be"),
    ({}, "at least one"),
    ([Role("a", 8), Role("a", 8)], "different names"),
    ([Role("a", 8, floor=70), Role("b", 8, floor=70)], "floors need"),
    ({str(i): 1 for i in range(17)}, "floors need"),
])
def test_impossible_requests_say_role_asked_and_available(roles: object, match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        plan(roles, 132, HOPPER)  # type: ignore[arg-type]


# Ladder ------------------------------------------------------------------------------------------------------------

DAEMON = Mps("/run/mps", True, 1000, None)
GOOD = Surroundings(True, 13000, 2, DAEMON, 1000)
ALONE = dataclasses.replace(GOOD, processes=1)


@pytest.mark.parametrize(("around", "mode", "reason"), [
    (GOOD, "mps+green", None),
    (dataclasses.replace(GOOD, mps=dataclasses.replace(DAEMON, owner=0)), "mps+green", None),
    (ALONE, "green", "one process needs no MPS"),
    (dataclasses.replace(GOOD, driver=12020), "mps", r"driver is CUDA 12\.2; SM partitions need 12\.4"),
    (dataclasses.replace(GOOD, driver=0), "mps", "cuda-python is not installed"),
    (dataclasses.replace(GOOD, mps=dataclasses.replace(DAEMON, thread_percentage="50")), "mps",
     "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is set"),
    (dataclasses.replace(ALONE, mps=Mps("/run/mps", False, None, "50")), "green", "one process needs no MPS"),
    (dataclasses.replace(GOOD, mps=Mps("/run/mps", False)), "timeslice", "no MPS daemon answers in /run/mps"),
    (dataclasses.replace(GOOD, mps=dataclasses.replace(DAEMON, owner=7)), "timeslice",
     "belongs to UID 7 and this process to 1000"),
    (dataclasses.replace(ALONE, driver=12020), "exclusive", "SM partitions need"),
    (dataclasses.replace(ALONE, partition_error="role 'a' asks for 140 SMs"), "exclusive", "asks for 140 SMs"),
    (Surroundings(False), "cpu", "no NVIDIA GPU"),
])
def test_the_ladder_takes_the_highest_rung_and_says_why(around: Surroundings, mode: str, reason: str | None,
                                                       caplog: pytest.LogCaptureFixture) -> None:
    import re

    with caplog.at_level(logging.INFO):
        isolation = choose(around)
    assert isolation.mode == mode
    if reason is None:
        assert not isolation.refused
        assert not caplog.records
    else:
        assert any(re.search(reason, text) for _, text in isolation.refused), isolation.refused
        assert len(caplog.records) == 1
        expected = (mode, around.processes) == ("green", 1)
        assert caplog.records[0].levelno == (logging.INFO if expected else logging.WARNING)
        assert re.search(reason, caplog.text)


def test_the_daemon_is_looked_for_where_cuda_would(tmp_path) -> None:
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path), "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25"}
    assert find_mps(environment) == Mps(str(tmp_path), False, None, "25")
    (tmp_path / "control").touch()
    assert find_mps(environment) == Mps(str(tmp_path), True, os.getuid(), "25")


# Roles on a pretended device ---------------------------------------------------------------------------------------

class FakeStream:
    """Notes what torch.cuda.Stream would do."""

    current: ClassVar[list[int]] = []

    def __init__(self, handle: int) -> None:
        self.cuda_stream, self.waited, self.synchronized = handle, [], 0

    @contextmanager
    def make_current(self):
        FakeStream.current.append(self.cuda_stream)
        try:
            yield
        finally:
            FakeStream.current.pop()

    def wait_stream(self, other: "FakeStream") -> None:
        self.waited.append(other.cuda_stream)

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeSplit:
    def __init__(self, num_slots: int, slot: int, remainder: int, refuses: str | None = None) -> None:
        self.num_slots, self.slot, self.remainder, self._refuses = num_slots, slot, remainder, refuses
        self.made: list[tuple] = []
        self.closed = False

    def make(self, slots: tuple[int, ...], remainder: bool) -> Made:
        if self._refuses:
            raise RuntimeError(self._refuses)
        self.made.append((slots, remainder))
        return Made(100 + len(self.made), len(slots) * self.slot + (self.remainder if remainder else 0))

    def close(self) -> None:
        self.closed = True


class FakeDevice:
    def __init__(self, total: int = 132, driver: int = 13000, num_slots: int | None = None,
                 error: str | None = None, refuses: str | None = None, remainder: int | None = None) -> None:
        self._remainder = remainder
        self._refuses = refuses
        self.index, self.total_sms, self.capability, self.driver = 0, total, (9, 0), driver
        self._num_slots, self._error = num_slots, error
        self.splits: list[FakeSplit] = []

    def grain(self) -> Granularity:
        return HOPPER

    def split(self, slot: int) -> FakeSplit:
        if self._error:
            raise RuntimeError(self._error)
        count = self._num_slots or self.total_sms // slot
        left = self.total_sms - count * slot if self._remainder is None else self._remainder
        self.splits.append(FakeSplit(count, slot, left, self._refuses))
        return self.splits[-1]


NO_MPS = Mps("/none", False)


def create(roles: object, device: FakeDevice | None = None, **more: object) -> Partitions:
    return Partitions.create(roles, device=device or FakeDevice(), mps=NO_MPS, streams=FakeStream, **more)  # type: ignore[arg-type]


def test_each_role_gets_its_stream_and_its_sms() -> None:
    device = FakeDevice()
    with create({"rollout": 96, "reward": 36}, device) as partitions:
        assert partitions.isolation_mode == "green"
        with partitions.role("rollout") as rollout:
            assert FakeStream.current == [rollout.stream.cuda_stream]
            with partitions.role("reward") as reward, partitions.role("reward"):
                assert FakeStream.current[-1] == reward.stream.cuda_stream
            assert FakeStream.current == [rollout.stream.cuda_stream]
        assert (rollout.num_sms, reward.num_sms) == (96, 36)
        assert rollout.stream.cuda_stream != reward.stream.cuda_stream
        assert not FakeStream.current
    assert device.splits[0].closed
    assert len(device.splits) == 1


def test_an_exception_leaves_the_role() -> None:
    with create({"a": 64, "b": 64}) as partitions:
        with pytest.raises(ValueError, match="mine"), partitions.role("a"):
            raise ValueError("mine")
        assert not FakeStream.current
        partitions.resize("default")


def test_resizing_is_another_stream_made_at_the_start() -> None:
    device = FakeDevice()
    with create({"day": {"a": 96, "b": 32}, "night": {"a": 32, "b": 96}}, device) as partitions:
        made = len(device.splits[0].made)
        day = partitions.slot("a")
        partitions.resize("night")
        night = partitions.slot("a")
        assert (day.num_sms, night.num_sms) == (96, 32)
        assert len(device.splits[0].made) == made == 4
        assert day.stream.cuda_stream in night.stream.waited
        partitions.resize("day")
        assert partitions.slot("a") is day


def test_resizing_inside_a_role_is_refused() -> None:
    with create({"day": {"a": 96}, "night": {"a": 32}}) as partitions:
        with partitions.role("a"), pytest.raises(RuntimeError, match="while a is entered"):
            partitions.resize("night")
        with pytest.raises(KeyError, match="no layout 'noon'; there are day, night"):
            partitions.resize("noon")


def test_layouts_must_name_the_same_roles() -> None:
    with pytest.raises(PartitionError, match="same roles"):
        create({"day": {"a": 96}, "night": {"b": 32}})


@pytest.mark.parametrize(("device", "roles", "reason"), [
    (FakeDevice(driver=12000), {"a": 64, "b": 64}, "SM partitions need"),
    (FakeDevice(total=100), {"a": 64, "b": 64}, "together"),
    (FakeDevice(error="CUDA driver: CUDA_ERROR_NOT_SUPPORTED (801)"), {"a": 64, "b": 64}, "801"),
    (FakeDevice(num_slots=10, remainder=4), [Role("a", 64, floor=48), Role("b", 64, floor=48)],
     "but there are 10 slots and 4 SMs over"),
    (FakeDevice(refuses="cuda.core: CUDAError: INVALID_RESOURCE_CONFIGURATION"), {"a": 64, "b": 64}, "CUDAError"),
])
def test_what_the_gpu_cannot_do_is_the_next_rung_with_the_reason(device: FakeDevice, roles: dict, reason: str) -> None:
    with create(roles, device) as partitions:
        assert partitions.isolation_mode == "exclusive"
        assert reason in str(partitions)
        with partitions.role("a") as slot:
            assert slot.num_sms == device.total_sms
        assert slot.stream.synchronized  # the turn ended with the work
    assert all(split.closed for split in device.splits)


def test_the_plan_follows_the_drivers_split() -> None:
    device = FakeDevice(num_slots=15)
    with create({"day": {"a": 96, "b": 36}, "night": {"a": 36, "b": 96}}, device) as partitions:
        assert partitions.isolation_mode == "green"
        assert [partitions.slot(role).num_sms for role in "ab"] == [96, 36]
        partitions.resize("night")
        assert [partitions.slot(role).num_sms for role in "ab"] == [36, 96]
    assert device.splits[0].made[:2] == [(tuple(range(12)), False), ((12, 13, 14), True)]


def test_who_gets_less_than_asked_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with create({"a": 64, "b": 64}, FakeDevice(num_slots=10, remainder=4)) as partitions:
        assert sum(partitions.slot(role).num_sms for role in "ab") == 84
    assert "role 'a' of layout 'default' asked for 64 SMs and got 44: the driver made 10 slots of 8" in caplog.text


def test_exclusive_roles_take_turns() -> None:
    order: list[str] = []
    with create({"a": 64, "b": 64}, FakeDevice(driver=12000)) as partitions:
        inside = threading.Event()

        def other() -> None:
            inside.wait()
            with partitions.role("b"):
                order.append("b")

        thread = threading.Thread(target=other)
        thread.start()
        with partitions.role("a"):
            inside.set()
            thread.join(0.05)
            order.append("a")
        thread.join()
    assert order == ["a", "b"]


def test_a_turn_ends_with_the_work_also_after_an_error() -> None:
    with create({"a": 64, "b": 64}, FakeDevice(driver=12000)) as partitions:
        with pytest.raises(ValueError, match="mine"), partitions.role("a") as slot:
            raise ValueError("mine")
        assert slot.stream.synchronized


def test_closing_gives_the_streams_back_although_work_failed() -> None:
    device = FakeDevice()
    partitions = create({"a": 64}, device)

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    partitions.slot("a").stream.synchronize = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        partitions.close()
    assert device.splits[0].closed


class FakeCore:
    """cuda.core and cuda.bindings as device.py uses them, on a GPU of 132 SMs."""

    class Refused(Exception):
        """cuda.core's CUDAError derives from Exception."""

    def __init__(self, refuse_several: bool) -> None:
        self.refuse_several, self.contexts, self.most = refuse_several, 0, 16
        self.resources = SimpleNamespace(sm=SimpleNamespace(split=self.split))

    def split(self, options: SimpleNamespace) -> tuple[list, SimpleNamespace]:
        if len(options.count) > self.most:
            raise FakeCore.Refused("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")
        return [SimpleNamespace(sm_count=n) for n in options.count], SimpleNamespace(sm_count=132 - sum(options.count))

    def set_current(self) -> None: ...

    def create_context(self, options: SimpleNamespace) -> SimpleNamespace:
        if self.refuse_several and len(options.resources) > 1:
            raise FakeCore.Refused("CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION")
        self.contexts += 1
        total = sum(r.sm_count for r in options.resources)
        return SimpleNamespace(create_stream=lambda: SimpleNamespace(handle=70 + self.contexts, close=lambda: None),
                               resources=SimpleNamespace(sm=SimpleNamespace(sm_count=total)), close=self._closed)

    def _closed(self) -> None:
        self.contexts -= 1


def fake_driver() -> SimpleNamespace:
    def resource(count: int) -> SimpleNamespace:
        return SimpleNamespace(type=1, sm=SimpleNamespace(smCount=count))

    return SimpleNamespace(
        CUdevResourceType=SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1),
        cuDeviceGet=lambda index: (0, index), cuDeviceGetDevResource=lambda device, kind: (0, resource(132)),
        cuDevSmResourceSplitByCount=lambda count, whole, flags, least:
            (0, [resource(least) for _ in range(count)], count, resource(whole.sm.smCount - count * least)),
        cuDevResourceGenerateDesc=lambda resources, count: (0, sum(r.sm.smCount for r in resources)),
        cuGreenCtxCreate=lambda descriptor, device, flags: (0, descriptor),
        cuGreenCtxStreamCreate=lambda context, flags, priority: (0, 900 + context),
        cuGreenCtxGetDevResource=lambda context, kind: (0, resource(context)),
        cuStreamDestroy=lambda stream: (0,), cuGreenCtxDestroy=lambda context: (0,),
        cuDriverGetVersion=lambda: (0, 13000))


@pytest.fixture
def cuda_python(monkeypatch: pytest.MonkeyPatch):
    """Installs a pretended cuda-python and an H200; call it with whether cuda.core refuses several groups in one."""
    def install(refuse_several: bool) -> CudaDevice:
        core = FakeCore(refuse_several)
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=fake_driver()))
        monkeypatch.setitem(sys.modules, "cuda.core", SimpleNamespace(
            ContextOptions=SimpleNamespace, SMResourceOptions=SimpleNamespace, Device=lambda index: core))
        properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
        return CudaDevice()
    return install


@pytest.mark.parametrize(("refuse_several", "interface"), [(False, "cuda.core"), (True, "cuda.bindings")])
def test_bindings_take_over_where_cuda_core_refuses_to_combine_groups(cuda_python, refuse_several: bool,
                                                                      interface: str) -> None:
    device = cuda_python(refuse_several)
    assert (device.total_sms, device.capability, device.driver) == (132, (9, 0), 13000)
    split = device.split(8)
    assert split.interface == interface
    assert (split.num_slots, split.remainder) == (16, 4)
    assert split.make(tuple(range(12)), False).num_sms == 96
    assert split.make((12, 13, 14, 15), True).num_sms == 36
    with Partitions.create({"rollout": 96, "reward": 36}, device=device, mps=NO_MPS, streams=FakeStream) as partitions:
        assert partitions.isolation_mode == "green"
        assert partitions.slot("reward").num_sms == 36


def test_cuda_core_is_asked_for_fewer_groups_where_the_die_has_no_room(cuda_python) -> None:
    device = cuda_python(False)
    sys.modules["cuda.core"].Device(0).most = 15
    split = device.split(8)
    assert split.interface == "cuda.core"
    assert (split.num_slots, split.remainder) == (15, 12)
    with Partitions.create({"rollout": 96, "reward": 36}, device=device, mps=NO_MPS, streams=FakeStream) as partitions:
        assert [partitions.slot(role).num_sms for role in ("rollout", "reward")] == [96, 36]


def test_an_error_of_cuda_core_is_one_that_the_ladder_knows(cuda_python, monkeypatch: pytest.MonkeyPatch) -> None:
    split = cuda_python(False).split(8)
    assert split.interface == "cuda.core"
    monkeypatch.setattr(split._device, "refuse_several", True)
    with pytest.raises(RuntimeError, match=r"cuda\.core: Refused: CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION"):
        split.make((0, 1), False)


def test_a_gpu_that_cannot_be_reached_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA_ERROR_MPS_CONNECTION_FAILED (805)")

    monkeypatch.setattr("flowmill_kernels.partition.partitions.CudaDevice", fail)
    with Partitions.create({"a": 64}, mps=NO_MPS) as partitions:
        assert partitions.isolation_mode == "cpu"
        assert all("805" in reason for _, reason in partitions.isolation.refused)


def test_streams_are_made_for_the_devices_index(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple] = []

    def external(handle: int, device: int) -> FakeStream:
        made.append((handle, device))
        return FakeStream(handle)

    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    device = FakeDevice()
    device.index = 3
    with Partitions.create({"a": 64}, device=device, mps=NO_MPS):  # type: ignore[arg-type]
        assert made == [(101, 3)]


def test_without_a_gpu_roles_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with Partitions.create({"a": 64, "b": 0.5}, mps=NO_MPS) as partitions, partitions.role("a") as slot:
        assert (partitions.isolation_mode, slot.num_sms, slot.stream) == ("cpu", 1, None)
        assert partitions.replay("a", "work", lambda: 3) == 3


def test_unknown_roles_and_closed_partitions_are_refused() -> None:
    partitions = create({"a": 64})
    with pytest.raises(KeyError, match="no role 'b'; there are a"), partitions.role("b"):
        pass
    with partitions.role("a"), pytest.raises(RuntimeError, match="while a is entered"):
        partitions.close()
    partitions.close()
    partitions.close()
    with pytest.raises(RuntimeError, match="closed"):
        partitions.slot("a")


def test_the_guard_finds_work_on_nobodys_stream() -> None:
    with create({"a": 64, "b": 64}) as partitions:
        current = lambda: FakeStream.current[-1] if FakeStream.current else 0  # noqa: E731
        guard = StreamGuard(partitions, current=current, on_gpu=lambda _: True)
        x = torch.ones(3)
        with guard:
            with partitions.role("a"):
                y = x + x
            y.view(3, 1)
            with pytest.raises(StrayWorkError, match=r"test_partition\.py:\d+ runs on a stream of no role"):
                y.mul(2)
        assert len(guard.stray) == 1
        with StreamGuard(partitions, raises=False, current=current, on_gpu=lambda _: True) as collecting:
            y.mul(2)
        assert "aten.mul" in collecting.stray[0]
        with StreamGuard(partitions, current=current, on_gpu=lambda _: False):
            y.mul(2)


# On a GPU ----------------------------------------------------------------------------------------------------------

def sms_of(stream: torch.cuda.Stream) -> set[int]:
    """The SMs that ran blocks of a kernel on this stream."""
    import triton
    import triton.language as tl

    @triton.jit
    def who(out, BLOCK: tl.constexpr):
        x = tl.arange(0, BLOCK)
        spin = x * 0.0
        for _ in range(2000):
            spin = spin * 1.0001 + 1.0
        sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)
        tl.store(out + tl.program_id(0) * BLOCK + x, tl.where(spin > 0, sm, -1))

    who.fn.__globals__["tl"] = tl
    out = torch.full((2112, 32), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        who[(2112,)](out, 32, num_warps=1)
    torch.cuda.synchronize()
    return set(out.flatten().tolist())


@pytest.mark.gpu
def test_on_a_gpu_roles_run_on_disjoint_sms(gpu: torch.device) -> None:
    with Partitions.create({"day": {"a": 96, "b": 36}, "night": {"a": 36, "b": 96}}, mps=NO_MPS) as partitions:
        assert partitions.isolation_mode == "green", str(partitions)
        assert partitions.slot("a").num_sms >= 88  # 96 on every die of 132 SMs
        whole = sms_of(torch.cuda.Stream())
        for layout in ("day", "night"):
            partitions.resize(layout)
            seen = {}
            for role in ("a", "b"):
                slot = partitions.slot(role)
                seen[role] = sms_of(slot.stream)
                assert len(seen[role]) == slot.num_sms
            assert not seen["a"] & seen["b"]
            assert seen["a"] | seen["b"] <= whole


@pytest.mark.gpu
def test_on_a_gpu_a_graph_keeps_the_partition_and_products_keep_their_bits(gpu: torch.device) -> None:
    from flowmill_kernels import assert_bitwise_equal, gemm_nt

    x, w = torch.randn(3000, 512, device=gpu).bfloat16(), torch.randn(1536, 512, device=gpu).bfloat16()
    want = gemm_nt(x, w, num_sms=132)
    torch.cuda.synchronize()
    with Partitions.create({"day": {"a": 96, "b": 36}, "night": {"a": 36, "b": 96}}, mps=NO_MPS) as partitions:
        assert partitions.isolation_mode == "green", str(partitions)
        for layout in ("day", "night", "day"):
            partitions.resize(layout)
            sms = partitions.slot("a").num_sms
            y = partitions.replay("a", "product", lambda sms=sms: gemm_nt(x, w, num_sms=sms))
            torch.cuda.synchronize()
            assert_bitwise_equal(y, want)


@pytest.mark.gpu
def test_on_a_gpu_the_guard_sees_torchs_own_streams(gpu: torch.device) -> None:
    x = torch.ones(8, device=gpu)
    with Partitions.create({"a": 64, "b": 64}, mps=NO_MPS) as partitions, StreamGuard(partitions):
        assert partitions.isolation_mode == "green", str(partitions)
        with partitions.role("a"):
            x.mul(2)
        with pytest.raises(StrayWorkError, match="no role"):
            x.mul(2)
