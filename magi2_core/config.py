"""Sizes of every component: frozen dataclasses whose defaults are the released values.

A checkpoint folder may carry `preview/config.json`, `refiner/config.json`, `vae/config.json` and `generation.json`;
then `from_dict` / `from_folder` read the sizes from there, so nothing in the loading or model code knows that a
checkpoint is small. Facts: spec preview.md 1.2-1.3, components.md 1.1, 1.6, 2.3-2.4, 3.1, 4.1.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .config_values import MOST, check_between, pick, read_json, section
from .errors import CheckpointError

MODALITIES = ("video", "audio", "text")
"""Order of the per-modality weight blocks; the index is the modality id of a token."""

PARAMS_DTYPES = ("bfloat16", "float32")
"""What `params_dtype` of a transformer may say."""

MOST_LAYERS, MOST_ROUNDS = 1000, 1000
PREVIEW_SIZES = (
    "hidden_size",
    "head_dim",
    "video_in_channels",
    "audio_in_channels",
    "text_in_channels",
    "num_streams",
    "sink_tokens",
    "time_channels",
)
MOE_OTHERS = ("route_scale", "moe_layers", "split_merge_intermediate_size")
REFINER_SIZES = (*PREVIEW_SIZES[:5], "num_query_groups", "patch_size", "t_patch_size")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Multi-head mixture of experts: `num_heads` independent routers, each over `num_experts` experts of its own."""

    num_heads: int = 12
    num_experts: int = 256
    top_k: int = 6
    route_scale: float = 4.9
    moe_layers: tuple[int, ...] = tuple(range(2, 38))
    expert_intermediate_size: int = 1280
    shared_expert_intermediate_size: int = 1280
    modality_specific_expert_intermediate_size: int = 1280
    split_merge_intermediate_size: int = 0
    """Channels of all heads together; 0 (null in the file): as many as the model has."""


@dataclass(frozen=True, kw_only=True)
class PreviewConfig:
    """The preview transformer (spec preview.md 1.2). Attention is plain multi-head: kv heads equal q heads."""

    num_layers: int = 40
    hidden_size: int = 3072
    head_dim: int = 128
    video_in_channels: int = 48
    audio_in_channels: int = 64
    text_in_channels: int = 5120
    intermediate_factor: float = 4.0
    mm_layers: tuple[int, ...] = (0, 1, 38, 39)
    num_streams: int = 4
    sinkhorn_iterations: int = 20
    sink_tokens: int = 1
    params_dtype: str = "bfloat16"
    time_channels: int = 64
    moe: MoEConfig = MoEConfig()

    @property
    def num_heads(self) -> int:
        """Attention heads."""
        return self.hidden_size // self.head_dim

    @property
    def stream_width(self) -> int:
        """Width of the residual of all streams, `num_streams * hidden_size`."""
        return self.num_streams * self.hidden_size

    @property
    def dense_intermediate(self) -> int:
        """Width inside the dense MLP of the per-modality layers, a multiple of 128."""
        return int(self.hidden_size * self.intermediate_factor * 2 / 3) // 128 * 128

    @property
    def moe_width(self) -> int:
        """Channels of all MoE heads."""
        return self.moe.split_merge_intermediate_size or self.hidden_size

    @property
    def moe_head_dim(self) -> int:
        """Channels of one MoE head."""
        return self.moe_width // self.moe.num_heads

    @property
    def rope_bands(self) -> int:
        """Frequency bands an axis; 6 times as many channels of a head rotate."""
        return self.head_dim // 8

    @property
    def out_channels(self) -> int:
        """Columns of the velocity matrix: the wider of video and audio."""
        return max(self.video_in_channels, self.audio_in_channels)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "preview/config.json") -> "PreviewConfig":
        """Reads the schema of a checkpoint's preview/config.json. Raises CheckpointError on a mode that is not built."""
        moe_values, mhc, sinks, gating = (
            dict(section(values, key, where)) for key in ("moe_config", "mhc_config", "attn_sinks", "attn_gating")
        )
        if moe_values.get("split_merge_intermediate_size", 0) is None:
            del moe_values["split_merge_intermediate_size"]
        for name, on in (("mhc_config", mhc), ("attn_sinks", sinks), ("attn_gating", gating)):
            if on.get("enable", True) is not True:
                raise CheckpointError(f"{where}: {name}.enable is {on['enable']!r}; this model is defined only with it on.")
        if values.get("activation_type", "swiglu7") != "swiglu7":
            raise CheckpointError(f"{where}: activation_type is {values['activation_type']!r}, expected 'swiglu7'.")
        if moe_values.get("score_func", "sigmoid") != "sigmoid" or not moe_values.get("route_norm", True):
            raise CheckpointError(f"{where}: only score_func 'sigmoid' with route_norm true is defined.")
        if float(values.get("attn_softcap") or -1.0) > 0:
            raise CheckpointError(f"{where}: attn_softcap is {values['attn_softcap']}, only values <= 0 (off) are defined.")
        picked = pick(cls, {key: value for key, value in values.items() if key != "moe"}, where)
        config = cls(
            **picked,
            num_streams=mhc.get("num_stream", cls.num_streams),
            sink_tokens=sinks.get("sink_token_num", cls.sink_tokens),
            moe=MoEConfig(**pick(MoEConfig, moe_values, where)),
        )
        config.check(values.get("num_query_groups"), where)
        return config

    def check(self, num_query_groups: int | None = None, where: str = "preview config") -> None:
        """Raises CheckpointError when the sizes contradict each other."""
        check_between(where, 1, MOST_LAYERS, num_layers=self.num_layers)
        check_between(where, 0, MOST_ROUNDS, sinkhorn_iterations=self.sinkhorn_iterations)
        check_between(where, 1, MOST, **{name: getattr(self, name) for name in PREVIEW_SIZES})
        check_between(where, 1, MOST, **{name: value for name, value in asdict(self.moe).items() if name not in MOE_OTHERS})
        check_between(where, 0, MOST, split_merge_intermediate_size=self.moe.split_merge_intermediate_size)
        check_between(where, 1e-6, 1e6, intermediate_factor=self.intermediate_factor, route_scale=self.moe.route_scale)
        problems = [
            (self.hidden_size % self.head_dim != 0, f"hidden_size {self.hidden_size} is not a multiple of head_dim {self.head_dim}"),
            (self.head_dim < 8, f"head_dim {self.head_dim} is below 8, the least that rotates"),
            (
                self.moe_width % self.moe.num_heads != 0 or self.moe_width < 1,
                f"the experts' width {self.moe_width} (split_merge_intermediate_size, else hidden_size) is not a multiple of moe num_heads "
                f"{self.moe.num_heads}",
            ),
            (self.moe.top_k > self.moe.num_experts, f"top_k {self.moe.top_k} exceeds num_experts {self.moe.num_experts}"),
            (
                sorted((*self.mm_layers, *self.moe.moe_layers)) != list(range(self.num_layers)),
                f"mm_layers {self.mm_layers} and moe_layers {self.moe.moe_layers} must cover 0..{self.num_layers - 1} once each",
            ),
            (num_query_groups not in (None, self.num_heads), f"num_query_groups {num_query_groups} must equal the {self.num_heads} heads"),
            (
                bool(self.mm_layers) and self.dense_intermediate == 0,
                f"intermediate_factor {self.intermediate_factor} of hidden_size {self.hidden_size} gives the dense MLP no channel, 128 are the least",
            ),
            (self.time_channels % 2 == 1, f"time_channels {self.time_channels} is odd: half are cosines, half sines"),
            (self.params_dtype not in PARAMS_DTYPES, f"params_dtype is {self.params_dtype!r}, expected one of {', '.join(PARAMS_DTYPES)}"),
            (self.stream_width < self.time_channels, f"stream width {self.stream_width} is below the {self.time_channels} time channels"),
        ]
        for wrong, text in problems:
            if wrong:
                raise CheckpointError(f"{where}: {text}.")


@dataclass(frozen=True, kw_only=True)
class WindowConfig:
    """Which keys a video token of the refiner sees (spec components.md 1.6-1.7). Defaults: the shipped grid mode."""

    mode: str = "window"
    level: str = "block"
    block_mode: str = "grid"
    block_t_size: int = 8
    block_size: int = 4
    block_t_radius: int = 2
    block_h_radius: int = 2
    block_w_radius: int = 2
    win_size: int = 384
    frame_receptive_field: int = -1
    dense_frame_receptive_field: int = 11

    @classmethod
    def from_dict(
        cls, values: Mapping[str, Any], dense_frame_receptive_field: int = 11, where: str = "refiner/config.json"
    ) -> "WindowConfig":
        """Reads `data_proxy.attn_config`, the "window" section overlaid; the mode "local" is an alias of "window".

        What the release defaults to when a value is missing: mode dense, level block, block_mode scan, sizes and radii 1.
        """
        base = {
            "mode": "dense",
            "level": "block",
            "block_mode": "scan",
            "block_t_size": 1,
            "block_size": 1,
            "block_t_radius": 1,
            "block_h_radius": 1,
            "block_w_radius": 1,
            "win_size": 1,
        }
        merged = {**base, **values, **(values.get("window") or {})}
        merged["block_mode"] = merged.get("window_block_mode", merged["block_mode"])
        merged.setdefault("frame_receptive_field", dense_frame_receptive_field)
        if merged.get("mode", "window") == "local":
            merged["mode"] = "window"
        if merged.get("mode", "window") not in ("window", "dense"):
            raise CheckpointError(f"{where}: attention mode is {merged['mode']!r}, expected 'window', 'local' or 'dense'.")
        return cls(**pick(cls, merged, where) | {"dense_frame_receptive_field": dense_frame_receptive_field})


@dataclass(frozen=True, kw_only=True)
class RefinerConfig:
    """The dense refiner transformer (spec components.md 1.1)."""

    num_layers: int = 30
    hidden_size: int = 4096
    head_dim: int = 128
    num_query_groups: int = 8
    video_in_channels: int = 48
    audio_in_channels: int = 64
    text_in_channels: int = 5120
    mm_layers: tuple[int, ...] = (0, 1, 28, 29)
    local_attn_layers: tuple[int, ...] = tuple(range(30))
    post_norm_layers: tuple[int, ...] = ()
    enable_attn_gating: bool = True
    params_dtype: str = "bfloat16"
    patch_size: int = 1
    t_patch_size: int = 1
    spatial_rope_interpolation: str = "extra"
    window: WindowConfig = WindowConfig()

    @property
    def num_heads(self) -> int:
        """Query heads; `num_query_groups` counts the key/value heads."""
        return self.hidden_size // self.head_dim

    @property
    def intermediate(self) -> int:
        """Width inside the MLP."""
        return int(self.hidden_size * 4 * 2 / 3) // 4 * 4

    @property
    def out_channels(self) -> int:
        """Columns of the velocity matrix: the wider of video and audio."""
        return max(self.video_in_channels, self.audio_in_channels)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "refiner/config.json") -> "RefinerConfig":
        """Reads the schema of refiner/config.json: "arch" and "data_proxy" sections (or the arch values at top level)."""
        arch, proxy = dict(section(values, "arch", where) or values), section(values, "data_proxy", where)
        if arch.get("activation_type", "swiglu7") != "swiglu7":
            raise CheckpointError(f"{where}: activation_type is {arch['activation_type']!r}, expected 'swiglu7'.")
        layers = arch.get("num_layers", cls.num_layers)
        check_between(where, 1, MOST_LAYERS, num_layers=layers)
        arch.setdefault("local_attn_layers", list(range(layers)))
        arch.setdefault("mm_layers", [layer for layer in cls.mm_layers if layer < layers])
        merged = {**arch, **{key: proxy[key] for key in ("patch_size", "t_patch_size", "spatial_rope_interpolation") if key in proxy}}
        holder = proxy if "attn_config" in proxy else values
        field = proxy.get("frame_receptive_field", values.get("frame_receptive_field"))
        dense = WindowConfig.dense_frame_receptive_field if field is None else int(field)
        is_said = holder.get("attn_config") is not None
        window = WindowConfig.from_dict(section(holder, "attn_config", where), dense, where) if is_said else WindowConfig()
        config = cls(**pick(cls, {key: value for key, value in merged.items() if key != "window"}, where), window=window)
        config.check(where)
        return config

    def check(self, where: str = "refiner config") -> None:
        """Raises CheckpointError when the sizes contradict each other."""
        check_between(where, 1, MOST, **{name: getattr(self, name) for name in REFINER_SIZES})
        if self.hidden_size % self.head_dim or self.num_heads % self.num_query_groups:
            raise CheckpointError(
                f"{where}: hidden_size {self.hidden_size}, head_dim {self.head_dim} and num_query_groups {self.num_query_groups} do not divide."
            )
        for name in ("mm_layers", "local_attn_layers", "post_norm_layers"):
            strange = [layer for layer in getattr(self, name) if layer not in range(self.num_layers) or isinstance(layer, bool)]
            if strange:
                raise CheckpointError(f"{where}: {name} has {strange[0]!r}, expected layers 0 to {self.num_layers - 1}.")
        for name, allowed in (("params_dtype", PARAMS_DTYPES), ("spatial_rope_interpolation", ("extra", "inter"))):
            if getattr(self, name) not in allowed:
                raise CheckpointError(f"{where}: {name} is {getattr(self, name)!r}, expected one of {', '.join(allowed)}.")
        window = self.window
        sizes = {name: getattr(window, name) for name in ("block_t_size", "block_size", "win_size")}
        radii = {name: getattr(window, name) for name in ("block_t_radius", "block_h_radius", "block_w_radius")}
        fields = {name: getattr(window, name) for name in ("frame_receptive_field", "dense_frame_receptive_field")}
        for low, values in ((1, sizes), (0, radii), (-1, fields)):
            check_between(f"{where}: attention window", low, MOST, **values)


@dataclass(frozen=True, kw_only=True)
class WanVAEConfig:
    """The Wan2.2 video auto-encoder, 16x16x4, 48 channels (spec components.md 2)."""

    dim: int = 160
    dec_dim: int = 256
    z_dim: int = 48
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "vae/config.json") -> "WanVAEConfig":
        """Reads vae/config.json."""
        return cls(**pick(cls, values, where))


@dataclass(frozen=True, kw_only=True)
class RefinerSampling:
    """Sampler settings of the refiner stage (spec components.md 1.9)."""

    num_inference_steps: int = 5
    shift: float = 5.0
    video_guidance: float = 2.0
    audio_guidance: float = 5.0
    noise_value: int = 220


@dataclass(frozen=True, kw_only=True)
class TrainedFor:
    """What a small checkpoint knows; empty = everything. `sizes` as "112x64", `words` of prompts in lower case, `untrained` components."""

    sizes: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()
    words: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "generation.json") -> "TrainedFor":
        """Reads the "trained" section of generation.json."""
        found = cls(**pick(cls, values, where))
        for name, kind in (("sizes", str), ("seconds", (int, float)), ("words", str), ("untrained", str)):
            if not all(isinstance(entry, kind) for entry in getattr(found, name)):
                raise CheckpointError(
                    f"{where}: trained.{name} is {getattr(found, name)!r}, expected a list of {'numbers' if name == 'seconds' else 'texts'}."
                )
        return found


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """What a checkpoint asks for when the user says nothing; `generation.json` overrides the released values."""

    preview_width: int = 896
    preview_height: int = 512
    seconds: float = 10.0
    fps: float = 12.5
    num_inference_steps: int = 100
    video_guidance: float = 5.0
    audio_guidance: float = 7.0
    shift: float = 7.0
    negative_prompt: str = ""
    default_prompt: str = ""
    use_negative_prompt: bool = True
    use_ref_for_uncond: bool = True
    refiner: RefinerSampling = RefinerSampling()
    trained: TrainedFor = TrainedFor()

    @classmethod
    def from_folder(cls, folder: Path) -> "GenerationDefaults":
        """Reads `folder/generation.json`; without the file the released defaults hold."""
        path = Path(folder) / "generation.json"
        if not path.is_file():
            return cls()
        values = read_json(path)
        defaults = cls(**pick(cls, {key: value for key, value in values.items() if key not in ("refiner", "trained")}, str(path)))
        refiner, trained = (section(values, name, str(path)) for name in ("refiner", "trained"))
        return replace(
            defaults,
            refiner=RefinerSampling(**pick(RefinerSampling, refiner, str(path))),
            trained=TrainedFor.from_dict(trained, str(path)),
        )
