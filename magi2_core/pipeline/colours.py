"""The colours of preview pictures: one linear map from latents to RGB, fitted to the checkpoint's own picture encoder.

Needs the encoder only, once a checkpoint; the caller keeps the result (media/preview.py draws with it).
"""

import torch

from magi2_core.media.preview import PreviewColours, calibration_picture, fit_rgb_factors

from .stages import Parts


def preview_colours(parts: Parts) -> PreviewColours:
    """Factors fp32 [48, 3] and bias fp32 [3] of the checkpoint, fitted on the first rank."""

    def fit() -> dict[str, torch.Tensor]:
        picture = calibration_picture(torch.Generator().manual_seed(0))
        pixels = picture.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        with parts.use("vae") as vae:
            latents = vae.encode(pixels.to(next(vae.parameters()).device)).cpu().float()
        factors, bias = fit_rgb_factors(latents, picture)
        return {"factors": factors.contiguous(), "bias": bias.contiguous()}

    return PreviewColours(**parts.first(fit))
