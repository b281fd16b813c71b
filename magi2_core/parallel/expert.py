"""Expert parallel over MoE heads: a rank holds all experts of some heads, and gets the channels of those heads from its group's tokens.

A head's experts see that head's channels only, so heads are the natural unit: routing runs after the exchange, on the heads that are
here, and no routing table crosses ranks. The degree is its own: 12 heads on 8 context ranks are two groups of 4, each with all heads,
instead of one of 8 padded to 16. Facts: spec preview.md 7.3. Legend: S tokens here, T of the group, G MoE heads, d head width, P ranks.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from .collectives import all_to_all
from .context import TokenShare
from .groups import Group, Groups

HeadCounts = Callable[[], Sequence[int]]
"""Tokens of every rank of a group, for the forward under way."""


class HeadDispatcher:
    """The dispatcher of `MultiHeadMoE` on an expert group.

    Args:
        group: the expert group; its size divides G.
        counts: tokens of each of its ranks in the forward under way.
    """

    def __init__(self, group: Group, counts: HeadCounts) -> None:
        self.group, self.counts = group, counts

    def dispatch(self, x: Tensor) -> Tensor:
        """[S, G, d] to [T, G / P, d], tokens in rank order."""
        rows, heads, width = x.shape
        size = self.group.size
        row = heads // size * width
        sent = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()  # [P, S, G / P, d]
        found = all_to_all(sent.view(-1), self.group, [rows * row] * size, [count * row for count in self.counts()])
        return found.view(-1, heads // size, width)

    def combine(self, x: Tensor) -> Tensor:
        """[T, G / P, d] to [S, G, d]."""
        _, heads, width = x.shape
        counts, size = self.counts(), self.group.size
        rows, row = counts[self.group.place], heads * width
        found = all_to_all(x.contiguous().view(-1), self.group, [count * row for count in counts], [rows * row] * size)
        return found.view(size, rows, heads, width).transpose(0, 1).reshape(rows, size * heads, width)


def expert_counts(groups: Groups, share: TokenShare) -> HeadCounts:
    """Tokens of the ranks of this rank's expert group: consecutive ones of the context group."""
    first = groups.context.ranks.index(groups.expert.ranks[0])
    return lambda: share.counts[first : first + groups.expert.size]
