"""The public reference's ops, timed from a checkout of it (`run.py --upstream PATH`): nothing of it is kept here.

Its imports that cannot be had are replaced: the compiler of its authors by torch.compile of a layer with attention and experts outside the
graph (static shapes; its unbacked sizes fail in torch 2.11), their attention extension by the package fa3-fwd and a sink correction in
plain PyTorch. `STUBBED` names what was replaced in this run.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch

STUBBED: list[str] = []


def _stub(name: str, **members: Any) -> None:
    top = name.partition(".")[0]
    if top not in STUBBED and importlib.util.find_spec(top) is not None:
        return
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    module.__spec__ = importlib.util.spec_from_loader(name, None)
    sys.modules[name] = module
    if name not in STUBBED:
        STUBBED.append(name)


class _Sinks:
    @staticmethod
    def correct_out_lse_with_sink(out: Any, lse: Any, sink: Any, sink_layout: str) -> tuple[Any, Any]:
        log_sum, total = lse.t(), torch.logsumexp(sink.float(), dim=0)
        joint = torch.logaddexp(log_sum, total.expand_as(log_sum))
        return (out.float() * torch.exp(log_sum - joint).unsqueeze(-1)).to(out.dtype), joint


def _keep(*_args: Any, **_options: Any) -> Any:
    return lambda wrapped: wrapped


def _outside_the_graph(*_args: Any, **_options: Any) -> Any:
    return torch.compiler.disable


def load(path: Path) -> Any:
    """Imports its preview model from the checkout."""
    sys.path.insert(0, str(path))
    fa3 = None
    if importlib.util.find_spec("fa3_fwd_interface"):
        importlib.import_module("fa3_fwd_interface")
        fa3 = torch.ops.fa3_fwd
    _stub("flash_attn_interface", flash_attn_3_cuda=fa3)
    _stub("magi_attn_extensions")
    _stub(
        "magi_attn_extensions.fa3_interface_with_sink",
        FA3VarlenFuncWithSink=_Sinks, fa3_func_with_sink=None, fa3_varlen_func_with_sink=None,
    )  # fmt: skip
    _stub("magi_compiler", magi_compile=_keep, magi_register_custom_op=_outside_the_graph)
    return importlib.import_module("inference.model.magi2_preview")


class Upstream:
    """One of its MoE layers with random weights, and the functions to time."""

    def __init__(self, path: Path) -> None:
        from whole import fill

        self.module = load(path)
        config = self.module.ModelConfig(num_heads_q=24, num_heads_kv=24)
        with torch.device("meta"):
            layer = self.module.TransformerLayer(config, 5)
        self.layer = fill(layer.to_empty(device="cuda")).requires_grad_(False).eval()
        with torch.no_grad():
            for buffer in self.layer.buffers():
                buffer.zero_()

    def context(self, ours: Any) -> dict[str, Any]:
        """Its arguments for our request: tokens padded to a multiple of 48 as it does, permuted by modality."""
        ids = ours.segments.ids
        ends = ours.cu_seqlens.host
        padding = -ends[-1] % 48
        ids = torch.cat([ids, ids.new_full((padding,), 2)])
        cu = torch.tensor([*ends, ends[-1] + padding] if padding else ends, dtype=torch.int32, device="cuda")
        rope = torch.cat([ours.rope, ours.rope.new_zeros(padding, ours.rope.shape[1])])
        longest = max(stop - start for start, stop in ours.cu_seqlens.bounds)
        dispatcher = self.module.ModalityDispatcher(ids, 3)
        sizes = [int(size) for size in dispatcher.group_size.tolist()]
        type(dispatcher).group_size_cpu = property(lambda _self: sizes)
        handler = self.module.VarlenHandler(cu, cu, longest, longest)
        return {"rope": rope, "varlen_handler": handler, "modality_dispatcher": dispatcher, "cp_split_sizes": torch.tensor([ids.shape[0]])}

    @torch.no_grad()
    def outputs(self, state: dict[str, torch.Tensor], context: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """What its layer, with our weights and for our request, makes of the streams [S, 4, C]: run as it is, and compiled."""
        bias = "mlp.moe_mlp.router.expert_bias"
        self.layer.load_state_dict({**state, bias: state[f"{bias}_ema"]})  # as its loader leaves it
        arguments = self.context(context)
        rows = arguments["rope"].shape[0]
        padded = torch.cat([x.flatten(1), x.new_zeros(rows - x.shape[0], x.shape[1] * x.shape[2])])
        order = arguments["modality_dispatcher"]
        runs = {"eager": self.layer, "compiled": torch.compile(self.layer, dynamic=False)}
        found = {name: order._inv_permute(run(order._permute(padded), **arguments)) for name, run in runs.items()}
        return {name: output[: x.shape[0]].view_as(x) for name, output in found.items()}

    def functions(self, shape: str) -> dict[str, Any]:
        """Name -> call without arguments, for one shape."""
        from whole import tokens

        layer, context = self.layer, self.context(tokens(shape))
        dispatcher = context["modality_dispatcher"]
        rows = context["rope"].shape[0]
        x = torch.randn(rows, 4 * 3072, device="cuda", dtype=torch.bfloat16)
        streams, branch = x.view(rows, 4, 3072), torch.randn(rows, 3072, device="cuda", dtype=torch.bfloat16)
        core = next(module for module in layer.modules() if type(module).__name__ == "CoreMultiHeadMoE")
        heads = branch.view(rows, 12, 256)
        compiled = torch.compile(layer, dynamic=False)

        def half_layer() -> None:
            post, res, into = layer._forward_mhc_pre_attn(streams, dispatcher)
            layer.attention.pre_norm(into, modality_dispatcher=dispatcher)
            arguments = (
                (layer.mhc_alpha_post_attn, layer.mhc_bias_post_attn, post),
                (layer.mhc_alpha_res_attn, layer.mhc_bias_res_attn, res),
            )
            weights = layer.mhc_handler.compute_hpost_and_hres(*arguments, out_dtype=torch.bfloat16)
            layer.mhc_handler.apply_hpost_and_hres(streams, branch, *weights)

        qkv = torch.randn(rows, 3, 24, 128, device="cuda", dtype=torch.bfloat16)

        def rotary() -> None:
            sin, cos = context["rope"].tensor_split(2, -1)
            for part, norm in ((qkv[:, 0], layer.attention.q_norm), (qkv[:, 1], layer.attention.k_norm)):
                heads_of = dispatcher._inv_permute(norm(part.clone(), modality_dispatcher=dispatcher)).unsqueeze(0)
                self.module.apply_rotary_emb_torch(heads_of, cos, sin).bfloat16()

        q, k, v = (qkv[:, i].contiguous()[None] for i in range(3))
        inner = torch.randn(rows, 5120, device="cuda", dtype=torch.bfloat16)
        gate = torch.randn(rows, 24, 1, device="cuda", dtype=torch.bfloat16)

        def attention() -> Any:
            sinks, handler = layer.attention.sinks, context["varlen_handler"]
            return self.module.flash_attn_with_sink(q, k, v, handler, context["cp_split_sizes"], -1.0, sinks)

        def sort(probs: torch.Tensor, indices: torch.Tensor) -> Any:
            return self.module._mh_moe_global_sort(topk_probs=probs, topk_indices=indices, num_experts=256)

        probs, indices = core._route(heads)
        return {
            "layer": lambda: layer(x, **context),
            "layer compiled": lambda: compiled(x, **context),
            "half_layer": half_layer,
            "qk_norm_rope": rotary,
            "modality_rms_norm": lambda: layer.attention.pre_norm(branch, modality_dispatcher=dispatcher),
            "swiglu7": lambda: self.module.swiglu7(inner),
            "gated_attention": lambda: dispatcher._permute(attention()) * torch.sigmoid(gate),
            "moe_routing": lambda: sort(*core._route(heads)),
            "multi_head_moe": lambda: core._flash_forward(heads, probs, indices),
            "routed_moe": lambda: core._forward_impl(branch),
        }
