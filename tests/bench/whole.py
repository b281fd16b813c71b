"""One layer, and a whole step, of the released sizes with random weights: what `run.py --op layer` and `--op step` measure.

A step runs 40 layers; as many distinct layers as fit are made and cycled over, so that weights come from memory and not from cache
(the experts of one layer alone are 6 GB, the cache is 60 MB). Nothing is extrapolated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

GRIDS = {"272p": (16, 28), "540p": (32, 56)}
FRAMES, AUDIO, TEXT, NEGATIVE = 32, 250, 2048, 448
MOE_LAYER, DENSE_LAYER = 5, 0
FREE_FOR_ACTIVATIONS = {"272p": 16 << 30, "540p": 48 << 30}


def small_config() -> Any:
    """A configuration of the same structure that a CPU runs: dense layers 0 and 3, MoE layers 1 and 2."""
    from magi2_core.config import MoEConfig, PreviewConfig

    moe = MoEConfig(
        num_heads=4,
        num_experts=8,
        top_k=2,
        moe_layers=(1, 2),
        expert_intermediate_size=32,
        shared_expert_intermediate_size=32,
        modality_specific_expert_intermediate_size=32,
    )
    return PreviewConfig(num_layers=4, hidden_size=64, head_dim=16, text_in_channels=24, mm_layers=(0, 3), moe=moe)


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
    return _context((FRAMES, *GRIDS[shape]), AUDIO, (TEXT, NEGATIVE), 16, "cuda")


def _context(grid: tuple[int, int, int], audio: int, texts: tuple[int, int], bands: int, device: str) -> Any:
    from magi2_core.model.packing import ItemShape, TokenContext, pack
    from magi2_core.model.rope import default_bands, rope_table
    from magi2_core.shapes import LatentShape

    video = LatentShape(frames=grid[0], height=grid[1], width=grid[2], channels=48)
    sequence = pack([ItemShape(video=video, audio=audio, text=count) for count in texts], device=device)
    return TokenContext(sequence.segments, rope_table(sequence.coords, default_bands(bands).to(device)), sequence.cu_seqlens)


def layer(index: int = MOE_LAYER, *, config: Any = None, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A layer with random weights, prepared for the chosen kernels; of the released sizes without a `config`."""
    from magi2_core.config import PreviewConfig
    from magi2_core.model.block import PreviewLayer

    with torch.device("meta"):
        made = PreviewLayer(config or PreviewConfig(), index, dtype)
    made = fill(made.to_empty(device=device)).requires_grad_(False)
    made.prepare(dtype)
    return made


def advance(made: Any, x: Tensor, context: Any) -> Tensor:
    """[S, N, C] through one layer, its last branch mixed in: what the released layer returns."""
    from magi2_core.model.hyper_connection import HyperState

    return made(HyperState(x), context).connected()


def streams(rows: int, width: int = 3072, device: str = "cuda") -> Tensor:
    """[S, 4, C]."""
    return torch.randn(rows, 4, width, device=device, dtype=torch.bfloat16)


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


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A short request and what a layer makes of it: in fp32 with plain kernels, in bf16 with the kernels chosen now and with plain ones."""

    x: Tensor
    context: Any
    exact: Tensor
    chosen: Tensor
    plain: Tensor

    def error(self, found: Tensor) -> float:
        """Difference to fp32 relative to what the layer changes."""
        return self.apart(found, self.exact)

    def apart(self, found: Tensor, wanted: Tensor) -> float:
        """Difference of two results relative to what the layer changes."""
        moved = (self.exact - self.x).double().norm()
        return ((found.double() - wanted.double()).norm() / moved).item()


@contextmanager
def experts_fixed(made: Any) -> Iterator[None]:
    """Every token of a head takes the same experts, so that no near tie sends one elsewhere: what is left of an error is rounding."""
    bias = made.mlp.moe_mlp.router.expert_bias_ema
    before = bias.clone()
    bias.copy_(torch.randperm(bias.numel(), device=bias.device).to(bias.dtype))
    try:
        yield
    finally:
        bias.copy_(before)


@torch.no_grad()
def compare_layer(made: Any, index: int = MOE_LAYER, *, config: Any = None, device: str = "cuda") -> Compared:
    """Runs a bf16 layer on a short request in the three ways.

    Both bf16 runs differ from fp32 by rounding and by experts that a near tie gives to another route, so the error of the chosen kernels
    must not be larger than that of the plain ones but for chance.
    """
    from magi2_core.config import PreviewConfig
    from magi2_kernels.common.choice import using
    from magi2_kernels.sink_attention import providers

    config = config or PreviewConfig()
    context = _context((4, 9, 14), 31, (77, 40), config.rope_bands, device)
    x = streams(context.cu_seqlens.total, config.hidden_size, device)
    chosen = advance(made, x, context)
    with using("reference"), providers.using("reference"):
        wide = layer(index, config=config, device=device, dtype=torch.float32)
        wide.load_state_dict({name: tensor.float() for name, tensor in made.state_dict().items()})
        wide.prepare(torch.float32)
        exact = advance(wide, x.float(), context)
        del wide
        made.prepare(torch.bfloat16)
        plain = advance(made, x, context)
    made.prepare(torch.bfloat16)
    return Compared(x=x, context=context, exact=exact, chosen=chosen, plain=plain)


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
def model(shape: str, *, config: Any = None, device: str = "cuda", most: int = 36) -> tuple[Any, int, int]:
    """The whole transformer with cycled layers, and the numbers of distinct MoE and per-modality layers."""
    from magi2_core.config import PreviewConfig
    from magi2_core.model.preview import PreviewTransformer
    from magi2_core.model.rope import default_bands

    config = config or PreviewConfig()
    with torch.device("meta"):
        made = PreviewTransformer(config, torch.bfloat16)
    for adapter in (made.pre_adapter, made.post_adapter):
        fill(adapter.to_empty(device=device))
    made.pre_adapter.rope.bands.copy_(default_bands(config.rope_bands))
    dense = [layer(DENSE_LAYER, config=config, device=device) for _ in range(2)]
    free = torch.cuda.mem_get_info()[0] - FREE_FOR_ACTIVATIONS[shape] if device == "cuda" else 0
    experts = [layer(config=config, device=device) for _ in range(max(1, min(most, free // 6_400_000_000)))]
    chosen, counts = [], {True: 0, False: 0}
    for index in range(config.num_layers):
        per_modality = index in config.mm_layers
        pool = dense if per_modality else experts
        chosen.append(pool[counts[per_modality] % len(pool)])
        counts[per_modality] += 1
    made.block.layers = nn.ModuleList(chosen)
    return made.requires_grad_(False).eval(), len(experts), len(dense)


def step(shape: str, made: tuple[Any, int, int], *, text: int = TEXT, grid: tuple[int, int, int] | None = None) -> Step:
    """A request of this shape (or of another latent grid) on the model."""
    from magi2_core.model.velocity import PreviewVelocity
    from magi2_core.shapes import LatentShape

    model_of, device = made[0], made[0].device
    frames, height, width = grid or (FRAMES, *GRIDS[shape])
    latent = LatentShape(frames=frames, height=height, width=width, channels=48)
    channels = model_of.config.text_in_channels
    features = [torch.randn(1, count, channels, device=device, dtype=torch.bfloat16) for count in (text, NEGATIVE)]
    velocity = PreviewVelocity(model_of, latent_shape=latent, audio_latents=AUDIO, text=features[0], negative=features[1])
    return Step(
        velocity=velocity,
        video=torch.randn(latent.size, device=device),
        audio=torch.randn(1, AUDIO, 64, device=device),
        moe_layers=made[1],
        dense_layers=made[2],
    )
