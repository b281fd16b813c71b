"""The refiner: a dense pre-norm transformer over block-ordered tokens, without any timestep input.

Parameter names are the checkpoint's. `dtype` is the type of the linear layers and of everything the release casts to bf16;
float32 gives the same graph without roundings. Long sequences go through the embedders, the MLP and the heads in chunks of
tokens, so 1080p fits one large card. Facts: spec components.md 1.1-1.3.
Legend: S tokens (of this rank), D width, H heads, Hkv key/value heads, Dh head width, M modalities.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from magi2_core.config import RefinerConfig
from magi2_core.errors import CheckpointError
from magi2_kernels.block_attention import block_attention
from magi2_kernels.block_attention.layout import BlockLayout
from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.grouped_linear import grouped_linear
from magi2_kernels.modality_rms_norm import modality_rms_norm
from magi2_kernels.qk_norm_rope import qk_norm_rope
from magi2_kernels.swiglu import swiglu7

from .modality import AUDIO, NUM_MODALITIES, TEXT, VIDEO
from .refiner_packing import RefinerSequence
from .rope import RotaryTable

AttentionCore = Callable[[Tensor, Tensor, Tensor, BlockLayout], Tensor]
"""q [S, H, Dh], k, v [S, Hkv, Dh] of this rank's tokens, layout of the whole sequence -> [S, H, Dh]."""

CHUNK_TOKENS = 32768
"""Tokens at once in the wide parts: the up projection of a chunk is 1.4 GB in bf16 at the released width."""


def _chunks(total: int) -> Iterator[slice]:
    return (slice(start, min(start + CHUNK_TOKENS, total)) for start in range(0, total, CHUNK_TOKENS))


def _part(segments: ModalitySegments | None, rows: slice) -> ModalitySegments | None:
    return None if segments is None else segments.slice(rows.start, rows.stop)


class Weight(nn.Module):
    """One parameter called `weight`, not trained here."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Attention(nn.Module):
    """Grouped-query attention branch: norm, q/k norm and rotary table, window attention, head gates, output projection."""

    def __init__(self, config: RefinerConfig, modalities: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, head, m = config.hidden_size, config.head_dim, modalities
        self.split = (width, config.num_query_groups * head, config.num_query_groups * head)
        self.head_dim = head
        self.dtype = dtype
        self.pre_norm = Weight(width * m, dtype=torch.float32)
        self.linear_qkv = Weight(sum(self.split) * m, width, dtype=dtype)
        self.linear_g = Weight(config.num_heads * m, width, dtype=dtype) if config.enable_attn_gating else None
        self.linear_proj = Weight(width * m, width, dtype=dtype)
        self.q_norm = Weight(head * m, dtype=torch.float32)
        self.k_norm = Weight(head * m, dtype=torch.float32)

    def forward(self, h: Tensor, rope: Tensor, segments: ModalitySegments | None, core: AttentionCore, layout: BlockLayout) -> Tensor:
        """Branch output [S, D] in the compute type from the residual [S, D] and the rotary table fp32 [S, 6 * bands]."""
        normed = modality_rms_norm(h, self.pre_norm.weight, segments, out_dtype=self.dtype)
        gate = None if self.linear_g is None else grouped_linear(normed, self.linear_g.weight, segments).float().sigmoid()
        qkv = grouped_linear(normed, self.linear_qkv.weight, segments)
        del normed
        q, k, v = (part.unflatten(1, (-1, self.head_dim)) for part in qkv.split(self.split, dim=1))
        q, k = qk_norm_rope(q, k, self.q_norm.weight, self.k_norm.weight, rope, segments, out_dtype=self.dtype)
        v = v.contiguous()
        del qkv
        attended = core(q, k, v, layout)
        del q, k, v
        branch = torch.empty(h.shape, dtype=self.dtype, device=h.device)
        for rows in _chunks(h.shape[0]):
            part = attended[rows]
            if gate is not None:
                part = (part.float() * gate[rows, :, None]).to(self.dtype)
            branch[rows] = grouped_linear(part.flatten(1), self.linear_proj.weight, _part(segments, rows))
        return branch


class MLP(nn.Module):
    """Clamped SwiGLU branch."""

    def __init__(self, config: RefinerConfig, modalities: int, dtype: torch.dtype) -> None:
        super().__init__()
        width, inner, m = config.hidden_size, config.intermediate, modalities
        self.dtype = dtype
        self.pre_norm = Weight(width * m, dtype=torch.float32)
        self.up_gate_proj = Weight(2 * inner * m, width, dtype=dtype)
        self.down_proj = Weight(width * m, inner, dtype=dtype)

    def forward(self, h: Tensor, segments: ModalitySegments | None) -> Tensor:
        """Branch output fp32 [S, D]."""
        normed = modality_rms_norm(h, self.pre_norm.weight, segments, out_dtype=self.dtype)
        active = swiglu7(grouped_linear(normed, self.up_gate_proj.weight, segments))
        return grouped_linear(active, self.down_proj.weight, segments).float()


class Layer(nn.Module):
    """One layer. The residual is in the compute type until the first MLP add and fp32 from there on."""

    def __init__(self, config: RefinerConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.per_modality = index in config.mm_layers
        self.is_local = index in config.local_attn_layers
        modalities = NUM_MODALITIES if self.per_modality else 1
        self.attention = Attention(config, modalities, dtype)
        self.mlp = MLP(config, modalities, dtype)
        post = index in config.post_norm_layers
        self.attn_post_norm = Weight(config.hidden_size * modalities, dtype=torch.float32) if post else None
        self.mlp_post_norm = Weight(config.hidden_size * modalities, dtype=torch.float32) if post else None

    def forward(self, h: Tensor, rope: Tensor, sequence: RefinerSequence, core: AttentionCore) -> Tensor:
        """The residual after this layer, fp32 [S, D]. `h` is overwritten."""
        segments = sequence.segments if self.per_modality else None
        layout = sequence.packing.local if self.is_local else sequence.packing.dense
        branch = self.attention(h, rope, segments, core, layout)
        if self.attn_post_norm is not None:
            branch = modality_rms_norm(branch, self.attn_post_norm.weight, segments)
        h += branch
        del branch
        out = h if h.dtype == torch.float32 else torch.empty(h.shape, dtype=torch.float32, device=h.device)
        for rows in _chunks(h.shape[0]):
            part = _part(segments, rows)
            change = self.mlp(h[rows], part)
            if self.mlp_post_norm is not None:
                change = modality_rms_norm(change, self.mlp_post_norm.weight, part)
            torch.add(h[rows], change, out=out[rows])
        return out


class PreAdapter(nn.Module):
    """Embeds each modality with its own fp32 linear layer, and makes the rotary table."""

    def __init__(self, config: RefinerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.width = config.hidden_size
        self.video_embedder = nn.Linear(config.video_in_channels, self.width, dtype=torch.float32)
        self.text_embedder = nn.Linear(config.text_in_channels, self.width, dtype=torch.float32)
        self.audio_embedder = nn.Linear(config.audio_in_channels, self.width, dtype=torch.float32)
        self.rope = RotaryTable(config.head_dim // 8)

    def forward(self, sequence: RefinerSequence) -> tuple[Tensor, Tensor]:
        """Residual [S, D] in the compute type and rotary table fp32 [S, 6 * bands]."""
        embedders = {VIDEO: self.video_embedder, AUDIO: self.audio_embedder, TEXT: self.text_embedder}
        hidden = torch.empty(sequence.stop - sequence.start, self.width, dtype=self.dtype, device=sequence.coords.device)
        at = 0
        for modality, features in sequence.features:
            for rows in _chunks(features.shape[0]):
                hidden[at + rows.start : at + rows.stop] = embedders[modality](features[rows])
            at += features.shape[0]
        return hidden, self.rope(sequence.coords)


class PostAdapter(nn.Module):
    """Final norm and fp32 head of video and audio rows; text rows are zero."""

    def __init__(self, config: RefinerConfig) -> None:
        super().__init__()
        self.out_channels = config.out_channels
        self.final_norm_video = Weight(config.hidden_size, dtype=torch.float32)
        self.final_norm_audio = Weight(config.hidden_size, dtype=torch.float32)
        self.final_linear_video = Weight(config.video_in_channels, config.hidden_size, dtype=torch.float32)
        self.final_linear_audio = Weight(config.audio_in_channels, config.hidden_size, dtype=torch.float32)

    def forward(self, h: Tensor, segments: ModalitySegments) -> Tensor:
        """Velocity rows fp32 [S, out channels]."""
        out = h.new_zeros(h.shape[0], self.out_channels, dtype=torch.float32)
        for modality, norm, linear in (
            (VIDEO, self.final_norm_video, self.final_linear_video),
            (AUDIO, self.final_norm_audio, self.final_linear_audio),
        ):
            for start, stop in segments.runs_of(modality):
                for rows in _chunks(stop - start):
                    part = slice(start + rows.start, start + rows.stop)
                    normed = modality_rms_norm(h[part], norm.weight, out_dtype=torch.float32)
                    out[part, : linear.weight.shape[0]] = functional.linear(normed, linear.weight)
        return out


class Block(nn.Module):
    """The stack of layers."""

    def __init__(self, config: RefinerConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, index, dtype) for index in range(config.num_layers))


class RefinerTransformer(nn.Module):
    """Velocity rows of a packed sequence, or of one rank's contiguous share of it.

    `attention_core` is the seam of context parallelism: it gets this rank's q, k, v and the layout of the whole sequence.
    Nothing else in the model looks beyond its own rows.
    """

    def __init__(self, config: RefinerConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        if config.window.mode == "dense" and config.window.dense_frame_receptive_field == -1 and config.local_attn_layers:
            raise CheckpointError("attention mode 'dense' without a frame window needs local_attn_layers to be empty.")
        self.config = config
        self.attention_core: AttentionCore = block_attention
        self.pre_adapter = PreAdapter(config, dtype)
        self.block = Block(config, dtype)
        self.post_adapter = PostAdapter(config)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, sequence: RefinerSequence) -> Tensor:
        """Velocity rows in kernel order, fp32 [S, out channels]; `refiner_packing.unpack_video` restores the latent."""
        hidden, rope = self.pre_adapter(sequence)
        for layer in self.block.layers:
            hidden = layer(hidden, rope, sequence, self.attention_core)
        return self.post_adapter(hidden, sequence.segments)
