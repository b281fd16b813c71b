"""A small random preview model and one request for it."""

import pytest
import torch
from torch import Tensor

from magi2_core.config import MoEConfig, PreviewConfig
from magi2_core.model.preview import PreviewTransformer
from magi2_core.shapes import LatentShape

SMALL = PreviewConfig(
    num_layers=3,
    hidden_size=32,
    head_dim=8,
    text_in_channels=24,
    mm_layers=(0, 2),
    moe=MoEConfig(
        num_heads=4,
        num_experts=6,
        top_k=2,
        moe_layers=(1,),
        expert_intermediate_size=8,
        shared_expert_intermediate_size=8,
        modality_specific_expert_intermediate_size=8,
    ),
    intermediate_factor=8,
)
LATENT = LatentShape(frames=2, height=2, width=3)
AUDIO = 9


def filled(config: PreviewConfig, dtype: torch.dtype) -> PreviewTransformer:
    """Random weights of ordinary size; the same numbers for both dtypes up to rounding."""
    generator = torch.Generator().manual_seed(0)
    model = PreviewTransformer(config, dtype)
    for name, tensor in model.state_dict().items():
        if name == "pre_adapter.rope.bands":
            continue
        scale = 0.3 if tensor.ndim == 1 else tensor.shape[-1] ** -0.5
        tensor.copy_(torch.randn(tensor.shape, generator=generator).mul(scale).bfloat16())
    return model.finish_loading()


@pytest.fixture(scope="session")
def small_config() -> PreviewConfig:
    return SMALL


@pytest.fixture
def small_model() -> PreviewTransformer:
    return filled(SMALL, torch.float32)


@pytest.fixture
def small_bf16_model() -> PreviewTransformer:
    return filled(SMALL, torch.bfloat16)


@pytest.fixture
def small_request() -> dict:
    """Arguments of PreviewVelocity: text, negative text, one reference image."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "latent_shape": LATENT,
        "audio_latents": AUDIO,
        "text": rand(1, 5, 24).bfloat16(),
        "negative": rand(1, 3, 24).bfloat16(),
        "special": rand(1, 1, 24).bfloat16(),
        "ref_latents": rand(1, 1, 48, 1, 2, 2),
    }


@pytest.fixture
def small_latents() -> tuple[Tensor, Tensor]:
    """Video and audio latents of that request."""
    generator = torch.Generator().manual_seed(2)
    return torch.randn(LATENT.size, generator=generator), torch.randn(1, AUDIO, 64, generator=generator)
