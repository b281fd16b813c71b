"""Norm, swiglu, q/k norm with rotary, grouped linear: Triton against reference.py, on the GPU or in the interpreter."""

import math

import pytest
import torch
from torch import Tensor

from magi2_kernels.common.choice import using
from magi2_kernels.common.segments import ModalitySegments
from magi2_kernels.grouped_linear import grouped_linear
from magi2_kernels.modality_rms_norm import modality_rms_norm
from magi2_kernels.qk_norm_rope import apply_rope, qk_norm_rope
from magi2_kernels.swiglu import swiglu7

RUNS = ((0, 3, 1), (3, 10, 0), (10, 11, 2), (11, 17, 0))
S = 17
TIGHT = {"rtol": 1e-5, "atol": 1e-5}
# One rounding each, at most one bf16 step apart; the interpreter cuts instead of rounding.
BF16 = {"rtol": 2**-7, "atol": 1e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results start as NaN: an element that a kernel does not write shows."""
    empty = torch.empty

    def filled(*args, **kwargs) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(math.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", filled)


def rand(device: str, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def limits(dtype: torch.dtype) -> dict[str, float]:
    return TIGHT if dtype == torch.float32 else BF16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(S, 37), (S, 16), (S, 3, 24), (S, 129), (S, 1)])
@pytest.mark.parametrize("per_modality", [False, True])
def test_modality_rms_norm_triton_equals_reference(
    triton_device: str, dtype: torch.dtype, shape: tuple[int, ...], per_modality: bool
) -> None:
    segments = ModalitySegments.build(RUNS, device=triton_device) if per_modality else None
    x, weight = rand(triton_device, *shape, dtype=dtype), rand(triton_device, (3 if per_modality else 1) * shape[-1], seed=1)
    for out_dtype in (None, torch.float32):
        want = modality_rms_norm(x, weight, segments, out_dtype=out_dtype)
        with using("triton"):
            got = modality_rms_norm(x, weight, segments, out_dtype=out_dtype)
        assert got.shape == x.shape
        torch.testing.assert_close(got, want, **limits(want.dtype))


def test_modality_rms_norm_triton_takes_views(triton_device: str) -> None:
    x, weight = rand(triton_device, S, 3, 4, 8), rand(triton_device, 8, seed=1)
    for view in (x[:, 1], x[:, :, 2], x[:, 0, 0], x, x[1:, 1:, 1:], x[..., ::2].repeat(1, 1, 1, 2)[:, 0]):
        want = modality_rms_norm(view, weight)
        with using("triton"):
            torch.testing.assert_close(modality_rms_norm(view, weight), want, **TIGHT)


def test_modality_rms_norm_triton_no_rows(triton_device: str) -> None:
    with using("triton"):
        empty = modality_rms_norm(rand(triton_device, 0, 8), rand(triton_device, 24), ModalitySegments.build((), device=triton_device))
    assert empty.shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9, 26), (3, 5, 2), (1, 130), (0, 8)])
def test_swiglu7_triton_equals_reference(triton_device: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    u = rand(triton_device, *shape, dtype=dtype) * 6
    for out_dtype in (None, torch.float32):
        want = swiglu7(u, out_dtype=out_dtype)
        with using("triton"):
            torch.testing.assert_close(swiglu7(u, out_dtype=out_dtype), want, **limits(want.dtype))


def test_swiglu7_triton_clamp_edges_and_strides(triton_device: str) -> None:
    gate = torch.tensor([-80.0, -30.0, 0.0, 6.9, 7.0, 7.5, 1e4], device=triton_device)
    linear = torch.tensor([3.0, -9.0, 5.0, 7.5, -7.5, 7.0, -1.0], device=triton_device)
    u = torch.stack([gate, linear], dim=-1).flatten().repeat(2, 1)
    strided = torch.stack([u, -u], dim=-1)[..., 0]
    want = swiglu7(u)
    with using("triton"):
        torch.testing.assert_close(swiglu7(u), want, rtol=1e-5, atol=1e-20)
        assert torch.equal(swiglu7(strided), swiglu7(u))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "half"), [(6, 2, 16, 6), (5, 5, 20, 3), (1, 1, 8, 4), (3, 9, 12, 1)])
@pytest.mark.parametrize("per_modality", [False, True])
def test_qk_norm_rope_triton_equals_reference(
    triton_device: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int, half: int, per_modality: bool
) -> None:
    segments = ModalitySegments.build(RUNS, device=triton_device) if per_modality else None
    blocks = 3 if per_modality else 1
    packed = rand(triton_device, S, heads + 2 * kv_heads, width, dtype=dtype)
    q, k = packed[:, :heads], packed[:, heads : heads + kv_heads]
    q_weight, k_weight = rand(triton_device, blocks * width, seed=7), rand(triton_device, blocks * width, seed=8)
    angles = rand(triton_device, S, half, seed=9)
    rope = torch.cat([angles.sin(), angles.cos()], dim=1)
    for out_dtype in (None, torch.float32):
        want = qk_norm_rope(q, k, q_weight, k_weight, rope, segments, out_dtype=out_dtype)
        with using("triton"):
            got = qk_norm_rope(q, k, q_weight, k_weight, rope, segments, out_dtype=out_dtype)
        for mine, wanted in zip(got, want, strict=True):
            assert mine.is_contiguous()
            torch.testing.assert_close(mine, wanted, **limits(wanted.dtype))


@pytest.mark.parametrize(("width", "half"), [(16, 6), (8, 4), (10, 1)])
def test_apply_rope_triton_equals_reference(triton_device: str, width: int, half: int) -> None:
    x, angles = rand(triton_device, S, 3, width), rand(triton_device, S, half, seed=12)
    rope = torch.cat([angles.sin(), angles.cos()], dim=1)
    want = apply_rope(x, rope)
    with using("triton"):
        torch.testing.assert_close(apply_rope(x, rope), want, **TIGHT)
        assert apply_rope(x[:0], rope[:0]).shape == (0, 3, width)


def test_grouped_linear_writes_runs_in_place(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = ModalitySegments.build(RUNS, device=triton_device)
    x, weight = rand(triton_device, S, 11), rand(triton_device, 3 * 7, 11, seed=4)
    want = grouped_linear(x, weight, segments)
    with using("triton"):
        got = grouped_linear(x, weight, segments)
    assert torch.equal(got, want)
    sizes = []
    copy = Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, *args, **kwargs: sizes.append(self.shape) or copy(self, *args, **kwargs))
    with using("triton"):
        grouped_linear(x, weight, segments)
    assert not sizes


def test_ops_triton_refuse_other_types(triton_device: str) -> None:
    x = torch.zeros(3, 4, dtype=torch.float64, device=triton_device)
    with using("triton"):
        with pytest.raises(ValueError, match="float64"):
            swiglu7(x)
        with pytest.raises(ValueError, match="float64"):
            modality_rms_norm(x, rand(triton_device, 4))


@pytest.mark.parametrize("name", ["swiglu7", "modality_rms_norm", "qk_norm_rope"])
def test_ops_triton_compile_into_one_graph(triton_device: str, name: str) -> None:
    x, heads = rand(triton_device, 5, 8), rand(triton_device, 5, 2, 8)
    weight, angles = rand(triton_device, 8), rand(triton_device, 5, 3)
    rope = torch.cat([angles.sin(), angles.cos()], dim=1)
    calls = {
        "swiglu7": lambda: swiglu7(x) + 1,
        "modality_rms_norm": lambda: modality_rms_norm(x, weight) + 1,
        "qk_norm_rope": lambda: qk_norm_rope(heads, heads, weight, weight, rope)[0] + 1,
    }
    with using("triton"):
        want = calls[name]()
        torch.testing.assert_close(torch.compile(calls[name], fullgraph=True, backend="eager")(), want)


def test_swiglu7_triton_keeps_what_is_not_a_number(triton_device: str) -> None:
    u = rand(triton_device, 3, 8)
    u[0, 2] = u[1, 5] = torch.nan
    want = swiglu7(u)
    with using("triton"):
        got = swiglu7(u)
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().sum() == 2


def test_norm_weights_are_read_by_their_strides_and_in_fp32(triton_device: str) -> None:
    x, weight, rope = rand(triton_device, S, 2, 16), rand(triton_device, 32, seed=1)[::2], rand(triton_device, S, 12, seed=2)
    want = [modality_rms_norm(x, weight), *qk_norm_rope(x, x, weight, weight, rope)]
    with using("triton"):
        got = [modality_rms_norm(x, weight), *qk_norm_rope(x, x, weight, weight, rope)]
        for call in (lambda w: modality_rms_norm(x, w), lambda w: qk_norm_rope(x, x, weight, w, rope)):
            with pytest.raises(ValueError, match=r"weight is torch\.bfloat16"):
                call(weight.bfloat16())
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, **TIGHT)


def test_qk_norm_rope_other_head_width_is_refused() -> None:
    with pytest.raises(ValueError, match="the head width 16 of q"):
        qk_norm_rope(torch.ones(3, 2, 16), torch.ones(3, 1, 8), torch.ones(16), torch.ones(8), torch.ones(3, 4))


def test_qk_norm_rope_heads_too_far_apart_are_copied() -> None:
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    from magi2_kernels.qk_norm_rope.kernel import _dense

    far = torch.empty_strided((3, 2, 16), (16, 2**31, 1), device="meta")
    near = torch.empty_strided((3, 2, 16), (16, 2**30, 1), device="meta")
    assert _dense(far).stride(1) == 16 and _dense(near).stride(1) == 2**30


def test_qk_norm_rope_no_head_is_refused() -> None:
    with pytest.raises(ValueError, match="q has no head"):
        qk_norm_rope(torch.ones(3, 0, 8), torch.ones(3, 1, 8), torch.ones(8), torch.ones(8), torch.ones(3, 4))
