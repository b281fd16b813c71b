"""The Triton routed experts against the reference: on the CPU under TRITON_INTERPRET=1 in fp32, on a GPU in bf16 as well."""

import hashlib
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton has no wheel for this system")

from magi2_kernels.common.choice import using
from magi2_kernels.moe_routing import Routes, TopK, sort_routes
from magi2_kernels.multi_head_moe import ExpertWeights, kernel, multi_head_moe, pack_w13, unpack_w13

ODD = [(13, 3, 5, 2, 6, 7), (1, 1, 1, 1, 1, 1), (40, 2, 4, 3, 20, 33), (17, 1, 9, 6, 16, 16), (0, 2, 3, 2, 8, 8)]
"""S, G, E, K, d, F."""
REAL = [(300, 2, 8, 6, 256, 1280), (1000, 1, 3, 2, 128, 96), (77, 3, 4, 3, 64, 128)]


def case(device: str, sizes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, TopK, ExpertWeights]:
    s, g, e, k, d, f = sizes
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(s, g, d, generator=generator)
    scores = torch.rand(g, s, e, generator=generator)
    weights, ids = scores.topk(k, dim=-1)
    gate, up = (torch.randn(g * e, d, f, generator=generator) * d**-0.5 * 2 for _ in range(2))
    down = torch.randn(g * e, f, d, generator=generator) * f**-0.5
    packed = ExpertWeights.packed(pack_w13(gate, up).to(device, dtype), down.to(device, dtype))
    return x.to(device, dtype), TopK(ids.to(device), weights.to(device)), packed


def exact(x: Tensor, chosen: TopK, weights: ExpertWeights) -> Tensor:
    """fp64, by token and head, no rounding."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    experts = weights.gate.shape[0] // x.shape[1]
    for g in range(x.shape[1]):
        for e in range(experts):
            token, place = (chosen.ids[g] == e).nonzero(as_tuple=True)
            one = x[token, g].double()
            gate, up = (one @ m[g * experts + e].double() for m in (weights.gate, weights.up))
            gate = gate.clamp(max=7)
            hidden = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
            out[token, g] += (hidden @ weights.down[g * experts + e].double()) * chosen.weights[g][token, place].double().unsqueeze(1)
    return out


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that a kernel fails to write are NaN, or numbers out of every range."""

    def poisoned(*shape, **options):
        tensor = plain(*shape, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(torch.iinfo(tensor.dtype).max)

    plain = torch.empty
    monkeypatch.setattr(kernel.torch, "empty", poisoned)


@pytest.fixture
def dtype(triton_device: str) -> torch.dtype:
    return torch.float32 if triton_device == "cpu" else torch.bfloat16


def routes_of(chosen: TopK, experts: int) -> Routes:
    with using("triton"):
        return sort_routes(chosen, experts)


def test_pack_w13_alternates_columns_and_unpacks_without_a_copy() -> None:
    gate, up = torch.arange(12.0).view(1, 2, 6), -torch.arange(12.0).view(1, 2, 6)
    w13 = pack_w13(gate, up)
    assert w13[0, 1, :4].tolist() == [6, -6, 7, -7]
    first, second = unpack_w13(w13)
    assert torch.equal(first, gate) and torch.equal(second, up)
    second[0, 0, 0] = 5.0
    assert w13[0, 0, 1] == 5.0


def test_pack_w13_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="one shape"):
        pack_w13(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4))


@pytest.mark.parametrize("sizes", ODD + REAL[2:], ids=str)
def test_multi_head_moe_equals_fp64(triton_device: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    x, chosen, weights = case(triton_device, sizes, dtype)
    routes = routes_of(chosen, sizes[2])
    with using("triton"):
        got = multi_head_moe(x, routes, weights)
    assert got.shape == x.shape and torch.isfinite(got).all()
    assert error(got, exact(x, chosen, weights)) < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_multi_head_moe_bf16_is_no_worse_than_reference(triton_device: str, sizes: tuple[int, ...]) -> None:
    x, chosen, weights = case(triton_device, sizes, torch.bfloat16)
    routes = routes_of(chosen, sizes[2])
    want = exact(x, chosen, weights)
    reference = multi_head_moe(x, routes, weights)
    with using("triton"):
        got = multi_head_moe(x, routes, weights)
    assert error(got, want) <= 1.05 * error(reference, want)


@pytest.mark.parametrize("name", kernel.TABLE)
def test_table_row_is_right(triton_device: str, dtype: torch.dtype, name: str) -> None:
    tile = kernel.TABLE[name]
    if triton_device == "cpu":
        tile, sizes = replace(tile, loads=kernel.POINTER), (40, 2, 3, 2, 24, 40)
    else:
        sizes = REAL[0]
    x, chosen, weights = case(triton_device, sizes, dtype, seed=3)
    routes = routes_of(chosen, sizes[2])
    rows = kernel.expert_rows(x, (routes.order, routes.weights, routes.offsets), weights.w13, weights.down, tile)
    got = kernel.sum_rows(rows, x.shape[0], x.shape[1])
    assert error(got, exact(x, chosen, weights)) < (1e-6 if dtype == torch.float32 else 6e-3)


def test_multi_head_moe_reads_strided_tokens(triton_device: str, dtype: torch.dtype) -> None:
    x, chosen, weights = case(triton_device, (19, 2, 4, 2, 24, 16), dtype)
    wide = torch.stack((x, x + 1), dim=1)
    routes = routes_of(chosen, 4)
    with using("triton"):
        assert torch.equal(multi_head_moe(wide[:, 0], routes, weights), multi_head_moe(x, routes, weights))


def test_multi_head_moe_same_bits_whatever_heads_and_tokens_are_here(triton_device: str, dtype: torch.dtype) -> None:
    sizes = (50, 4, 5, 3, 32, 32) if triton_device == "cpu" else (3000, 4, 5, 3, 256, 1280)
    x, chosen, weights = case(triton_device, sizes, dtype)
    e, half, rows = sizes[2], slice(2, 4), slice(sizes[0] // 3, None)
    with using("triton"):
        whole = multi_head_moe(x, sort_routes(chosen, e), weights)
        again = multi_head_moe(x, sort_routes(chosen, e), weights)
        part = ExpertWeights.packed(weights.w13[2 * e :].contiguous(), weights.down[2 * e :].contiguous())
        picked = TopK(chosen.ids[half, rows].contiguous(), chosen.weights[half, rows].contiguous())
        local = multi_head_moe(x[rows, half].contiguous(), sort_routes(picked, e), part)

    def digest(tensor: Tensor) -> str:
        return hashlib.sha256(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    assert digest(whole) == digest(again)
    assert digest(local) == digest(whole[rows, half])


def test_multi_head_moe_separate_weights_are_refused(triton_device: str, dtype: torch.dtype) -> None:
    x, chosen, weights = case(triton_device, (5, 1, 2, 1, 8, 8), dtype)
    with using("triton"), pytest.raises(ValueError, match="packed"):
        multi_head_moe(x, sort_routes(chosen, 2), ExpertWeights(weights.gate, weights.up, weights.down))


@pytest.mark.gpu
def test_multi_head_moe_fp32_is_refused_on_a_gpu(triton_device: str) -> None:
    x, chosen, weights = case(triton_device, (5, 1, 2, 1, 64, 64), torch.float32)
    with using("triton"), pytest.raises(ValueError, match="reference"):
        multi_head_moe(x, sort_routes(chosen, 2), weights)


@pytest.mark.gpu
def test_multi_head_moe_is_captured_in_a_graph(triton_device: str) -> None:
    x, chosen, weights = case(triton_device, REAL[0], torch.bfloat16)
    with using("triton"):
        want = multi_head_moe(x, sort_routes(chosen, 8), weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = multi_head_moe(x, sort_routes(chosen, 8), weights)
        got.zero_()
        graph.replay()
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_routed_op_never_waits_for_the_device(triton_device: str) -> None:
    x, chosen, weights = case(triton_device, REAL[0], torch.bfloat16)
    with using("triton"):
        multi_head_moe(x, sort_routes(chosen, 8), weights)
        torch.cuda.set_sync_debug_mode("error")
        try:
            multi_head_moe(x, sort_routes(chosen, 8), weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
