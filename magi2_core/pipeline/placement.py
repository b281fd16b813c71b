"""Which component lives where between stages: a plan from sizes and free memory, and what would fit when memory is short. Pure.

Three modes: resident (always on the device), roundtrip (host copy, brought to the device for its stage), cpu (stays and computes on
the host). The denoiser comes first, and encoding a prompt or a picture never evicts it: an encoder that does not fit beside it
computes on the host. Facts: spec components.md 9, preview.md 3.12; working memory is an estimate from the widths listed there.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from magi2_core.config import PreviewConfig, RefinerConfig
from magi2_core.errors import OutOfMemoryError, RequestError
from magi2_core.model.refiner import CHUNK_TOKENS
from magi2_core.shapes import PRESETS, LatentShape, VideoShape

MODES = ("resident", "roundtrip", "cpu")
ORDER = ("preview", "turbo", "audio", "vae", "refiner", "text_encoder")
"""Who is placed first. Small components are cheap to keep; the text encoder is used once a prompt and comes last."""

HOST_CAPABLE = ("text_encoder", "vae", "turbo", "audio")
"""Components whose stage may compute on the host when the device is full; a transformer there would take days."""

RESERVE = 1 << 30
"""Left free on a device for the allocator's fragments and the libraries' workspaces."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of a component's weights, and of what its stage holds beside them while it runs."""

    weights: int
    working: int = 0


def plan_placement(footprints: Mapping[str, Footprint], free_bytes: int | None, fixed: Mapping[str, str] | None = None) -> dict[str, str]:
    """A mode for every component in `footprints`.

    Args:
        footprints: component name -> its bytes.
        free_bytes: free memory of the device; None when there is no device, then everything is "cpu".
        fixed: modes that the user chose.

    Working memory decides between modes; only weights that do not fit are refused, since working memory depends on the size asked for.

    Raises RequestError on an unknown name or mode, OutOfMemoryError when the weights of a component do not fit.
    """
    fixed = dict(fixed or {})
    for name, mode in fixed.items():
        if name not in ORDER or mode not in MODES:
            raise RequestError(f"placement {name}={mode}: components are {', '.join(ORDER)}, modes {', '.join(MODES)}.")
    if free_bytes is None:
        return dict.fromkeys(footprints, "cpu")
    plan = {name: fixed[name] for name in footprints if name in fixed}
    budget = free_bytes - RESERVE
    for name in ORDER:
        if name in footprints and name not in plan:
            plan[name] = _choose(name, plan, footprints, budget, fixed)
    for name, mode in plan.items():
        if mode != "cpu" and _beside(name, plan, footprints) + footprints[name].weights > budget:
            raise OutOfMemoryError(_too_large(name, plan, footprints, free_bytes))
    return plan


def _beside(name: str, plan: Mapping[str, str], footprints: Mapping[str, Footprint]) -> int:
    """Bytes of the resident components other than `name`."""
    return sum(footprints[other].weights for other, mode in plan.items() if mode == "resident" and other != name)


def _fits(name: str, plan: Mapping[str, str], footprints: Mapping[str, Footprint], budget: int) -> bool:
    """Whether the stage of `name` fits beside the residents."""
    return _beside(name, plan, footprints) + footprints[name].weights + footprints[name].working <= budget


def _choose(name: str, plan: dict[str, str], footprints: Mapping[str, Footprint], budget: int, fixed: Mapping[str, str]) -> str:
    """The best mode for `name` given the modes of those before it; may turn a resident denoiser into a roundtrip one for the refiner."""
    trial = {**plan, name: "resident"}
    if all(_fits(other, trial, footprints, budget) for other, mode in trial.items() if mode != "cpu"):
        return "resident"
    if plan and _fits(name, plan, footprints, budget):
        return "roundtrip"
    if name in HOST_CAPABLE:
        return "cpu"
    if name == "refiner" and plan.get("preview") == "resident" and "preview" not in fixed:
        plan["preview"] = "roundtrip"
        return "roundtrip"
    return "resident"


def _too_large(name: str, plan: Mapping[str, str], footprints: Mapping[str, Footprint], free_bytes: int) -> str:
    own = footprints[name]
    others = _beside(name, plan, footprints)
    needed = own.weights + own.working + others + RESERVE
    cards = -(-needed // max(free_bytes, 1))
    return (
        f"{name} needs {gigabytes(needed)} on one device ({gigabytes(own.weights)} weights, {gigabytes(own.working)} working memory, "
        f"{gigabytes(others)} other components), free are {gigabytes(free_bytes)}. Use about {cards} or more devices, a smaller size, "
        "or the embedded nano checkpoint."
    )


def gigabytes(count: float) -> str:
    """`12345678901` -> "12.3 GB"."""
    return f"{count / 1e9:.1f} GB"


def preview_working_bytes(config: PreviewConfig, tokens: int, element_size: int = 2) -> int:
    """Estimated bytes of one preview step over `tokens` packed tokens: adapter output and normalised state in fp32, two states,
    q/k/v and their fp32 copies, the dense MLP's inside."""
    per_token = 8 * config.stream_width + 2 * element_size * config.stream_width
    per_token += (3 * element_size + 8) * config.hidden_size + 3 * element_size * config.dense_intermediate
    return tokens * per_token


def refiner_working_bytes(config: RefinerConfig, tokens: int, element_size: int = 2) -> int:
    """Estimated bytes of one refiner forward over `tokens` tokens: fp32 residual twice, q/k/v and their fp32 copies, one chunk of the MLP."""
    widths = config.hidden_size + 2 * config.num_query_groups * config.head_dim
    inside = min(tokens, CHUNK_TOKENS) * (4 + 3 * element_size) * config.intermediate
    return tokens * (8 * config.hidden_size + (element_size + 4) * widths) + inside


def preview_tokens(latent: LatentShape, audio_latents: int, text: int, negative: int, image: int = 0) -> int:
    """Packed tokens of a step: both guidance branches."""
    return 2 * (latent.tokens + audio_latents + image) + text + negative


def what_would_fit(config: PreviewConfig, free_bytes: int, element_size: int = 2) -> str:
    """A sentence naming the size presets whose preview stage fits into `free_bytes` of working memory (text of full length)."""
    fitting = []
    for name, preset in PRESETS.items():
        if preset.refined is None:
            shape = VideoShape(width=preset.preview[0], height=preset.preview[1])
            tokens = preview_tokens(shape.latent(), shape.audio_latents(), 2000, 500)
            if preview_working_bytes(config, tokens, element_size) <= free_bytes:
                fitting.append(f"{name} ({preset.preview[0]}x{preset.preview[1]})")
    return f"By estimate {' and '.join(fitting)} would fit." if fitting else "By estimate no size preset fits: use more devices."
