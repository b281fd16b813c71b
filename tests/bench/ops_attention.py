"""Benchmark entries of attention: every provider that this machine has, the fused sinks and gate, and the two together.

The exact reference of a whole 540p sequence takes minutes in float64, so a provider is checked on 96 random query rows of every head
against float64 over all keys, result and log-sum; everything else of an entry runs at the full shape.
"""

from typing import Any

import torch
from registry import Entry
from torch import Tensor

HEADS, WIDTH = 24, 128
ENDS = {"272p": (0, 16_634, 31_668), "540p": (0, 59_642, 117_684), "rank": (0, 59_642, 117_684)}
"""Conditional and unconditional sequence with 2048 and 448 text tokens."""
HEADS_OF = {"272p": HEADS, "540p": HEADS, "rank": HEADS // 8}
PROBES = 96


def make(shape: str) -> dict[str, Any]:
    """q and k as the rotary kernel leaves them (contiguous, unit mean square), v a strided view, sinks, gate."""
    from magi2_kernels.common.sequences import CuSeqlens

    ends, heads = ENDS[shape], HEADS_OF[shape]
    rows = ends[-1]
    qkv = torch.randn(rows, 3, heads, WIDTH, device="cuda", dtype=torch.bfloat16)
    return {
        "q": qkv[:, 0].contiguous(),
        "k": qkv[:, 1].contiguous(),
        "v": qkv[:, 2],
        "cu_seqlens": CuSeqlens.build(ends, "cuda"),
        "sinks": torch.randn(1, heads, device="cuda"),
        "gate": torch.randn(rows, heads, device="cuda", dtype=torch.bfloat16),
    }


def flops(i: dict[str, Any]) -> float:
    """Two products over the square of every sequence."""
    heads = i["q"].shape[1]
    return sum(4.0 * (stop - start) ** 2 * heads * WIDTH for start, stop in i["cu_seqlens"].bounds)


def probe(i: dict[str, Any], attend: Any) -> float:
    """Largest relative error of result and log-sum on random rows of every sequence against float64."""
    out, lse = attend(i["q"], i["k"], i["v"], i["cu_seqlens"])
    device, width = out.device, out.shape[2]
    assert torch.isfinite(out).all() and torch.isfinite(lse).all(), "not finite"
    worst = 0.0
    for start, stop in i["cu_seqlens"].bounds:
        rows = torch.randint(start, stop, (PROBES // 2,), device=device)
        rows = torch.cat([rows, torch.tensor([start, stop - 1], device=device)])
        for head in range(i["q"].shape[1]):
            scores = i["q"][rows, head].double() @ i["k"][start:stop, head].double().T / width**0.5
            want, want_lse = scores.softmax(-1) @ i["v"][start:stop, head].double(), scores.logsumexp(-1)
            error = (out[rows, head].double() - want).norm() / want.norm()
            worst = max(worst, error.item(), ((lse[rows, head].double() - want_lse).norm() / want_lse.norm()).item())
    return worst


def _attend(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.sink_attention import packed_attention

    return list(packed_attention(i["q"], i["k"], i["v"], i["cu_seqlens"]))


def _provider(name: str) -> Entry:
    from magi2_kernels.sink_attention import packed_attention, providers

    def check(i: dict[str, Any]) -> float:
        with providers.using(name):
            return probe(i, packed_attention)

    return Entry(
        name=f"attention {name}", make=make, run=_attend, flops=flops, check=check, tolerance=5e-3, context=lambda: providers.using(name),
    )  # fmt: skip


def _make_finish(shape: str) -> dict[str, Any]:
    inputs = make(shape)
    rows, heads = inputs["q"].shape[:2]
    return inputs | {"lse": (torch.randn(heads, rows, device="cuda") + 5).t()}


def _finish(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.sink_attention import sink_and_gate

    return [sink_and_gate(i["q"], i["lse"], i["sinks"], i["gate"])]


def _gated(i: dict[str, Any]) -> list[Tensor]:
    from magi2_kernels.sink_attention import gated_attention

    return [gated_attention(i["q"], i["k"], i["v"], i["sinks"], i["cu_seqlens"], i["gate"])]


def entries() -> list[Entry]:
    """The providers that are here, fastest first, then what follows them."""
    from magi2_kernels.sink_attention import packed_attention, providers

    target = providers.Target(device=torch.device("cuda", 0), dtype=torch.bfloat16, head_dim=WIDTH)
    here = [name for name in providers.CHECKS if name != "reference" and providers.CHECKS[name](target) is None]
    best = providers.resolve("auto", target).name

    def check(i: dict[str, Any]) -> float:
        with providers.using(best):
            out, lse = packed_attention(i["q"], i["k"], i["v"], i["cu_seqlens"])
            got, exact = _gated(i)[0], probe(i, packed_attention)
        share = torch.sigmoid(lse - i["sinks"])
        want = ((out.float() * share[..., None]).bfloat16() * torch.sigmoid(i["gate"])[..., None]).float()
        return max(((got.float() - want).norm() / want.norm()).item(), exact)

    return [
        *(_provider(name) for name in here),
        Entry(
            name="sink_and_gate", make=_make_finish, run=_finish,
            bytes=lambda i: 2 * i["q"].nbytes + i["lse"].nbytes + i["gate"].nbytes,
        ),
        Entry(
            name=f"gated_attention ({best})", make=make, run=_gated, flops=flops, check=check, context=lambda: providers.using(best),
            upstream="gated_attention",
        ),
    ]  # fmt: skip
