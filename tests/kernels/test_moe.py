"""Routing and routed experts against loops over tokens and heads."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from magi2_kernels.moe_routing import TopK, plan_tiles, reference, route, router_logits, select_experts, sort_routes
from magi2_kernels.multi_head_moe import ExpertWeights, multi_head_moe

S, G, E, K, D, F = 13, 3, 5, 2, 6, 7


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chosen(seed: int = 0) -> TopK:
    return select_experts(rand(G, S, E, seed=seed), rand(G * E, seed=1), top_k=K, route_scale=4.9)


def experts(dtype: torch.dtype = torch.float32) -> ExpertWeights:
    return ExpertWeights(*(rand(*shape, seed=2).to(dtype) for shape in ((G * E, D, F), (G * E, D, F), (G * E, F, D))))


def test_router_logits_uses_the_gate_of_the_head() -> None:
    x, gate = rand(S, G, D), rand(G * E, D, seed=3)
    got = router_logits(x, gate)
    for g in range(G):
        torch.testing.assert_close(got[g].double(), x[:, g].double() @ gate[g * E : (g + 1) * E].double().T, rtol=1e-5, atol=1e-5)


def test_select_experts_bias_chooses_and_never_weighs() -> None:
    logits, bias = torch.zeros(1, 1, 4), torch.tensor([0.0, 0.3, 0.2, 0.1])
    logits[0, 0] = torch.tensor([2.0, 0.0, -1.0, -5.0])
    picked = select_experts(logits, bias, top_k=2, route_scale=3.0)
    assert picked.ids.tolist() == [[[0, 1]]]
    scores = torch.sigmoid(logits[0, 0])
    torch.testing.assert_close(picked.weights[0, 0], 3.0 * scores[:2] / scores[:2].sum())
    assert select_experts(logits, bias * 100, top_k=2, route_scale=3.0).ids.tolist() == [[[1, 2]]]


def test_select_experts_vanishing_scores_stay_finite() -> None:
    picked = select_experts(torch.full((1, 2, 4), -200.0), torch.zeros(4), top_k=2, route_scale=4.9)
    assert torch.isfinite(picked.weights).all()


def test_route_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, gate, bias = rand(S, G, D), rand(G * E, D, seed=3), rand(G * E, seed=4)
    whole = route(x, gate, bias, top_k=K, route_scale=4.9)
    monkeypatch.setattr(reference, "CHUNK_SCORES", 4 * G * E)
    parts = route(x, gate, bias, top_k=K, route_scale=4.9)
    assert torch.equal(whole.ids, parts.ids)
    torch.testing.assert_close(whole.weights, parts.weights)
    assert route(x[:0], gate, bias, top_k=K, route_scale=4.9).ids.shape == (G, 0, K)


def test_sort_routes_lists_every_route_once_in_order() -> None:
    picked = chosen()
    routes = sort_routes(picked, E)
    want = sorted(
        (g * E + int(picked.ids[g, s, k]), s, float(picked.weights[g, s, k])) for g in range(G) for s in range(S) for k in range(K)
    )
    flat = torch.repeat_interleave(torch.arange(G * E), routes.offsets.diff())
    got = list(zip(flat.tolist(), routes.tokens().tolist(), routes.sorted_weights().tolist(), strict=True))
    assert got == want and routes.offsets[0] == 0


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_plan_tiles_covers_every_route_once(rows: int) -> None:
    routes = sort_routes(chosen(), E)
    tiles = plan_tiles(routes, rows)
    seen = []
    for expert, start in zip(tiles.expert.tolist(), tiles.start.tolist(), strict=True):
        if expert >= 0:
            end = int(routes.offsets[expert + 1])
            assert int(routes.offsets[expert]) <= start < end
            seen += range(start, min(start + rows, end))
    assert seen == list(range(G * S * K))


def test_plan_tiles_no_routes() -> None:
    empty = TopK(torch.zeros(G, 0, K, dtype=torch.int64), torch.zeros(G, 0, K))
    routes = sort_routes(empty, E)
    assert routes.offsets.tolist() == [0] * (G * E + 1) and plan_tiles(routes, 4).expert.numel() == 0
    assert multi_head_moe(torch.zeros(0, G, D), routes, experts()).shape == (0, G, D)


def test_multi_head_moe_sums_the_experts_of_each_head() -> None:
    x, picked, weights = rand(S, G, D), chosen(), experts()
    got = multi_head_moe(x, sort_routes(picked, E), weights)
    for s in range(S):
        for g in range(G):
            want = torch.zeros(D, dtype=torch.float64)
            for k in range(K):
                e = g * E + int(picked.ids[g, s, k])
                gate, up = (x[s, g].double() @ m[e].double() for m in (weights.gate, weights.up))
                gate = gate.clamp(max=7)
                hidden = gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7, 7) + 1)
                want += float(picked.weights[g, s, k]) * (hidden @ weights.down[e].double())
            torch.testing.assert_close(got[s, g].double(), want, rtol=1e-4, atol=1e-4)


def test_multi_head_moe_repeats_bit_for_bit_and_is_local_to_a_token() -> None:
    x, picked, weights = rand(S, G, D).bfloat16(), chosen(), experts(torch.bfloat16)
    whole = multi_head_moe(x, sort_routes(picked, E), weights)
    assert torch.equal(whole, multi_head_moe(x, sort_routes(picked, E), weights))
    part = multi_head_moe(x[4:9], sort_routes(TopK(picked.ids[:, 4:9], picked.weights[:, 4:9]), E), weights)
    torch.testing.assert_close(part.float(), whole[4:9].float(), rtol=2**-7, atol=1e-2)


def test_multi_head_moe_wrong_weights_are_refused() -> None:
    weights = experts()
    with pytest.raises(ValueError, match=r"weights\.down"):
        multi_head_moe(rand(S, G, D), sort_routes(chosen(), E), ExpertWeights(weights.gate, weights.up, weights.gate))


def test_multi_head_moe_wrong_routes_are_refused() -> None:
    weights, routes = experts(), sort_routes(chosen(), E)
    for order in (routes.order[:-1], torch.stack([routes.order, routes.order], 1)[:, 0], routes.order[None]):
        with pytest.raises(ValueError, match="make them with sort_routes"):
            multi_head_moe(rand(S, G, D), replace(routes, order=order), weights)


def test_multi_head_moe_packed_weights_of_another_width_are_refused() -> None:
    weights = experts()
    with pytest.raises(ValueError, match=r"weights\.w13 has shape"):
        multi_head_moe(rand(S, G, D), sort_routes(chosen(), E), replace(weights, w13=torch.zeros(G * E, D, 2)))
