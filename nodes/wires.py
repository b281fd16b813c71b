"""What travels along the wires between the nodes: CPU tensors and plain descriptions, so the host may cache and re-run them."""

from dataclasses import dataclass

from comfy_api.latest import io

from magi2_core.checkpoint.catalog import Checkpoint
from magi2_core.config import GenerationDefaults
from magi2_core.request import Latents

Model = io.Custom("MAGI2_MODEL")
LoaderOptions = io.Custom("MAGI2_LOADER_OPTIONS")
Conditioning = io.Custom("MAGI2_CONDITIONING")
Latent = io.Custom("MAGI2_LATENT")
SamplingOptions = io.Custom("MAGI2_SAMPLING_OPTIONS")

CHECKPOINT_DEFAULT = "checkpoint default"
"""First choice of the size widget; in number widgets 0 means the same."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Value of MAGI2_LOADER_OPTIONS: where the model runs. Texts as typed into the widgets; checked when the model is loaded."""

    devices: str = "auto"
    layout: str = "auto"
    mode: str = "auto"
    address: str = ""
    text_encoder: str = "auto"
    vae: str = "auto"
    idle_minutes: int = 30


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Value of MAGI2_SAMPLING_OPTIONS; 0 in `shift`, `width` and `height` is the checkpoint's own, in `stop_after` no stop."""

    shift: float = 0.0
    deterministic: bool = False
    noise: str = "cpu"
    preview_every: int = 1
    width: int = 0
    height: int = 0
    stop_after: int = 0
    resume: Latents | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelHandle:
    """Value of MAGI2_MODEL: which checkpoint, where it runs, and its defaults. Holds no live thing; can be weakly referenced."""

    checkpoint: Checkpoint
    settings: LoaderSettings
    defaults: GenerationDefaults
