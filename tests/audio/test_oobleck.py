"""The audio decoder: its config, folded weights, checkpoint and sound."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from magi2_core.audio.oobleck import OobleckConfig, OobleckDecoder, decode_audio, fold_weight_norm, load_oobleck_state
from magi2_core.errors import CheckpointError, RequestError

RELEASED = OobleckConfig(
    out_channels=2, channels=128, latent_dim=64, c_mults=(1, 2, 4, 8, 16), strides=(2, 4, 4, 8, 8), use_snake=True, final_tanh=False
)
SMALL = OobleckConfig(out_channels=2, channels=2, latent_dim=4, c_mults=(1, 2), strides=(2, 4), use_snake=True, final_tanh=False)


@pytest.fixture
def values(nano_folder):
    return json.loads((nano_folder / "stable-audio-open-1.0" / "model_config.json").read_text())


def test_oobleck_decoder_released_size():
    with torch.device("meta"):
        state = OobleckDecoder(RELEASED).state_dict()
    normed = [tensor for name, tensor in state.items() if name.endswith(".weight")]
    assert len(state) + len(normed) == 182  # the file holds two tensors for each weight
    stored = sum(tensor.numel() for tensor in state.values()) + sum(tensor.shape[0] for tensor in normed)
    assert stored / 1e6 == pytest.approx(78.12, abs=0.005)
    assert RELEASED.samples_per_latent == 2048


def test_config_from_file_embedded(nano_folder):
    config = OobleckConfig.from_file(nano_folder / "stable-audio-open-1.0" / "model_config.json")
    assert (config.latent_dim, config.strides, config.final_tanh, config.soft_clip) == (64, (2, 4, 4, 8, 8), False, False)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("decoder", "type"), "seanet", "decoder.type is 'seanet'"),
        (("bottleneck", "type"), "rvq", "bottleneck.type is 'rvq'"),
        (("decoder", "config", "strides"), [2, 4], "equally long"),
        (("decoder", "config", "channels"), "12", "expected int"),
        (("decoder", "config", "antialias_activation"), True, "antialias"),
        (("decoder", "config"), None, "config is missing"),
    ],
)
def test_config_refuses(values, path, value, text):
    section = values["model"]["pretransform"]["config"]
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    with pytest.raises(CheckpointError, match=text):
        OobleckConfig.from_dict(values)


def test_config_missing_field(values):
    changed = copy.deepcopy(values)
    del changed["model"]["pretransform"]["config"]["decoder"]["config"]["final_tanh"]
    with pytest.raises(CheckpointError, match="final_tanh is missing"):
        OobleckConfig.from_dict(changed)
    with pytest.raises(CheckpointError, match=r"model\.pretransform\.config is missing"):
        OobleckConfig.from_dict({"model": {}})


def test_fold_weight_norm_per_first_dim():
    g, v = torch.tensor([2.0, 3.0]).view(2, 1, 1), torch.tensor([[[3.0, 4.0]], [[0.0, -5.0]]])
    folded = fold_weight_norm({"a.weight_g": g, "a.weight_v": v, "a.bias": torch.ones(1)})
    torch.testing.assert_close(folded["a.weight"], torch.tensor([[[1.2, 1.6]], [[0.0, -3.0]]]))
    assert sorted(folded) == ["a.bias", "a.weight"]
    assert fold_weight_norm(folded).keys() == folded.keys()


def test_fold_weight_norm_is_fp32_for_16_bit_files():
    g, v = torch.tensor([1.0]).view(1, 1, 1).bfloat16(), torch.tensor([[[1.0, 2.0, 3.0]]]).bfloat16()
    folded = fold_weight_norm({"a.weight_g": g, "a.weight_v": v})["a.weight"]
    torch.testing.assert_close(folded, torch.tensor([[[1.0, 2.0, 3.0]]]) / 14**0.5)


@pytest.mark.parametrize(
    "state",
    [
        {"a.weight_g": torch.ones(2, 1, 1)},
        {"a.weight_v": torch.ones(2, 1, 1)},
        {"a.weight_g": torch.ones(1, 2, 1), "a.weight_v": torch.ones(2, 2, 3)},
        {"a.weight_g": torch.ones(2, 1, 1), "a.weight_v": torch.ones(2, 2, 3), "a.weight": torch.ones(2, 2, 3)},
    ],
)
def test_fold_weight_norm_refuses(state):
    with pytest.raises(CheckpointError, match=r"file\.safetensors: tensor 'a\.weight_"):
        fold_weight_norm(state, "file.safetensors")


def test_load_oobleck_state_reads_the_decoder_only(tmp_path):
    path = tmp_path / "model.safetensors"
    mine = {
        "pretransform.model.decoder.layers.0.weight_g": torch.ones(2, 1, 1),
        "pretransform.model.decoder.layers.0.weight_v": torch.ones(2, 1, 4),
    }
    save_file({**mine, "pretransform.model.encoder.x": torch.ones(1), "model.ids": torch.ones(1, dtype=torch.int64)}, path)
    assert {name: tensor.shape for name, tensor in load_oobleck_state(path).items()} == {"decoder.layers.0.weight": (2, 1, 4)}


def test_load_oobleck_state_refuses(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"audio VAE: .*model\.safetensors"):
        load_oobleck_state(path)
    path.write_bytes(b"not a file of tensors")
    with pytest.raises(CheckpointError, match=r"audio VAE: .*model\.safetensors"):
        load_oobleck_state(path)
    save_file({"other": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match="no tensor"):
        load_oobleck_state(path)


def test_decode_audio_embedded_checkpoint(nano_folder):
    folder = nano_folder / "stable-audio-open-1.0"
    decoder = OobleckDecoder(OobleckConfig.from_file(folder / "model_config.json")).requires_grad_(False)
    decoder.load_state_dict(load_oobleck_state(folder / "model.safetensors"), strict=True)
    waveform = decode_audio(decoder, torch.zeros(1, 5, 64))
    assert waveform.shape == (1, 2, 8820)
    assert waveform.dtype == torch.float32
    assert torch.isfinite(waveform).all()


def test_decode_audio_soft_clip_bounds():
    torch.manual_seed(0)
    values = {field: getattr(SMALL, field) for field in SMALL.__dataclass_fields__}
    plain = OobleckDecoder(SMALL).requires_grad_(False)
    clipped = OobleckDecoder(OobleckConfig(**values | {"soft_clip": True}))
    clipped.load_state_dict(plain.state_dict())
    latents = torch.randn(1, 4, 6) * 100
    torch.testing.assert_close(clipped(latents), plain(latents).tanh())


@pytest.mark.parametrize("shape", [(1, 64, 5), (5, 4), (1, 0, 4)])
def test_decode_audio_refuses_shape(shape):
    with pytest.raises(RequestError, match=r"expected \[1, A, 4\]"):
        decode_audio(OobleckDecoder(SMALL), torch.zeros(shape))
