"""What is written down about a run: hashes of what it was made from, its settings, and whether a cut run may go on."""

import hashlib
import json
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

import magi2_core
from magi2_core.errors import RequestError
from magi2_core.request import Latents, RefineRequest, SampleRequest, SolverState, to_message


def text_hash(text: str) -> str:
    """SHA-256 of a text, the key of its features."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def prompt_hash(prompt: str, negative: str, image: Tensor | None) -> str:
    """Sixteen hex digits over prompt, negative prompt and the picture's pixels."""
    digest = hashlib.sha256(json.dumps([prompt, negative]).encode())
    if image is not None:
        digest.update(repr(tuple(image.shape)).encode())
        digest.update(image.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def request_hash(request: Any) -> str:
    """SHA-256 over every field and tensor of a request, for the ranks to compare."""
    header, tensors = to_message(request)
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def machine_settings(device: torch.device, dtype: torch.dtype, kernels: str, attention: str) -> dict[str, Any]:
    """Where a stage ran, as plain values."""
    return {
        "device": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "kernels": kernels,
        "attention": attention,
        "version": magi2_core.__version__,
        "torch": torch.__version__,
    }


def sample_settings(request: SampleRequest) -> dict[str, Any]:
    """Settings of the preview stage; guidance options only where they are on."""
    settings = {
        name: getattr(request, name)
        for name in ("seconds", "num_inference_steps", "video_guidance", "audio_guidance", "shift", "use_ref_for_uncond", "deterministic")
    }
    settings["has_image"] = request.conditioning.image is not None
    if request.guidance != type(request.guidance)():
        settings["guidance"] = asdict(request.guidance)
    if request.initial_video is not None or request.initial_audio is not None:
        settings["noise_injected"] = True
    return settings


def refine_settings(request: RefineRequest) -> dict[str, Any]:
    """Settings of the refiner stage."""
    names = ("num_inference_steps", "shift", "video_guidance", "noise_value", "deterministic")
    settings = {name: getattr(request, name) for name in names}
    if request.initial_noise is not None:
        settings["noise_injected"] = True
    return settings


def check_resume(request: SampleRequest, checkpoint_hash: str, installation_hash: str) -> SolverState:
    """The solver state to go on from. Raises RequestError, with both values, when the request differs in what fixes the trajectory.

    Args: the hashes of the checkpoint, as checkpoint/manifest.py makes them; the second stands in latents of early 0.1.0.
    """
    cut = request.resume
    assert cut is not None and cut.solver is not None
    made_by = checkpoint_hash if cut.checkpoint_hash == installation_hash else cut.checkpoint_hash
    state = cut.solver
    latent, audio = request.video_shape().latent(), request.video_shape().audio_latents()
    compared = (
        ("size", f"{cut.width}x{cut.height}", f"{request.width}x{request.height}"),
        ("video latent", tuple(state.sample["video"].shape), latent.size),
        ("audio latents", state.sample["audio"].shape[1], audio),
        ("seed", cut.seed, request.seed),
        ("steps", state.num_inference_steps, request.num_inference_steps),
        ("shift", state.shift, request.shift),
        ("prompt hash", cut.prompt_hash, request.conditioning.prompt_hash),
        ("checkpoint", made_by, checkpoint_hash),
    )
    for name, before, now in compared:
        if before != now:
            raise RequestError(f"resume: {name} was {before}, this request has {now}. Use the same, or start anew without resume.")
    if request.stop_after is not None and request.stop_after <= state.step:
        raise RequestError(f"stop_after {request.stop_after}: these latents have {state.step} finished steps already. Use a larger number.")
    return state


def map_state(state: SolverState, device: torch.device) -> SolverState:
    """The same state with its tensors on `device`, fp32."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, torch.float32)

    return replace(
        state,
        sample={name: move(tensor) for name, tensor in state.sample.items()},
        history={name: tuple(move(tensor) for tensor in kept) for name, kept in state.history.items()},
        previous={name: move(tensor) for name, tensor in state.previous.items()},
    )


def preview_latents(request: SampleRequest, state: SolverState, draws: tuple[tuple[int, ...], ...], checkpoint_hash: str) -> Latents:
    """Latents of a sampling run, finished or cut; those of a cut run show the last x0 estimate and carry the solver state."""
    state = map_state(state, torch.device("cpu"))
    is_cut = state.step < state.num_inference_steps
    shown = {name: state.history[name][-1] if is_cut and name in state.history else tensor for name, tensor in state.sample.items()}
    conditioning = request.conditioning
    return Latents(
        video=shown["video"],
        audio=shown["audio"],
        stage="preview",
        fps=request.fps,
        seed=request.seed,
        width=request.width,
        height=request.height,
        noise=request.noise,
        draws=draws,
        solver=state if is_cut else None,
        prompt=conditioning.prompt,
        negative_prompt=conditioning.negative_prompt,
        prompt_hash=conditioning.prompt_hash,
        checkpoint_hash=checkpoint_hash,
        settings=sample_settings(request),
    )
