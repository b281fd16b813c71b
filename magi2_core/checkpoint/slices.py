"""Which rows of which tensor a rank reads: routed experts are split by MoE head, everything else is whole on every rank.

Facts: spec preview.md 2.4 and 7.3. The expert tensors are head-major on dim 0 (head * num_experts + expert), so a rank's heads are
one block of rows. Pure functions of names, sizes and rank: no rank is asked for here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from magi2_core.config import MoEConfig
from magi2_core.errors import RequestError

SPLIT_MODULE = ".moe_mlp."
SPLIT_SUFFIXES = ("gate", "W_gate", "W_up", "W_down", "router.expert_bias", "router.expert_bias_ema")


@dataclass(frozen=True)
class Slice:
    """Entries `start` to `stop` of dim `dim` of a stored tensor; entries past the stored ones read as zero."""

    dim: int
    start: int
    stop: int

    def stored(self, total: int) -> tuple[int, int]:
        """The part of the range that a tensor with `total` entries holds."""
        return min(self.start, total), min(self.stop, total)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape that a rank keeps of a tensor of `shape`."""
        return (*shape[: self.dim], self.stop - self.start, *shape[self.dim + 1 :])


SliceRule = Callable[[str], Slice | None]
"""Tensor name -> its slice, None for a tensor that every rank reads whole."""


def is_expert_tensor(name: str) -> bool:
    """True for the tensors that expert parallelism splits."""
    _, found, rest = name.partition(SPLIT_MODULE)
    return bool(found) and rest in SPLIT_SUFFIXES


def head_range(num_heads: int, rank: int, size: int, *, padded: bool = False) -> range:
    """MoE heads of `rank` out of `size`: consecutive blocks of ceil(num_heads / size).

    The last ranks may own fewer or none; with `padded` every rank gets a full block that may run past `num_heads`.
    """
    if size < 1 or not 0 <= rank < size:
        raise RequestError(f"expert-parallel rank {rank} of {size}: expected 0 <= rank < size.")
    block = -(-num_heads // size)
    if padded:
        return range(rank * block, (rank + 1) * block)
    return range(min(rank * block, num_heads), min((rank + 1) * block, num_heads))


def expert_slices(moe: MoEConfig, rank: int, size: int, *, padded: bool = False) -> SliceRule | None:
    """Rule for `rank` of an expert-parallel group of `size`; None for a group of one (all is read whole).

    `padded` keeps rows of zeros for heads past the last, as the release does.
    """
    heads = head_range(moe.num_heads, rank, size, padded=padded)
    if size == 1:
        return None
    rows = Slice(0, heads.start * moe.num_experts, heads.stop * moe.num_experts)

    def rule(name: str) -> Slice | None:
        return rows if is_expert_tensor(name) else None

    return rule
