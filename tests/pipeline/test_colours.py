"""The preview colours of a checkpoint: shapes, and that they show a decoded clip in its own colours."""

import torch

from magi2_core.media.preview import ColoursRequest, latent_preview
from magi2_core.pipeline.build import build_pipeline


def test_colours_show_an_encoded_picture(nano_folder) -> None:
    pipeline = build_pipeline(nano_folder, device="cpu")
    colours = pipeline.colours(ColoursRequest())
    assert colours.factors.shape == (48, 3) and colours.bias.shape == (3,)
    picture = torch.tensor([25, 45, 140], dtype=torch.uint8).repeat(1, 32, 48, 1)
    with torch.no_grad(), pipeline.use("vae") as vae:
        latents = vae.encode(picture.permute(3, 0, 1, 2)[None].float() / 127.5 - 1)
    shown = latent_preview(latents, colours.factors, colours.bias, long_side=3).float()
    assert (shown.mean((0, 1, 2)) - torch.tensor([25.0, 45.0, 140.0])).abs().max() < 16
