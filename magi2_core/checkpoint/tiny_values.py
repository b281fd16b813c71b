"""Random values for a tiny checkpoint: scales chosen by name so that every forward of every component stays finite and alive."""

import math
import zlib
from typing import Any

import torch
from torch import Tensor

UNIT_GAINS = (".gamma", ".linear_attn.norm.weight")
SMALL = (".alpha", ".beta", ".bias", ".dt_bias", ".expert_bias", ".expert_bias_ema")


def random_state(shapes: dict[str, Tensor], seed: int, component: str) -> dict[str, Tensor]:
    """Values on the CPU for meta tensors; each tensor has its own generator, so a value depends on seed, component and name only."""
    state = {}
    for name, meta in shapes.items():
        # torch's CPU generator looks at the lower 32 bits of a seed only, so all parts are hashed into them.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{component}/{name}".encode()))
        state[name] = _values(name, tuple(meta.shape), generator).to(meta.dtype)
    return state


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("rope.bands"):
        return 10000.0 ** (-torch.arange(shape[0], dtype=torch.float32) / shape[0])
    if name.endswith(UNIT_GAINS):
        return 1.0 + 0.05 * noise
    if name.endswith(".A_log"):
        return torch.empty(shape).uniform_(1.0, 16.0, generator=generator).log()
    if name.endswith(".weight_g"):
        return 1.0 + 0.05 * noise.abs()
    if "mhc_alpha" in name:
        return 0.01 + 0.001 * noise
    if name.endswith(".sinks"):
        return 0.5 * noise
    if len(shape) == 1 or name.endswith(SMALL) or "mhc_bias" in name:
        # Norm weights are stored as an offset from one.
        return 0.05 * noise
    return noise / math.sqrt(_fan_in(name, shape))


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Inputs of one output: routed experts and hyper-connection matrices multiply from the right, all others are [out, in, ...]."""
    if ".moe_mlp.W_" in name:
        return shape[1]
    if "mhc_phi" in name:
        return shape[0]
    return math.prod(shape[1:])


def unfold_weight_norm(shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The stored form of folded convolutions: each `weight` of three dims becomes `weight_g` and `weight_v`."""
    stored: dict[str, Tensor] = {}
    for name, tensor in shapes.items():
        if name.endswith(".weight") and tensor.ndim == 3:
            stem = name.removesuffix("weight")
            stored[stem + "weight_g"] = torch.empty(tensor.shape[0], 1, 1, device="meta")
            stored[stem + "weight_v"] = tensor
        else:
            stored[name] = tensor
    return stored


def audio_encoder_shapes(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the audio encoder: in the released file, read by nobody here. Meta tensors, stored form."""
    sizes = values["model"]["pretransform"]["config"]["encoder"]["config"]
    widths = [sizes["channels"] * mult for mult in (1, *sizes["c_mults"])]
    shapes: dict[str, tuple[int, ...]] = {}

    def convolution(name: str, out_channels: int, in_channels: int, kernel: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out_channels, in_channels, kernel), (out_channels,)

    def snake(name: str, channels: int) -> None:
        shapes[f"{name}.alpha"] = shapes[f"{name}.beta"] = (channels,)

    convolution("encoder.layers.0", widths[0], sizes["in_channels"], 7)
    for block, stride in enumerate(sizes["strides"], start=1):
        inner, outer = widths[block - 1], widths[block]
        base = f"encoder.layers.{block}.layers"
        for unit in range(3):
            for place, kernel in ((1, 7), (3, 1)):
                snake(f"{base}.{unit}.layers.{place - 1}", inner)
                convolution(f"{base}.{unit}.layers.{place}", inner, inner, kernel)
        snake(f"{base}.3", inner)
        convolution(f"{base}.4", outer, inner, 2 * stride)
    last = len(sizes["strides"]) + 1
    snake(f"encoder.layers.{last}", widths[-1])
    convolution(f"encoder.layers.{last + 1}", sizes["latent_dim"], widths[-1], 3)
    return unfold_weight_norm({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
