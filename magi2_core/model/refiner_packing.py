"""Packs one guidance branch of the refiner: five segments in one token sequence, in the order its attention wants.

Natural order is video, audio, text, reference audio, reference video; the shipped use has video and text only. The video
is then put in block order (`window`), the rest keeps its place behind it. Every modality keeps its own feature matrix: one
matrix padded to the text width would take 10.6 GB at 1080p. Facts: spec components.md 1.4, 1.5.
Legend: S tokens, V video tokens.
"""

import math
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from magi2_core.config import RefinerConfig
from magi2_core.errors import RequestError
from magi2_kernels.block_attention.layout import BlockLayout
from magi2_kernels.common.segments import ModalitySegments

from .modality import AUDIO, TEXT, VIDEO
from .window import Grid, restore_order, token_order, window_layout

SEGMENT_MODALITIES = (VIDEO, AUDIO, TEXT, AUDIO, VIDEO)
"""Modality of the segments video, audio, text, reference audio, reference video."""

REF_VIDEO_TIME = 1000.0
AUDIO_STRIDE = 8
"""Audio latents a video latent frame spans, for the scale of audio positions."""

INTERPOLATED_SIDE = 32.0
"""Reference size of y and x when spatial_rope_interpolation is "inter"."""


@dataclass(frozen=True, kw_only=True)
class SegmentLengths:
    """Tokens of each segment; the video is given by its grid (T, h, w) in tokens."""

    grid: Grid
    audio: int = 0
    text: int = 0
    ref_audio: int = 0
    ref_video: int = 0

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Tokens a segment in natural order."""
        frames, height, width = self.grid
        return (frames * height * width, self.audio, self.text, self.ref_audio, self.ref_video)

    @property
    def total(self) -> int:
        """S."""
        return sum(self.counts)


def _rows(position: Tensor, size: tuple[float, ...], reference: tuple[float, ...]) -> Tensor:
    """Coordinate rows [n, 9] of positions [n, 3] that share one size and one reference size."""
    return torch.cat([position.float(), torch.tensor([*size, *reference], dtype=torch.float32).expand(position.shape[0], 6)], dim=1)


def _grid_positions(frames: int, height: int, width: int) -> Tensor:
    axes = (torch.arange(frames), torch.arange(height), torch.arange(width))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)


def _line(count: int, first: int) -> Tensor:
    """Positions (first + i, 0, 0)."""
    position = torch.zeros(count, 3)
    position[:, 0] = torch.arange(count) + first
    return position


def coordinates(lengths: SegmentLengths, config: RefinerConfig) -> Tensor:
    """Rows (t, y, x, size, reference size) of every token in natural order, fp32 [S, 9]."""
    grid = lengths.grid
    if config.spatial_rope_interpolation not in ("extra", "inter"):
        raise RequestError(f"spatial_rope_interpolation is {config.spatial_rope_interpolation!r}, expected 'extra' or 'inter'.")
    reference = grid if config.spatial_rope_interpolation == "extra" else (grid[0], INTERPOLATED_SIDE, INTERPOLATED_SIDE)
    parts = [_rows(_grid_positions(*grid), grid, reference)]
    for count, first, size_t, reference_t in (
        (lengths.audio, 0, lengths.audio, _audio_frames(lengths.audio) // config.t_patch_size),
        (lengths.text, -lengths.text, lengths.text, 1),
        (lengths.ref_audio, 2 * lengths.audio, lengths.ref_audio, _ref_audio_frames(lengths.ref_audio, config.t_patch_size)),
    ):
        parts.append(_rows(_line(count, first), (size_t, 1, 1), (reference_t, 1, 1)))
    side = math.isqrt(lengths.ref_video - 1) + 1 if lengths.ref_video else 1
    square = _grid_positions(1, side, side)[: lengths.ref_video].float()
    square[:, 0] = REF_VIDEO_TIME
    parts.append(_rows(square, (1, side, side), (1, side, side)))
    return torch.cat(parts)


def _audio_frames(count: int) -> int:
    return (count - 1) // AUDIO_STRIDE + 1


def _ref_audio_frames(count: int, t_patch: int) -> int:
    frames = -(-_audio_frames(count) // t_patch)
    return max(2, frames) if count > 1 else frames


@dataclass(frozen=True, kw_only=True, eq=False)
class RefinerPacking:
    """What depends on the segment lengths only: built once a guidance branch, used at every step.

    lengths: tokens of the segments. coords: fp32 [S, 9] in kernel order. segments: modality runs in kernel order.
    order, restore: int32 [S], natural index at a kernel position and its inverse. local: who sees whom in the layers with
    local attention. dense: the same for all others.
    """

    lengths: SegmentLengths
    coords: Tensor
    segments: ModalitySegments
    order: Tensor
    restore: Tensor
    local: BlockLayout
    dense: BlockLayout

    @classmethod
    def build(cls, lengths: SegmentLengths, config: RefinerConfig, device: torch.device | str = "cpu") -> "RefinerPacking":
        """Orders and describes the tokens; tensors end on `device`."""
        counts = lengths.counts
        tail = lengths.total - counts[0]
        order = token_order(lengths.grid, tail, config.window)
        runs, start = [], 0
        for count, modality in zip(counts, SEGMENT_MODALITIES, strict=True):
            runs.append((start, start + count, modality))
            start += count
        return cls(
            lengths=lengths,
            coords=coordinates(lengths, config)[order.long()].to(device),
            segments=ModalitySegments.build(runs, device=device),
            order=order.to(device),
            restore=restore_order(order).to(device),
            local=window_layout(lengths.grid, tail, config.window, lengths.ref_video).to(device),
            dense=BlockLayout.dense(lengths.total).to(device),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class RefinerSequence:
    """Tokens `start` to `stop` of a packed sequence in kernel order: the whole of it, or one rank's contiguous share.

    features: (modality, fp32 [n, channels]) pieces that follow one another. coords, segments: of these tokens only.
    packing: of the whole sequence, with the attention layouts.
    """

    packing: RefinerPacking
    features: tuple[tuple[int, Tensor], ...]
    coords: Tensor
    segments: ModalitySegments
    start: int
    stop: int

    def slice(self, start: int, stop: int) -> "RefinerSequence":
        """The share of rows `start` to `stop` (counted within this sequence)."""
        pieces, at = [], 0
        for modality, rows in self.features:
            pieces.append((modality, rows[max(0, start - at) : max(0, stop - at)]))
            at += rows.shape[0]
        return replace(
            self,
            features=tuple(pieces),
            coords=self.coords[start:stop],
            segments=self.segments.slice(start, stop),
            start=self.start + start,
            stop=self.start + stop,
        )


def token_grid(latent: tuple[int, int, int], config: RefinerConfig) -> Grid:
    """Token grid of a latent (T, h, w). Raises RequestError when the patch does not divide it."""
    patch = (config.t_patch_size, config.patch_size, config.patch_size)
    if any(extent % edge for extent, edge in zip(latent, patch, strict=True)):
        raise RequestError(f"latent grid {latent} is not divisible by the refiner's patch {patch}: choose other sides.")
    return (latent[0] // patch[0], latent[1] // patch[1], latent[2] // patch[2])


def video_tokens(latent: Tensor, config: RefinerConfig) -> Tensor:
    """Latent [1, C, T, h, w] as tokens [V, C * patch volume] in natural order, columns channel-major (c, pt, ph, pw)."""
    token_grid(tuple(latent.shape[2:]), config)  # type: ignore[arg-type]
    edges = {"a": config.t_patch_size, "b": config.patch_size, "c": config.patch_size}
    return rearrange(latent[0].float(), "ch (t a) (h b) (w c) -> (t h w) (ch a b c)", **edges)


def pack(packing: RefinerPacking, video: Tensor, config: RefinerConfig, others: dict[str, Tensor]) -> RefinerSequence:
    """The sequence of one forward.

    Args: video: fp32 [1, C, T, h, w]; others: "text", "audio", "ref_audio", "ref_video" as [1, n, C] where present.
    """
    counts = packing.lengths.counts
    tokens = video_tokens(video, config)
    pieces = [(VIDEO, tokens[packing.order[: counts[0]].long()])]
    for name, modality, count in zip(("audio", "text", "ref_audio", "ref_video"), SEGMENT_MODALITIES[1:], counts[1:], strict=True):
        if count:
            pieces.append((modality, others[name][0].float()))
        found = others[name].shape[1] if name in others else 0
        if found != count:
            raise RequestError(f"{name} has {found} tokens, the packing was built for {count}: build it again for these lengths.")
    return RefinerSequence(
        packing=packing,
        features=tuple(pieces),
        coords=packing.coords,
        segments=packing.segments,
        start=0,
        stop=packing.lengths.total,
    )


def unpack_video(output: Tensor, packing: RefinerPacking, config: RefinerConfig) -> Tensor:
    """Video velocity fp32 [1, C, T, h, w] from the model's rows [S, out] in kernel order; columns are (pt, ph, pw, c)."""
    frames, height, width = packing.lengths.grid
    rows = output[packing.restore[: frames * height * width].long(), : config.video_in_channels]
    edges = {"t": frames, "h": height, "w": width, "a": config.t_patch_size, "b": config.patch_size, "c": config.patch_size}
    return rearrange(rows, "(t h w) (a b c ch) -> 1 ch (t a) (h b) (w c)", **edges)


def unpack_audio(output: Tensor, packing: RefinerPacking, config: RefinerConfig) -> Tensor:
    """Audio velocity fp32 [1, A, C] from the model's rows [S, out] in kernel order."""
    first = packing.lengths.counts[0]
    return output[None, first : first + packing.lengths.audio, : config.audio_in_channels]
