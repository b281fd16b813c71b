"""Sizes of the distilled decoder, read from the JSON of `turbo_vae/`. Facts: spec components.md 3.1, 3.6."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_args

from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError

from .blocks import LATENT_MEAN


@dataclass(frozen=True, kw_only=True)
class TurboConfig:
    """The fields of the decoder's JSON that matter; lists in the file's own (encoder) order. Nothing has a default but the options."""

    latent_channels: int
    out_channels: int
    decoder_block_out_channels: tuple[int, ...]
    decoder_layers_per_block: tuple[int, ...]
    decoder_spatio_temporal_scaling: tuple[bool, ...]
    decoder_spatio_only: tuple[bool, ...]
    decoder_is_dw_conv: tuple[bool, ...]
    decoder_dw_kernel_size: int
    resnet_norm_eps: float
    patch_size: int
    first_chunk_size: int
    step_size: int
    use_unpatchify: bool
    decoder_causal: bool = False
    patch_size_t: int = 1

    @classmethod
    def from_file(cls, path: Path) -> "TurboConfig":
        """Reads the JSON of `turbo_vae/`. Raises CheckpointError naming the file and the field."""
        return cls.from_dict(read_json(Path(path)), str(path))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "turbo VAE config") -> "TurboConfig":
        """Picks and checks the fields; training-only ones are ignored."""
        picked: dict[str, Any] = {}
        for field in fields(cls):
            if field.name not in values:
                if field.default is MISSING:
                    raise CheckpointError(f"{where}: {field.name} is missing.")
                continue
            value = values[field.name]
            listed = bool(get_args(field.type))
            kind: Any = get_args(field.type)[0] if listed else field.type
            parts = value if listed and isinstance(value, list) else [value]
            accepted = (int, float) if kind is float else (kind,)
            if listed != isinstance(value, list) or any(type(part) not in accepted for part in parts):
                raise CheckpointError(f"{where}: {field.name} is {value!r}, expected {'a list of ' if listed else ''}{kind.__name__}.")
            picked[field.name] = tuple(value) if listed else value
        config = cls(**picked)
        config.check(where)
        return config

    def check(self, where: str) -> None:
        """Raises CheckpointError when the fields contradict each other or ask for a mode that is not defined."""
        blocks = len(self.decoder_block_out_channels)
        lengths = (
            len(self.decoder_spatio_temporal_scaling),
            len(self.decoder_spatio_only),
            len(self.decoder_layers_per_block) - 1,
            len(self.decoder_is_dw_conv) - 1,
        )
        problems = [
            (
                set(lengths) != {blocks},
                f"list lengths do not fit {blocks} blocks: scaling and spatio_only need {blocks}, the others {blocks + 1}",
            ),
            (
                self.latent_channels != len(LATENT_MEAN),
                f"latent_channels is {self.latent_channels}, expected {len(LATENT_MEAN)} (the latent statistics are fixed)",
            ),
            (self.patch_size != 2 or self.patch_size_t != 1, f"patches {self.patch_size_t}x{self.patch_size}: only 1x2 is defined"),
            (self.decoder_causal, "decoder_causal is true: only false is defined"),
            (min(self.first_chunk_size, self.step_size) < 1, "first_chunk_size and step_size must be at least 1"),
            (self.decoder_dw_kernel_size % 2 == 0, f"decoder_dw_kernel_size is {self.decoder_dw_kernel_size}, expected an odd number"),
        ]
        for wrong, text in problems:
            if wrong:
                raise CheckpointError(f"{where}: {text}.")

    @property
    def temporal_factor(self) -> int:
        """Frames a latent: 2 for every block that doubles time."""
        return 2 ** sum(
            up and not spatial for up, spatial in zip(self.decoder_spatio_temporal_scaling, self.decoder_spatio_only, strict=True)
        )
