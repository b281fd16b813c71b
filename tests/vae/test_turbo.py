"""Windows, the decoder over a clip, and its checkpoint."""

import json

import pytest
import torch

from magi2_core.errors import CheckpointError, RequestError
from magi2_core.vae.turbo import TurboConfig, TurboVAED, load_turbo_state, plan_windows

FILE = "TurboV3-Wan22-TinyShallow_7_7.json"


@pytest.fixture
def config(nano_folder):
    values = json.loads((nano_folder / "turbo_vae" / FILE).read_text())
    return TurboConfig.from_dict(values | {"decoder_block_out_channels": [2, 2, 3, 4], "first_chunk_size": 2, "step_size": 2})


@pytest.fixture
def model(config):
    torch.manual_seed(0)
    return TurboVAED(config).requires_grad_(False)


@pytest.mark.parametrize(
    ("latents", "frames", "inputs"),
    [(1, 1, [7]), (3, 9, [7]), (7, 25, [7]), (8, 29, [8, 8]), (32, 125, [8, 9, 9, 9, 8]), (63, 249, [8, *[9] * 7, 8])],
)
def test_plan_windows_released(latents, frames, inputs):
    windows = plan_windows(latents, 7, 7)
    assert [window.stop - window.start for window in windows] == inputs
    assert sum(window.num_frames for window in windows) == frames


@pytest.mark.parametrize("first", [1, 3, 7])
@pytest.mark.parametrize("step", [1, 5])
@pytest.mark.parametrize("factor", [2, 4])
def test_plan_windows_cover_without_gap_or_overlap(first, step, factor):
    for latents in range(1, 20):
        position = 0
        for window in plan_windows(latents, first, step, factor):
            made = factor * (window.stop - window.start) - (factor - 1 if window.is_first else 0)
            assert window.first_frame == position
            assert window.num_frames > 0
            assert window.drop_front + window.num_frames <= made
            position += window.num_frames
        assert position == factor * (latents - 1) + 1


def test_plan_windows_empty_clip():
    with pytest.raises(RequestError, match="at least 1"):
        plan_windows(0, 7, 7)


def test_turbo_vaed_released_size():
    values = {
        "latent_channels": 48,
        "out_channels": 3,
        "decoder_block_out_channels": [64, 128, 256, 512],
        "decoder_layers_per_block": [2, 2, 2, 3, 3],
        "decoder_spatio_temporal_scaling": [False, True, True, True],
        "decoder_spatio_only": [False, True, False, False],
        "decoder_is_dw_conv": [False] * 5,
        "decoder_dw_kernel_size": 5,
        "resnet_norm_eps": 1e-6,
        "patch_size": 2,
        "first_chunk_size": 7,
        "step_size": 7,
        "use_unpatchify": True,
    }
    with torch.device("meta"):
        model = TurboVAED(TurboConfig.from_dict(values))
    assert sum(parameter.numel() for parameter in model.parameters()) == 107_122_892


@pytest.mark.parametrize("latents", [1, 2, 5])
def test_decode_streams_the_same_clip(model, latents):
    z, seen = torch.randn(1, 48, latents, 1, 2), []
    video = model.decode(z)
    assert video.shape == (1, 3, 4 * latents - 3, 16, 32)
    assert model.decode(z, on_window=lambda window, frames: seen.append((window, frames))) is None
    assert [window.index for window, _ in seen] == list(range(len(model.windows(latents))))
    assert torch.equal(torch.cat([frames for _, frames in seen], dim=2), video)


def test_decode_window_alone_equals_clip(model):
    z = torch.randn(1, 48, 6, 1, 1)
    window = model.windows(6)[1]
    part = model.decode(z)[:, :, window.first_frame : window.first_frame + window.num_frames]
    assert torch.equal(model.decode_window(z, window), part)


def test_decode_repeats_the_last_latent(model):
    z = torch.randn(1, 48, 3, 1, 1)
    longer = torch.cat([z, z[:, :, -1:]], dim=2)
    torch.testing.assert_close(model.decode(z), model.decode(longer)[:, :, :9])


def test_decode_bf16_rounds_the_latent_first(model):
    model.to(torch.bfloat16)
    z = torch.randn(1, 48, 2, 1, 1)
    video = model.decode(z)
    assert video.dtype == torch.bfloat16
    assert torch.equal(video, model.decode(z.bfloat16().float()))


def test_decode_refuses_shape(model):
    with pytest.raises(RequestError, match=r"\[1, 48, T, h, w\]"):
        model.decode(torch.zeros(1, 16, 2, 1, 1))


def test_finish_loading_leaves_cpu_weights(model):
    before = {name: parameter.stride() for name, parameter in model.named_parameters()}
    model.to(torch.bfloat16).finish_loading()
    assert {name: parameter.stride() for name, parameter in model.named_parameters()} == before


def test_load_turbo_state_embedded_checkpoint(nano_folder):
    model = TurboVAED(TurboConfig.from_file(nano_folder / "turbo_vae" / FILE)).requires_grad_(False)
    model.load_state_dict(load_turbo_state(nano_folder / "turbo_vae" / "checkpoint.ckpt"), strict=True)
    video = model.decode(torch.zeros(1, 48, 2, 2, 2))
    assert video.shape == (1, 3, 5, 32, 32)
    assert torch.isfinite(video).all()


ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


@pytest.mark.parametrize(
    ("saved", "value"),
    [
        ({"ema_state_dict": {"module.decoder.a": ONE, "heads.b": TWO}, "state_dict": {"decoder.a": TWO}}, 1),
        ({"state_dict": {"module.decoder.a": TWO, "module.encoder.x": ONE}}, 2),
        ({"decoder.a": TWO, "latents_mean": [0.5]}, 2),
        ({"module.a": ONE}, 1),
        ({"module.a": ONE, "module.aligned_feature_projection_heads.0.weight": TWO, "latents_mean": [0.5], "latents_std": TWO}, 1),
    ],
)
def test_load_turbo_state_layouts(tmp_path, saved, value):
    path = tmp_path / "checkpoint.ckpt"
    torch.save(saved, path)
    state = load_turbo_state(path)
    assert {name: tensor.item() for name, tensor in state.items()} == {"decoder.a": value}


@pytest.mark.parametrize("saved", [{"encoder.a": ONE}, {"state_dict": {}}, [1, 2], {"decoder.a": 5}])
def test_load_turbo_state_refuses(tmp_path, saved):
    path = tmp_path / "checkpoint.ckpt"
    torch.save(saved, path)
    with pytest.raises(CheckpointError, match=r"turbo VAE: .*checkpoint\.ckpt"):
        load_turbo_state(path)
