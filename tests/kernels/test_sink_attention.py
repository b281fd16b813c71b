"""Packed attention with sinks, against a float64 softmax that has the sinks as extra keys of value zero."""

import itertools

import pytest
import torch
from torch import Tensor

from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.sink_attention import gate_heads, packed_attention, reference, sink_attention, sink_weight

ENDS = (0, 5, 5, 6, 19)
H, DH = 3, 10


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, ENDS[-1], H, DH, generator=generator).mul(2).to(dtype).unbind(0)


def with_sink_keys(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for start, stop in itertools.pairwise(ENDS):
        for h in range(H):
            scores = q[start:stop, h].double() @ k[start:stop, h].double().T / DH**0.5
            scores = torch.cat([scores, sinks[:, h].double().expand(stop - start, -1)], dim=1)
            out[start:stop, h] = scores.softmax(dim=1)[:, : stop - start] @ v[start:stop, h].double()
    return out


@pytest.mark.parametrize("count", [1, 3])
def test_sink_attention_is_attention_with_valueless_keys(count: int) -> None:
    q, k, v = qkv()
    sinks = torch.randn(count, H, generator=torch.Generator().manual_seed(1)) * 3
    got = sink_attention(q, k, v, sinks, CuSeqlens.build(ENDS))
    torch.testing.assert_close(got.double(), with_sink_keys(q, k, v, sinks), rtol=1e-4, atol=1e-6)


def test_packed_attention_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    whole, lse = packed_attention(q, k, v, CuSeqlens.build(ENDS))
    monkeypatch.setattr(reference, "CHUNK_SCORES", 60)
    chunked, chunked_lse = packed_attention(q, k, v, CuSeqlens.build(ENDS))
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(chunked_lse, lse)


def test_packed_attention_sequences_do_not_see_each_other() -> None:
    q, k, v = qkv()
    before, _ = packed_attention(q, k, v, CuSeqlens.build(ENDS))
    k[6:], v[6:] = 50.0, -50.0
    after, _ = packed_attention(q, k, v, CuSeqlens.build(ENDS))
    assert torch.equal(before[:6], after[:6]) and not torch.equal(before[6:], after[6:])


def test_packed_attention_large_logits_stay_finite() -> None:
    q, k, v = (tensor * 100 for tensor in qkv())
    out, lse = packed_attention(q, k, v, CuSeqlens.build(ENDS))
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()


def test_sink_weight_extremes() -> None:
    lse = torch.tensor([[-80.0, 0.0, 80.0]])
    share = sink_weight(lse, torch.zeros(1, 3))
    torch.testing.assert_close(share, torch.tensor([[0.0, 0.5, 1.0]]))


def test_sink_attention_rounds_twice_in_bf16() -> None:
    q, k, v = qkv(torch.bfloat16)
    sinks = torch.ones(1, H)
    plain, lse = packed_attention(q, k, v, CuSeqlens.build(ENDS))
    assert plain.dtype == torch.bfloat16 and lse.dtype == torch.float32
    want = (plain.float() * sink_weight(lse, sinks)[..., None]).bfloat16()
    assert torch.equal(sink_attention(q, k, v, sinks, CuSeqlens.build(ENDS)), want)


def test_gate_heads_scales_each_head() -> None:
    x, gate = torch.ones(2, H, DH), torch.tensor([[0.0, 100.0, -100.0]] * 2)
    assert gate_heads(x, gate)[0, :, 0].tolist() == pytest.approx([0.5, 1.0, 0.0])


def test_attention_misfitting_arguments_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match="cu_seqlens ends at 3"):
        packed_attention(q, k, v, CuSeqlens.build([0, 3]))
    with pytest.raises(ValueError, match="slice the sinks"):
        sink_weight(torch.zeros(4, 2), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="expected that of q"):
        packed_attention(q, k[:, :1], v, CuSeqlens.build(ENDS))
