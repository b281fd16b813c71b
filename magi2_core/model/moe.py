"""The two MLP branches of the preview transformer: dense per modality, and multi-head mixture of experts (spec preview.md 3.9).

`MultiHeadMoE.dispatcher` is a seam: expert parallelism replaces it by one that trades tokens for MoE heads, so that the
routing runs after the exchange and on the heads a rank holds. How many heads those are is read off the weights.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from magi2_core.config import PreviewConfig
from magi2_kernels.moe_routing import TopK, route, sort_routes, split_gate
from magi2_kernels.multi_head_moe import ExpertWeights, multi_head_moe, pack_w13, unpack_w13
from magi2_kernels.swiglu import swiglu7

from .layers import GroupedLinear, ModalityRMSNorm, frozen
from .modality import NUM_MODALITIES
from .packing import TokenContext


class MoEDispatcher(Protocol):
    """Brings tokens to their heads and back: [S, G, d] -> [S of the group, G here, d] -> [S, G, d]."""

    def dispatch(self, x: Tensor) -> Tensor: ...

    def combine(self, x: Tensor) -> Tensor: ...


class LocalDispatcher:
    """All heads are here."""

    def dispatch(self, x: Tensor) -> Tensor:
        return x

    def combine(self, x: Tensor) -> Tensor:
        return x


class DenseMLP(nn.Module):
    """Branch of the per-modality layers: norm, up and gate in one matrix, swiglu7, down."""

    def __init__(self, config: PreviewConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.dense_intermediate
        self.pre_norm = ModalityRMSNorm(hidden, NUM_MODALITIES)
        self.up_gate_proj = GroupedLinear(hidden, 2 * inner, NUM_MODALITIES, dtype=dtype)
        self.down_proj = GroupedLinear(inner, hidden, NUM_MODALITIES, dtype=dtype)

    def forward(self, x: Tensor, tokens: TokenContext, *, is_normed: bool = False) -> Tensor:
        """[S, C] to [S, C]; `is_normed` when x went through `pre_norm` already."""
        segments = tokens.segments
        normed = x if is_normed else self.pre_norm(x, segments)
        return self.down_proj(swiglu7(self.up_gate_proj(normed, segments)), segments)


class Router(nn.Module):
    """Chooses the experts of every head. The trained weights are averaged ones, and so must be the bias that selects:
    `expert_bias_ema` is used, `expert_bias` is only carried because the checkpoint has it."""

    def __init__(self, config: PreviewConfig) -> None:
        super().__init__()
        self.top_k, self.route_scale = config.moe.top_k, config.moe.route_scale
        flat = config.moe.num_heads * config.moe.num_experts
        self.expert_bias = frozen(flat)
        self.expert_bias_ema = frozen(flat)
        # Made by `MultiHeadMoE.prepare` where the kernels want it; moves with the weights, not part of a checkpoint.
        self.register_buffer("gate_parts", None, persistent=False)

    def forward(self, x: Tensor, gate: Tensor) -> TopK:
        """x [S, G, d] and gate fp32 [G * E, d] to the chosen experts and their weights."""
        return route(x, gate, self.expert_bias_ema, top_k=self.top_k, route_scale=self.route_scale, parts=self.gate_parts)


PACKED = ("W_gate", "W_up")
"""What the checkpoint names the two halves of `W13`, in their order."""


class MultiHeadMoE(nn.Module):
    """Routed experts: every head of a token goes through its own top-k experts.

    W_gate and W_up exist only interleaved, as the parameter `W13` [G * E, d, 2 * F]: the form the kernels read, with no second
    copy. The state dict speaks of W_gate and W_up all the same (strided views), `load_state_dict` takes them, and
    `place_weight` gives a loader the view to fill, so that a checkpoint is packed shard by shard while it is read.
    """

    dispatcher: MoEDispatcher

    def __init__(self, config: PreviewConfig, dtype: torch.dtype) -> None:
        super().__init__()
        moe, width = config.moe, config.moe_head_dim
        flat, inner = moe.num_heads * moe.num_experts, moe.expert_intermediate_size
        self.num_experts = moe.num_experts
        self.gate = frozen(flat, width)
        self.W13 = frozen(flat, width, 2 * inner, dtype=dtype)
        self.W_down = frozen(flat, inner, width, dtype=dtype)
        self.router = Router(config)
        self.dispatcher = LocalDispatcher()
        self.register_state_dict_post_hook(_name_halves)
        self.register_load_state_dict_pre_hook(_join_halves)

    def place_weight(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """Where a loader copies the weight `name` [*shape] to, None when it is an ordinary parameter.

        The first half asked for makes W13; its numbers are undefined until both are filled.
        """
        if name not in PACKED:
            return None
        whole = (*shape[:2], 2 * shape[2])
        if (tuple(self.W13.shape), self.W13.dtype, self.W13.device) != (whole, dtype, device):
            self.W13 = nn.Parameter(torch.empty(whole, dtype=dtype, device=device), requires_grad=False)
        return unpack_w13(self.W13)[PACKED.index(name)]

    def prepare(self, dtype: torch.dtype) -> None:
        """Splits the gate for tokens of type `dtype`, once the weights are in and the kernels are chosen."""
        self.router.gate_parts = split_gate(self.gate, self.gate.shape[0] // self.num_experts, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[S, G, d] to [S, G, d]."""
        x = self.dispatcher.dispatch(x)
        routes = sort_routes(self.router(x, self.gate), self.num_experts)
        return self.dispatcher.combine(multi_head_moe(x, routes, ExpertWeights.packed(self.W13, self.W_down)))


def _name_halves(module: nn.Module, state: dict[str, Tensor], prefix: str, _metadata: object) -> None:
    halves = unpack_w13(state.pop(f"{prefix}W13"))
    state.update({f"{prefix}{name}": half for name, half in zip(PACKED, halves, strict=True)})


def _join_halves(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    if all(f"{prefix}{name}" in state for name in PACKED):
        state[f"{prefix}W13"] = pack_w13(*(state.pop(f"{prefix}{name}") for name in PACKED))


class MoEMLP(nn.Module):
    """Branch of the other layers: routed experts between a split and a merge, plus two experts that every token takes."""

    def __init__(self, config: PreviewConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, moe = config.hidden_size, config.moe
        self.num_heads = moe.num_heads
        self.pre_norm = ModalityRMSNorm(hidden, NUM_MODALITIES)
        self.split_linear = GroupedLinear(hidden, config.moe_width, dtype=dtype)
        self.merge_linear = GroupedLinear(config.moe_width, hidden, dtype=dtype)
        self.moe_mlp = MultiHeadMoE(config, dtype)
        shared, specific = moe.shared_expert_intermediate_size, moe.modality_specific_expert_intermediate_size
        self.shared_expert_fc1 = GroupedLinear(hidden, 2 * shared, dtype=dtype)
        self.shared_expert_fc2 = GroupedLinear(shared, hidden, dtype=dtype)
        self.modality_specific_shared_expert_fc1 = GroupedLinear(hidden, 2 * specific, NUM_MODALITIES, dtype=dtype)
        self.modality_specific_shared_expert_fc2 = GroupedLinear(specific, hidden, NUM_MODALITIES, dtype=dtype)

    def routed(self, normed: Tensor, tokens: TokenContext, onto: Tensor) -> Tensor:
        """`onto` [S, C] with what the routed experts add, in place."""
        heads = self.split_linear(normed, tokens.segments).unflatten(1, (self.num_heads, -1))
        return self.merge_linear(self.moe_mlp(heads).flatten(1), tokens.segments, onto)

    def shared(self, normed: Tensor, tokens: TokenContext) -> Tensor:
        """What the common expert and the modality's own expert add, [S, C]."""
        segments = tokens.segments
        common = self.shared_expert_fc2(swiglu7(self.shared_expert_fc1(normed, segments)), segments)
        own = swiglu7(self.modality_specific_shared_expert_fc1(normed, segments))
        return self.modality_specific_shared_expert_fc2(own, segments, common)

    def forward(self, x: Tensor, tokens: TokenContext, *, is_normed: bool = False) -> Tensor:
        """[S, C] to [S, C]; `is_normed` when x went through `pre_norm` already."""
        normed = x if is_normed else self.pre_norm(x, tokens.segments)
        return self.routed(normed, tokens, self.shared(normed, tokens))
