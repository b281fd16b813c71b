"""One layer, and a whole step, of the released sizes with random weights: what `run.py --op layer` and `--op step` measure.

A step runs 40 layers; as many distinct layers as fit are made and cycled over, so that weights come from memory and not from cache
(the experts of one layer alone are 6 GB, the cache is 60 MB). Nothing is extrapolated.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

GRIDS = {"272p": (16, 28), "540p": (32, 56)}
FRAMES, AUDIO, TEXT, NEGATIVE = 32, 250, 2048, 448
MOE_LAYER, DENSE_LAYER = 5, 0
FREE_FOR_ACTIVATIONS = {"272p": 16 << 30, "540p": 48 << 30}


@torch.no_grad()
def fill(module: nn.Module) -> nn.Module:
    """Random weights that keep activations near unit size: matrices by their fan-in, norms near one, small hyper-connection terms."""
    for name, parameter in module.named_parameters():
        leaf = name.rsplit(".", 1)[-1]
        if parameter.ndim >= 2 and not leaf.startswith(("mhc", "sinks")):
            fan_in = parameter.shape[-2] if leaf.startswith("W") else parameter.shape[-1]
            parameter.normal_(0.0, fan_in**-0.5)
        elif leaf.startswith("mhc_phi"):
            parameter.normal_(0.0, 0.02)
        else:
            parameter.normal_(0.0, 0.1)
    return module


def tokens(shape: str) -> Any:
    """The context of a request of this shape: both branches packed."""
    from magi2_core.model.packing import ItemShape, TokenContext, pack
    from magi2_core.model.rope import default_bands, rope_table
    from magi2_core.shapes import LatentShape

    height, width = GRIDS[shape]
    video = LatentShape(frames=FRAMES, height=height, width=width, channels=48)
    sequence = pack([ItemShape(video=video, audio=AUDIO, text=count) for count in (TEXT, NEGATIVE)], device="cuda")
    return TokenContext(sequence.segments, rope_table(sequence.coords, default_bands(16).cuda()), sequence.cu_seqlens)


def layer(index: int = MOE_LAYER) -> Any:
    """A layer on the GPU, prepared for the chosen kernels."""
    from magi2_core.config import PreviewConfig
    from magi2_core.model.block import PreviewLayer

    with torch.device("meta"):
        made = PreviewLayer(PreviewConfig(), index, torch.bfloat16)
    made = fill(made.to_empty(device="cuda")).requires_grad_(False)
    made.prepare(torch.bfloat16)
    return made


def streams(rows: int) -> Tensor:
    """[S, 4, 3072]."""
    return torch.randn(rows, 4, 3072, device="cuda", dtype=torch.bfloat16)


def layer_flops(context: Any, per_modality: bool = False) -> float:
    """Attention, dense products and experts of one layer."""
    rows = context.cu_seqlens.total
    attention = sum(4.0 * (stop - start) ** 2 * 3072 for start, stop in context.cu_seqlens.bounds)
    qkv = 2.0 * rows * 3072 * (9216 + 24 + 3072)
    if per_modality:
        return attention + qkv + 2.0 * rows * 3072 * 3 * 8192
    dense = 2.0 * rows * 3072 * (2 * 3072 + 2 * 2560 + 2 * 1280)
    experts = 2.0 * rows * 12 * 6 * 3 * 256 * 1280
    return attention + qkv + dense + experts


def layer_error(made: Any) -> float:
    """The layer under the Triton kernels against the plain ones, on a short request of the released widths."""
    from magi2_core.model.packing import ItemShape, TokenContext, pack
    from magi2_core.model.rope import default_bands, rope_table
    from magi2_core.shapes import LatentShape
    from magi2_kernels.common.choice import using
    from magi2_kernels.sink_attention import providers

    video = LatentShape(frames=4, height=9, width=14, channels=48)
    sequence = pack([ItemShape(video=video, audio=31, text=count) for count in (77, 40)], device="cuda")
    context = TokenContext(sequence.segments, rope_table(sequence.coords, default_bands(16).cuda()), sequence.cu_seqlens)
    x = streams(sequence.total)
    with torch.no_grad():
        got = made(x, context)
        with using("reference"), providers.using("reference"):
            made.prepare(torch.bfloat16)
            want = made(x, context)
        made.prepare(torch.bfloat16)
    moved = (want - x).double().norm()
    return ((got - want).double().norm() / moved).item()


@dataclass(frozen=True, kw_only=True)
class Step:
    """A velocity function of the released size, its latents, and how many distinct layers it cycles over."""

    velocity: Any
    video: Tensor
    audio: Tensor
    moe_layers: int
    dense_layers: int

    def __call__(self, timestep: int = 700) -> Any:
        return self.velocity(self.video, self.audio, timestep)


@torch.no_grad()
def model(shape: str, most: int = 36) -> tuple[Any, int, int]:
    """The whole transformer with cycled layers, and the numbers of distinct MoE and per-modality layers."""
    from magi2_core.config import PreviewConfig
    from magi2_core.model.preview import PreviewTransformer
    from magi2_core.model.rope import default_bands

    config = PreviewConfig()
    with torch.device("meta"):
        made = PreviewTransformer(config, torch.bfloat16)
    for adapter in (made.pre_adapter, made.post_adapter):
        fill(adapter.to_empty(device="cuda"))
    made.pre_adapter.rope.bands.copy_(default_bands(16))
    dense = [layer(DENSE_LAYER) for _ in range(2)]
    free = torch.cuda.mem_get_info()[0] - FREE_FOR_ACTIVATIONS[shape]
    experts = [layer() for _ in range(max(1, min(most, free // 6_400_000_000)))]
    chosen, counts = [], {True: 0, False: 0}
    for index in range(config.num_layers):
        per_modality = index in config.mm_layers
        pool = dense if per_modality else experts
        chosen.append(pool[counts[per_modality] % len(pool)])
        counts[per_modality] += 1
    made.block.layers = nn.ModuleList(chosen)
    return made.requires_grad_(False).eval(), len(experts), len(dense)


def step(shape: str, made: tuple[Any, int, int], text: int = TEXT) -> Step:
    """A request of this shape on the model."""
    from magi2_core.model.velocity import PreviewVelocity
    from magi2_core.shapes import LatentShape

    height, width = GRIDS[shape]
    latent = LatentShape(frames=FRAMES, height=height, width=width, channels=48)
    features = [torch.randn(1, count, 5120, device="cuda", dtype=torch.bfloat16) for count in (text, NEGATIVE)]
    velocity = PreviewVelocity(made[0], latent_shape=latent, audio_latents=AUDIO, text=features[0], negative=features[1])
    return Step(
        velocity=velocity,
        video=torch.randn(latent.size, device="cuda"),
        audio=torch.randn(1, AUDIO, 64, device="cuda"),
        moe_layers=made[1],
        dense_layers=made[2],
    )


def with_forward(made: Step, forward: Any) -> Step:
    """The same request launched another way."""
    made.velocity.forward = forward
    return replace(made)
