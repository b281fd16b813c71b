"""The fused pass over the attention result against reference.py: odd shapes, strided inputs, both flags, extremes, empty input."""

import pytest
import torch
from torch import Tensor

from magi2_kernels.common import choice
from magi2_kernels.common.sequences import CuSeqlens
from magi2_kernels.sink_attention import gate_heads, gated_attention, reference, sink_and_gate, sink_attention, sink_weight

SHAPES = [(1, 1, 1), (5, 3, 10), (37, 24, 128), (3, 5, 130)]


def inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: str, sinks: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, heads, _ = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator).to(device, dtype)
    lse = (torch.randn(heads, tokens, generator=generator) * 4).to(device).t()
    gate = (torch.randn(tokens, 2 * heads, generator=generator) * 3).to(device, dtype)[:, ::2]
    return x, lse, (torch.randn(sinks, heads, generator=generator) * 3).to(device), gate


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sinks", [1, 3])
def test_sink_and_gate_equals_reference(triton_device: str, shape: tuple[int, int, int], dtype: torch.dtype, sinks: int) -> None:
    x, lse, sink, gate = inputs(shape, dtype, triton_device, sinks)
    cases = ((x, lse, sink, gate), (x, lse, sink, None), (x, None, None, gate))
    want = [reference.finish(*case) for case in cases]
    with choice.using("triton"):
        got = [sink_and_gate(x, lse, sink, gate), choice_sink(x, lse, sink), gate_heads(x, gate)]
    # The interpreter truncates where the hardware rounds: two roundings of bf16 are up to two units apart there.
    exactly = dtype == torch.float32 or triton_device != "cpu"
    for one, other in zip(got, want, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other, rtol=(2e-6 if dtype == torch.float32 else 8e-3) if exactly else 3e-2, atol=1e-6)
        if dtype == torch.bfloat16 and exactly:
            assert (one != other).float().mean() < 1e-3


def choice_sink(x: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    from magi2_kernels.sink_attention import kernel

    return kernel.finish(x, lse, sinks, None)


def test_finish_reads_strided_results_and_writes_every_element(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, lse, sinks, gate = inputs((19, 3, 10), torch.float32, triton_device)
    wide = torch.full((19, 2, 3, 20), float("nan"), device=triton_device)
    view = wide[:, 1, :, 4:14]
    view.copy_(x)
    monkeypatch.setattr(torch, "empty", lambda shape, **options: torch.full(shape, float("nan"), **options))
    with choice.using("triton"):
        got = sink_and_gate(view, lse, sinks, gate)
    torch.testing.assert_close(got, reference.finish(x, lse, sinks, gate), rtol=2e-6, atol=1e-6)


def test_finish_extremes_and_empty(triton_device: str) -> None:
    x = torch.ones(3, 1, 4, device=triton_device)
    lse = torch.tensor([[-1000.0], [0.0], [1000.0]], device=triton_device)
    with choice.using("triton"):
        share = choice_sink(x, lse, torch.zeros(1, 1, device=triton_device))[:, 0, 0]
        torch.testing.assert_close(share.cpu(), torch.tensor([0.0, 0.5, 1.0]))
        torch.testing.assert_close(sink_weight(lse, torch.zeros(1, 1, device=triton_device))[:, 0], share)
        assert gate_heads(x[:0], x[:0, :, 0]).shape == (0, 1, 4)


def test_gated_attention_triton_equals_reference(triton_device: str) -> None:
    q, k, v = torch.randn(3, 41, 3, 16, generator=torch.Generator().manual_seed(5)).to(triton_device).unbind(0)
    ends = CuSeqlens.build((0, 9, 41), triton_device)
    sinks, gate = torch.randn(2, 3, device=triton_device), torch.randn(41, 3, device=triton_device)
    want = gate_heads(sink_attention(q, k, v, sinks, ends), gate)
    with choice.using("triton"):
        got = gated_attention(q, k, v, sinks, ends, gate)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gated_attention(q, k, v, sinks, ends, gate), want)


def test_finish_on_the_cpu_without_interpreter_is_refused(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with choice.using("triton"), pytest.raises(RuntimeError, match="reference kernels"):
        gate_heads(torch.ones(2, 1, 4), torch.ones(2, 1))


def test_sink_and_gate_sinks_of_minus_infinity_take_nothing(triton_device: str) -> None:
    x, lse, sinks, gate = inputs((5, 3, 10), torch.float32, triton_device, 2)
    sinks[:, 0] = -torch.inf
    sinks[0, 1] = -torch.inf
    want = reference.finish(x, lse, sinks, gate)
    with choice.using("triton"):
        got = sink_and_gate(x, lse, sinks, gate)
    assert torch.isfinite(want).all()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)


def test_sink_and_gate_other_rows_are_refused() -> None:
    x, lse, sinks, gate = inputs((5, 3, 10), torch.float32, "cpu")
    with pytest.raises(ValueError, match="lse has shape"):
        sink_and_gate(x, lse[:2], sinks, gate)
