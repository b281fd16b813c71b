"""Benchmark entries of the routed experts: routing, the expert network, and the two together as a layer runs them.

`python tests/bench/ops_moe.py --out FILE` checks and measures them at every shape, with what each part takes, and writes one JSON file.
Legend: S tokens, G MoE heads, E experts a head, K routes of a token and head, d channels of a head, F width inside an expert.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure
import torch
from registry import Entry
from torch import Tensor

E, K, D, F = 256, 6, 256, 1280
SCALE = 4.9
SHAPES = {"272p": (31_680, 12), "540p": (117_696, 12), "rank": (58_848, 3), "272p rank EP4": (15_840, 3), "540p SP8": (14_712, 12)}
"""Tokens and heads here. "rank": 540p on 8 cards with the heads over 4 of them and the tokens over 2; SP8: an eighth of the tokens, all heads."""
SETS = 2e-5
"""Share of rows (token and head) whose set of experts may differ from the fp32 reference: near ties."""
RELEASED_MS = {"540p": 83.98, "272p": 24.37, "rank": 11.13, "272p rank EP4": 3.53, "540p SP8": 12.33}
"""Whole routed op of the released code (logits, choice, sort, experts), measured once on the same kind of card with torch 2.11, Triton 3.6."""


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Random tokens, router and experts; the routing of a random router is balanced but for chance (0.35 to 1.85 of the mean)."""

    x: Tensor
    gate: Tensor
    parts: Tensor | None
    bias: Tensor
    w13: Tensor
    down: Tensor
    routes: Any

    @property
    def rows(self) -> int:
        """Pairs of token and head."""
        return self.x.shape[0] * self.x.shape[1]


def _route(i: Inputs) -> Any:
    from magi2_kernels.moe_routing import route

    return route(i.x, i.gate, i.bias, top_k=K, route_scale=SCALE, parts=i.parts)


def _routing(i: Inputs) -> Any:
    from magi2_kernels.moe_routing import sort_routes

    return sort_routes(_route(i), E)


def _normal(*shape: int, scale: float, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).mul_(scale)


def make(shape: str) -> Inputs:
    """Inputs of the released widths."""
    from magi2_kernels.common.choice import using
    from magi2_kernels.moe_routing import split_gate

    tokens, heads = SHAPES[shape]
    flat = heads * E
    fields = {
        "x": _normal(tokens, heads, D, scale=1.0),
        "gate": _normal(flat, D, scale=D**-0.5, dtype=torch.float32),
        "bias": _normal(flat, scale=0.01, dtype=torch.float32),
        "w13": _normal(flat, D, 2 * F, scale=D**-0.5),
        "down": _normal(flat, F, D, scale=F**-0.5),
    }
    with using("triton"):
        fields["parts"] = split_gate(fields["gate"], heads, torch.bfloat16)
        return Inputs(**fields, routes=_routing(Inputs(**fields, routes=None)))


def run_routing(i: Inputs) -> list[Tensor]:
    """Logits, choice, sort, tile table."""
    from magi2_kernels.moe_routing import plan_tiles

    routes = _routing(i)
    tiles = plan_tiles(routes, 128)
    return [routes.order, routes.weights, routes.offsets, tiles.expert, tiles.start]


def run_experts(i: Inputs) -> list[Tensor]:
    """Expert network and sum for given routes."""
    from magi2_kernels.multi_head_moe import ExpertWeights, multi_head_moe

    return [multi_head_moe(i.x, i.routes, ExpertWeights.packed(i.w13, i.down))]


def run_whole(i: Inputs) -> list[Tensor]:
    """Tokens in, sums out."""
    from magi2_kernels.multi_head_moe import ExpertWeights, multi_head_moe

    return [multi_head_moe(i.x, _routing(i), ExpertWeights.packed(i.w13, i.down))]


def different_sets(i: Inputs) -> float:
    """Share of rows with another set of experts than the reference; infinite when weights, order or tiles are wrong."""
    from magi2_kernels.common.choice import using
    from magi2_kernels.moe_routing import plan_tiles, sort_routes

    found = _route(i)
    routes = sort_routes(found, E)
    tiles = plan_tiles(routes, 128)
    with using("reference"):
        want = _route(i)
        want_routes = sort_routes(found, E)
        want_tiles = plan_tiles(want_routes, 128)
    exact = (found.ids == want.ids).all(-1)
    right = (found.weights[exact] - want.weights[exact]).abs().max() < 1e-5
    for name in ("order", "offsets"):
        right = right and torch.equal(getattr(routes, name), getattr(want_routes, name))
    right = right and torch.equal(tiles.expert, want_tiles.expert) and torch.equal(tiles.start, want_tiles.start)
    same = (found.ids.sort(-1).values == want.ids.sort(-1).values).all(-1)
    return 1.0 - same.double().mean().item() if right else float("inf")


def flops(i: Inputs) -> float:
    """Of the three products of every route."""
    return 6.0 * i.rows * K * D * F


def routing_bytes(i: Inputs) -> float:
    """Tokens once, routes (place, weight) once."""
    return float(i.x.numel() * 2 + i.rows * K * 12)


def entries() -> list[Entry]:
    """For the registry."""
    return [
        Entry(
            name="moe_routing",
            make=make,
            run=run_routing,
            bytes=routing_bytes,
            check=different_sets,
            tolerance=SETS,
            upstream="moe_routing",
        ),
        Entry(name="multi_head_moe", make=make, run=run_experts, flops=flops, upstream="multi_head_moe"),
        Entry(name="routed moe", make=make, run=run_whole, flops=flops, tolerance=2e-2, upstream="routed_moe"),
    ]


def parts(i: Inputs) -> dict[str, float]:
    """Median milliseconds of the kernels inside."""
    from magi2_kernels.moe_routing import kernel, plan_tiles, sort_routes
    from magi2_kernels.multi_head_moe import kernel as experts

    found = _route(i)
    routes = (i.routes.order, i.routes.weights, i.routes.offsets)
    tile = experts.settings(i.x.device, D, F)
    rows = experts.expert_rows(i.x, routes, i.w13, i.down, tile)
    tokens, heads = i.x.shape[:2]
    calls = {
        "gate parts": lambda: kernel.split_gate(i.gate, heads, torch.bfloat16),
        "logits, choice": lambda: _route(i),
        "sort": lambda: sort_routes(found, E),
        "tile table": lambda: plan_tiles(i.routes, tile.rows),
        "tile table, expert network": lambda: experts.expert_rows(i.x, routes, i.w13, i.down, tile),
        "sum": lambda: experts.sum_rows(rows, tokens, heads),
    }
    return {name: round(measure.timed(call).median, 4) for name, call in calls.items()}


def graphed(i: Inputs) -> float:
    """Median milliseconds of the whole op replayed as a CUDA graph: without the host."""
    run_whole(i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_whole(i)
    return measure.timed(graph.replay).median


def report(shape: str) -> dict[str, Any]:
    """Check and times of one shape."""
    from magi2_kernels.common.choice import using

    i = make(shape)
    found: dict[str, Any] = {"tokens": i.x.shape[0], "heads": i.x.shape[1]}
    with using("triton"):
        found["share of rows with another expert set"] = different_sets(i)
        first, again = run_whole(i)[0], run_whole(i)[0]
        found["equal bits in two runs"] = torch.equal(first, again)
    with using("reference"):
        want = run_experts(i)
    with using("triton"):
        found["error against reference"] = measure.error(run_experts(i), want)
        assert found["share of rows with another expert set"] <= SETS and found["error against reference"] <= 6e-3, found
        times = {"routing": run_routing, "experts and sum": run_experts, "whole": run_whole}
        found["ms"] = {name: round(measure.timed(lambda run=run: run(i)).median, 4) for name, run in times.items()}
        found["ms"]["whole, as a graph"] = round(graphed(i), 4)
        found["ms of parts"] = parts(i)
        network = found["ms of parts"]["tile table, expert network"]
        found["TF/s of the expert network"] = round(flops(i) / network / 1e9, 1)
        found["TF/s of the whole"] = round(flops(i) / found["ms"]["whole"] / 1e9, 1)
    with using("reference"):
        found["reference.py ms"] = {
            name: round(measure.timed(lambda run=run: run(i), most_seconds=2.0).median, 3) for name, run in times.items()
        }
    found["ratio to reference.py"] = {name: round(found["ms"][name] / found["reference.py ms"][name], 4) for name in times}
    found["ratio to the released code (another run)"] = round(found["ms"]["whole"] / RELEASED_MS[shape], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", action="append", choices=SHAPES, default=[])
    options = parser.parse_args()
    torch.manual_seed(0)
    result: dict[str, Any] = {"machine": measure.machine(), "experts": E, "routes": K, "channels": D, "inner": F, "shapes": {}}
    limits = measure.ceilings()
    result["ceilings"] = {"copy GB/s": limits.copy, "bf16 TF/s": limits.short, "bf16 TF/s of 10 ms": limits.sustained}
    with torch.no_grad():
        for shape in options.shape or SHAPES:
            result["shapes"][shape] = report(shape)
            print(shape, json.dumps(result["shapes"][shape]), flush=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    measure.register()
    main()
