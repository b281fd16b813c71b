"""The distilled decoder's layers: slices change nothing, borders are repeated, the first window loses frames."""

import pytest
import torch

from magi2_core.vae import turbo_blocks
from magi2_core.vae.turbo_blocks import SymmetricConv3d, TurboUpsampler, rms_norm


def test_rms_norm_against_float64():
    x = torch.randn(1, 5, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * 3
    exact = x.double() / (x.double().square().mean(dim=1, keepdim=True) + 0.5).sqrt()
    torch.testing.assert_close(rms_norm(x, 0.5), exact.float())
    torch.testing.assert_close(rms_norm(x, 0.5, torch.nn.functional.relu), exact.clamp_min(0).float())


def test_rms_norm_bf16_rounds_once():
    x = torch.randn(1, 64, 1, 4, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rms_norm(x, 1e-8), rms_norm(x.float(), 1e-8).bfloat16())


@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("elements", [1, 150, 1 << 20])
def test_symmetric_conv_slices_repeat_borders(monkeypatch, depthwise, elements):
    torch.manual_seed(0)
    conv = SymmetricConv3d(3, 4, (5, 3, 3), depthwise).requires_grad_(False)
    x = torch.randn(1, 3, 7, 4, 3)
    padded = torch.cat([x[:, :, :1], x[:, :, :1], x, x[:, :, -1:], x[:, :, -1:]], dim=2).tanh()
    expected = padded
    for name in conv.layers:
        expected = getattr(conv, name)(expected)
    monkeypatch.setattr(turbo_blocks, "SLICE_ELEMENTS", elements)
    torch.testing.assert_close(conv(x, torch.tanh), expected)
    residual = torch.randn_like(expected)
    torch.testing.assert_close(conv(x, torch.tanh, onto=residual.clone()), expected + residual)


@pytest.mark.parametrize(("temporal", "is_first", "frames"), [(True, True, 5), (True, False, 6), (False, True, 3)])
def test_upsampler_frames(monkeypatch, temporal, is_first, frames):
    upsampler = TurboUpsampler(2, temporal).requires_grad_(False)
    x = torch.randn(1, 2, 3, 2, 2)
    whole = upsampler(x, is_first)
    assert whole.shape == (1, 2, frames, 4, 4)
    monkeypatch.setattr(turbo_blocks, "SLICE_ELEMENTS", 64)
    torch.testing.assert_close(upsampler(x, is_first), whole)


@pytest.mark.parametrize("layout", [torch.channels_last_3d, torch.contiguous_format])
def test_rms_norm_and_assemble_keep_the_layout(monkeypatch, layout):
    monkeypatch.setattr(turbo_blocks, "SLICE_ELEMENTS", 100)
    x = torch.randn(1, 4, 6, 3, 3).contiguous(memory_format=layout)
    assert rms_norm(x, 1e-8).is_contiguous(memory_format=layout)
    parts = ((low, high, x[:, :, low:high].clone(memory_format=layout)) for low, high in turbo_blocks._slices(x, 4))
    joined = turbo_blocks._assemble(parts, 6)
    assert torch.equal(joined, x)
    assert joined.is_contiguous(memory_format=layout)
