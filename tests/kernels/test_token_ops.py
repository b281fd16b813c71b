"""Norm, swiglu, grouped linear, q/k norm with rotary: against float64 statements token by token, on odd shapes."""

import math

import pytest
import torch
from torch import Tensor

from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.grouped_linear import grouped_linear
from magi2_kernels.modality_rms_norm import modality_rms_norm
from magi2_kernels.qk_norm_rope import apply_rope, qk_norm_rope
from magi2_kernels.swiglu import swiglu7

RUNS = ((0, 3, 1), (3, 10, 0), (10, 11, 2), (11, 17, 0))
SEGMENTS = ModalitySegments.build(RUNS)
S = 17


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm64(row: Tensor, weight: Tensor) -> Tensor:
    row = row.double()
    return row / math.sqrt(float((row * row).mean()) + 1e-6) * (1 + weight.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modality_rms_norm_every_token_uses_its_block(dtype: torch.dtype) -> None:
    x, weight = rand(S, 37, dtype=dtype), rand(3 * 37, seed=1)
    want = torch.stack([norm64(x[row], weight.view(3, 37)[m]) for row, m in enumerate(SEGMENTS.ids.tolist())])
    got = modality_rms_norm(x, weight, SEGMENTS)
    assert got.dtype == dtype
    # One rounding: the result is the float64 value rounded, up to fp32 noise at a rounding border.
    limit = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
    torch.testing.assert_close(got.double(), want, **limit)
    assert modality_rms_norm(x, weight, SEGMENTS, out_dtype=torch.float32).dtype == torch.float32


def test_modality_rms_norm_absent_modality_may_hold_nan() -> None:
    weight = rand(3 * 8, seed=2)
    weight[8:16] = math.nan
    only_video = ModalitySegments.build(((0, 5, 0),))
    assert torch.isfinite(modality_rms_norm(rand(5, 8), weight, only_video)).all()


def test_modality_rms_norm_head_axis_is_shared() -> None:
    x, weight = rand(S, 3, 8), rand(24, seed=3)
    together = modality_rms_norm(x, weight, SEGMENTS)
    for head in range(3):
        torch.testing.assert_close(together[:, head], modality_rms_norm(x[:, head], weight, SEGMENTS))


def test_modality_rms_norm_no_rows() -> None:
    assert modality_rms_norm(torch.zeros(0, 8), torch.zeros(24), ModalitySegments.build(())).shape == (0, 8)


def test_swiglu7_clamp_edges() -> None:
    gate = torch.tensor([-80.0, -30.0, 0.0, 6.9, 7.0, 7.5, 1e4])
    linear = torch.tensor([3.0, -9.0, 5.0, 7.5, -7.5, 7.0, -1.0])
    got = swiglu7(torch.stack([gate, linear], dim=-1).flatten())
    want = []
    for g, value in zip(gate.tolist(), linear.tolist(), strict=True):
        g, value = min(g, 7.0), max(-7.0, min(value, 7.0))
        want.append(g / (1 + math.exp(-1.702 * g)) * (value + 1))
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-5, atol=1e-20)


def test_swiglu7_rounds_once() -> None:
    u = rand(9, 26, dtype=torch.bfloat16)
    assert torch.equal(swiglu7(u), swiglu7(u.float()).bfloat16())
    assert torch.equal(swiglu7(u, out_dtype=torch.float32), swiglu7(u.float()))


@pytest.mark.parametrize("runs", [RUNS, ((0, 17, 2),), ((0, 0, 0), (0, 17, 1))])
def test_grouped_linear_every_token_uses_its_block(runs: tuple) -> None:
    segments = ModalitySegments.build(runs)
    x, weight = rand(S, 11), rand(3 * 7, 11, seed=4)
    want = torch.stack([weight.view(3, 7, 11)[m].double() @ x[row].double() for row, m in enumerate(segments.ids.tolist())])
    torch.testing.assert_close(grouped_linear(x, weight, segments).double(), want, rtol=1e-5, atol=1e-5)
    onto = rand(S, 7, seed=6)
    wanted = onto.double() + want
    found = grouped_linear(x, weight, segments, onto=onto)
    assert found is onto or found.data_ptr() == onto.data_ptr()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_grouped_linear_single_block_and_no_rows() -> None:
    x, weight = rand(S, 11), rand(7, 11, seed=5)
    torch.testing.assert_close(grouped_linear(x, weight), x @ weight.T)
    torch.testing.assert_close(grouped_linear(x, weight, onto=torch.ones(S, 7)), x @ weight.T + 1)
    assert grouped_linear(x[:0], rand(21, 11), ModalitySegments.build(())).shape == (0, 7)


def test_qk_norm_rope_turns_pairs_half_a_table_apart() -> None:
    heads, kv_heads, width, half = 6, 2, 16, 6
    q, k = rand(S, heads, width), rand(S, kv_heads, width, seed=6)
    q_weight, k_weight, angles = rand(3 * width, seed=7), rand(3 * width, seed=8), rand(S, half, seed=9)
    rope = torch.cat([angles.sin(), angles.cos()], dim=1)
    got_q, got_k = qk_norm_rope(q, k, q_weight, k_weight, rope, SEGMENTS)
    for got, x, weight in ((got_q, q, q_weight), (got_k, k, k_weight)):
        for row, modality in enumerate(SEGMENTS.ids.tolist()):
            for head in range(x.shape[1]):
                normed = norm64(x[row, head], weight.view(3, width)[modality])
                # A pair as a complex number, turned by its angle.
                pairs = torch.complex(normed[:half], normed[half : 2 * half]) * torch.exp(1j * angles[row].double())
                want = torch.cat([pairs.real, pairs.imag, normed[2 * half :]])
                torch.testing.assert_close(got[row, head].double(), want, rtol=1e-5, atol=1e-5)


def test_qk_norm_rope_takes_strided_views_and_rounds_at_the_end() -> None:
    qkv = rand(S, 3, 4, 8, dtype=torch.bfloat16)
    q, k, _ = qkv.unbind(1)
    weight, angles = rand(8, seed=10), rand(S, 3, seed=11)
    rope = torch.cat([angles.sin(), angles.cos()], dim=1)
    wide, _ = qk_norm_rope(q.float(), k.float(), weight, weight, rope)
    narrow, other = qk_norm_rope(q, k, weight, weight, rope)
    assert torch.equal(narrow, wide.bfloat16()) and narrow.is_contiguous() and other.dtype == torch.bfloat16


def test_apply_rope_keeps_the_length_of_a_head() -> None:
    x, angles = rand(5, 2, 16), rand(5, 6, seed=12)
    turned = apply_rope(x, torch.cat([angles.sin(), angles.cos()], dim=1))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[..., 12:], x[..., 12:])


def test_qk_norm_rope_wrong_table_is_refused() -> None:
    q = rand(S, 2, 8)
    with pytest.raises(ValueError, match="sines, then cosines"):
        qk_norm_rope(q, q, torch.zeros(8), torch.zeros(8), torch.zeros(S, 10))
