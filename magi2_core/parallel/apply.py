"""Fills the seams of a loaded model for this rank's groups; the model files know nothing of it.

| model | seam | filled with |
| --- | --- | --- |
| PreviewTransformer | split | TokenShare: this rank's rows |
| its attentions | core | UlyssesAttention: tokens traded for heads around attention and sinks |
| its expert layers | dispatcher | HeadDispatcher, where the layout has expert groups |
| RefinerTransformer | attention_core, and the model itself | UlyssesBlockAttention, SharedRefiner |

A weight that expert parallel splits must have been loaded for this rank (`checkpoint.slices.expert_slices`).
"""

from typing import TypeVar, overload

from magi2_core.config import RefinerConfig
from magi2_core.errors import CheckpointError
from magi2_core.model.attention import Attention
from magi2_core.model.moe import MultiHeadMoE
from magi2_core.model.preview import PreviewTransformer
from magi2_core.model.refiner import RefinerTransformer

from .context import SharedRefiner, TokenShare, UlyssesAttention, UlyssesBlockAttention
from .expert import HeadDispatcher, expert_counts
from .groups import Groups

__all__ = ["absent_refiner", "apply_parallel"]

ModelT = TypeVar("ModelT")


@overload
def apply_parallel(model: PreviewTransformer, groups: Groups) -> PreviewTransformer: ...
@overload
def apply_parallel(model: RefinerTransformer, groups: Groups) -> RefinerTransformer | SharedRefiner: ...
@overload
def apply_parallel(model: ModelT, groups: Groups) -> ModelT: ...
def apply_parallel(model: object, groups: Groups) -> object:
    """The model to use on this rank: changed in place or wrapped; other components, and a single rank, get back what they gave."""
    if isinstance(model, PreviewTransformer):
        _split_preview(model, groups)
    elif isinstance(model, RefinerTransformer) and groups.world.is_real:
        if groups.refiner.is_real:
            model.attention_core = UlyssesBlockAttention(model.attention_core, groups.refiner)
        return SharedRefiner(model, model.config, groups)
    return model


def absent_refiner(config: RefinerConfig, groups: Groups) -> SharedRefiner:
    """What a rank without a share of the refiner uses in its place: no weights, it waits for the others' velocities."""
    return SharedRefiner(None, config, groups)


def _split_preview(model: PreviewTransformer, groups: Groups) -> None:
    if not groups.context.is_real:
        return
    share = TokenShare(groups.context)
    model.split = share
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = UlyssesAttention(groups.context)
    if not groups.expert.is_real:
        return
    moe = model.config.moe
    held = moe.num_heads // groups.expert.size * moe.num_experts
    counts = expert_counts(groups, share)
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadMoE):
            if module.gate.shape[0] != held:
                raise CheckpointError(
                    f"preview: {name}.gate has {module.gate.shape[0]} rows, a rank of {groups.expert.size} expert-parallel ranks holds {held}. "
                    "Load the model with this rank's expert slice."
                )
            module.dispatcher = HeadDispatcher(groups.expert, counts)
