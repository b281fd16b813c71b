"""The refiner transformer: released state dict, chunks, a rank's share of the tokens, dtypes."""

import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch

from magi2_core.config import RefinerConfig, WindowConfig
from magi2_core.errors import CheckpointError
from magi2_core.model import refiner
from magi2_core.model.refiner import RefinerTransformer
from magi2_core.model.refiner_packing import RefinerPacking, RefinerSequence, SegmentLengths, pack
from magi2_kernels.block_attention import block_attention

CONFIG = RefinerConfig(
    num_layers=3,
    hidden_size=32,
    head_dim=16,
    num_query_groups=1,
    video_in_channels=6,
    audio_in_channels=8,
    text_in_channels=12,
    mm_layers=(0, 2),
    local_attn_layers=(0, 1),
    post_norm_layers=(0, 1),
    window=WindowConfig(block_t_size=2, block_size=2, block_t_radius=1, block_h_radius=1, block_w_radius=1),
)


def _model(config: RefinerConfig = CONFIG, dtype: torch.dtype = torch.float32) -> RefinerTransformer:
    torch.manual_seed(0)
    model = RefinerTransformer(config, dtype)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape) * 0.2)
    return model


def _sequence(config: RefinerConfig = CONFIG) -> RefinerSequence:
    generator = torch.Generator().manual_seed(1)
    packing = RefinerPacking.build(SegmentLengths(grid=(3, 3, 5), audio=4, text=6), config)
    others = {"text": torch.randn(1, 6, 12, generator=generator), "audio": torch.randn(1, 4, 8, generator=generator)}
    return pack(packing, torch.randn(1, 6, 3, 3, 5, generator=generator), config, others)


def test_refiner_released_state_dict() -> None:
    with torch.device("meta"):
        state = RefinerTransformer(RefinerConfig()).state_dict()
    assert len(state) == 281
    assert sum(tensor.numel() for tensor in state.values()) == 6_720_075_280
    assert sum(tensor.numel() * tensor.element_size() for tensor in state.values()) == pytest.approx(13.485e9, abs=5e5)
    assert Counter(tensor.dtype for tensor in state.values()) == {torch.bfloat16: 150, torch.float32: 131}
    shapes = {
        "pre_adapter.text_embedder.bias": (4096,),
        "pre_adapter.rope.bands": (16,),
        "block.layers.29.attention.linear_qkv.weight": (3 * 6144, 4096),
        "block.layers.2.attention.linear_qkv.weight": (6144, 4096),
        "block.layers.2.attention.linear_g.weight": (32, 4096),
        "block.layers.1.attention.k_norm.weight": (3 * 128,),
        "block.layers.28.mlp.up_gate_proj.weight": (3 * 21840, 4096),
        "block.layers.27.mlp.down_proj.weight": (4096, 10920),
        "post_adapter.final_linear_audio.weight": (64, 4096),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


def test_refiner_post_norm_and_no_gate_keys() -> None:
    state = RefinerTransformer(replace(CONFIG, enable_attn_gating=False)).state_dict()
    assert tuple(state["block.layers.1.attn_post_norm.weight"].shape) == (32,)
    assert "block.layers.2.mlp_post_norm.weight" not in state
    assert not [name for name in state if "linear_g" in name]


def test_refiner_chunks_change_nothing(monkeypatch) -> None:
    model, sequence = _model(), _sequence()
    whole = model(sequence)
    monkeypatch.setattr(refiner, "CHUNK_TOKENS", 7)
    torch.testing.assert_close(model(sequence), whole, atol=1e-6, rtol=1e-5)


def test_refiner_text_rows_are_zero_and_audio_rows_are_not() -> None:
    rows = _model()(_sequence())
    assert rows.shape == (55, 8)
    assert rows[45:49].abs().min() > 0
    assert not rows[49:].any()
    assert not rows[:45, 6:].any()


def test_refiner_residual_is_fp32_from_the_first_mlp_on() -> None:
    model, seen = _model(dtype=torch.bfloat16), []
    for layer in model.block.layers:
        layer.attention.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
        layer.mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    assert model(_sequence()).dtype == torch.float32
    assert seen == [torch.bfloat16, torch.bfloat16, *[torch.float32] * 4]


@pytest.mark.parametrize("cuts", [(28,), (10, 47, 50)])
def test_refiner_shares_of_tokens_equal_the_whole(cuts: tuple[int, ...]) -> None:
    """Ranks as threads: the attention seam trades tokens, everything else stays on the rank's rows."""
    model, sequence = _model(), _sequence()
    whole = model(sequence)
    bounds = [0, *cuts, 55]
    ranks = len(bounds) - 1
    barrier = threading.Barrier(ranks)
    models = [_model() for _ in range(ranks)]
    board: list = [None] * ranks
    found: list = [None] * ranks

    def run(rank: int) -> None:
        def core(q, k, v, layout):
            board[rank] = (q, k, v)
            barrier.wait(30)
            full = [torch.cat(parts) for parts in zip(*board, strict=True)]
            barrier.wait(30)
            return block_attention(*full, layout)[bounds[rank] : bounds[rank + 1]]

        models[rank].attention_core = core
        found[rank] = models[rank](sequence.slice(bounds[rank], bounds[rank + 1]))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(torch.cat(found), whole, atol=2e-5, rtol=1e-4)


def test_refiner_local_layers_use_the_window() -> None:
    model, layouts = _model(), []
    model.attention_core = lambda q, k, v, layout: layouts.append(layout.num_blocks) or block_attention(q, k, v, layout)
    model(_sequence())
    assert layouts == [12, 12, 0]


def test_refiner_dense_mode_without_frames_refuses_local_layers() -> None:
    with pytest.raises(CheckpointError, match="local_attn_layers"):
        RefinerTransformer(replace(CONFIG, window=WindowConfig(mode="dense", dense_frame_receptive_field=-1)))
