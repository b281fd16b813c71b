"""Who sees whom in block attention, as lists of key blocks: no S x S mask exists anywhere.

The sequence is N query blocks of consecutive tokens (ragged sizes allowed), then a tail. A block sees the blocks in its
list and the whole tail; the tail sees every token. Lists are in compressed-row form; facts: spec components.md 1.6.
Legend: S tokens, N blocks, P block pairs.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockGroup:
    """Blocks with equally many queries and keys; int64 tensors on one device.

    first_query: [B], the first token of every block. queries, keys: tokens a block has, and sees.
    range_starts, range_lengths: [R], runs of consecutive keys, block after block; block b has runs range_ends[b] .. range_ends[b + 1] - 1.
    """

    queries: int
    keys: int
    first_query: Tensor
    range_starts: Tensor
    range_lengths: Tensor
    range_ends: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        """B."""
        return len(self.range_ends) - 1


@dataclass(frozen=True, kw_only=True, eq=False)
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

    @property
    def tail(self) -> int:
        """Tokens after the last block."""
        return self.num_tokens - self.offsets[-1]

    @cached_property
    def offsets(self) -> list[int]:
        """`block_offsets` on the host; waits for the device, once."""
        return self.block_offsets.tolist()

    @cached_property
    def key_ranges(self) -> list[list[tuple[int, int]]]:
        """Of every block the token ranges (start, stop) that it sees, the tail among them, adjacent ones merged; waits for the device, once."""
        offsets, lists, ids = self.offsets, self.neighbour_offsets.tolist(), self.neighbours.tolist()
        tail = (offsets[-1], self.num_tokens)
        found = []
        for block in range(self.num_blocks):
            ranges: list[tuple[int, int]] = []
            for start, stop in [*((offsets[i], offsets[i + 1]) for i in ids[lists[block] : lists[block + 1]]), tail]:
                if ranges and ranges[-1][1] == start:
                    ranges[-1] = (ranges[-1][0], stop)
                elif start < stop:
                    ranges.append((start, stop))
            if not ranges and offsets[block] < offsets[block + 1]:
                raise ValueError(f"block {block} has tokens but sees none: give it itself at least.")
            found.append(ranges)
        return found

    @cached_property
    def groups(self) -> tuple[BlockGroup, ...]:
        """The blocks that have queries, those with equally many queries and keys together."""
        members: dict[tuple[int, int], list[int]] = {}
        for block, ranges in enumerate(self.key_ranges):
            queries, keys = self.offsets[block + 1] - self.offsets[block], sum(stop - start for start, stop in ranges)
            members.setdefault((queries, keys), []).append(block)
        return tuple(self._group(*size, blocks) for size, blocks in members.items() if all(size))

    def _group(self, queries: int, keys: int, blocks: list[int]) -> BlockGroup:
        ranges = [part for block in blocks for part in self.key_ranges[block]]
        ends = [0]
        for block in blocks:
            ends.append(ends[-1] + len(self.key_ranges[block]))
        device = self.block_offsets.device
        return BlockGroup(
            queries=queries,
            keys=keys,
            first_query=torch.tensor([self.offsets[block] for block in blocks], device=device),
            range_starts=torch.tensor([start for start, _ in ranges], device=device),
            range_lengths=torch.tensor([stop - start for start, stop in ranges], device=device),
            range_ends=tuple(ends),
        )

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
        pairs = torch.cat([query_blocks.long(), key_blocks.long()])
        if not ((pairs >= 0) & (pairs < count)).all():
            raise ValueError(f"pairs name blocks {int(pairs.min())} to {int(pairs.max())}, there are 0 to {count - 1}.")
        if tail < 0 or (block_sizes < 0).any():
            raise ValueError("a block or the tail has a negative size.")
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
