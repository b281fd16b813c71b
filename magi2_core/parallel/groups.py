"""Which rank does what: the layout of a fleet, its choice from the device count, and the process groups of its axes.

World = guidance branches x context. Ranks of one context group are consecutive and share the tokens (Ulysses); expert groups
are consecutive ranks inside a context group and share the MoE heads; a cfg group joins the ranks that hold the same place in both
branches. The refiner has head counts of its own and runs on the first ranks. `Groups.local()` is one rank without any process
group: every parallel function runs, and is tested, with it. Rules: spec preview.md 7.1-7.4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from magi2_core.config import PreviewConfig, RefinerConfig
from magi2_core.device import parse_layout, process_group_backend, set_device
from magi2_core.errors import RequestError

if TYPE_CHECKING:
    from torch.distributed import Store

TIMEOUT_SECONDS = 600.0
"""A collective that takes longer has lost a rank: the longest step of the release takes seconds, the longest wait is one decode."""


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(candidate for candidate in range(1, number + 1) if number % candidate == 0)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """`total` rows over `parts` ranks in order; the first `total % parts` ranks take one more."""
    small, extra = divmod(total, parts)
    return tuple(small + (index < extra) for index in range(parts))


def refiner_ranks(refiner: RefinerConfig, world: int) -> int:
    """How many ranks share the refiner: the largest number up to `world` that divides its query and its key/value heads."""
    return max(size for size in divisors(math.gcd(refiner.num_heads, refiner.num_query_groups)) if size <= world)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """A layout: `world` = `context` x `cfg` ranks, `expert` ranks of a context group share the MoE heads, the first `refiner` ranks
    run the refiner. `reason` says why it was chosen."""

    world: int = 1
    context: int = 1
    expert: int = 1
    cfg: int = 1
    refiner: int = 1
    reason: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """As `plan_layout` reads it: cp8ep4, cp4cfg2ep4."""
        return f"cp{self.context}" + (f"cfg{self.cfg}" if self.cfg > 1 else "") + (f"ep{self.expert}" if self.expert > 1 else "")

    def validate(self, preview: PreviewConfig, refiner: RefinerConfig | None = None) -> None:
        """Raises RequestError, naming the value and the allowed ones, when the models cannot be split this way."""
        heads, moe_heads = preview.num_heads, preview.moe.num_heads
        allowed = divisors(heads)
        if self.context not in allowed:
            raise RequestError(f"context parallel {self.context}: must divide the {heads} attention heads. Use one of {_listed(allowed)}.")
        allowed = divisors(math.gcd(self.context, moe_heads))
        if self.expert not in allowed:
            raise RequestError(
                f"expert parallel {self.expert}: must divide the context group of {self.context} ranks and the {moe_heads} MoE heads. "
                f"Use one of {_listed(allowed)}."
            )
        if self.cfg not in (1, 2):
            raise RequestError(f"CFG parallel {self.cfg}: there are two guidance branches. Use 1 or 2.")
        if self.world != self.context * self.cfg:
            raise RequestError(
                f"layout {self.name} has {self.context} x {self.cfg} = {self.context * self.cfg} ranks, the fleet has {self.world}. "
                "Make the two equal."
            )
        if refiner is not None:
            allowed = tuple(n for n in divisors(math.gcd(refiner.num_heads, refiner.num_query_groups)) if n <= self.world)
            if self.refiner not in allowed:
                raise RequestError(
                    f"refiner ranks {self.refiner}: must divide its {refiner.num_heads} query and {refiner.num_query_groups} key/value "
                    f"heads and be at most {self.world}. Use one of {_listed(allowed)}."
                )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def plan_layout(device_count: int, preview: PreviewConfig, *, choice: str = "auto", refiner: RefinerConfig | None = None) -> ParallelConfig:
    """The layout for so many devices, validated.

    Args:
        device_count: devices there are; a layout may use fewer, and says so.
        preview: head counts of the preview transformer.
        choice: auto, or a name as `ParallelConfig.name`; without an ep part the expert degree is the automatic one.
        refiner: its configuration; without it the refiner runs on one rank.

    Auto takes the most devices that the attention heads can be split over, preferring one group to CFG parallel, and the largest
    expert degree that divides both the context group and the MoE heads (12 heads on 8 ranks: two expert groups of 4, so that no rank
    idles or computes padding). Raises RequestError.
    """
    if device_count < 1:
        raise RequestError(f"device count {device_count}: at least one device is needed.")
    if choice == "auto":
        config = _automatic(device_count, preview)
    else:
        config = _chosen(choice, device_count, preview)
    if refiner is not None:
        config = replace(config, refiner=refiner_ranks(refiner, config.world))
    config.validate(preview, refiner)
    return config


def _expert_degree(context: int, preview: PreviewConfig) -> int:
    return math.gcd(context, preview.moe.num_heads)


def _automatic(device_count: int, preview: PreviewConfig) -> ParallelConfig:
    heads, moe_heads = preview.num_heads, preview.moe.num_heads
    options = [(max(n for n in divisors(heads) if n <= device_count // cfg), cfg) for cfg in (1, 2) if device_count >= cfg]
    context, cfg = max(options, key=lambda option: (option[0] * option[1], -option[1]))
    world, expert = context * cfg, _expert_degree(context, preview)
    config = ParallelConfig(world=world, context=context, expert=expert, cfg=cfg)
    used = f"{world} of {device_count} devices" if world < device_count else f"{world} device{'s' if world > 1 else ''}"
    why = f"{config.name} on {used}: {heads} attention heads over {context}"
    why += f", {moe_heads} MoE heads over {expert}"
    if cfg > 1:
        why += ", each guidance branch on a group of its own"
    if world < device_count:
        why += f"; {heads} heads cannot be split evenly over more, {device_count - world} stay unused"
    return replace(config, reason=why + ".")


def _chosen(choice: str, device_count: int, preview: PreviewConfig) -> ParallelConfig:
    given = parse_layout(choice)
    context, cfg = given["cp"], given.get("cfg", 1)
    config = ParallelConfig(
        world=context * cfg,
        context=context,
        expert=given.get("ep", _expert_degree(context, preview)),
        cfg=cfg,
        reason=f"layout {choice} was asked for.",
    )
    config.validate(preview)
    if config.world > device_count:
        fitting = sorted({n * c for c in (1, 2) for n in divisors(preview.num_heads) if n * c <= device_count})
        raise RequestError(
            f"layout {choice} needs {config.world} devices, there are {device_count}. Use a layout of {_listed(fitting)} ranks."
        )
    return config


@dataclass(eq=False)
class Traffic:
    """What the collectives of a rank have moved since it was made: calls, and bytes handed to other ranks."""

    calls: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """One axis as seen from one rank: the world ranks in it, this rank's place (None: not in it), and the process group."""

    ranks: tuple[int, ...] = (0,)
    index: int | None = 0
    handle: Any = None
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return len(self.ranks)

    @property
    def is_member(self) -> bool:
        """Whether this rank is in it."""
        return self.index is not None

    @property
    def place(self) -> int:
        """This rank's index, for code that only members reach."""
        assert self.index is not None, f"this rank is not in the group of ranks {self.ranks}"
        return self.index

    @property
    def is_real(self) -> bool:
        """Whether there is a process group; without one its collectives hand back what they were given."""
        return self.handle is not None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the group's first."""
        return self.index == 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The layout and the axes of this rank. The default is a single rank without process groups."""

    config: ParallelConfig = ParallelConfig()
    rank: int = 0
    world: Group = field(default_factory=Group)
    context: Group = field(default_factory=Group)
    expert: Group = field(default_factory=Group)
    cfg: Group = field(default_factory=Group)
    refiner: Group = field(default_factory=Group)
    traffic: Traffic = field(default_factory=Traffic)

    @classmethod
    def local(cls) -> "Groups":
        """One rank: nothing is split, nothing is sent."""
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that encodes, decides about stopping, and reports."""
        return self.rank == 0

    @property
    def branch(self) -> str:
        """Guidance branches this rank evaluates, as `PreviewVelocity` calls them."""
        return ("cond", "uncond")[self.cfg.place] if self.config.cfg == 2 else "both"

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        *,
        rank: int,
        device: torch.device | str = "cpu",
        init_method: str | None = None,
        store: "Store | None" = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> "Groups":
        """Joins the fleet: every rank calls this once a layout, in the same order, and before RPC is up.

        Args:
            config: the same on every rank, validated before.
            rank: 0 to world - 1.
            device: of this rank; it decides the collective library (small control messages go over gloo on any device).
            init_method: rendezvous of torch.distributed, as tcp://127.0.0.1:29500 or file:///path; used when no process group exists.
            store: a store in place of `init_method`.
            timeout_seconds: after which a collective gives up.

        A world of one needs no rendezvous; given one, it makes a process group all the same.
        """
        device = torch.device(device)
        if not 0 <= rank < config.world:
            raise RequestError(f"rank {rank}: a layout of {config.world} ranks has ranks 0 to {config.world - 1}.")
        if config.world == 1 and init_method is None and store is None:
            return cls(config=config)
        import torch.distributed as dist

        timeout, backend = timedelta(seconds=timeout_seconds), process_group_backend(device)
        set_device(device)
        if not dist.is_initialized():
            dist.init_process_group(backend, init_method=init_method, store=store, rank=rank, world_size=config.world, timeout=timeout)
        if dist.get_world_size() != config.world:
            raise RequestError(f"layout {config.name} has {config.world} ranks, the process group has {dist.get_world_size()}.")
        traffic = Traffic()

        def axis(*members: Sequence[int]) -> Group:
            """The group this rank is in, of several disjoint ones that together form an axis; all ranks create all of them."""
            mine = Group(ranks=tuple(members[0]), index=None, traffic=traffic)
            for ranks in members:
                is_real = len(ranks) > 1 or config.world == 1  # a world of one with a rendezvous runs the library on itself
                handle = dist.new_group(list(ranks), timeout=timeout, backend=backend) if is_real else None
                if rank in ranks:
                    mine = Group(ranks=tuple(ranks), index=list(ranks).index(rank), handle=handle, traffic=traffic)
            return mine

        world, context, expert = config.world, config.context, config.expert
        return cls(
            config=config,
            rank=rank,
            world=Group(ranks=tuple(range(world)), index=rank, handle=dist.group.WORLD, traffic=traffic),
            context=axis(*(range(start, start + context) for start in range(0, world, context))),
            expert=axis(*(range(start, start + expert) for start in range(0, world, expert))),
            cfg=axis(*(range(place, world, context) for place in range(context))),
            refiner=axis(range(config.refiner)),
            traffic=traffic,
        )

    @property
    def axes(self) -> tuple[Group, ...]:
        """Every axis. The seams hold these objects, whatever process group is behind them."""
        return self.world, self.context, self.expert, self.cfg, self.refiner

    def adopt(self, fresh: "Groups") -> None:
        """Puts the process groups of `fresh`, which has the same layout, behind the axes of this one."""
        for old, new in zip(self.axes, fresh.axes, strict=True):
            assert old.ranks == new.ranks
            object.__setattr__(old, "handle", new.handle)

    def close(self) -> None:
        """Leaves the fleet: the process groups of every layout end, their sockets close. Does nothing on one rank, or when it was done."""
        may_be_joined = self.config.world > 1 or self.world.is_real  # a join that failed half-way has left no handle
        for group in self.axes:
            object.__setattr__(group, "handle", None)
        if not may_be_joined:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
