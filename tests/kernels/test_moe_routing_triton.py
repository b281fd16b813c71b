"""The Triton routing against the reference: on the CPU under TRITON_INTERPRET=1 (fp32 and bf16 tokens), on a GPU unchanged."""

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from magi2_kernels.common.choice import using
from magi2_kernels.moe_routing import TopK, kernel, plan_tiles, reference, route, sort_routes, split_gate

SHAPES = [(13, 3, 5, 2, 6), (1, 1, 1, 1, 1), (33, 2, 20, 6, 40), (70, 1, 17, 3, 16), (0, 2, 8, 2, 8)]
"""S, G, E, K, d."""


def inputs(device: str, s: int, g: int, e: int, d: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, gate, bias = (torch.randn(*shape, generator=generator) for shape in ((s, g, d), (g * e, d), (g * e,)))
    return x.to(device, dtype), gate.to(device), (0.1 * bias).to(device)


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that a kernel fails to write are NaN, or numbers out of every range."""

    def poisoned(*shape, **options):
        tensor = plain(*shape, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(torch.iinfo(tensor.dtype).max)

    plain = torch.empty
    monkeypatch.setattr(kernel.torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_route_equals_reference(triton_device: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    s, g, e, k, d = shape
    if dtype == torch.bfloat16 and triton_device == "cpu":
        pytest.skip("the interpreter's bf16 product is wrong")
    x, gate, bias = inputs(triton_device, s, g, e, d, dtype)
    want_ids, want_weights = reference.route(x, gate, bias, top_k=k, route_scale=4.9)
    with using("triton"):
        got = route(x, gate, bias, top_k=k, route_scale=4.9)
    assert torch.equal(got.ids.long(), want_ids)
    assert torch.equal(got.flat.long(), want_ids + torch.arange(0, g * e, e, device=triton_device).view(-1, 1, 1))
    torch.testing.assert_close(got.weights, want_weights, rtol=2e-5, atol=1e-6)


def test_route_reads_strided_tokens(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 21, 4, 7, 10, torch.float32)
    part, some = x[2:19, 1:3], slice(7, 21)
    with using("triton"):
        got = route(part, gate[some], bias[some], top_k=3, route_scale=1.0)
        same = route(part.contiguous(), gate[some], bias[some], top_k=3, route_scale=1.0)
    assert torch.equal(got.ids, same.ids) and torch.equal(got.weights, same.weights)


def test_route_equal_scores_and_not_a_number_stay_in_the_table(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 6, 1, 5, 8, torch.float32)
    x[0], x[1] = 0.0, float("nan")
    with using("triton"):
        got = route(x, gate, torch.zeros_like(bias), top_k=3, route_scale=1.0)
    assert got.ids[0, 0].tolist() == [0, 1, 2]
    assert got.ids.min() >= 0 and got.ids.max() < 5
    assert torch.isfinite(got.weights[0, 2:]).all()


def test_route_bias_chooses_and_hardly_touches_the_weights(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 40, 1, 16, 16, torch.float32)
    want_ids, want = reference.route(x, gate, 10 * bias, top_k=4, route_scale=4.9)
    with using("triton"):
        got = route(x, gate, 10 * bias, top_k=4, route_scale=4.9)
    same = (got.ids == want_ids).all(-1)
    assert same.float().mean() > 0.9 and not torch.equal(want_ids, reference.route(x, gate, 0 * bias, top_k=4, route_scale=4.9)[0])
    torch.testing.assert_close(got.weights[same], want[same], rtol=2e-5, atol=2e-6)


def test_route_vanishing_scores_stay_finite(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 5, 1, 6, 8, torch.float32)
    with using("triton"):
        got = route(x, gate - 1000 * x.mean(0).sign(), bias, top_k=3, route_scale=4.9)
    assert torch.isfinite(got.weights).all() and got.ids.max() < 6


def test_route_prepared_gate_gives_the_same_bits(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 21, 2, 7, 10, torch.float32)
    with using("triton"):
        parts = split_gate(gate, 2, x.dtype)
        want = route(x, gate, bias, top_k=3, route_scale=1.0)
        got = route(x, gate.fill_(0.0), bias, top_k=3, route_scale=1.0, parts=parts)
        with pytest.raises(ValueError, match="split this gate"):
            route(x[:, :1], gate[:7], bias[:7], top_k=3, route_scale=1.0, parts=parts)
    assert torch.equal(got.ids, want.ids) and torch.equal(got.weights, want.weights)


def test_model_prepare_splits_the_gate_beside_the_checkpoint(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from magi2_core.config import MoEConfig, PreviewConfig
    from magi2_core.model.block import PreviewLayer

    moe = MoEConfig(num_heads=2, num_experts=4, top_k=2, moe_layers=(0,), expert_intermediate_size=8)
    layer = PreviewLayer(PreviewConfig(num_layers=1, hidden_size=24, head_dim=12, mm_layers=(), moe=moe), 0, torch.float32)
    x, gate, _ = inputs("cpu", 9, 2, 4, 12, torch.float32)
    experts, names = layer.mlp.moe_mlp, set(layer.state_dict())
    for parameter in layer.parameters():
        parameter.data.fill_(0.1)
    experts.gate.data.copy_(gate)
    layer.to(triton_device)
    x = x.to(triton_device)
    want = experts.router(x, experts.gate)
    with using("triton"):
        layer.prepare(torch.float32)
        monkeypatch.setattr(kernel, "split_gate", None)
        got = experts.router(x, experts.gate)
    assert torch.equal(got.ids.long(), want.ids) and set(layer.state_dict()) == names


def test_split_gate_bf16_parts_add_up_exactly(triton_device: str) -> None:
    gate = inputs(triton_device, 1, 3, 35, 40, torch.float32)[1]
    with using("triton"):
        parts = split_gate(gate, 3, torch.bfloat16)
    assert parts.dtype == torch.bfloat16 and torch.equal(parts.float().sum(0).transpose(1, 2).flatten(0, 1), gate)


def test_split_gate_launches_nothing() -> None:
    # weights that visit the device for a stage only are loaded, and split, in host memory
    with using("triton"):
        assert split_gate(torch.empty(6, 8, device="meta"), 3, torch.bfloat16).shape == (3, 3, 8, 2)


def test_route_other_types_are_refused(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 3, 1, 4, 8, torch.float64)
    with using("triton"), pytest.raises(ValueError, match="the Triton kernel takes"):
        route(x, gate, bias, top_k=2, route_scale=1.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 128])
def test_sort_and_tiles_equal_reference(triton_device: str, shape: tuple[int, ...], rows: int) -> None:
    s, g, e, k, d = shape
    chosen = TopK(*reference.route(*inputs(triton_device, s, g, e, d, torch.float32), top_k=k, route_scale=4.9))
    want = sort_routes(chosen, e)
    tiles = plan_tiles(want, rows)
    with using("triton"):
        got = sort_routes(TopK(chosen.ids.int(), chosen.weights), e)
        got_tiles = plan_tiles(got, rows)
    for field in dataclasses.fields(want):
        left, right = getattr(got, field.name), getattr(want, field.name)
        assert torch.equal(left, right) and left.dtype == right.dtype, field.name
    assert torch.equal(got_tiles.expert, tiles.expert) and torch.equal(got_tiles.start, tiles.start)


def test_sort_routes_many_experts_use_wide_keys(triton_device: str) -> None:
    ids = torch.tensor([[[39_999], [1], [39_998]]], device=triton_device)
    with using("triton"):
        got = sort_routes(TopK(ids.int(), torch.ones(1, 3, 1, device=triton_device)), 40_000)
    assert got.tokens().tolist() == [1, 2, 0] and got.offsets[-1] == 3


def test_sort_routes_by_the_keys_that_route_made(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 33, 2, 20, 40, torch.float32)
    with using("triton"):
        chosen = route(x, gate, bias, top_k=6, route_scale=4.9)
        got = sort_routes(chosen, 20)
    want = sort_routes(TopK(chosen.ids, chosen.weights), 20)
    assert chosen.flat.dtype == torch.int16 and torch.equal(got.order, want.order) and torch.equal(got.offsets, want.offsets)


@pytest.mark.parametrize("name", kernel.TABLE)
def test_router_table_row_is_right(triton_device: str, name: str) -> None:
    on_gpu = triton_device != "cpu"
    s, g, e, k, d = (700, 2, 256, 6, 256) if on_gpu else (20, 1, 16, 2, 20)
    x, gate, bias = inputs(triton_device, s, g, e, d, torch.bfloat16 if on_gpu else torch.float32)
    want_ids, want = reference.route(x, gate, bias, top_k=k, route_scale=4.9)
    ids, weights, _ = kernel._launch_route(x, kernel.split_gate(gate, g, x.dtype), bias, k, 4.9, kernel.TABLE[name])
    same = (ids == want_ids).all(-1)
    assert same.float().mean() > 0.998
    torch.testing.assert_close(weights[same], want[same], rtol=2e-5, atol=1e-6)


@pytest.mark.gpu
def test_route_sets_on_many_rows_equal_fp64(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 20_000, 3, 256, 256, torch.bfloat16)
    gate = gate / 16
    with using("triton"):
        got = route(x, gate, bias, top_k=6, route_scale=4.9).ids.sort(-1).values
    scores = torch.sigmoid(torch.bmm(x.double().transpose(0, 1), gate.double().view(3, 256, 256).transpose(1, 2)))
    want = torch.topk(scores + bias.double().view(3, 1, 256), 6, dim=-1).indices.sort(-1).values
    assert (got == want).all(-1).float().mean() > 0.9999


@pytest.mark.gpu
def test_routing_is_captured_in_a_graph(triton_device: str) -> None:
    x, gate, bias = inputs(triton_device, 300, 2, 64, 64, torch.bfloat16)

    def run():
        routes = sort_routes(route(x, gate, bias, top_k=4, route_scale=4.9), 64)
        return routes, plan_tiles(routes, 64)

    with using("triton"):
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            routes, tiles = run()
        x.copy_(torch.randn_like(x))
        graph.replay()
        want, want_tiles = run()
    assert torch.equal(routes.order, want.order) and torch.equal(tiles.start, want_tiles.start)
