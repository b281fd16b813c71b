"""Where each packed sequence starts: host integers for planning, an int32 tensor for kernels."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class CuSeqlens:
    """`host` (0, end of sequence 0, end of sequence 1, ...) and the same numbers as int32 `tensor` on a device."""

    host: tuple[int, ...]
    tensor: Tensor

    @classmethod
    def build(cls, ends: Sequence[int], device: torch.device | str = "cpu") -> "CuSeqlens":
        """Makes both forms. `ends` starts at 0 and never falls; equal neighbours are an empty sequence."""
        host = tuple(int(end) for end in ends)
        if not host or host[0] != 0 or any(after < before for before, after in itertools.pairwise(host)):
            raise ValueError(f"cu_seqlens {host}: expected ascending row numbers that begin with 0.")
        return cls(host, torch.tensor(host, dtype=torch.int32, device=device))

    @property
    def total(self) -> int:
        """Rows of all sequences."""
        return self.host[-1]

    @property
    def max_length(self) -> int:
        """Rows of the longest sequence."""
        return max((stop - start for start, stop in self.bounds), default=0)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(first row, row after the last) of every sequence."""
        return tuple(zip(self.host, self.host[1:], strict=False))
