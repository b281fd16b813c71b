"""The packed sequence: where every token of the conditional and the unconditional item lies (spec preview.md 4).

Packed = item ++ item ++ padding; an item is [video | audio | text | (special token, image patches) per reference image].
Everything is described by a few runs of equal tokens, so the real path keeps the features of a run as they are and never
builds the [S, 5120] fp32 matrix (2.3 GB at 540p); `token_matrix` builds it from the same runs for comparison.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from magi2_core.errors import RequestError
from magi2_core.shapes import LatentShape
from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.common.sequences import CuSeqlens

from .modality import AUDIO, NUM_MODALITIES, TEXT, VIDEO
from .time_code import timestep_code

MODALITY_OF = {"video": VIDEO, "audio": AUDIO, "text": TEXT, "special": TEXT, "image": VIDEO, "padding": TEXT}
TIMED = ("video", "audio")
"""Kinds that carry the diffusion time; the others always get the code of time 0, padding gets zeros."""
AUDIO_STRIDE = 8
"""Audio latents to one video latent frame."""


@dataclass(frozen=True, kw_only=True)
class ItemShape:
    """Token counts of one item: video latent, audio latents, text rows, (height, width) of each reference image latent."""

    video: LatentShape
    audio: int
    text: int
    images: tuple[tuple[int, int], ...] = ()

    @property
    def lengths(self) -> tuple[tuple[str, int, int], ...]:
        """(kind, image number, tokens) in packed order."""
        plain = (("video", 0, self.video.tokens), ("audio", 0, self.audio), ("text", 0, self.text))
        images = tuple(
            part
            for number, (height, width) in enumerate(self.images)
            for part in (("special", number, 1), ("image", number, height * width))
        )
        return plain + images

    @property
    def tokens(self) -> int:
        """Tokens of the item."""
        return sum(count for _, _, count in self.lengths)


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Rows start..stop-1 hold tokens of one kind; `item` counts items (padding has the number after the last), `number` images."""

    kind: str
    item: int
    number: int
    start: int
    stop: int

    @property
    def modality(self) -> int:
        """Weight block these tokens use."""
        return MODALITY_OF[self.kind]

    @property
    def timed(self) -> bool:
        """True for video and audio tokens."""
        return self.kind in TIMED


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedSequence:
    """Layout of all items: runs without gaps, coordinates fp32 [S, 9], modality segments, cu_seqlens (padding is its own sequence)."""

    items: tuple[ItemShape, ...]
    runs: tuple[TokenRun, ...]
    coords: Tensor
    segments: ModalitySegments
    cu_seqlens: CuSeqlens

    @property
    def total(self) -> int:
        """Rows with padding, S."""
        return self.cu_seqlens.total


@dataclass(frozen=True, kw_only=True, eq=False)
class BranchInputs:
    """Features of one item: text [1, L, C], special [1, M, C], ref_latents [1, M, 48, 1, h, w], and what changes from
    step to step: video [1, 48, T, h, w] and audio [1, A, 64] (None while only the rest is known)."""

    text: Tensor
    video: Tensor | None = None
    audio: Tensor | None = None
    special: Tensor | None = None
    ref_latents: Tensor | None = None

    def without_ref(self) -> "BranchInputs":
        """The same with zeroed image features; image and special tokens stay in the sequence."""
        return replace(self, ref_latents=None if self.ref_latents is None else torch.zeros_like(self.ref_latents))


@dataclass(frozen=True, eq=False)
class TokenContext:
    """What a layer needs besides the tokens: `segments` and `rope` of these rows, `cu_seqlens` of the whole packed sequence."""

    segments: ModalitySegments
    rope: Tensor
    cu_seqlens: CuSeqlens

    def slice(self, start: int, stop: int) -> "TokenContext":
        """Context of a rank's rows; cu_seqlens stays global."""
        return TokenContext(self.segments.slice(start, stop), self.rope[start:stop], self.cu_seqlens)


@dataclass(frozen=True, eq=False)
class TokenPiece:
    """Consecutive rows from `start` on: either `features` [n, c] fp32 still to be embedded, with the time `code` [64] that
    overwrites their first channels, or rows already `embedded` [n, N * C]."""

    start: int
    modality: int
    features: Tensor | None = None
    code: Tensor | None = None
    embedded: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """Whichever of the two matrices is there."""
        rows = self.features if self.embedded is None else self.embedded
        assert rows is not None
        return rows

    @property
    def stop(self) -> int:
        """Row after the last."""
        return self.start + self.rows.shape[0]

    def slice(self, start: int, stop: int) -> "TokenPiece | None":
        """The part inside rows start..stop-1, counted from `start`; None when there is none."""
        low, high = max(start, self.start), min(stop, self.stop)
        if low >= high:
            return None
        rows = self.rows[low - self.start : high - self.start]
        if self.embedded is None:
            return replace(self, start=low - start, features=rows)
        return replace(self, start=low - start, embedded=rows)


@dataclass(frozen=True, eq=False)
class PackedInputs:
    """One forward's input: the pieces of all rows of `context`, in order, without gaps."""

    context: TokenContext
    pieces: tuple[TokenPiece, ...]

    @property
    def total(self) -> int:
        """Rows here, S (of this rank)."""
        return self.context.segments.total

    def slice(self, start: int, stop: int) -> "PackedInputs":
        """A rank's contiguous share of the rows."""
        pieces = tuple(part for piece in self.pieces if (part := piece.slice(start, stop)) is not None)
        return PackedInputs(self.context.slice(start, stop), pieces)


def _grid(frames: int, height: int, width: int, device: torch.device | str) -> Tensor:
    """Row-major positions (t, h, w), fp32 [frames * height * width, 3]."""
    axes = [torch.arange(length, dtype=torch.float32, device=device) for length in (frames, height, width)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3)


def _line(count: int, first: int, device: torch.device | str) -> Tensor:
    """Positions (first + j, 0, 0), fp32 [count, 3]."""
    line = torch.zeros(count, 3, device=device)
    line[:, 0] = torch.arange(first, first + count, dtype=torch.float32, device=device)
    return line


def _run_coords(run: TokenRun, items: Sequence[ItemShape], device: torch.device | str) -> Tensor:
    """fp32 [rows, 9] of one run: positions, sizes, reference sizes (spec preview.md 3.5)."""
    count = run.stop - run.start
    if run.kind == "padding":
        positions, size, ref = _line(count, 0, device), (count, 1, 1), (count, 1, 1)
    else:
        item = items[run.item]
        if run.kind == "video":
            size = ref = (item.video.frames, item.video.height, item.video.width)
            positions = _grid(*size, device)
        elif run.kind == "audio":
            size, ref = (count, 1, 1), ((count - 1) // AUDIO_STRIDE + 1, 1, 1)
            positions = _line(count, 0, device)
        elif run.kind == "text":
            size, ref = (count, 1, 1), (1, 1, 1)
            positions = _line(count, -count, device)
        else:
            size = ref = (1, *item.images[run.number])
            positions = torch.tensor([[0.0, -1.0, -1.0]], device=device) if run.kind == "special" else _grid(*size, device)
            # Images stand two frames behind the clip, one frame apart.
            positions[:, 0] = item.video.frames + 2 + run.number
    sizes = torch.tensor([*size, *ref], dtype=torch.float32, device=device)
    return torch.cat([positions, sizes.expand(count, 6)], dim=1)


def pack(items: Sequence[ItemShape], *, multiple: int = 1, device: torch.device | str = "cpu") -> PackedSequence:
    """Lays the items out one after the other.

    Args:
        items: conditional, then unconditional (or one of them alone).
        multiple: the total is filled up to a multiple of this with padding tokens; 1 adds none.
        device: of the coordinates and ids.
    """
    runs: list[TokenRun] = []
    ends = [0]
    row = 0
    for index, item in enumerate(items):
        for kind, number, count in item.lengths:
            if count:
                runs.append(TokenRun(kind=kind, item=index, number=number, start=row, stop=row + count))
            row += count
        ends.append(row)
    if row % multiple:
        filled = -(-row // multiple) * multiple
        runs.append(TokenRun(kind="padding", item=len(items), number=0, start=row, stop=filled))
        ends.append(filled)
    segments = ModalitySegments.build(((run.start, run.stop, run.modality) for run in runs), num_modalities=NUM_MODALITIES, device=device)
    coords = torch.cat([_run_coords(run, items, device) for run in runs]) if runs else torch.zeros(0, 9, device=device)
    return PackedSequence(items=tuple(items), runs=tuple(runs), coords=coords, segments=segments, cu_seqlens=CuSeqlens.build(ends, device))


def image_grids(special: Tensor | None, ref_latents: Tensor | None) -> tuple[tuple[int, int], ...]:
    """(height, width) of each reference image latent. Raises RequestError when special tokens and images do not pair."""
    if (special is None) != (ref_latents is None):
        raise RequestError("Reference image latents and special tokens come together: pass both or neither.")
    if special is None or ref_latents is None:
        return ()
    if ref_latents.ndim != 6 or special.ndim != 3 or special.shape[1] != ref_latents.shape[1]:
        raise RequestError(
            f"special tokens {tuple(special.shape)} and reference latents {tuple(ref_latents.shape)}: expected [1, M, C] and [1, M, 48, 1, h, w]."
        )
    return ((ref_latents.shape[4], ref_latents.shape[5]),) * ref_latents.shape[1]


def latent_tokens(latent: Tensor) -> Tensor:
    """A latent [48, T, h, w] as rows [T * h * w, 48] (the patch size is 1)."""
    return latent.flatten(1).transpose(0, 1)


def run_features(run: TokenRun, branch: BranchInputs) -> Tensor:
    """The features of a run of an item, [rows, channels] in the type given."""
    source = {
        "video": branch.video,
        "audio": branch.audio,
        "text": branch.text,
        "special": branch.special,
        "image": branch.ref_latents,
    }[run.kind]
    assert source is not None, f"no features for {run.kind} tokens"
    if run.kind == "video":
        return latent_tokens(source[0])
    if run.kind == "image":
        return latent_tokens(source[0, run.number])
    if run.kind == "special":
        return source[0, run.number : run.number + 1]
    return source[0]


def run_code(run: TokenRun, timestep: int, channels: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [channels] that overwrites the first channels of every token of the run."""
    if run.kind == "padding":
        return torch.zeros(channels, device=device)
    return timestep_code(timestep if run.timed else 0, channels, device)


def token_matrix(sequence: PackedSequence, branches: Sequence[BranchInputs]) -> Tensor:
    """Every token's features, zero-padded on the right to the widest kind: fp32 [S, widest]."""
    parts = [(run, run_features(run, branches[run.item])) for run in sequence.runs if run.kind != "padding"]
    widths = [part.shape[1] for _, part in parts] + [branch.text.shape[2] for branch in branches]
    matrix = torch.zeros(sequence.total, max(widths, default=0), device=sequence.coords.device)
    for run, part in parts:
        matrix[run.start : run.stop, : part.shape[1]] = part
    return matrix


def time_matrix(sequence: PackedSequence, timestep: int, channels: int) -> Tensor:
    """Every token's time code, fp32 [S, channels]."""
    matrix = torch.zeros(sequence.total, channels, device=sequence.coords.device)
    for run in sequence.runs:
        matrix[run.start : run.stop] = run_code(run, timestep, channels, matrix.device)
    return matrix


def unpack(sequence: PackedSequence, velocities: Tensor, *, audio_channels: int = 64) -> list[tuple[Tensor, Tensor]]:
    """Reads the velocity matrix back: per item, video [1, 48, T, h, w] and audio [1, A, 64]; rows of other tokens are dropped.

    Args:
        sequence: of the whole packed sequence.
        velocities: fp32 [S, columns].
        audio_channels: columns of an audio row.
    """
    found = []
    for item, start in zip(sequence.items, sequence.cu_seqlens.host, strict=False):
        shape, middle = item.video, start + item.video.tokens
        video = velocities[start:middle, : shape.channels].transpose(0, 1).reshape(shape.size)
        found.append((video, velocities[middle : middle + item.audio, :audio_channels].unsqueeze(0)))
    return found
