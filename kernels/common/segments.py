"""Which modality each row of a packed token matrix has: contiguous runs as Python integers, plus a cached id per row.

The packed order keeps each modality in a few long runs (a handful per sequence), so a per-modality weight needs no sort and
no gather: the runs are walked on the host, or a kernel reads `ids`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Run = tuple[int, int, int]
"""(first row, row after the last, modality id)."""


@dataclass(frozen=True, eq=False)
class ModalitySegments:
    """Runs that cover rows 0..S-1 in order, and `ids` int32 [S] on the device of the tokens. Made by `build`."""

    runs: tuple[Run, ...]
    ids: Tensor
    num_modalities: int

    @classmethod
    def build(
        cls, runs: Iterable[tuple[int, int, int]], *, num_modalities: int = 3, device: torch.device | str = "cpu"
    ) -> "ModalitySegments":
        """Checks and joins `runs`; empty runs are dropped, neighbours of one modality merged.

        Args:
            runs: (start, stop, modality id), ascending, without gaps, starting at row 0.
            num_modalities: weight blocks a per-modality weight has.
            device: where `ids` lives.
        """
        joined: list[Run] = []
        end = 0
        for start, stop, modality in runs:
            if start != end or stop < start:
                raise ValueError(
                    f"modality run ({start}, {stop}) does not follow row {end}: runs must be ascending without gaps from row 0."
                )
            if not 0 <= modality < num_modalities:
                raise ValueError(f"modality id {modality} of run ({start}, {stop}) is outside 0..{num_modalities - 1}.")
            end = stop
            if stop == start:
                continue
            if joined and joined[-1][2] == modality:
                joined[-1] = (joined[-1][0], stop, modality)
            else:
                joined.append((start, stop, modality))
        lengths = torch.tensor([stop - start for start, stop, _ in joined], dtype=torch.int64)
        modalities = torch.tensor([modality for _, _, modality in joined], dtype=torch.int32)
        return cls(tuple(joined), torch.repeat_interleave(modalities, lengths).to(device), num_modalities)

    @classmethod
    def from_ids(cls, ids: Tensor) -> "ModalitySegments":
        """Reads the runs off `ids` [S] (any integer type); copies it to the host once."""
        values, lengths = torch.unique_consecutive(ids.cpu(), return_counts=True)
        runs, start = [], 0
        for modality, length in zip(values.tolist(), lengths.tolist(), strict=True):
            runs.append((start, start + length, modality))
            start += length
        return cls.build(runs, device=ids.device)

    @property
    def total(self) -> int:
        """Rows covered, S."""
        return self.runs[-1][1] if self.runs else 0

    def runs_of(self, modality: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of every run of one modality."""
        return tuple((start, stop) for start, stop, found in self.runs if found == modality)

    def slice(self, start: int, stop: int) -> "ModalitySegments":
        """The same description of rows start..stop-1, renumbered from 0 (a rank's share); modalities may be absent in it."""
        if not 0 <= start <= stop <= self.total:
            raise ValueError(f"rows {start}..{stop} are not inside the {self.total} rows covered.")
        runs = tuple(
            (max(first, start) - start, min(last, stop) - start, modality)
            for first, last, modality in self.runs
            if first < stop and last > start and start < stop
        )
        return ModalitySegments(runs, self.ids[start:stop], self.num_modalities)

    def to(self, device: torch.device | str) -> "ModalitySegments":
        """The same runs with `ids` on another device."""
        return ModalitySegments(self.runs, self.ids.to(device), self.num_modalities)
