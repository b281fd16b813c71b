"""The Wan2.2 auto-encoder: released sizes, streaming, the embedded checkpoint."""

import json

import pytest
import torch
from torch import nn

from magi2_core.config import WanVAEConfig
from magi2_core.errors import CheckpointError, RequestError
from magi2_core.vae.wan import WanVAE, load_wan_state

TINY = WanVAEConfig(dim=2, dec_dim=2)


def _tiny() -> WanVAE:
    torch.manual_seed(0)
    return WanVAE(TINY).requires_grad_(False)


def test_wan_vae_released_size():
    with torch.device("meta"):
        model = WanVAE(WanVAEConfig())
    assert len(model.state_dict()) == 196
    assert sum(parameter.numel() for parameter in model.parameters()) == 704_688_668
    convs = (nn.Conv3d, nn.Conv2d)
    assert sum(isinstance(module, nn.Conv3d) for module in model.encoder.modules()) == 26
    assert sum(isinstance(module, nn.Conv3d) for module in model.decoder.modules()) == 34
    assert any(isinstance(module, convs) for module in model.modules())


def test_wan_vae_halves_add_up():
    with torch.device("meta"):
        whole, encoder, decoder = (
            {name: tensor.shape for name, tensor in WanVAE(TINY, **halves).state_dict().items()}
            for halves in ({}, {"decoder": False}, {"encoder": False})
        )
    assert encoder.keys().isdisjoint(decoder)
    assert encoder | decoder == whole


@pytest.mark.parametrize("changes", [{"z_dim": 16}, {"temporal_downsample": (True, True)}])
def test_wan_vae_refuses_config(changes):
    with pytest.raises(CheckpointError):
        WanVAE(WanVAEConfig(dim=2, dec_dim=2, **changes))


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_encode_frame_count(frames, latents):
    assert _tiny().encode(torch.zeros(1, 3, frames, 16, 32)).shape == (1, 48, latents, 1, 2)


def test_encode_depends_on_past_only():
    model, pixels = _tiny(), torch.rand(1, 3, 9, 16, 16) * 2 - 1
    torch.testing.assert_close(model.encode(pixels[:, :, :5]), model.encode(pixels)[:, :, :2])


@pytest.mark.parametrize("shape", [(1, 3, 1, 24, 32), (1, 4, 1, 32, 32), (3, 1, 32, 32), (1, 3, 0, 32, 32)])
def test_encode_refuses_shape(shape):
    with pytest.raises(RequestError, match="multiples of 16"):
        _tiny().encode(torch.zeros(shape))


def test_decode_shape_and_clamp():
    video = _tiny().decode(torch.randn(1, 48, 3, 1, 2) * 50)
    assert video.shape == (1, 3, 9, 16, 32)
    assert video.dtype == torch.float32
    assert video.abs().max() <= 1


def test_decode_on_frames_streams_the_same_clip():
    model, latents, seen = _tiny(), torch.randn(1, 48, 3, 1, 1), []
    assert model.decode(latents, on_frames=lambda index, chunk: seen.append((index, chunk.clone()))) is None
    assert [(index, chunk.shape[2]) for index, chunk in seen] == [(0, 1), (1, 4), (2, 4)]
    assert torch.equal(torch.cat([chunk for _, chunk in seen], dim=2), model.decode(latents))


def test_decode_depends_on_past_only():
    model, latents = _tiny(), torch.randn(1, 48, 4, 1, 1)
    torch.testing.assert_close(model.decode(latents[:, :, :2]), model.decode(latents)[:, :, :5])


def test_decode_ends_when_callback_raises():
    calls = []

    def stop(index, chunk):
        calls.append(index)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _tiny().decode(torch.zeros(1, 48, 3, 1, 1), on_frames=stop)
    assert calls == [0]


def test_decode_refuses_shape():
    with pytest.raises(RequestError, match="48"):
        _tiny().decode(torch.zeros(1, 16, 3, 1, 1))


def test_load_wan_state_embedded_checkpoint(nano_folder):
    folder = nano_folder / "vae"
    config = WanVAEConfig.from_dict(json.loads((folder / "config.json").read_text()))
    model = WanVAE(config).requires_grad_(False)
    model.load_state_dict(load_wan_state(folder / "Wan2.2_VAE.pth"), strict=True)
    # A picture of the world it was trained on comes back: 30 dB is what these weights reach.
    rows, columns = torch.meshgrid(torch.arange(64) + 0.5, torch.arange(112) + 0.5, indexing="ij")
    inside = (10.5 - ((columns - 30) ** 2 + (rows - 30) ** 2).sqrt()).clamp(0, 1)
    red, blue = (torch.tensor(color).view(3, 1, 1) / 255 for color in ([230.0, 40, 40], [25.0, 45, 140]))
    picture = (blue + inside * (red - blue))[None, :, None] * 2 - 1
    error = (model.decode(model.encode(picture)) - picture).square().mean()
    assert 10 * torch.log10(4 / error) > 28


def test_load_wan_state_halves(nano_folder):
    path = nano_folder / "vae" / "Wan2.2_VAE.pth"
    encoder, decoder = load_wan_state(path, decoder=False), load_wan_state(path, encoder=False)
    assert {name.split(".")[0] for name in encoder} == {"encoder", "conv1"}
    assert {name.split(".")[0] for name in decoder} == {"decoder", "conv2"}
    assert len(encoder) + len(decoder) == 196


def test_load_wan_state_foreign_name(tmp_path):
    path = tmp_path / "Wan2.2_VAE.pth"
    torch.save({"encoder.conv1.weight": torch.zeros(1), "unet.x": torch.zeros(1)}, path)
    with pytest.raises(CheckpointError, match=r"Wan2\.2_VAE\.pth: tensor 'unet\.x'"):
        load_wan_state(path)
