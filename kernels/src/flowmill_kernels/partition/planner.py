"""Which role gets which SMs: fractions and counts in, disjoint slots out. Pure Python, no device.

A GPU is split once into slots of one size, the smallest that its driver takes; a role owns whole slots, so every plan
of one GPU is a choice among the same slots and any two roles of a plan are disjoint. What the slots leave over goes
whole to one role. How many slots a driver makes of a GPU is a matter of the single die: it is asked, not computed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class PartitionError(ValueError):
    """A request that a GPU cannot meet; the message says role, asked, available and what to do."""


@dataclass(frozen=True)
class Granularity:
    """Sizes that a driver takes for an SM partition."""

    minimum: int
    alignment: int

    @property
    def slot(self) -> int:
        """The smallest partition of which several make a larger one."""
        return -(-self.minimum // self.alignment) * self.alignment


# CUDA driver API, group Green Contexts: "guideline for each compute architecture". What a driver makes
# of it is checked in device.py.
_BY_MAJOR = {6: Granularity(1, 1), 7: Granularity(2, 2), 8: Granularity(4, 2)}


def granularity(capability: tuple[int, int]) -> Granularity:
    """Published minimum and alignment for a compute capability, e.g. (9, 0): 8 SMs in steps of 8.

    Raises:
        PartitionError: below 6.0, which has no SM partitions.
    """
    if capability[0] < 6:
        raise PartitionError(f"compute capability {capability[0]}.{capability[1]} has no SM partitions; 6.0 or newer "
                             "is needed")
    return _BY_MAJOR.get(capability[0], Granularity(8, 8))


@dataclass(frozen=True)
class Role:
    """What a role asks for."""

    name: str
    share: int | float
    """An int counts SMs; a float between 0 and 1 is a fraction of the GPU."""
    floor: int = 0
    """SMs below which the role is of no use."""

    def __post_init__(self) -> None:
        if not self.name:
            raise PartitionError("a role needs a name")
        if isinstance(self.share, bool) or not isinstance(self.share, int | float):
            raise PartitionError(f"role {self.name!r}: share must be an SM count (int) or a fraction (float), got "
                                 f"{self.share!r}")
        if isinstance(self.share, float) and not 0.0 < self.share <= 1.0:
            raise PartitionError(f"role {self.name!r}: a fraction must lie in (0, 1], got {self.share}; write SM "
                                 "counts as ints")
        if self.share <= 0 or self.floor < 0:
            raise PartitionError(f"role {self.name!r}: asks for {self.share} SMs with a floor of {self.floor}; both "
                                 "must be positive")

    def asked(self, total: int) -> float:
        """SMs, of `total`."""
        return self.share * total if isinstance(self.share, float) else float(self.share)


@dataclass(frozen=True)
class Grant:
    """What a role got."""

    role: str
    asked: float
    """SMs; a fraction's need not be whole."""
    num_sms: int
    slots: tuple[int, ...]
    """Numbers of its slots."""
    remainder: bool
    """Whether it also has the SMs that the slots left over."""


@dataclass(frozen=True)
class Plan:
    """Disjoint partitions of one GPU."""

    total: int
    slot: int
    grants: tuple[Grant, ...]
    spare: int
    """SMs that belong to nobody."""

    def __getitem__(self, role: str) -> Grant:
        for grant in self.grants:
            if grant.role == role:
                return grant
        raise KeyError(f"no role {role!r}; there are {', '.join(g.role for g in self.grants)}")

    def __str__(self) -> str:
        parts = [f"{g.role} {g.num_sms} SMs (asked {g.asked:g})" for g in self.grants]
        return f"{self.total} SMs in slots of {self.slot}: {', '.join(parts)}; {self.spare} spare"


def as_roles(roles: Mapping[str, int | float] | Sequence[Role]) -> tuple[Role, ...]:
    """Roles from ``{"rollout": 96, "reward": 0.25}`` or as they are."""
    try:
        listed = [Role(name, share) for name, share in roles.items()] if isinstance(roles, Mapping) else roles
        given = tuple(listed)
    except TypeError:
        given = (None,)  # type: ignore[assignment]
    if not all(isinstance(role, Role) for role in given):
        raise PartitionError(f"roles must be a mapping of names to shares or a sequence of Role, got {roles!r}")
    if (whole := sum(role.share for role in given if isinstance(role.share, float))) > 1 + 1e-9:
        raise PartitionError(f"the roles' fractions are {whole:g} of a GPU together; at most 1 can be had")
    names = [role.name for role in given]
    if not given or len(set(names)) != len(names):
        raise PartitionError(f"roles must be at least one and have different names, got {names}")
    return given


def plan(roles: Mapping[str, int | float] | Sequence[Role], total: int, grain: Granularity, *,
         num_slots: int | None = None, remainder: int | None = None) -> Plan:
    """Give every role whole slots, and what the slots left over to at most one of them.

    Args:
        roles: Requests; fractions may sum to 1, counts to `total`.
        total: SMs of the GPU.
        grain: Its granularity.
        num_slots, remainder: What the driver's split made; None: as many slots as `total` holds. Two GPUs of one model
            can differ: of 132 SMs, 16 slots and 4 SMs over were seen, and 15 and 12.

    Returns:
        Grants in the order of the roles; a role's slots are neighbours. Of all ways to give the remainder the one with
        the smallest shortfall of any role, then of all together. A count is never exceeded, except that no role gets
        less than one slot or its floor; a fraction may be, by less than the remainder.

    Raises:
        PartitionError: more asked for than there is, or a floor that cannot be kept.
    """
    given, slot = as_roles(roles), grain.slot
    num_slots = total // slot if num_slots is None else num_slots
    remainder = total - num_slots * slot if remainder is None else remainder
    asked = {role.name: role.asked(total) for role in given}
    for role in given:
        if asked[role.name] > total or role.floor > total:
            raise PartitionError(f"role {role.name!r} asks for {max(asked[role.name], role.floor):g} SMs, but the GPU "
                                 f"has {total}; ask for less, or for a fraction")
    if sum(asked.values()) > total * (1 + 1e-9):
        listed = ", ".join(f"{name} {sms:g}" for name, sms in asked.items())
        raise PartitionError(f"roles ask for {sum(asked.values()):g} SMs together ({listed}), but the GPU has {total}; "
                             "lower one")
    best: tuple[tuple[float, float], Role | None, dict[str, int]] | None = None
    for taker in (None, *(given if remainder else ())):
        for slots in _shares(given, asked, slot, num_slots, remainder, taker):
            short = [max(0.0, asked[r.name] - slots[r.name] * slot - (remainder if r is taker else 0)) for r in given]
            score = round(max(short), 6), round(sum(short), 6)
            if best is None or score < best[0]:
                best = score, taker, slots
    if best is None:
        least = sum(_least(role, slot, 0) for role in given)
        raise PartitionError(f"the floors need {least * slot} SMs in slots of {slot}, but there are {num_slots} slots "
                             f"and {remainder} SMs over; lower a floor or drop a role")
    _, taker, slots = best
    grants, at = [], 0
    for role in given:
        own = tuple(range(at, at + slots[role.name]))
        at += len(own)
        extra = remainder if role is taker else 0
        grants.append(Grant(role.name, asked[role.name], len(own) * slot + extra, own, bool(extra)))
    return Plan(total, slot, tuple(grants), total - sum(g.num_sms for g in grants))


def _least(role: Role, slot: int, extra: int) -> int:
    """Slots that a role needs beside `extra` SMs: its floor, and one slot unless those are one."""
    return max(0 if extra >= slot else 1, -(-(role.floor - extra) // slot))


def _shares(given: Sequence[Role], asked: Mapping[str, float], slot: int, num_slots: int, remainder: int,
            taker: Role | None) -> list[dict[str, int]]:
    """Slots a role where `taker` has the remainder: one way, or two, or none."""
    extra = {role.name: remainder if role is taker else 0 for role in given}
    least = {role.name: _least(role, slot, extra[role.name]) for role in given}
    down = {name: max(int(max(0.0, asked[name] - extra[name]) + 1e-6) // slot, least[name]) for name in asked}
    starts = [down]
    if taker is not None and isinstance(taker.share, float):  # not exact: slots for the whole ask, then what is over
        name = taker.name
        starts.append(down | {name: max(int(asked[name] + 1e-6) // slot, least[name])})
    found = []
    for slots in starts:
        def over(name: str, slots: dict[str, int] = slots) -> float:
            return slots[name] * slot + extra[name] - asked[name]

        while sum(slots.values()) > num_slots:  # who is furthest above its ask, or least below, gives
            can = [name for name in slots if slots[name] > least[name]]
            if not can:
                break
            slots[max(can, key=lambda name: (over(name), slots[name]))] -= 1
        spare = num_slots - sum(slots.values())
        while spare > 0:
            most = min(slots, key=over)
            if -over(most) < slot - 1e-6:
                break
            slots[most] += 1
            spare -= 1
        fits = True
        if taker is not None:
            exact = over(taker.name) < 1e-6 or (taker.floor > 0 and slots[taker.name] == least[taker.name])
            fraction = isinstance(taker.share, float) and slots[taker.name] * slot < asked[taker.name] - 1e-6
            fits = exact or fraction
        if spare >= 0 and fits:
            found.append(slots)
    return found
