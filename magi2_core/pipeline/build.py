"""A checkpoint folder becomes a Pipeline: four stages over components that load when first used.

What a request needs is checked before anything loads (`require`): files, headers, names, shapes and dtypes, no weights. Where each
component lives comes from `placement`. On one rank of several the same pipeline runs in lockstep with the others: the groups fill the
models' seams after loading, and encoders and sequential decoders are loaded on the first rank only.
"""

import importlib.util
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from magi2_core import device as devices
from magi2_core import env
from magi2_core.checkpoint import catalog, components
from magi2_core.checkpoint.manifest import checkpoint_hash, installation_hash
from magi2_core.checkpoint.slices import is_expert_tensor
from magi2_core.config import GenerationDefaults, PreviewConfig
from magi2_core.errors import CheckpointError, DependencyError, RequestError
from magi2_core.media.preview import ColoursRequest, PreviewColours
from magi2_core.parallel.apply import absent_refiner, apply_parallel
from magi2_core.parallel.collectives import check_same
from magi2_core.parallel.groups import Groups
from magi2_core.parallel.lockstep import Alone, Lockstep
from magi2_core.request import Clip, Conditioning, DecodeRequest, EncodeRequest, Latents, RefineRequest, SampleRequest
from magi2_core.shapes import VideoShape
from magi2_kernels.common import choice
from magi2_kernels.common.tuning import is_interpreted
from magi2_kernels.sink_attention import providers
from magi2_kernels.sink_attention.providers import Target

from . import accelerate, stages
from .colours import preview_colours
from .guards import deterministic, memory_guard
from .hooks import StageHooks
from .placement import Footprint, plan_placement, preview_tokens, preview_working_bytes, refiner_working_bytes, what_would_fit
from .records import machine_settings, request_hash
from .residence import Residence

Result = TypeVar("Result")
log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TEXT_CACHE_ENTRIES = 16
"""Texts whose features are kept; one of 7000 tokens takes 72 MB at the released width."""

TYPICAL_TEXT, TYPICAL_NEGATIVE = 2000, 500
DECODE_WORKING = {"turbo": 20 << 30, "vae": 8 << 30, "audio": 1 << 30, "text_encoder": 4 << 30}
"""Working memory of the other stages at 1080p, upper estimates of spec components.md 9; scaled down with the checkpoint's canvas."""

FIRST_RANK_ONLY = ("text_encoder", "vae", "audio")
"""Components that one rank uses for all."""

REFINED_TOKENS = 8.96
"""Video tokens of the refiner at 1080p for one of the preview at 540p: 514,080 / 57,344."""


class TextCache(OrderedDict[str, stages.EncodedText]):
    """Keeps the features of the texts used last."""

    def __getitem__(self, key: str) -> stages.EncodedText:
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: stages.EncodedText) -> None:
        super().__setitem__(key, value)
        while len(self) > TEXT_CACHE_ENTRIES:
            self.popitem(last=False)


class Pipeline:
    """The stages of one checkpoint on one device. Made by `build_pipeline`; each stage takes hooks of its own or uses the pipeline's."""

    def __init__(
        self,
        checkpoint: Path,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernels: str,
        hooks: StageHooks,
        launch: accelerate.Launch,
        placement: Mapping[str, str] | None = None,
    ) -> None:
        self.checkpoint = Path(checkpoint)
        self.device, self.dtype, self.kernels, self.hooks, self.launch = device, dtype, kernels, hooks, launch
        self.groups = launch.groups
        self.defaults = GenerationDefaults.from_folder(self.checkpoint)
        self.checkpoint_hash = checkpoint_hash(self.checkpoint)
        self.installation_hash = installation_hash(self.checkpoint)
        self.text_cache: MutableMapping[str, stages.EncodedText] = TextCache()
        self._fixed = dict(placement or {})
        self._checked: dict[str, int] = {}
        self._plan: dict[str, str] | None = None
        self._residences: dict[str, Residence] = {}
        self.bytes_read: dict[str, int] = {}
        """Component -> bytes that this rank has read of its files."""
        self._lockstep = Lockstep(self.groups, hooks.should_stop)
        self._running = hooks

    def require(self, names: Iterable[str], *, image: bool = False, decoder: str = "turbo", video: bool = True, audio: bool = True) -> None:
        """Raises CheckpointError, before anything loads, when a component that the stages `names` need is absent or does not fit.

        Args: names: of "encode", "preview", "refine", "decode"; the rest as in the requests.
        """
        needed = catalog.check_components(self.checkpoint, names, image=image, decoder=decoder, video=video, audio=audio)
        for name in needed:
            if name not in self._checked:
                self._checked[name] = components.check_component(name, self.checkpoint).total_bytes

    def encode(self, request: EncodeRequest, hooks: StageHooks | None = None) -> Conditioning:
        """Prompt (and picture) to conditioning. Raises RequestError on a prompt of more tokens than the encoder takes."""
        request.validate()
        self.require(("encode",))
        return self._run("encode", request, hooks, lambda active: stages.encode(self, request, active))

    def sample(self, request: SampleRequest, hooks: StageHooks | None = None) -> Latents:
        """Conditioning to preview latents."""
        request.validate()
        self.require(("preview",), image=request.conditioning.image is not None)
        return self._run("preview", request, hooks, lambda active: stages.sample(self, request, active))

    def refine(self, request: RefineRequest, hooks: StageHooks | None = None) -> Latents:
        """Preview latents to refined latents."""
        request.validate()
        self.require(("refine",))
        return self._run("refine", request, hooks, lambda active: stages.refine(self, request, active))

    def decode(self, request: DecodeRequest, hooks: StageHooks | None = None) -> Clip:
        """Latents to frames and sound."""
        request.validate()
        self.require(("decode",), decoder=request.decoder, video=request.video, audio=request.audio)
        return self._run("decode", request, hooks, lambda active: stages.decode(self, request, active))

    def colours(self, request: ColoursRequest, hooks: StageHooks | None = None) -> PreviewColours:
        """The map from latents to preview colours."""
        self.require(("decode",), decoder="wan", audio=False)
        return self._run("colours", request, hooks, lambda active: preview_colours(self))

    def close(self) -> None:
        """Frees the weights and cached features; the pipeline may be used again."""
        for residence in self._residences.values():
            residence.close()
        self._residences.clear()
        self.text_cache.clear()

    def machine(self) -> dict[str, Any]:
        """Where this runs, for the settings of a result."""
        return machine_settings(self.device, self.dtype, self.kernels, self.launch.attention.name)

    def forward_of(self, model: Any) -> accelerate.Forward:
        """The preview model's forward for one request, launched the way chosen at build."""
        return accelerate.forward_of(model, self.launch.step, self.groups)

    def placement(self) -> dict[str, str]:
        """Component -> resident, roundtrip or cpu; planned once, from the components that are present and the memory that is free."""
        if self._plan is None:
            footprints = self._footprints() if self.device.type != "cpu" else {}
            self._plan = plan_placement(footprints, None if self.device.type == "cpu" else self._free_bytes(), self._fixed)
            log.info("placement: %s", ", ".join(f"{name} {mode}" for name, mode in self._plan.items()) or "everything on the CPU")
        return self._plan

    def use(self, name: str) -> AbstractContextManager[Any]:
        """The loaded component `name` ("vae" is the image encoder, "vae_decoder" the quality decoder) on its device, in a with block."""
        if name not in self._residences:
            mode = self.placement().get("vae" if name == "vae_decoder" else name, "cpu" if self.device.type == "cpu" else "roundtrip")
            self._residences[name] = Residence(name, lambda target: self._load(name, target), mode, self.device)
        return self._residences[name].use()

    def first(self, body: Alone) -> dict[str, torch.Tensor]:
        """Runs `body` on the first rank; its named CPU tensors, or its error, reach every rank."""
        return self._lockstep.first(body)

    def _run(self, stage: str, request: Any, hooks: StageHooks | None, body: Callable[[StageHooks], Result]) -> Result:
        active = hooks or self.hooks
        self._lockstep = Lockstep(self.groups, active.should_stop)
        self._running = replace(active, should_stop=self._lockstep.should_stop)
        if self.groups.world.is_real:
            check_same(self.groups, f"{stage} {request_hash(request)} {self.installation_hash}")
        is_deterministic = getattr(request, "deterministic", False)
        guard = memory_guard(stage, self.device, lambda: self._advice(stage))
        chosen = choice.using(self.kernels), providers.using(self.launch.attention.name)
        with torch.no_grad(), chosen[0], chosen[1], deterministic(is_deterministic), guard:
            return body(self._running)
        raise AssertionError("unreachable: memory_guard raises what it catches")

    def _load(self, name: str, target: torch.device) -> Any:
        report: dict[str, Any] = {"device": target, "progress": self._running.progress, "should_stop": self._running.should_stop}
        root = self.checkpoint
        loaders: dict[str, Callable[[], Any]] = {
            "preview": lambda: components.load_preview(
                root, dtype=self.dtype, expert_rank=self.groups.expert.place, expert_size=self.groups.expert.size, **report
            ),
            "refiner": lambda: components.load_refiner(root, dtype=self.dtype, **report),
            "text_encoder": lambda: components.load_text_encoder(root, **report),
            "vae": lambda: components.load_vae(root, decoder=False, **report),
            "vae_decoder": lambda: components.load_vae(root, encoder=False, **report),
            "turbo": lambda: components.load_turbo(root, dtype=self.dtype, **report),
            "audio": lambda: components.load_audio(root, **report),
        }
        if name == "refiner" and not self.groups.refiner.is_member:
            components.follow_load(name, root, self._running.should_stop)
            return absent_refiner(components.refiner_config(root), self.groups)
        loaded = loaders[name]()
        self.bytes_read[name] = self.bytes_read.get(name, 0) + loaded.bytes_read
        return apply_parallel(loaded.module, self.groups)

    def _footprints(self) -> dict[str, Footprint]:
        """Bytes of every component that is whole; working memory for the checkpoint's own canvas, and 1080p for the refiner. On one rank
        of several: of its share of weights and tokens, without the components that other ranks hold."""
        found = {}
        groups = self.groups
        size = self.dtype.itemsize
        shape = VideoShape(width=self.defaults.preview_width, height=self.defaults.preview_height, seconds=self.defaults.seconds)
        canvas = min(1.0, self.defaults.preview_width * self.defaults.preview_height / (896 * 512))
        for name in catalog.present_components(self.checkpoint):
            if (name in FIRST_RANK_ONLY and not groups.is_first) or (name == "refiner" and not groups.refiner.is_member):
                continue
            try:
                files = components.check_component(name, self.checkpoint)
            except CheckpointError:
                continue  # a request that needs it is refused by `require`, with the reason
            weights = files.total_bytes
            working = int(DECODE_WORKING.get(name, 0) * canvas)
            if name == "preview":
                tokens = preview_tokens(shape.latent(), shape.audio_latents(), TYPICAL_TEXT, TYPICAL_NEGATIVE) // groups.world.size
                experts = sum(entry.nbytes for key, entry in files.tensors.items() if is_expert_tensor(key))
                weights -= experts - experts // groups.expert.size
                working = preview_working_bytes(components.preview_config(self.checkpoint), tokens, size)
            elif name == "refiner":
                tokens = (int(REFINED_TOKENS * shape.latent().tokens) + TYPICAL_TEXT) // groups.refiner.size
                working = refiner_working_bytes(components.refiner_config(self.checkpoint), tokens, size)
            scale = size / 2 if name in ("preview", "refiner") else 1
            found[name] = Footprint(weights=int(weights * scale), working=working)
        return found

    def _free_bytes(self) -> int:
        return next((info.free_bytes for info in devices.list_devices() if info.index == (self.device.index or 0)), 0)

    def _advice(self, stage: str) -> str:
        if stage != "preview":
            return "Use a smaller size, or place other components on the CPU to make room."
        fits = what_would_fit(components.preview_config(self.checkpoint), self._free_bytes(), self.dtype.itemsize)
        return f"{fits} More devices, or other components on the CPU, make room too."


def choose_kernels(name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
    """The implementation for `auto`, `triton` or `reference`: auto is Triton on an accelerator in bfloat16, plain PyTorch otherwise.

    Raises RequestError on an unknown name or a type that the kernels do not take, DependencyError when Triton is needed and absent.
    """
    asked, name = name, env.kernel_choice() if name == "auto" else name
    said = env.chosen_as("kernels", asked, name, "MAGI2_KERNELS")
    if name not in ("auto", *choice.IMPLEMENTATIONS):
        raise RequestError(f"{said}: use auto, {' or '.join(choice.IMPLEMENTATIONS)}.")
    chosen = ("reference" if device.type == "cpu" or dtype != torch.bfloat16 else "triton") if name == "auto" else name
    if chosen == "triton" and importlib.util.find_spec("triton") is None:
        raise DependencyError(f"{said}: the package triton is absent. Install it: pip install triton, or use kernels reference (slower).")
    if chosen == "triton" and device.type == "cpu" and not is_interpreted():
        raise RequestError(f"{said}: Triton needs a GPU, this runs on the CPU. Use auto or reference.")
    if chosen == "triton" and dtype != torch.bfloat16:
        raise RequestError(f"{said}: the experts' kernel takes bfloat16. Use dtype bfloat16, or kernels auto or reference with float32.")
    return chosen


def build_pipeline(
    checkpoint: Path,
    *,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    kernels: str = "auto",
    attention: str = "auto",
    step: str = "auto",
    hooks: StageHooks | None = None,
    placement: Mapping[str, str] | None = None,
    groups: Groups | None = None,
) -> Pipeline:
    """A pipeline over the checkpoint folder; nothing is loaded yet.

    Args:
        checkpoint: folder in the released layout.
        device: auto, cpu, or a device as `doctor` lists it.
        dtype: float32 or bfloat16, of transformers and Turbo decoder; default bfloat16 on an accelerator, float32 on a CPU.
        kernels: auto, triton or reference.
        attention: auto, or a provider of the preview's attention (fa3, mate, cudnn, flash, flex, reference).
        step: auto, eager, compile or graph: how the kernels of a preview step are launched.
        hooks: of every stage that is not given its own.
        placement: component -> resident, roundtrip or cpu, where it should not be planned.
        groups: of this rank of a fleet, from `Groups.create`; every rank then calls every stage with the same request.

    Raises RequestError, CheckpointError when there is no such folder, DependencyError.
    """
    folder = Path(checkpoint)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint folder {folder} does not exist. Give a folder in the released layout.")
    target = devices.resolve(device)
    if isinstance(dtype, str) and dtype not in DTYPES:
        raise RequestError(f"dtype {dtype!r}: use {' or '.join(DTYPES)}.")
    chosen = DTYPES[dtype] if isinstance(dtype, str) else dtype or devices.default_dtype(target)
    if chosen not in DTYPES.values():
        raise RequestError(f"dtype {chosen}: use {' or '.join(DTYPES)}.")
    devices.use_full_fp32()
    env.set_deterministic_workspace()
    devices.synchronize(target)  # initialises the device: its memory statistics raise before that
    implementation, groups = choose_kernels(kernels, target, chosen), groups or Groups.local()
    _check_groups(folder, groups)
    width = components.preview_config(folder).head_dim if "preview" in catalog.present_components(folder) else PreviewConfig.head_dim
    launch = accelerate.choose_launch(attention, step, Target(device=target, dtype=chosen, head_dim=width), implementation, groups)
    return Pipeline(
        folder,
        device=target,
        dtype=chosen,
        kernels=implementation,
        launch=launch,
        hooks=hooks or StageHooks(),
        placement=placement,
    )


def _check_groups(folder: Path, groups: Groups) -> None:
    """Raises RequestError when this checkpoint's models cannot be split as the groups are."""
    if not groups.world.is_real:
        return
    present = catalog.present_components(folder)
    refiner = components.refiner_config(folder) if "refiner" in present else None
    if "preview" in present:
        groups.config.validate(components.preview_config(folder), refiner)
