"""Which role gets which SMs: fractions and counts in, disjoint slots out. Pure Python, no device.

A GPU is split once into slots of one size, the smallest that its driver takes; a role owns whole slots, so every plan
of one GPU is a choice among the same slots and any two roles of a plan are disjoint. What the slots leave over goes
whole to one role.
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


def plan(roles: Mapping[str, int | float] | Sequence[Role], total: int, grain: Granularity) -> Plan:
    """Give every role whole slots: what it asks for rounded down, then slots still wanted to the largest shortfalls.

    Args:
        roles: Requests; fractions may sum to 1, counts to `total`.
        total: SMs of the GPU.
        grain: Its granularity.

    Returns:
        Grants in the order of the roles; a role's slots are neighbours. A count is never exceeded, except that no role
        gets less than one slot or its floor. The split's left-over goes to the role that lacks it most.

    Raises:
        PartitionError: more asked for than there is, or a floor that cannot be kept.
    """
    given, slot = as_roles(roles), grain.slot
    num_slots = total // slot
    asked = {role.name: role.asked(total) for role in given}
    for role in given:
        if asked[role.name] > total or role.floor > total:
            raise PartitionError(f"role {role.name!r} asks for {max(asked[role.name], role.floor):g} SMs, but the GPU "
                                 f"has {total}; ask for less, or for a fraction")
    if sum(asked.values()) > total * (1 + 1e-9):
        listed = ", ".join(f"{name} {sms:g}" for name, sms in asked.items())
        raise PartitionError(f"roles ask for {sum(asked.values()):g} SMs together ({listed}), but the GPU has {total}; "
                             "lower one")
    least = {role.name: max(1, -(-role.floor // slot)) for role in given}
    slots = {role.name: max(int(asked[role.name] + 1e-6) // slot, least[role.name]) for role in given}
    while sum(slots.values()) > num_slots:  # floors pushed it over: who is furthest above its ask gives
        can = [n for n in slots if slots[n] > least[n]]
        if not can:
            raise PartitionError(f"the floors need {sum(least.values()) * slot} SMs in slots of {slot}, but there are "
                                 f"{num_slots} slots; lower a floor or drop a role")
        slots[max(can, key=lambda n: (slots[n] * slot - asked[n], slots[n]))] -= 1
    spare = num_slots - sum(slots.values())
    left_over = total - num_slots * slot
    short = {n: asked[n] - slots[n] * slot for n in slots}
    # The left-over fits a shortfall better than a slot where both would do; names keep ties in the roles' order.
    taker = None
    if left_over:
        fits = [n for n in short if short[n] >= left_over - 1e-6]
        exact = [n for n in fits if short[n] < slot - 1e-6]
        candidates = exact or fits
        taker = max(candidates, key=lambda n: short[n]) if candidates else None
        if taker is not None:
            short[taker] -= left_over
    while spare:
        most = max(short, key=lambda n: short[n])
        if short[most] < slot - 1e-6:
            break
        slots[most] += 1
        short[most] -= slot
        spare -= 1
    if left_over and taker is None:  # a fraction is not exact, so its role may go over by less than the left-over
        fractions = [role.name for role in given if isinstance(role.share, float) and short[role.name] > 1e-6]
        taker = max(fractions, key=lambda n: short[n]) if fractions else None
    grants, at = [], 0
    for role in given:
        own = tuple(range(at, at + slots[role.name]))
        at += len(own)
        extra = left_over if role.name == taker else 0
        grants.append(Grant(role.name, asked[role.name], len(own) * slot + extra, own, bool(extra)))
    return Plan(total, slot, tuple(grants), total - sum(g.num_sms for g in grants))
