"""Writes a random tiny checkpoint in the released folder layout, with every component, its configs, a tokenizer and checksums.

For tests of loading, plumbing and parallel runs: the clip it makes is noise. Names, shapes and dtypes come from the real models on
the meta device, so nothing here can disagree with them; values are seeded and scaled so that every forward stays finite.
"""

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from magi2_core.audio.oobleck import OobleckConfig, OobleckDecoder
from magi2_core.config import MoEConfig, PreviewConfig, RefinerConfig, WanVAEConfig
from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError, OutputError, RequestError
from magi2_core.model.preview import PreviewTransformer
from magi2_core.model.refiner import RefinerTransformer
from magi2_core.text.encoder import build_model
from magi2_core.vae.turbo import TurboConfig, TurboVAED
from magi2_core.vae.wan import WanVAE

from .catalog import INDEX_FILE, LAYOUTS, SINGLE_FILE
from .manifest import MANIFEST_FILE, read_manifest, write_manifest
from .tiny_text import TEXT_PREFIX, text_config, write_tokenizer
from .tiny_values import audio_encoder_shapes, random_state, unfold_weight_norm

PACK_ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES = 2_000_000_000
WHAT = "random weights of make-tiny"


@dataclass(frozen=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny checkpoint; attention heads are `hidden_size / head_dim`. `shards` files hold the preview transformer."""

    num_layers: int = 4
    hidden_size: int = 96
    head_dim: int = 16
    moe_heads: int = 4
    experts: int = 8
    top_k: int = 2
    expert_size: int = 32
    text_size: int = 64
    text_layers: int = 4
    refiner_layers: int = 3
    refiner_heads: int = 4
    refiner_groups: int = 2
    refiner_head_dim: int = 16
    wan_size: int = 8
    audio_size: int = 8
    shards: int = 2

    @classmethod
    def parallel(cls) -> "TinySizes":
        """The head counts of the release (24 attention, 12 MoE, refiner 32 over 8), for every split that the release allows."""
        return cls(hidden_size=384, moe_heads=12, expert_size=32, refiner_heads=32, refiner_groups=8, refiner_head_dim=8, shards=3)

    def preview(self) -> PreviewConfig:
        """The transformer's configuration: the first and the last layer per modality, experts between them."""
        config = PreviewConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            head_dim=self.head_dim,
            text_in_channels=self.text_size,
            mm_layers=(0, self.num_layers - 1),
            moe=MoEConfig(
                num_heads=self.moe_heads,
                num_experts=self.experts,
                top_k=self.top_k,
                route_scale=2.0,
                moe_layers=tuple(range(1, self.num_layers - 1)),
                expert_intermediate_size=self.expert_size,
                shared_expert_intermediate_size=self.expert_size,
                modality_specific_expert_intermediate_size=self.expert_size,
            ),
        )
        config.check(where="make-tiny")
        return config

    def refiner(self) -> RefinerConfig:
        """The refiner's configuration."""
        arch = {
            "num_layers": self.refiner_layers,
            "hidden_size": self.refiner_heads * self.refiner_head_dim,
            "head_dim": self.refiner_head_dim,
            "num_query_groups": self.refiner_groups,
            "text_in_channels": self.text_size,
            "mm_layers": [0, self.refiner_layers - 1],
        }
        return RefinerConfig.from_dict({"arch": arch}, "make-tiny")

    def validate(self) -> None:
        """Raises RequestError on sizes that contradict each other."""
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise RequestError(f"make-tiny: {name} is {value!r}, expected a positive whole number.")
        if min(self.num_layers, self.refiner_layers) < 3:
            raise RequestError(
                "make-tiny: num_layers and refiner_layers must be at least 3: the first and the last layer are per modality."
            )
        if self.text_layers < 3 or self.text_size % 16:
            raise RequestError("make-tiny: text_layers must be at least 3 and text_size a multiple of 16.")
        try:
            self.preview()
            self.refiner()
        except CheckpointError as error:
            raise RequestError(str(error)) from None


def make_tiny(folder: Path, *, seed: int = 0, sizes: TinySizes | None = None, overwrite: bool = False) -> Path:
    """Writes the checkpoint to `folder` (new or empty), whole or not at all; the same seed and sizes give the same bytes.

    With `overwrite` the files of an earlier make-tiny there, and only those, are replaced. Raises RequestError on sizes that do not
    fit or a folder that must not be written, OutputError when writing fails. Returns the folder.
    """
    sizes = TinySizes() if sizes is None else sizes
    sizes.validate()
    folder = Path(os.path.expanduser(folder)).resolve()
    old = _check_target(folder, overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write_all(work, seed, sizes)
            write_manifest(work)
            for name in old:
                (folder / name).unlink(missing_ok=True)
            folder.mkdir(exist_ok=True)
            for path in sorted(work.rglob("*")):
                if path.is_file():
                    target = folder / path.relative_to(work)
                    target.parent.mkdir(exist_ok=True)
                    os.replace(path, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise OutputError(f"{folder} could not be written ({error.strerror or error}). Check permissions and free space.") from None
    return folder


def _check_target(folder: Path, overwrite: bool) -> list[str]:
    """Files to remove first; raises RequestError when `folder` is in the pack, is a file, or holds what is not ours to replace."""
    if folder == PACK_ROOT or PACK_ROOT in folder.parents:
        raise RequestError(f"{folder} is inside the node pack. Choose a folder outside {PACK_ROOT}.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise RequestError(f"{folder} is a file. Choose another folder.")
    if not os.path.isdir(folder) or not any(folder.iterdir()):
        return []
    if not overwrite:
        raise RequestError(f"{folder} is not empty. Choose a new folder, or add --overwrite to replace an earlier make-tiny.")
    listed = [*read_manifest(folder), MANIFEST_FILE] if (folder / MANIFEST_FILE).is_file() else []
    foreign = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).as_posix() not in listed]
    generation = folder / "generation.json"
    is_ours = generation.is_file() and str(read_json(generation).get("what", "")).startswith(WHAT)
    if foreign or not is_ours:
        what = foreign[0] if foreign else folder
        raise RequestError(f"{what} was not written by make-tiny, so nothing is overwritten. Choose a new folder.")
    return listed


def _meta_state(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.state_dict(keep_vars=True))


def _write_all(root: Path, seed: int, sizes: TinySizes) -> None:
    preview, refiner = sizes.preview(), sizes.refiner()
    wan = WanVAEConfig(dim=sizes.wan_size, dec_dim=sizes.wan_size)
    turbo, audio = turbo_values(sizes), audio_values(sizes)
    with torch.device("meta"):
        states = {
            "preview": _meta_state(PreviewTransformer(preview)),
            "refiner": _meta_state(RefinerTransformer(refiner)),
            "vae": _meta_state(WanVAE(wan)),
            "turbo": _meta_state(TurboVAED(TurboConfig.from_dict(turbo)).to(torch.bfloat16)),
            "audio": unfold_weight_norm(_meta_state(OobleckDecoder(OobleckConfig.from_dict(audio)))) | audio_encoder_shapes(audio),
        }
    total = sum(tensor.nbytes for state in states.values() for tensor in state.values())
    if total > MAX_BYTES:
        raise RequestError(
            f"make-tiny: these sizes make {total / 1e9:.1f} GB, at most {MAX_BYTES / 1e9:.0f} GB are written. Use smaller sizes."
        )
    if sizes.shards > len(states["preview"]):
        raise RequestError(f"make-tiny: {sizes.shards} shards for {len(states['preview'])} tensors. Use fewer shards.")
    folders = {name: root / layout.folder for name, layout in LAYOUTS.items()}
    for path in folders.values():
        path.mkdir()
    vocabulary = write_tokenizer(folders["text_encoder"])
    text = text_config(sizes.text_size, sizes.text_layers, vocabulary)
    states["text_encoder"] = {TEXT_PREFIX + name: tensor for name, tensor in _text_state(text).items()}
    values = {name: random_state(state, seed, name) for name, state in sorted(states.items())}

    _write_shards(folders["preview"], values["preview"], sizes.shards)
    _write_json(folders["preview"] / "config.json", preview_values(preview))
    _write_shards(folders["refiner"], values["refiner"], 3)
    _write_json(folders["refiner"] / "config.json", refiner_values(refiner))
    head = {"lm_head.weight": torch.zeros(1, sizes.text_size, dtype=torch.bfloat16)}
    _write_shards(folders["text_encoder"], values["text_encoder"] | head, 2)
    _write_json(folders["text_encoder"] / "config.json", text)
    torch.save(values["vae"], folders["vae"] / LAYOUTS["vae"].files[0])
    _write_json(folders["vae"] / "config.json", asdict(wan))
    stored = {f"module.{name}": value for name, value in values["turbo"].items()}
    stored["module.aligned_feature_projection_heads.0.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    torch.save({"ema_state_dict": stored}, folders["turbo"] / LAYOUTS["turbo"].files[0])
    _write_json(folders["turbo"] / LAYOUTS["turbo"].files[1], turbo)
    _write_shards(folders["audio"], {f"pretransform.model.{name}": value for name, value in values["audio"].items()}, 1)
    _write_json(folders["audio"] / LAYOUTS["audio"].files[0], audio)
    _write_json(root / "generation.json", generation_values(seed))


def _text_state(text: dict[str, Any]) -> dict[str, Tensor]:
    """The text model's tensors in the released dtypes: bf16, but A_log and the gated norm fp32."""
    model, _ = build_model(text, full_depth=True)
    state = {}
    for name, tensor in _meta_state(model).items():
        is_float = name.endswith((".A_log", ".linear_attn.norm.weight"))
        state[name] = torch.empty(tensor.shape, dtype=torch.float32 if is_float else torch.bfloat16, device="meta")
    return state


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _save(state: dict[str, Tensor], path: Path) -> None:
    """A safetensors file with the permissions of any new file (safetensors' writer makes it readable by its owner only)."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    save_file(state, str(path), metadata={"format": "pt"})
    path.chmod(mode)


def _write_shards(folder: Path, state: dict[str, Tensor], shards: int) -> None:
    """One file, or `shards` numbered files with an index, names in order."""
    if shards == 1:
        _save(state, folder / SINGLE_FILE)
        return
    names = sorted(state)
    size = -(-len(names) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = names[number * size : (number + 1) * size]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        _save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in state.values())
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def preview_values(config: PreviewConfig) -> dict[str, Any]:
    """preview/config.json of `config`, in the schema that `PreviewConfig.from_dict` reads."""
    names = ("num_layers", "hidden_size", "head_dim", "video_in_channels", "audio_in_channels", "text_in_channels", "params_dtype")
    return {name: getattr(config, name) for name in (*names, "intermediate_factor")} | {
        "num_query_groups": config.num_heads,
        "mm_layers": list(config.mm_layers),
        "activation_type": "swiglu7",
        "attn_softcap": -1.0,
        "attn_gating": {"enable": True},
        "attn_sinks": {"enable": True, "sink_token_num": config.sink_tokens},
        "mhc_config": {"enable": True, "num_stream": config.num_streams, "alpha_init": 0.01},
        "moe_config": asdict(config.moe) | {"score_func": "sigmoid", "route_norm": True},
    }


def refiner_values(config: RefinerConfig) -> dict[str, Any]:
    """refiner/config.json of `config`, with the shipped window."""
    arch = asdict(config)
    window = arch.pop("window")
    proxy = {name: arch.pop(name) for name in ("t_patch_size", "patch_size", "spatial_rope_interpolation")}
    inner = ("level", "block_mode", "block_t_radius", "block_h_radius", "block_w_radius", "win_size", "frame_receptive_field")
    attention = {name: window[name] for name in ("mode", "block_t_size", "block_size")} | {"window": {name: window[name] for name in inner}}
    return {
        "arch": arch | {"activation_type": "swiglu7"},
        "data_proxy": proxy | {"frame_receptive_field": window["dense_frame_receptive_field"], "attn_config": attention},
    }


def turbo_values(sizes: TinySizes) -> dict[str, Any]:
    """The Turbo decoder's JSON: the released structure with narrow blocks."""
    return {
        "latent_channels": 48,
        "out_channels": 3,
        "decoder_block_out_channels": [sizes.wan_size * part for part in (1, 2, 3, 4)],
        "decoder_layers_per_block": [1, 1, 1, 2, 2],
        "decoder_spatio_temporal_scaling": [False, True, True, True],
        "decoder_spatio_only": [False, True, False, False],
        "decoder_is_dw_conv": [False] * 5,
        "decoder_dw_kernel_size": 5,
        "patch_size": 2,
        "patch_size_t": 1,
        "decoder_causal": False,
        "resnet_norm_eps": 1e-6,
        "first_chunk_size": 7,
        "step_size": 7,
        "use_unpatchify": True,
    }


def audio_values(sizes: TinySizes) -> dict[str, Any]:
    """The audio auto-encoder's JSON: the released structure with narrow layers."""
    shared = {"channels": sizes.audio_size, "c_mults": [1, 2, 4, 8, 16], "strides": [2, 4, 4, 8, 8], "use_snake": True}
    return {
        "sample_rate": 44100,
        "audio_channels": 2,
        "model": {
            "pretransform": {
                "config": {
                    "encoder": {"type": "oobleck", "config": shared | {"in_channels": 2, "latent_dim": 128}},
                    "decoder": {"type": "oobleck", "config": shared | {"out_channels": 2, "latent_dim": 64, "final_tanh": False}},
                    "bottleneck": {"type": "vae"},
                    "latent_dim": 64,
                    "downsampling_ratio": 2048,
                    "io_channels": 2,
                }
            }
        },
    }


def generation_values(seed: int) -> dict[str, Any]:
    """generation.json: a small canvas and few steps, so that a whole run takes seconds on a CPU."""
    return {
        "what": f"{WHAT}, seed {seed}: for tests, the clip is noise",
        "preview_width": 112,
        "preview_height": 64,
        "num_inference_steps": 4,
        "negative_prompt": "static noise, flickering",
        "default_prompt": "a random field of colours with a random sound",
        "refiner": {"num_inference_steps": 2},
        "trained": {"untrained": ["preview", "refiner"]},
    }
