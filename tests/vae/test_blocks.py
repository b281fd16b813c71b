"""Latent statistics, patches, bytes, torch files, and the streamed building blocks."""

import os
import pickle

import pytest
import torch

from magi2_core.errors import CheckpointError
from magi2_core.vae.blocks import (
    CausalConv3d,
    Stream,
    average_down,
    check_tensors,
    denormalise_latents,
    duplicate_up,
    frames_to_uint8,
    latent_statistics,
    normalise_latents,
    patchify,
    read_torch_file,
    unpatchify,
)


def test_latent_statistics_known_channels():
    mean, inverse_std = latent_statistics()
    assert mean.shape == inverse_std.shape == (1, 48, 1, 1, 1)
    assert mean[0, [0, 19, 47], 0, 0, 0].tolist() == pytest.approx([-0.2289, 0.5109, -0.0667])
    assert (1 / inverse_std)[0, [0, 39, 47], 0, 0, 0].tolist() == pytest.approx([0.4765, 1.6887, 0.7744])


def test_denormalise_inverts_normalise():
    latents = torch.randn(1, 48, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(normalise_latents(denormalise_latents(latents)), latents)


def test_patchify_channel_order():
    image = torch.arange(12.0).view(1, 3, 1, 2, 2)
    assert patchify(image).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


def test_unpatchify_pixel_order():
    pixels = unpatchify(torch.arange(12.0).view(1, 12, 1, 1, 1))
    assert pixels[0, :, 0].tolist() == [[[0, 2], [1, 3]], [[4, 6], [5, 7]], [[8, 10], [9, 11]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frames_to_uint8_truncates_and_leaves_its_input(dtype):
    video = torch.tensor([-1.5, -1.0, 0.0, 0.9921875, 1.0, 3.0], dtype=dtype).view(1, 1, 1, 1, 6).repeat(1, 3, 2, 1, 1)
    before = video.clone()
    frames = frames_to_uint8(video)
    assert frames.shape == (2, 1, 6, 3)
    assert frames.dtype == torch.uint8
    assert frames[1, 0, :, 2].tolist() == [0, 0, 127, 254, 255, 255]  # 127.5 and 254.004 are cut, not rounded
    assert torch.equal(video, before)


def test_average_down_single_frame_halves():
    frame = torch.arange(8.0).view(1, 2, 1, 2, 2)
    assert average_down(frame, 2, time=2, space=2).flatten().tolist() == [0.75, 2.75]


def test_duplicate_up_places_channels_in_cell():
    x = torch.arange(8.0).view(1, 8, 1, 1, 1)
    up = duplicate_up(x, 1, time=2, space=2, first=False)
    assert up[0, 0].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert duplicate_up(x, 1, time=2, space=2, first=True)[0, 0].tolist() == [[[4, 5], [6, 7]]]


@pytest.mark.parametrize("cuts", [[1, 2, 4], [1, 1, 1, 1, 3], [5, 2]])
def test_causal_conv_streamed_equals_whole(cuts):
    torch.manual_seed(1)
    conv = CausalConv3d(2, 3, (3, 3, 3)).requires_grad_(False)
    x = torch.randn(1, 2, 7, 4, 5)
    stream = Stream()
    pieces = [conv(chunk, stream) for chunk in x.split(cuts, dim=2)]
    torch.testing.assert_close(torch.cat(pieces, dim=2), conv(x))


def test_causal_conv_sees_no_future():
    conv = CausalConv3d(1, 1, (3, 1, 1)).requires_grad_(False)
    x = torch.randn(1, 1, 5, 1, 1)
    changed = x.clone()
    changed[:, :, 3:] += 1
    assert torch.equal(conv(x)[:, :, :3], conv(changed)[:, :, :3])


def test_read_torch_file_missing_names_component_and_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"video VAE: .*absent\.pth is missing"):
        read_torch_file(tmp_path / "absent.pth", "video VAE")


def test_read_torch_file_damaged(tmp_path):
    path = tmp_path / "cut.pth"
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(CheckpointError, match=r"cut\.pth"):
        read_torch_file(path, "video VAE")


class _Payload:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (self.target,)


def test_read_torch_file_runs_no_code(tmp_path):
    path, target = tmp_path / "evil.ckpt", tmp_path / "made"
    torch.save({"state_dict": _Payload(str(target))}, path, pickle_module=pickle)
    with pytest.raises(CheckpointError, match=r"evil\.ckpt"):
        read_torch_file(path, "turbo VAE")
    assert not target.exists()


@pytest.mark.parametrize("state", [{}, [1], {"a": 3}, {"a": torch.zeros(2, dtype=torch.int64)}])
def test_check_tensors_refuses(state, tmp_path):
    with pytest.raises(CheckpointError, match="video VAE"):
        check_tensors(state, "video VAE", tmp_path / "x.pth")


def test_frames_to_uint8_refuses_what_is_not_a_number():
    video = torch.zeros(1, 3, 4, 2, 2)
    video[0, 1, 2, 0, 1] = torch.nan
    with pytest.raises(CheckpointError, match="made 1 of 4 frames with values that are not numbers"):
        frames_to_uint8(video)
