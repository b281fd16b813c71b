"""Golden kinds of the refiner: packing and masks, the full forward, the denoising loop."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from magi2_core.config import RefinerConfig
from magi2_core.model.refiner import RefinerTransformer
from magi2_core.model.refiner_packing import (
    RefinerPacking,
    RefinerSequence,
    SegmentLengths,
    pack,
    token_grid,
    unpack_audio,
    unpack_video,
)
from magi2_core.model.refiner_velocity import RefinerVelocity
from magi2_core.model.rope import default_bands, rope_table
from magi2_core.model.window import allowed_mask
from magi2_core.request import GuidanceOptions
from magi2_core.sampling.denoise import DenoiseHooks, DenoiseOptions, denoise, start_state
from magi2_core.sampling.noise import NoiseStream
from magi2_core.sampling.renoise import renoise, renoise_audio, signal_table, upsample
from magi2_core.sampling.schedule import flow_schedule
from magi2_core.shapes import LatentShape, refined_shape
from magi2_kernels.block_attention import block_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROPE_BANDS = 2
"""The pack cases give the rotary table of a head width of 16."""


def run(case) -> dict[str, Tensor]:
    return {"refiner_pack": _pack, "refiner_forward": _forward, "refiner_loop": _loop}[case.kind](case)


def _others(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The segments behind the video by the names of the case files."""
    names = {"txt_feat": "text", "audio_x_t": "audio", "ref_audio_feat": "ref_audio", "ref_video_feat": "ref_video"}
    return {ours: inputs[theirs] for theirs, ours in names.items() if theirs in inputs}


# refiner_pack


def _pack_config(config: dict) -> RefinerConfig:
    patch = config.get("t_patch_size", 1) * config.get("patch_size", 1) ** 2
    channels = {
        "video_in_channels": config.get("video_channels", 48) * patch,
        "audio_in_channels": config.get("audio_channels", 64),
        "text_in_channels": config.get("text_channels", 5120),
    }
    return RefinerConfig.from_dict({"arch": channels, "data_proxy": config})


def _bits(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.numpy(), axis=1))


def _padded(sequence: RefinerSequence, config: RefinerConfig) -> Tensor:
    """Features of all segments in one matrix, padded to the widest modality; the model itself never builds it."""
    width = max(config.video_in_channels, config.audio_in_channels, config.text_in_channels)
    rows = [torch.nn.functional.pad(piece, (0, width - piece.shape[1])) for _, piece in sequence.features]
    return torch.cat(rows)


def _pack(case) -> dict[str, Tensor]:
    config = _pack_config(case.config)
    lengths = SegmentLengths(
        grid=token_grid((case.config["T"], case.config["H"], case.config["W"]), config),
        audio=case.config.get("audio_tokens", 0),
        text=case.config["text_tokens"],
        ref_audio=case.config.get("ref_audio_tokens", 0),
        ref_video=case.config.get("ref_video_tokens", 0),
    )
    packing = RefinerPacking.build(lengths, config)
    produced = {"token_order": packing.order, "token_restore_order": packing.restore}
    if "sample_index_kernel_order" in case.outputs:
        index = case.outputs["sample_index_kernel_order"]
        return {
            "sample_index_kernel_order": index,
            "sample_coords": packing.coords[index],
            "sample_token_order": packing.order[index],
        }
    mask = allowed_mask(packing.local)
    natural = mask[packing.restore.long()][:, packing.restore.long()]
    produced |= {
        "coords_mapping": packing.coords,
        "modality_mapping": packing.segments.ids.long(),
        "rope_head_dim16": rope_table(packing.coords, default_bands(ROPE_BANDS)),
        "mask": mask,
        "mask_natural_order": natural,
        "mask_packed": _bits(mask),
        "mask_natural_order_packed": _bits(natural),
    }
    if "x_t" in case.inputs:
        produced["token_sequence"] = _padded(pack(packing, case.inputs["x_t"], config, _others(case.inputs)), config)
    return produced


# refiner_forward


class _Recorder:
    """Collects what a forward passes between its parts, through hooks and the attention seam."""

    def __init__(self, model: RefinerTransformer, prefix: str) -> None:
        self.found: dict[str, Tensor] = {}
        self.prefix = prefix
        self.layer = 0
        model.attention_core = self.core
        model.pre_adapter.register_forward_hook(self.embedded)
        for index, layer in enumerate(model.block.layers):
            layer.register_forward_pre_hook(lambda module, inputs, index=index: setattr(self, "layer", index))
            layer.attention.register_forward_hook(self.append(f"layer{index}.attn_out"))
            layer.mlp.register_forward_hook(self.append(f"layer{index}.mlp_out"))
            layer.register_forward_hook(self.append(f"layer{index}.hidden_out"))

    def keep(self, name: str, value: Tensor) -> None:
        self.found[f"{self.prefix}.{name}"] = value.float().clone()

    def append(self, name: str):
        def hook(module, inputs, output) -> None:
            rows = output.float().clone()
            before = self.found.get(f"{self.prefix}.{name}")
            self.found[f"{self.prefix}.{name}"] = rows if before is None else torch.cat([before, rows])

        return hook

    def embedded(self, module, inputs, output) -> None:
        self.keep("pre_adapter.hidden", output[0])
        self.keep("pre_adapter.rope", output[1])

    def core(self, q, k, v, layout) -> Tensor:
        out = exact_attention(q, k, v, layout)
        for name, value in (("q_rope", q), ("k_rope", k), ("v", v), ("attn_core", out)):
            self.keep(f"layer{self.layer}.{name}", value)
        return out


def _model(case, config: RefinerConfig, dtype: torch.dtype) -> RefinerTransformer:
    model = RefinerTransformer(config, dtype)
    model.load_state_dict(case.weights, strict=True)
    model.attention_core = exact_attention
    return model


def exact_attention(q: Tensor, k: Tensor, v: Tensor, layout) -> Tensor:
    """The attention in float64 as the goldens have it: over the steps of a bf16 loop another summation grows to a tenth."""
    return block_attention(q.double(), k.double(), v.double(), layout).to(q.dtype)


def _forward(case) -> dict[str, Tensor]:
    config = RefinerConfig.from_dict(case.config)
    inputs = case.inputs
    others = _others(inputs)
    lengths = SegmentLengths(
        grid=token_grid(tuple(inputs["x_t"].shape[2:]), config), **{name: features.shape[1] for name, features in others.items()}
    )
    packing = RefinerPacking.build(lengths, config)
    produced: dict[str, Tensor] = {}
    for prefix, dtype in DTYPES.items():
        model = _model(case, config, dtype)
        recorder = _Recorder(model, prefix)
        out = model(pack(packing, inputs["x_t"], config, others))
        recorder.keep("model_out", out)
        recorder.keep("x_video", unpack_video(out, packing, config))
        recorder.keep("x_audio", unpack_audio(out, packing, config))
        produced |= recorder.found
    return produced


# refiner_loop


def _loop(case) -> dict[str, Tensor]:
    config, inputs, evaluation = RefinerConfig.from_dict(case.config), case.inputs, case.config["evaluation_config"]
    video = inputs["latent_video"]
    preview = LatentShape(channels=video.shape[1], frames=video.shape[2], height=video.shape[3], width=video.shape[4])
    shape = refined_shape(preview, case.config["refiner_width"], case.config["refiner_height"])
    shift = evaluation["magi2_refiner_shift"] if evaluation["magi2_refiner_shift"] is not None else evaluation["shift"]
    schedule = flow_schedule(case.config["steps"], shift)
    produced = {
        "upsampled": upsample(video, shape),
        "refiner_sigma_table": signal_table(),
        "scheduler.sigmas": schedule.sigmas,
        "scheduler.timesteps": torch.tensor(schedule.timesteps),
    }
    for prefix, dtype in DTYPES.items():
        produced |= _denoised(case, _model(case, config, dtype), prefix, shape, shift)
    return produced


def _denoised(case, model: RefinerTransformer, prefix: str, shape: LatentShape, shift: float) -> dict[str, Tensor]:
    """One run of the real loop from the injected noise; its inputs and velocities are written down on the way."""
    inputs, evaluation = case.inputs, case.config["evaluation_config"]
    stream = NoiseStream(0, "cpu", torch.device("cpu"))
    start = renoise(upsample(inputs["latent_video"], shape), evaluation["magi2_refiner_noise_value"], stream, inputs.get("noise_video"))
    noise_scale = evaluation["magi2_refiner_audio_noise_scale"]
    audio = renoise_audio(inputs["latent_audio"], noise_scale, stream, inputs.get("noise_audio"))
    moving, fixed = (audio, None) if noise_scale > 0 else (None, audio)
    scale = evaluation["magi2_refiner_video_txt_guidance_scale"]
    velocity = RefinerVelocity(
        model,
        latent_shape=shape,
        text=inputs["context"],
        negative=inputs["context_null"],
        guided=scale != 0,
        audio_tokens=0 if audio is None else audio.shape[1],
        fixed_audio=fixed,
    )
    found: dict[str, Tensor] = {}

    def recorded(video: Tensor, audio: Tensor | None, timestep: int):
        step = sum(name.endswith("latent_in") for name in found)
        heard = fixed if audio is None else audio
        result = velocity(video, heard, timestep)
        values = {"latent_in": video, "v_cond": result.video_cond, "v_uncond": result.video_uncond}
        values |= {"audio_in": heard, "va_cond": result.audio_cond, "va_uncond": result.audio_uncond}
        found.update({f"{prefix}.step{step}.{name}": value for name, value in values.items() if value is not None})
        return result if audio is not None else replace(result, audio_cond=None, audio_uncond=None)

    said = case.guidance  # of the options the refiner has the trick alone
    options = DenoiseOptions(
        video_guidance=scale,
        audio_guidance=evaluation["magi2_refiner_audio_txt_guidance_scale"] if scale else 0.0,
        guidance=GuidanceOptions(
            start_frame_trick=said.start_frame_trick, start_frames=said.start_frames, start_frame_scale=said.start_frame_scale
        ),
        stage="refine",
    )
    state = denoise(recorded, start_state(case.config["steps"], shift, start, moving), options, DenoiseHooks())
    found[f"{prefix}.final_video"] = state.sample["video"]
    empty = inputs["latent_audio"][:, :0]
    found[f"{prefix}.final_audio"] = state.sample["audio"] if moving is not None else empty if fixed is None else fixed
    return found
