"""Context parallel by Ulysses: every rank holds consecutive tokens, and trades them for heads around each attention.

Between attentions nothing crosses ranks. One all-to-all carries q, k and v together (joined on the head axis), a second brings the
result back after the sink correction. Token counts may differ by one: sizes are explicit and nothing is padded or computed twice.
Facts: spec preview.md 7.2, components.md 1. Legend: S tokens here, T of all ranks, H heads, Dh head width, P ranks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from magi2_core.config import RefinerConfig
from magi2_core.model.packing import PackedInputs
from magi2_core.model.refiner import AttentionCore as RefinerCore
from magi2_core.model.refiner import RefinerTransformer
from magi2_core.model.refiner_packing import RefinerSequence
from magi2_kernels.block_attention.layout import BlockLayout
from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.sink_attention import gate_heads, sink_attention

from .collectives import all_to_all, broadcast, gather_rows
from .groups import Group, Groups, split_evenly


def tokens_to_heads(parts: Sequence[Tensor], group: Group, counts: Sequence[int]) -> list[Tensor]:
    """From all heads of my tokens to my heads of all tokens, in one exchange.

    Args:
        parts: [S, H_i, Dh] each, one dtype; P divides every H_i.
        group: the context group.
        counts: tokens of every rank, S = counts[mine].

    Returns:
        [T, H_i / P, Dh] each, tokens in rank order (views of one buffer).
    """
    size, rows, width = group.size, parts[0].shape[0], parts[0].shape[2]
    heads = [part.shape[1] // size for part in parts]
    # [P, S, sum h, Dh], written in place: joining first would cost one more pass over q, k and v.
    sent = parts[0].new_empty(size, rows, sum(heads), width)
    for part, target in zip(parts, sent.split(heads, dim=2), strict=True):
        target.copy_(part.unflatten(1, (size, -1)).transpose(0, 1))
    row = sum(heads) * width
    found = all_to_all(sent.view(-1), group, [rows * row] * size, [count * row for count in counts])
    return list(found.view(-1, sum(heads), width).split(heads, dim=1))


def heads_to_tokens(x: Tensor, group: Group, counts: Sequence[int]) -> Tensor:
    """The way back: my heads of all tokens [T, h, Dh] to all heads of my tokens [S, P * h, Dh], heads in rank order."""
    _, heads, width = x.shape
    rows = counts[group.place]
    row = heads * width
    found = all_to_all(x.contiguous().view(-1), group, [count * row for count in counts], [rows * row] * group.size)
    return found.view(group.size, rows, heads, width).transpose(0, 1).reshape(rows, group.size * heads, width)


class TokenShare:
    """The preview transformer's `split`: this rank's consecutive rows of the packed sequence; velocities of all rows come back."""

    multiple = 1

    def __init__(self, group: Group) -> None:
        self.group = group
        self.counts: tuple[int, ...] = ()

    def take(self, inputs: PackedInputs) -> PackedInputs:
        """My rows. Remembers how many every rank has until the next forward."""
        self.counts = split_evenly(inputs.total, self.group.size)
        start = sum(self.counts[: self.group.place])
        return inputs.slice(start, start + self.counts[self.group.place])

    def gather(self, velocities: Tensor) -> Tensor:
        """[S, columns] to [T, columns]."""
        return gather_rows(velocities, self.group, self.counts)


class UlyssesAttention:
    """The preview transformer's attention core on a context group: attention and sinks on this rank's heads and every token, the
    gate on this rank's tokens again."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens: CuSeqlens, gate: Tensor) -> Tensor:
        counts = split_evenly(cu_seqlens.total, self.group.size)
        heads = q.shape[1] // self.group.size
        first = heads * self.group.place
        q, k, v = tokens_to_heads((q, k, v), self.group, counts)
        out = sink_attention(q, k, v, sinks[:, first : first + heads].contiguous(), cu_seqlens)
        return gate_heads(heads_to_tokens(out, self.group, counts), gate)


class UlyssesBlockAttention:
    """The refiner's attention core on its group: grouped queries, tokens in block order, layouts of the whole sequence."""

    def __init__(self, core: RefinerCore, group: Group) -> None:
        self.core, self.group = core, group

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout) -> Tensor:
        counts = split_evenly(layout.num_tokens, self.group.size)
        q, k, v = tokens_to_heads((q, k, v), self.group, counts)
        return heads_to_tokens(self.core(q, k, v, layout), self.group, counts)


class SharedRefiner:
    """The refiner as `RefinerVelocity` calls it, on the ranks that share it; the others wait for its rows.

    Every rank calls with the whole sequence and gets the velocity of all rows, so the loop around it is the same everywhere.
    """

    def __init__(self, model: RefinerTransformer | None, config: RefinerConfig, groups: Groups) -> None:
        assert (model is not None) == groups.refiner.is_member
        self.model, self.config, self.groups = model, config, groups

    def __call__(self, sequence: RefinerSequence) -> Tensor:
        """Velocity rows fp32 [T, out channels]."""
        group, total = self.groups.refiner, sequence.stop - sequence.start
        if self.model is not None:
            counts = split_evenly(total, group.size)
            start = sum(counts[: group.place])
            rows = gather_rows(self.model(sequence.slice(start, start + counts[group.place])), group, counts)
        else:
            rows = torch.empty(total, self.config.out_channels, device=sequence.coords.device)
        return rows if group.size == self.groups.world.size else broadcast(rows, self.groups.world)
