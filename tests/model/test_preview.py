"""The transformer: names, types and bytes of the checkpoint, precision rules, ranks' shares, seams."""

import gc
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from magi2_core.config import PreviewConfig
from magi2_core.errors import CheckpointError
from magi2_core.model.hyper_connection import HyperState
from magi2_core.model.packing import PackedInputs
from magi2_core.model.preview import PreviewTransformer
from magi2_core.model.velocity import PreviewVelocity

BF16_NAMES = (
    "linear_g",
    "linear_qkv",
    "linear_proj",
    "up_gate_proj",
    "down_proj",
    "split_linear",
    "merge_linear",
    "expert_fc1",
    "expert_fc2",
)


def bytes_of(state: dict[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def test_preview_released_config_is_the_released_checkpoint() -> None:
    with torch.device("meta"):
        state = PreviewTransformer(PreviewConfig()).state_dict()
    assert len(state) == 1371
    assert bytes_of(state) == 228_107_858_176
    assert sum(tensor.numel() for tensor in state.values()) == 113_934_953_536
    shapes = {
        "pre_adapter.rope.bands": (16,),
        "block.layers.39.attention.linear_qkv.weight": (27648, 3072),
        "block.layers.2.attention.linear_qkv.weight": (9216, 3072),
        "block.layers.2.mlp.pre_norm.weight": (9216,),
        "block.layers.2.mlp.moe_mlp.W_down": (3072, 1280, 256),
        "block.layers.2.mlp.moe_mlp.gate": (3072, 256),
        "block.layers.37.mlp.moe_mlp.router.expert_bias_ema": (3072,),
        "block.layers.0.mhc_phi_fused_mlp": (12288, 24),
        "block.layers.0.mhc_norm.weight": (36864,),
        "post_adapter.final_linear_audio.weight": (64, 12288),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_preview_dtypes_only_matrices_follow_the_choice(small_config: PreviewConfig, dtype: torch.dtype) -> None:
    with torch.device("meta"):
        state = PreviewTransformer(small_config, dtype).state_dict()
    for name, tensor in state.items():
        is_matrix = any(part in name for part in BF16_NAMES) or name.endswith(("W_gate", "W_up", "W_down"))
        assert tensor.dtype == (dtype if is_matrix else torch.float32), name


def test_preview_bf16_path_keeps_fp32_where_the_release_does(
    small_bf16_model: PreviewTransformer, small_request: dict, small_latents: tuple
) -> None:
    seen: dict[str, torch.dtype] = {}

    def watch(name: str):
        def hook(_module, args, result) -> None:
            for side, value in (("in", args[0]), ("out", result)):
                value = value.streams if isinstance(value, HyperState) else value
                if isinstance(value, Tensor):
                    seen[f"{name} {side}"] = value.dtype

        return hook

    model, layer = small_bf16_model, small_bf16_model.block.layers[1]
    watched = {
        "embed": model.pre_adapter.video_embedder,
        "layer": layer,
        "attention": layer.attention,
        "linear_qkv": layer.attention.linear_qkv,
        "mlp": layer.mlp,
        "experts": layer.mlp.moe_mlp,
        "final_norm": model.post_adapter.final_norm_video,
        "final_linear": model.post_adapter.final_linear_video,
    }
    for name, module in watched.items():
        module.register_forward_hook(watch(name))
    heads: dict[str, torch.dtype] = {}
    core = layer.attention.core

    def watched_core(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens, gate: Tensor) -> Tensor:
        heads.update(q=q.dtype, k=k.dtype, v=v.dtype, sinks=sinks.dtype)
        return core(q, k, v, sinks, cu_seqlens, gate)

    layer.attention.core = watched_core
    weights: list[torch.dtype] = []
    layer.mlp.moe_mlp.router.register_forward_hook(lambda _module, _args, chosen: weights.append(chosen.weights.dtype))
    video, audio = small_latents
    PreviewVelocity(model, **small_request)(video, audio, 500)
    bf16, fp32 = torch.bfloat16, torch.float32
    low = ("layer", "attention", "linear_qkv", "mlp", "experts")
    assert {name: seen[name] for name in seen if name.split()[0] in low} == {
        f"{name} {side}": bf16 for name in low for side in ("in", "out")
    }
    assert seen["embed in"] == seen["embed out"] == fp32
    assert (seen["final_norm in"], seen["final_norm out"], seen["final_linear out"]) == (bf16, fp32, fp32)
    assert heads == {"q": bf16, "k": bf16, "v": bf16, "sinks": fp32} and weights == [fp32]
    streams = torch.zeros(4, 4, 32, dtype=bf16)
    segments = PreviewVelocity(model, **small_request).context.segments.slice(0, 4)
    assert layer.project("attn", streams, segments).dtype == fp32
    assert {tensor.dtype for tensor in vars(layer.coefficients("attn", streams, segments)).values()} == {bf16}


def test_preview_forward_bf16_is_near_fp32(
    small_model: PreviewTransformer, small_bf16_model: PreviewTransformer, small_request: dict, small_latents: tuple
) -> None:
    video, audio = small_latents
    wide = PreviewVelocity(small_model, **small_request)(video, audio, 700).video_cond
    narrow = PreviewVelocity(small_bf16_model, **small_request)(video, audio, 700).video_cond
    error = float((narrow - wide).norm() / wide.norm())
    assert 1e-5 < error < 0.1


class RowsOf:
    """One rank's share of the packed rows."""

    multiple = 1

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def take(self, inputs: PackedInputs) -> PackedInputs:
        return inputs.slice(self.start, self.stop)

    def gather(self, velocities: Tensor) -> Tensor:
        return velocities


@pytest.mark.parametrize("ranks", [2, 5])
def test_preview_slices_equal_whole(small_model: PreviewTransformer, small_request: dict, small_latents: tuple, ranks: int) -> None:
    video, audio = small_latents
    inputs = PreviewVelocity(small_model, **small_request).inputs(video, audio, 300)
    attended: list[tuple[Tensor, ...]] = []
    originals = [layer.attention.core for layer in small_model.block.layers]

    def keep(core):
        def run(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, cu_seqlens, gate: Tensor) -> Tensor:
            attended.append((q, k, v, core(q, k, v, sinks, cu_seqlens, gate)))
            return attended[-1][-1]

        return run

    for layer, core in zip(small_model.block.layers, originals, strict=True):
        layer.attention.core = keep(core)
    with torch.no_grad():
        whole = small_model(inputs)
    found = []
    step = math.ceil(inputs.total / ranks)
    for start in range(0, inputs.total, step):
        stop = min(start + step, inputs.total)
        for index, layer in enumerate(small_model.block.layers):

            def from_whole(q, k, v, sinks, cu_seqlens, gate, index=index, rows=slice(start, stop)) -> Tensor:
                # Rows a rank sends to the exchange are those of the whole run, so what comes back may be cut from it.
                assert cu_seqlens.total == inputs.total
                for mine, full in zip((q, k, v), attended[index][:3], strict=True):
                    torch.testing.assert_close(mine, full[rows], rtol=1e-4, atol=1e-4)
                return attended[index][3][rows]

            layer.attention.core = from_whole
        small_model.split = RowsOf(start, stop)
        with torch.no_grad():
            found.append(small_model(inputs))
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-4, atol=1e-4)


def test_preview_dispatcher_seam_heads_apart_equal_heads_together(
    small_model: PreviewTransformer, small_request: dict, small_latents: tuple
) -> None:
    video, audio = small_latents
    velocity = PreviewVelocity(small_model, **small_request)
    whole = velocity(video, audio, 300)
    moe = small_model.block.layers[1].mlp.moe_mlp
    half = moe.gate.shape[0] // 2
    names = ("gate", "W13", "W_down", "router.expert_bias", "router.expert_bias_ema")
    full = {name: moe.get_parameter(name).data for name in names}

    class OneAfterTheOther:
        """Two expert ranks in turn: each gets all tokens and its half of the heads."""

        def dispatch(self, x: Tensor) -> Tensor:
            self.x = x
            return x[:, :2]

        def combine(self, first: Tensor) -> Tensor:
            for name in names:
                moe.get_parameter(name).data = full[name][half:]
            moe.dispatcher = Second()
            second = moe(self.x[:, 2:])
            return torch.cat([first, second], dim=1)

    class Second:
        def dispatch(self, x: Tensor) -> Tensor:
            return x

        combine = dispatch

    for name in names:
        moe.get_parameter(name).data = full[name][:half]
    moe.dispatcher = OneAfterTheOther()
    apart = velocity(video, audio, 300)
    torch.testing.assert_close(apart.video_cond, whole.video_cond, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(apart.audio_uncond, whole.audio_uncond, rtol=1e-4, atol=1e-4)


def test_router_selects_with_the_averaged_bias(small_model: PreviewTransformer, small_request: dict, small_latents: tuple) -> None:
    video, audio = small_latents
    velocity, router = PreviewVelocity(small_model, **small_request), small_model.block.layers[1].mlp.moe_mlp.router
    before = velocity(video, audio, 300).video_cond
    router.expert_bias += torch.linspace(-9, 9, router.expert_bias.numel())
    assert torch.equal(velocity(video, audio, 300).video_cond, before)
    router.expert_bias_ema += torch.linspace(-9, 9, router.expert_bias.numel())
    assert not torch.equal(velocity(video, audio, 300).video_cond, before)


def test_finish_loading_names_what_is_missing(small_config: PreviewConfig) -> None:
    with torch.device("meta"):
        model = PreviewTransformer(small_config)
    with pytest.raises(RuntimeError, match="are not loaded"):
        model.finish_loading()


def test_preview_contradicting_config_is_refused(small_config: PreviewConfig) -> None:
    with pytest.raises(CheckpointError, match="must cover"):
        PreviewTransformer(replace(small_config, mm_layers=(0,)))


def test_preview_holds_the_streams_once(small_model: PreviewTransformer, small_request: dict, small_latents: tuple) -> None:
    """At 540p they are 2.9 GB: a name left on old ones would cost as much again, just where the experts need their room."""
    inputs = PreviewVelocity(small_model, **small_request).inputs(*small_latents, 300)
    config, counts = small_model.config, []
    size = inputs.total * config.num_streams * config.hidden_size

    def count(*_: object) -> None:
        held = (item for item in gc.get_objects() if type(item) is Tensor and item.shape[:1] == (inputs.total,))
        counts.append(len({item.untyped_storage().data_ptr() for item in held if item.untyped_storage().nbytes() == 4 * size}))

    watched = [module for layer in small_model.block.layers for module in (layer.attention, layer.mlp)] + [small_model.post_adapter]
    for module in watched:
        module.register_forward_pre_hook(count)
    with torch.no_grad():
        small_model(inputs)
    assert counts == [1] * len(watched)
