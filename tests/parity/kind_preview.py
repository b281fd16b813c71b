"""Golden kinds of the preview stage: preview_component, packing, preview_transformer.

Everything runs the public modules and functions; intermediate tensors are read with forward hooks. bf16 runs follow the golden
README: where a layer's bf16 output is stored, the next layer starts from it.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from magi2_core.config import PreviewConfig
from magi2_core.model.hyper_connection import HyperState, split_streams
from magi2_core.model.packing import (
    BranchInputs,
    ItemShape,
    TokenContext,
    image_grids,
    pack,
    time_matrix,
    token_matrix,
    unpack,
)
from magi2_core.model.preview import PreviewTransformer
from magi2_core.model.rope import default_bands, rope_table
from magi2_core.model.time_code import time_code
from magi2_core.model.velocity import PreviewVelocity
from magi2_core.shapes import LatentShape
from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.hyper_connection import hyper_branch_input, hyper_connect
from magi2_kernels.moe_routing import router_logits, select_experts, sort_routes
from magi2_kernels.qk_norm_rope import apply_rope
from magi2_kernels.sink_attention import packed_attention, sink_attention, sink_weight
from magi2_kernels.swiglu import swiglu7

Tensors = dict[str, Tensor]


def build_model(case, dtype: torch.dtype) -> PreviewTransformer:
    """The case's model with its weights, in fp32 or as released."""
    with torch.device("meta"):
        model = PreviewTransformer(PreviewConfig.from_dict(case.model_config), dtype)
    wanted = model.state_dict()
    weights = case.weights
    assert wanted.keys() == weights.keys(), sorted(wanted.keys() ^ weights.keys())
    model.load_state_dict({name: weights[name].to(wanted[name].dtype) for name in wanted}, assign=True)
    return model.finish_loading()


class Component:
    """Arguments of the component cases, in the packed order of the case."""

    def __init__(self, case, dtype: torch.dtype) -> None:
        self.case, self.dtype, self.inputs = case, dtype, case.inputs
        ids = self.inputs.get("modality_mapping")
        self.segments = None if ids is None else ModalitySegments.from_ids(ids)

    @cached_property
    def model(self) -> PreviewTransformer:
        return build_model(self.case, self.dtype)

    @property
    def layer(self):
        return self.model.block.layers[self.case.spec["layer"]]

    def get(self, name: str) -> Tensor:
        """An input in the type of the streams."""
        return self.inputs[name].to(self.dtype)

    def tokens(self) -> TokenContext:
        rope, ends = self.inputs.get("rope"), self.inputs.get("cu_seqlens")
        rows = self.segments.total
        return TokenContext(
            self.segments,
            torch.zeros(rows, 0) if rope is None else rope,
            CuSeqlens.build([0, rows] if ends is None else ends.tolist()),
        )


def record(module: nn.Module, store: Tensors, into: str | None = None, out: str | None = None) -> None:
    """Stores a module's first argument and its result under the given names."""

    def hook(_module, args, result) -> None:
        if into is not None:
            store[into] = args[0]
        if out is not None:
            store[out] = result

    module.register_forward_hook(hook)


def _swiglu7(c: Component) -> Tensors:
    return {"y": swiglu7(c.get("x"))}


def _rmsnorm(c: Component) -> Tensors:
    layers, post = c.model.block.layers, c.model.post_adapter
    sources = {
        "attention_pre_norm": "x_hidden",
        "mlp_pre_norm": "x_hidden",
        "q_norm": "x_heads",
        "k_norm": "x_heads",
        "mhc_norm": "x_streams",
    }
    found = {}
    for name in c.case.spec["compare"]:
        if name.startswith("final_norm"):
            found[name] = getattr(post, name)(c.inputs["x_streams"], c.segments, torch.float32)
            continue
        index, norm = name.removeprefix("layer").split("_", 1)
        source = next(value for key, value in sources.items() if norm.endswith(key))
        dotted = norm if norm == "mhc_norm" else norm.replace("_", ".", 1)
        to_fp32 = norm.endswith(("q_norm", "k_norm", "mhc_norm"))
        module = layers[int(index)].get_submodule(dotted)
        found[name] = module(c.get(source), c.segments, torch.float32 if to_fp32 else None)
    return found


def _attention_sink(c: Component) -> Tensors:
    q, k, v, cu = c.get("q"), c.get("k"), c.get("v"), CuSeqlens.build(c.inputs["cu_seqlens"].tolist())
    plain, lse = packed_attention(q, k, v, cu)
    found = {
        "out": sink_attention(q, k, v, c.inputs["sinks"], cu),
        "out_without_sink": plain,
        "lse": lse,
        "sink_weight": sink_weight(lse, c.inputs["sinks"]),
    }
    for name, sinks in c.inputs.items():
        if name.startswith("sinks_"):
            found[f"out_{name.removeprefix('sinks_')}_sinks"] = sink_attention(q, k, v, sinks, cu)
    return found


def _mhc(c: Component) -> Tensors:
    streams, branch = c.get("streams"), c.get("branch_out")
    found: Tensors = {}
    names = c.case.spec.get("branches", ["attn"])
    for name in names:
        n = streams.shape[1]
        pre, post, res = c.layer.project(name, streams, c.segments).split([n, n, n * n], dim=1)
        mix = c.layer.coefficients(name, streams, c.segments)
        tensors = {
            "raw_h_pre": pre,
            "raw_h_post": post,
            "raw_h_res": res.unflatten(1, (n, n)),
            "h_pre": mix.pre,
            "h_post": mix.post,
            "h_res": mix.res,
            "branch_in": hyper_branch_input(streams, mix.pre),
            "streams_out": hyper_connect(streams, branch, mix),
        }
        # With several branches the golden names carry the branch.
        for key, value in tensors.items():
            found[f"{key}_{name}"] = found[f"{name}_{key}"] = value
            found.setdefault(key, value)
    return found


def _router(c: Component) -> Tensors:
    moe = c.layer.mlp.moe_mlp
    logits = router_logits(c.get("x_heads"), moe.gate)
    chosen = select_experts(logits, moe.router.expert_bias_ema, top_k=moe.router.top_k, route_scale=moe.router.route_scale)
    routes = sort_routes(chosen, moe.num_experts)
    return {
        "logits": logits,
        "topk_ids": chosen.ids,
        "topk_weights": chosen.weights,
        "gather_ids": routes.tokens(),
        "probs_sorted": routes.sorted_weights(),
        "expert_offsets": routes.offsets,
    }


def _moe_core(c: Component) -> Tensors:
    moe, config = c.layer.mlp.moe_mlp, c.model.config
    return {"y": moe(c.get("x").unflatten(1, (config.moe.num_heads, -1))).flatten(1)}


def _moe(c: Component) -> Tensors:
    mlp, tokens, found = c.layer.mlp, c.tokens(), {}
    record(mlp.pre_norm, found, out="norm_output")
    record(mlp.split_linear, found, out="split_out")
    record(mlp.moe_mlp, found, out="moe_out")
    found["y"] = mlp(c.get("hidden_states"), tokens)
    found["moe_out"] = found["moe_out"].flatten(1)
    # The layer adds both to what is there already; the goldens are the two alone.
    found["merged"] = mlp.merge_linear(found["moe_out"], c.segments)
    found["shared_out"] = mlp.shared(found["norm_output"], tokens)
    return found


def _layer(c: Component) -> Tensors:
    layer, tokens, found = c.layer, c.tokens(), {}
    record(layer.attention, found, out="attn_out")
    record(layer.mlp, found, out="mlp_out")
    streams = split_streams(c.get("x"), c.model.config.num_streams)
    attended = layer.attend(HyperState(streams), tokens)
    found["streams_after_attn"] = attended.connected()
    # The layer makes a branch's input and its norm in one call; the golden is the value between the two.
    for name, before in (("attn", streams), ("mlp", found["streams_after_attn"])):
        found[f"{name}_in"] = hyper_branch_input(before, layer.coefficients(name, before, c.segments).pre)
    found["y"] = layer.feed_forward(attended, tokens).connected().flatten(1)
    return found


def _pre_adapter(c: Component) -> Tensors:
    adapter = c.model.pre_adapter
    parts = [adapter.embed(c.inputs["tokens"][start:stop], modality) for start, stop, modality in c.segments.runs]
    return {"x": torch.cat(parts), "rope": adapter.rope(c.inputs["coords"])}


COMPONENTS: dict[str, Callable[[Component], Tensors]] = {
    "swiglu7": _swiglu7,
    "rmsnorm": _rmsnorm,
    "rope_embed": lambda c: {"rope": c.model.pre_adapter.rope(c.inputs["coords"])},
    "rope_apply": lambda c: {"y": apply_rope(c.inputs["q"], c.inputs["rope"])},
    "time_embedding": lambda c: {name: time_code(c.inputs["t"], int(name.removeprefix("emb"))) for name in c.case.spec["compare"]},
    "attention_sink": _attention_sink,
    "mhc": _mhc,
    "router": _router,
    "moe_core": _moe_core,
    "moe": _moe,
    "moe_layer": _moe,
    "dense_mlp": lambda c: {"y": c.layer.mlp(c.get("hidden_states"), c.tokens())},
    "pre_adapter": _pre_adapter,
    "post_adapter": lambda c: {"y": c.model.post_adapter(c.get("x"), c.segments)},
    "attention_block": lambda c: {"y": c.layer.attention(c.get("hidden_states"), c.tokens())},
}


def run_component(case, dtype: torch.dtype) -> Tensors:
    """One component case; whole-layer cases are named after their layer."""
    name = case.spec["component"]
    compute = COMPONENTS.get(name, _layer if name.startswith("layer") else None)
    assert compute is not None, f"component {name!r} is unknown"
    return compute(Component(case, dtype))


def case_branches(case) -> list[BranchInputs]:
    """Conditional and unconditional features of a packing case."""
    inputs = case.inputs
    shared = {
        "video": inputs["latent"],
        "audio": inputs["audio_latent"],
        "special": inputs.get("ref_image_special_token_embedding"),
        "ref_latents": inputs.get("ref_image_feat"),
    }
    cond, uncond = (BranchInputs(text=inputs[name], **shared) for name in ("txt_feat", "null_txt_feat"))
    return [cond, uncond if case.evaluation.get("use_ref_for_uncond", True) else uncond.without_ref()]


def case_items(case, branches: list[BranchInputs]) -> list[ItemShape]:
    """Token counts of those branches."""
    _, channels, frames, height, width = case.inputs["latent"].shape
    video = LatentShape(frames=frames, height=height, width=width, channels=channels)
    audio = case.inputs["audio_latent"].shape[1]
    return [
        ItemShape(video=video, audio=audio, text=branch.text.shape[1], images=image_grids(branch.special, branch.ref_latents))
        for branch in branches
    ]


def run_packing(case) -> Tensors:
    """Layout, features, codes, rotary table of the packed sequence, and unpacking of a given result."""
    branches = case_branches(case)
    sequence = pack(case_items(case, branches))
    config = PreviewConfig.from_dict(case.model_config)
    items = unpack(sequence, case.inputs["model_output"], audio_channels=case.inputs["audio_latent"].shape[2])
    return {
        "token_sequence": token_matrix(sequence, branches),
        "coords_mapping": sequence.coords,
        "modality_mapping": sequence.segments.ids,
        "cu_seqlens": sequence.cu_seqlens.tensor,
        "max_seqlen": torch.tensor(sequence.cu_seqlens.max_length),
        "time_token_sequence": time_matrix(sequence, int(case.inputs["timestep"]), config.time_channels),
        "rope": rope_table(sequence.coords, default_bands(config.rope_bands)),
        "unpacked_video": torch.cat([video for video, _ in items]),
        "unpacked_audio": torch.cat([audio for _, audio in items]),
    }


def _record_router(layer: nn.Module, name: str, found: Tensors) -> None:
    """Stores ids, weights and gap of a MoE layer's routing, [S, G, K] and [S, G]."""
    router = layer.mlp.moe_mlp.router

    def hook(_module, args, chosen) -> None:
        x, gate = args
        found[f"{name}_router_ids"] = chosen.ids.transpose(0, 1)
        found[f"{name}_router_weights"] = chosen.weights.transpose(0, 1)
        logits = router_logits(x, gate)
        biased = torch.sigmoid(logits) + router.expert_bias_ema.view(logits.shape[0], 1, -1)
        best = torch.topk(biased, min(router.top_k + 1, biased.shape[-1]), dim=-1).values
        found[f"{name}_router_gap"] = (best[..., router.top_k - 1] - best[..., -1]).transpose(0, 1)

    router.register_forward_hook(hook)


def run_transformer(case, dtype: torch.dtype, golden: Tensors) -> Tensors:
    """The whole forward as the sampler calls it; a layer whose output is in `golden` hands the golden on."""
    inputs, found = case.inputs, {}
    model = build_model(case, dtype)
    record(model.pre_adapter, found, out="block_in")
    record(model, found, out="transformer_out")
    for index, layer in enumerate(model.block.layers):
        name = f"layer_{index:02d}"

        def hook(_module, _args, state, name=name):
            streams = state.connected()
            found[f"{name}_out"] = streams.flatten(1)
            known = golden.get(f"{name}_out")
            return None if known is None else HyperState(known.to(streams.dtype).view_as(streams))

        layer.register_forward_hook(hook)
        if index in model.config.moe.moe_layers:
            _record_router(layer, name, found)
    _, channels, frames, height, width = inputs["latent"].shape
    velocity = PreviewVelocity(
        model,
        latent_shape=LatentShape(frames=frames, height=height, width=width, channels=channels),
        audio_latents=inputs["audio_latent"].shape[1],
        text=inputs["txt_feat"],
        negative=inputs["null_txt_feat"],
        special=inputs.get("ref_image_special_token_embedding"),
        ref_latents=inputs.get("ref_image_feat"),
        use_ref_for_uncond=case.evaluation.get("use_ref_for_uncond", True),
    )
    result = velocity(inputs["latent"], inputs["audio_latent"], int(inputs["timestep"]))
    found["rope"] = velocity.context.rope
    found["unpacked_video"] = torch.cat([result.video_cond, result.video_uncond])
    found["unpacked_audio"] = torch.cat([result.audio_cond, result.audio_uncond])
    return found


def run(case) -> Tensors:
    """fp32."""
    if case.kind == "packing":
        return run_packing(case)
    if case.kind == "preview_component":
        return run_component(case, torch.float32)
    return run_transformer(case, torch.float32, {})


def run_bf16(case) -> Tensors | None:
    """As released; a transformer case goes layer by layer."""
    if case.kind == "preview_component":
        return run_component(case, torch.bfloat16)
    return run_transformer(case, torch.bfloat16, case.outputs_bf16) if case.kind == "preview_transformer" else None
