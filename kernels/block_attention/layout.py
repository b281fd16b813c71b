"""Who sees whom in block attention, as lists of key blocks: no S x S mask exists anywhere.

The sequence is N query blocks of consecutive tokens (ragged sizes allowed), then a tail. A block sees the blocks in its
list and the whole tail; the tail sees every token. Lists are in compressed-row form; facts: spec components.md 1.6.
Legend: S tokens, N blocks, P block pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class BlockLayout:
    """Block borders and neighbour lists; int32 tensors on one device.

    block_offsets: [N + 1], first token of every block; the last entry is the first token of the tail.
    neighbour_offsets: [N + 1], where the list of each block starts in `neighbours`.
    neighbours: [P], ids of the key blocks, ascending within a list and never twice.
    num_tokens: S, blocks and tail together.
    max_block: the largest block in tokens (0 without blocks).
    """

    block_offsets: Tensor
    neighbour_offsets: Tensor
    neighbours: Tensor
    num_tokens: int
    max_block: int

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.block_offsets.numel() - 1

    def to(self, device: torch.device | str) -> "BlockLayout":
        """The same layout with its tensors on `device`."""
        if self.block_offsets.device == torch.device(device):
            return self
        return BlockLayout(
            block_offsets=self.block_offsets.to(device),
            neighbour_offsets=self.neighbour_offsets.to(device),
            neighbours=self.neighbours.to(device),
            num_tokens=self.num_tokens,
            max_block=self.max_block,
        )

    @classmethod
    def from_pairs(cls, block_sizes: Tensor, query_blocks: Tensor, key_blocks: Tensor, tail: int) -> "BlockLayout":
        """Builds the lists from block pairs in any order.

        Args: block_sizes int [N] in tokens; query_blocks, key_blocks int [P]; tail: tokens after the last block.
        """
        count = block_sizes.numel()
        zero = block_sizes.new_zeros(1, dtype=torch.int64)
        offsets = torch.cat([zero, block_sizes.long().cumsum(0)])
        order = torch.argsort(query_blocks.long() * max(count, 1) + key_blocks.long())
        lists = torch.cat([zero, torch.bincount(query_blocks.long(), minlength=count).cumsum(0)])
        return cls(
            block_offsets=offsets.to(torch.int32),
            neighbour_offsets=lists.to(torch.int32),
            neighbours=key_blocks[order].to(torch.int32),
            num_tokens=int(offsets[-1]) + tail,
            max_block=int(block_sizes.max()) if count else 0,
        )

    @classmethod
    def dense(cls, num_tokens: int) -> "BlockLayout":
        """Every token sees every token: the whole sequence is tail."""
        empty = torch.zeros(0, dtype=torch.int64)
        return cls.from_pairs(empty, empty, empty, num_tokens)
