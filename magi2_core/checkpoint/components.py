"""One loading function a component: where its files and sizes are in a checkpoint folder, and how strict its dtypes are.

The transformers' files must have the released dtypes (bf16 matrices, fp32 for the rest); the auto-encoders may be stored in any
floating-point type, as the release casts them. Facts: spec preview.md 2.1-2.4, components.md 1.2, 1.4b, 2.1, 3.2, 4.1, 5.1.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from magi2_core.audio.oobleck import PREFIX as OOBLECK_PREFIX
from magi2_core.audio.oobleck import OobleckConfig, OobleckDecoder, load_oobleck_state
from magi2_core.config import PreviewConfig, RefinerConfig, WanVAEConfig
from magi2_core.config_values import read_json
from magi2_core.device import default_dtype
from magi2_core.errors import CheckpointError, Interrupted
from magi2_core.model.preview import PreviewTransformer
from magi2_core.model.refiner import RefinerTransformer
from magi2_core.model.window import check_window
from magi2_core.request import Progress
from magi2_core.shapes import AUDIO_CHANNELS, VIDEO_CHANNELS
from magi2_core.text.encoder import TextEncoder
from magi2_core.text.weights import PREFIX
from magi2_core.vae.turbo import TurboConfig, TurboVAED, load_turbo_state
from magi2_core.vae.wan import WanVAE, load_wan_state

from .catalog import LAYOUTS, missing_files
from .index import ComponentFiles, read_component, torch_component
from .load import DtypeRule, LoadResult, ProgressCallback, StopCheck, check_module, file_dtypes, load_module
from .slices import expert_slices

ConfigT = TypeVar("ConfigT")

PARAMS_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def _any_float(name: str) -> torch.dtype | None:
    return None


def _config(root: Path, component: str, released: ConfigT, read: Callable[[dict[str, Any], str], ConfigT]) -> ConfigT:
    """The component's config.json, or the released sizes when the folder has none."""
    path = Path(root) / LAYOUTS[component].folder / "config.json"
    if not path.is_file():
        return released
    values = read_json(path)
    with _sound(path):
        return read(values, str(path))


@contextmanager
def _sound(path: Path) -> Iterator[None]:
    """Turns what a value of a wrong kind leads to, a text for a number or a list for a table, into CheckpointError naming the file."""
    try:
        yield
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, MemoryError) as error:
        raise CheckpointError(f"{path}: holds a value of a wrong kind ({error}). Download this file again.") from None


def preview_config(root: Path) -> PreviewConfig:
    """Sizes of the preview transformer of the checkpoint folder `root`."""
    config = _config(root, "preview", PreviewConfig(), PreviewConfig.from_dict)
    _check_channels("preview", config.video_in_channels, config.audio_in_channels)
    return config


def _check_channels(component: str, video: int, audio: int) -> None:
    """Raises CheckpointError when a transformer's latents are not those that the decoders take."""
    if (video, audio) != (VIDEO_CHANNELS, AUDIO_CHANNELS):
        raise CheckpointError(
            f"{component}: config.json says video_in_channels {video} and audio_in_channels {audio}; latents of this model have "
            f"{VIDEO_CHANNELS} and {AUDIO_CHANNELS}."
        )


def refiner_config(root: Path) -> RefinerConfig:
    """Sizes of the refiner of the checkpoint folder `root`."""
    config = _config(root, "refiner", RefinerConfig(), lambda values, where: RefinerConfig.from_dict(values, where))
    _check_channels("refiner", config.video_in_channels, config.audio_in_channels)
    if (config.patch_size, config.t_patch_size) != (1, 1):
        raise CheckpointError(
            f"refiner: config.json says patch_size {config.patch_size} and t_patch_size {config.t_patch_size}; the refiner is built for 1 and 1."
        )
    check_window(config.window)
    return config


def wan_config(root: Path) -> WanVAEConfig:
    """Sizes of the Wan auto-encoder of the checkpoint folder `root`."""
    return _config(root, "vae", WanVAEConfig(), WanVAEConfig.from_dict)


def turbo_config(root: Path) -> TurboConfig:
    """Sizes of the Turbo decoder of the checkpoint folder `root`."""
    path = Path(root) / LAYOUTS["turbo"].folder / LAYOUTS["turbo"].files[1]
    with _sound(path):
        return TurboConfig.from_file(path)


def audio_config(root: Path) -> OobleckConfig:
    """Sizes of the audio decoder of the checkpoint folder `root`."""
    path = Path(root) / LAYOUTS["audio"].folder / LAYOUTS["audio"].files[0]
    with _sound(path):
        return OobleckConfig.from_file(path)


def _require(component: str, root: Path) -> Path:
    """The component's folder; raises CheckpointError naming an absent file."""
    missing = missing_files(component, root)
    if missing:
        raise CheckpointError(f"{component}: {Path(root) / missing[0]} is missing{f' and {len(missing) - 1} more' if missing[1:] else ''}.")
    return Path(root) / LAYOUTS[component].folder


def _stored_dtypes(params_dtype: str, build: Callable[[torch.dtype], nn.Module]) -> DtypeRule:
    """The dtypes the files must have: those of the module built in the checkpoint's own `params_dtype`."""
    with torch.device("meta"):
        return file_dtypes(build(PARAMS_DTYPES[params_dtype]))


def load_preview(
    root: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    expert_rank: int = 0,
    expert_size: int = 1,
    progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
) -> LoadResult[PreviewTransformer]:
    """Loads the preview transformer; of the routed experts only the heads of `expert_rank` out of `expert_size` ranks.

    `dtype` None: bfloat16 on an accelerator, float32 on the CPU.
    """
    files = read_component("preview", _require("preview", root))
    config = preview_config(root)
    chosen = default_dtype(torch.device(device)) if dtype is None else dtype
    return load_module(
        lambda: PreviewTransformer(config, chosen),
        files,
        device=device,
        dtype_of=_stored_dtypes(config.params_dtype, lambda kind: PreviewTransformer(config, kind)),
        slices=expert_slices(config.moe, expert_rank, expert_size),
        progress=progress,
        should_stop=should_stop,
    )


def load_refiner(
    root: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
) -> LoadResult[RefinerTransformer]:
    """Loads the refiner, whole on every rank. `dtype` as in `load_preview`."""
    files = read_component("refiner", _require("refiner", root))
    config = refiner_config(root)
    chosen = default_dtype(torch.device(device)) if dtype is None else dtype
    return load_module(
        lambda: RefinerTransformer(config, chosen),
        files,
        device=device,
        dtype_of=_stored_dtypes(config.params_dtype, lambda kind: RefinerTransformer(config, kind)),
        progress=progress,
        should_stop=should_stop,
    )


def follow_load(name: str, root: Path, should_stop: StopCheck) -> None:
    """What a rank that keeps nothing of a component does while others load it: asks, as they do, before each file whether to stop."""
    files = read_component(name, _require(name, root)).files
    for number in range(1, len(files) + 1):
        if should_stop():
            raise Interrupted(f"loading of {name} was cancelled at shard {number} of {len(files)}.")


def load_vae(
    root: Path,
    *,
    device: torch.device | str,
    encoder: bool = True,
    decoder: bool = True,
    progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
) -> LoadResult[WanVAE]:
    """Loads the wanted halves of the Wan auto-encoder, in float32."""
    files = _vae_files(root, encoder, decoder)
    config = wan_config(root)
    return load_module(
        lambda: WanVAE(config, decoder=decoder, encoder=encoder),
        files,
        device=device,
        dtype_of=_any_float,
        progress=progress,
        should_stop=should_stop,
    )


def _vae_files(root: Path, encoder: bool, decoder: bool) -> ComponentFiles:
    path = _require("vae", root) / LAYOUTS["vae"].files[0]
    return torch_component("vae", path, load_wan_state(path, decoder=decoder, encoder=encoder))


def load_turbo(
    root: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
) -> LoadResult[TurboVAED]:
    """Loads the Turbo decoder. `dtype` as in `load_preview`."""
    files = _turbo_files(root)
    config = turbo_config(root)
    chosen = default_dtype(torch.device(device)) if dtype is None else dtype
    return load_module(
        lambda: TurboVAED(config).to(chosen),
        files,
        device=device,
        dtype_of=_any_float,
        progress=progress,
        should_stop=should_stop,
    )


def _turbo_files(root: Path) -> ComponentFiles:
    path = _require("turbo", root) / LAYOUTS["turbo"].files[0]
    return torch_component("turbo", path, load_turbo_state(path))


def load_audio(
    root: Path,
    *,
    device: torch.device | str,
    progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
) -> LoadResult[OobleckDecoder]:
    """Loads the audio decoder in float32, its weight normalisation folded."""
    files = _audio_files(root)
    config = audio_config(root)
    return load_module(
        lambda: OobleckDecoder(config), files, device=device, dtype_of=_any_float, progress=progress, should_stop=should_stop
    )


def _audio_files(root: Path) -> ComponentFiles:
    folder = _require("audio", root)
    (path,) = read_component("audio", folder).files
    return torch_component("audio", path, load_oobleck_state(path), is_owned=True)


def _audio_headers(root: Path) -> ComponentFiles:
    """The decoder's tensors under their folded names, from the header alone."""
    files = read_component("audio", _require("audio", root))

    def folded(key: str) -> str | None:
        name = key.removeprefix(OOBLECK_PREFIX)
        if name == key or not name.startswith("decoder.") or name.endswith(".weight_g"):
            return None
        if name.endswith(".weight_v"):
            if key.removesuffix("v") + "g" not in files.tensors:
                raise files.fail("missing, weight_v needs it beside it.", name=key.removesuffix("v") + "g")
            return name.removesuffix("_v")
        return name

    return files.renamed(folded)


def load_text_encoder(
    root: Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    progress: ProgressCallback | None = None,
    should_stop: StopCheck | None = None,
) -> LoadResult[TextEncoder]:
    """Loads the text encoder without its last two layers, after all its files' headers were checked. One progress event at the end."""
    folder = _require("text_encoder", root)
    files = read_component("text_encoder", folder)
    if should_stop is not None and should_stop():
        raise Interrupted("loading of text_encoder was cancelled before its first shard.")
    try:
        encoder = TextEncoder.from_folder(folder, device=device, dtype=dtype)
    except CheckpointError as error:
        raise error if str(folder) in str(error) else CheckpointError(f"{error} Folder: {folder}.") from None
    if progress is not None:
        count = len(files.files)
        progress(Progress(stage="load", step=count, total=count, message=f"text_encoder: shard {count}/{count}"))
    read = sum(files.tensors[PREFIX + name].nbytes for name, _ in encoder.model.named_parameters())
    return LoadResult(module=encoder, bytes_read=read)


def check_component(name: str, root: Path) -> ComponentFiles:
    """Compares headers of one component with the model of its configuration, reading no weights. Raises CheckpointError.

    Of the text encoder only the files themselves are checked: its model needs transformers.
    """
    if name == "preview":
        files, preview = read_component(name, _require(name, root)), preview_config(root)
        return _check(files, lambda: PreviewTransformer(preview, PARAMS_DTYPES[preview.params_dtype]), None)
    if name == "refiner":
        files, refiner = read_component(name, _require(name, root)), refiner_config(root)
        return _check(files, lambda: RefinerTransformer(refiner, PARAMS_DTYPES[refiner.params_dtype]), None)
    if name == "vae":
        wan = wan_config(root)
        return _check(_vae_files(root, True, True), lambda: WanVAE(wan), _any_float)
    if name == "turbo":
        turbo = turbo_config(root)
        return _check(_turbo_files(root), lambda: TurboVAED(turbo), _any_float)
    if name == "audio":
        audio = audio_config(root)
        return _check(_audio_headers(root), lambda: OobleckDecoder(audio), _any_float)
    return read_component(name, _require(name, root))


def _check(files: ComponentFiles, factory: Callable[[], nn.Module], dtype_of: DtypeRule | None) -> ComponentFiles:
    with torch.device("meta"):
        module = factory()
    check_module(module, files, dtype_of)
    return files
