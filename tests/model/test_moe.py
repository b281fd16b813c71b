"""The packed form of the expert matrices: state dict, loading, slices."""

from dataclasses import replace

import pytest
import torch

from magi2_core.checkpoint.slices import Slice
from magi2_core.config import MoEConfig, PreviewConfig
from magi2_core.model.moe import MoEMLP, MultiHeadMoE

CONFIG = PreviewConfig(hidden_size=12, head_dim=6)
CONFIG = replace(CONFIG, moe=replace(CONFIG.moe, num_heads=3, num_experts=2, top_k=1, expert_intermediate_size=5))
NAMES = {"gate", "W_gate", "W_up", "W_down", "router.expert_bias", "router.expert_bias_ema"}


def filled(seed: int = 0) -> MultiHeadMoE:
    module = MultiHeadMoE(CONFIG, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def test_state_dict_has_the_names_of_the_checkpoint_and_no_copy() -> None:
    module = filled()
    state = module.state_dict()
    assert state.keys() == NAMES
    assert state["W_gate"].shape == state["W_up"].shape == (6, 4, 5)
    storage = {state[name].untyped_storage().data_ptr() for name in ("W_gate", "W_up")}
    assert storage == {module.W13.untyped_storage().data_ptr()}
    assert torch.equal(module.W13[..., 1::2], state["W_up"])


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_takes_separate_halves(assign: bool) -> None:
    source, target = filled(1), MultiHeadMoE(CONFIG, torch.float32)
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    target.load_state_dict(state, assign=assign)
    assert state.keys() == NAMES
    x = torch.randn(7, 3, 4, generator=torch.Generator().manual_seed(2))
    assert torch.equal(source(x), target(x))


def test_load_state_dict_names_a_missing_half() -> None:
    state = filled().state_dict()
    del state["W_up"]
    with pytest.raises(RuntimeError, match="W13"):
        MultiHeadMoE(CONFIG, torch.float32).load_state_dict(state)


def test_place_weight_fills_one_tensor_of_the_size_a_rank_keeps() -> None:
    source = filled(3).state_dict()
    with torch.device("meta"):
        module = MultiHeadMoE(CONFIG, torch.float32)
    part = Slice(0, 2, 4)
    for name in ("W_up", "W_gate"):
        shape = part.local_shape(source[name].shape)
        target = module.place_weight(name, shape, torch.float32, torch.device("cpu"))
        assert target is not None and target.shape == shape
        target.copy_(source[name][2:4])
    state = module.state_dict()
    assert all(torch.equal(state[name], source[name][2:4]) for name in ("W_gate", "W_up"))
    assert module.W13.shape == (2, 4, 10)
    assert module.place_weight("W_down", (1, 1, 1), torch.float32, torch.device("cpu")) is None


def test_moe_width_of_its_own() -> None:
    """spec preview.md 1.2: split [w, C], merge [C, w], d_head = w / heads."""
    moe = MoEConfig(num_heads=3, num_experts=4, top_k=2, moe_layers=(0,), expert_intermediate_size=8, split_merge_intermediate_size=24)
    layer = MoEMLP(PreviewConfig(num_layers=1, hidden_size=48, head_dim=12, mm_layers=(), moe=moe), torch.float32)
    shapes = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert shapes["split_linear.weight"] == (24, 48) and shapes["merge_linear.weight"] == (48, 24)
    assert shapes["moe_mlp.gate"] == (12, 8) and shapes["moe_mlp.W_down"] == (12, 8, 8)
