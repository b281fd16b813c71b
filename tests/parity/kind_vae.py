"""Golden kinds turbo_vaed, wan22_vae and audio_vae, through the public code of magi2_core.vae and magi2_core.audio."""

import torch
from torch import Tensor, nn

from magi2_core.audio.oobleck import OobleckConfig, OobleckDecoder, decode_audio, load_oobleck_state
from magi2_core.audio.resample import fft_resample, resampled_length
from magi2_core.config import WanVAEConfig
from magi2_core.vae.blocks import frames_to_uint8, latent_statistics
from magi2_core.vae.turbo import TurboConfig, TurboVAED
from magi2_core.vae.wan import WanVAE


def run(case) -> dict[str, Tensor]:
    with torch.no_grad():
        return {"turbo_vaed": _turbo, "wan22_vae": _wan, "audio_vae": _audio}[case.kind](case)


def _suffixed(case, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in case.inputs.items() if name.startswith(prefix)}


def _turbo(case) -> dict[str, Tensor]:
    config = TurboConfig.from_dict(case.config["turbo_config"], str(case.folder))
    model = TurboVAED(config).requires_grad_(False)
    model.load_state_dict(case.weights, strict=True)
    out = _turbo_direct(model, case.inputs["direct_z"]) if "direct_z" in case.inputs else {}
    for dtype, label in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        model.to(dtype)
        for clip, latents in _suffixed(case, "z_").items():
            video = model.decode(latents)
            out[f"{label}.decode_{clip}"] = video
            out[f"{label}.decode_video_uint8_{clip}"] = frames_to_uint8(video)
    return out


def _turbo_direct(model: TurboVAED, z: Tensor) -> dict[str, Tensor]:
    """The network without latent statistics and windows; layers may overwrite their input, so each output is copied."""
    out: dict[str, Tensor] = {}
    decoder = model.decoder
    watched: dict[str, nn.Module] = {"conv_in": decoder.conv_in, "mid_block": decoder.mid_block, "conv_out": decoder.conv_out}
    watched |= {f"up_blocks.{index}": block for index, block in enumerate(decoder.up_blocks)}

    def record(name: str):
        return lambda _module, _inputs, result: out.update({name: result.clone()})

    hooks = [module.register_forward_hook(record(f"direct.first=True.{name}")) for name, module in watched.items()]
    out["direct.first=True.out"] = decoder(z, True)
    for hook in hooks:
        hook.remove()
    out["direct.first=False.out"] = decoder(z, False)
    return out


def _wan(case) -> dict[str, Tensor]:
    model = WanVAE(WanVAEConfig.from_dict(case.config, str(case.folder))).requires_grad_(False)
    model.load_state_dict(case.weights, strict=True)
    mean, inverse_std = latent_statistics()
    out = {"mean": mean.flatten(), "inv_std": inverse_std.flatten(), "std": 1 / inverse_std.flatten()}
    for clip, pixels in _suffixed(case, "video_").items():
        out[f"encode_{clip}"] = model.encode(pixels)
        out[f"encode_raw_mu_{clip}"] = model.encode_mean(pixels)
    for clip, latents in _suffixed(case, "z_").items():
        out[f"derived_decode_{clip}"] = torch.cat(list(model.iter_decode(latents)), dim=2)
    return out


def _audio(case) -> dict[str, Tensor]:
    decoder = OobleckDecoder(OobleckConfig.from_dict(case.config["model_config"], str(case.folder))).requires_grad_(False)
    decoder.load_state_dict(load_oobleck_state(case.folder / "weights.safetensors"), strict=True)
    out: dict[str, Tensor] = {}
    for clip, latents in _suffixed(case, "audio_latent_").items():
        out[f"waveform_{clip}"] = decoder(latents.T[None])
        out[f"decode_audio_{clip}"] = decode_audio(decoder, latents[None])[0].T
    for length, samples in _suffixed(case, "resample_in_").items():
        out[f"resample_out_{length}"] = fft_resample(samples.T, resampled_length(samples.shape[0])).T
    return out
