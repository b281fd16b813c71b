"""One layer of the preview transformer and the stack of all of them (spec preview.md 3.7)."""

import torch
from torch import Tensor, nn

from magi2_core.config import PreviewConfig

from .attention import Attention
from .hyper_connection import HyperConnectedLayer, HyperState
from .modality import NUM_MODALITIES
from .moe import DenseMLP, MoEMLP
from .packing import TokenContext


class PreviewLayer(HyperConnectedLayer):
    """Attention, then MLP. A layer has weights per modality and a dense MLP, or shared attention and experts."""

    def __init__(self, config: PreviewConfig, index: int, dtype: torch.dtype) -> None:
        per_modality = index in config.mm_layers
        blocks = NUM_MODALITIES if per_modality else 1
        super().__init__(config, blocks)
        self.attention = Attention(config, blocks, dtype)
        self.mlp = DenseMLP(config, dtype) if per_modality else MoEMLP(config, dtype)

    def prepare(self, dtype: torch.dtype) -> None:
        """Makes the forms of the weights that the kernels read, once the weights are in and the kernels are chosen."""
        super().prepare(dtype)
        if isinstance(self.mlp, MoEMLP):
            self.mlp.moe_mlp.prepare(dtype)

    def attend(self, state: HyperState, tokens: TokenContext) -> HyperState:
        """After the attention branch."""
        norm = self.attention.pre_norm
        return self.through("attn", state, tokens.segments, norm, lambda x: self.attention(x, tokens, is_normed=True))

    def feed_forward(self, state: HyperState, tokens: TokenContext) -> HyperState:
        """After the MLP branch."""
        return self.through("mlp", state, tokens.segments, self.mlp.pre_norm, lambda x: self.mlp(x, tokens, is_normed=True))

    def forward(self, state: HyperState, tokens: TokenContext) -> HyperState:
        """The state, changed by both branches; the second one's output stays open for the next layer."""
        return self.feed_forward(self.attend(state, tokens), tokens)


class PreviewBlock(nn.Module):
    """All layers in order."""

    def __init__(self, config: PreviewConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PreviewLayer(config, index, dtype) for index in range(config.num_layers))

    def forward(self, state: HyperState, tokens: TokenContext) -> Tensor:
        """Streams [S, N, C] behind the last layer."""
        for layer in self.layers:
            state = layer(state, tokens)
        return state.connected()
