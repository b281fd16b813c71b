"""Into and out of the streams: one fp32 embedding a modality, the time code, and one fp32 head a modality (spec preview.md 3.2, 3.3, 3.10)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from magi2_core.config import PreviewConfig
from magi2_kernels.common.segments import ModalitySegments

from .layers import ModalityRMSNorm, frozen
from .modality import AUDIO, TEXT, VIDEO
from .packing import TokenPiece
from .rope import RotaryTable

CHUNK_ROWS = 8192
"""8192 rows of 12,288 fp32 channels are 400 MB."""


class Linear32(nn.Module):
    """fp32 linear layer whose weights a checkpoint fills; the input is taken as fp32."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = frozen(out_features, in_features)
        self.bias = frozen(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[S, in] in any type to fp32 [S, out]."""
        return F.linear(x.float(), self.weight, self.bias)


class PreAdapter(nn.Module):
    """Features of every modality to stream width, and the rotary table."""

    def __init__(self, config: PreviewConfig) -> None:
        super().__init__()
        self.video_embedder = Linear32(config.video_in_channels, config.stream_width, bias=True)
        self.audio_embedder = Linear32(config.audio_in_channels, config.stream_width, bias=True)
        self.text_embedder = Linear32(config.text_in_channels, config.stream_width, bias=True)
        self.rope = RotaryTable(config.rope_bands)

    def embed(self, features: Tensor, modality: int, code: Tensor | None = None) -> Tensor:
        """Embeds rows of one modality; the time code replaces their first channels.

        Args:
            features: [n, c], c the input channels of the modality (more columns are ignored).
            modality: VIDEO, AUDIO or TEXT.
            code: fp32 [64], None leaves the channels alone.

        Returns:
            fp32 [n, N * C].
        """
        embedder = {VIDEO: self.video_embedder, AUDIO: self.audio_embedder, TEXT: self.text_embedder}[modality]
        out = embedder(features[:, : embedder.weight.shape[1]])
        if code is not None:
            out[:, : code.shape[0]] = code
        return out

    def forward(self, pieces: Sequence[TokenPiece], total: int, dtype: torch.dtype) -> Tensor:
        """Writes every piece into one matrix [total, N * C] of the stream's type; fp32 copies stay one chunk long."""
        out = torch.empty(total, self.video_embedder.weight.shape[0], dtype=dtype, device=self.video_embedder.weight.device)
        for piece in pieces:
            if piece.features is None:
                out[piece.start : piece.stop] = piece.rows
                continue
            for start in range(0, piece.features.shape[0], CHUNK_ROWS):
                part = piece.features[start : start + CHUNK_ROWS]
                first = piece.start + start
                out[first : first + part.shape[0]] = self.embed(part, piece.modality, piece.code)
        return out


class PostAdapter(nn.Module):
    """Final norm and head of video and audio tokens; rows of other tokens stay zero."""

    def __init__(self, config: PreviewConfig) -> None:
        super().__init__()
        self.out_channels = config.out_channels
        self.final_norm_video = ModalityRMSNorm(config.stream_width)
        self.final_norm_audio = ModalityRMSNorm(config.stream_width)
        self.final_linear_video = Linear32(config.stream_width, config.video_in_channels, bias=False)
        self.final_linear_audio = Linear32(config.stream_width, config.audio_in_channels, bias=False)

    def forward(self, x: Tensor, segments: ModalitySegments) -> Tensor:
        """[S, N * C] in the stream's type to velocities fp32 [S, max(48, 64)], zero beyond a modality's channels."""
        out = torch.zeros(x.shape[0], self.out_channels, dtype=torch.float32, device=x.device)
        heads = ((VIDEO, self.final_norm_video, self.final_linear_video), (AUDIO, self.final_norm_audio, self.final_linear_audio))
        for modality, norm, linear in heads:
            for run_start, run_stop in segments.runs_of(modality):
                for start in range(run_start, run_stop, CHUNK_ROWS):
                    rows = slice(start, min(start + CHUNK_ROWS, run_stop))
                    out[rows, : linear.weight.shape[0]] = linear(norm(x[rows], segments, torch.float32))
        return out
