"""What a fleet is: a frozen description that a node, the command line and the head all mean the same by. Standard library only."""

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from magi2_core.errors import RequestError

MODES = ("auto", "keep", "attach")
DTYPES = ("auto", "float32", "bfloat16")
KERNELS = ("auto", "triton", "reference")
PLACEMENTS = ("auto", "resident", "roundtrip", "cpu")
MAX_RANKS = 64
FLEET_FIELDS = ("checkpoint", "devices", "layout", "text_encoder", "vae", "dtype", "kernels")
"""Fields that decide which fleet it is; the others say how it is reached and how long it lives."""


@dataclass(frozen=True, kw_only=True)
class BackendSpec:
    """One fleet of workers.

    `devices` is "auto" (every accelerator, one CPU worker where there is none) or one device name a rank; `layout` is "auto" or a name
    as cp8ep4. `mode`: auto (ends with the process that started it), keep (outlives it), attach (a head at `address`, started by `serve`).
    `step_seconds` is how long a step, shard or window may take before the fleet counts as hung; 0 never.
    """

    checkpoint: str
    devices: str | tuple[str, ...] = "auto"
    layout: str = "auto"
    mode: str = "auto"
    address: str = ""
    text_encoder: str = "auto"
    vae: str = "auto"
    idle_minutes: float = 30
    dtype: str = "auto"
    kernels: str = "auto"
    step_seconds: float = 900

    def validate(self) -> None:
        """Raises RequestError naming the value and what is allowed."""
        if not isinstance(self.checkpoint, str) or (not self.checkpoint and self.mode != "attach"):
            raise RequestError(f"checkpoint {self.checkpoint!r}: give the folder of a checkpoint.")
        choices = (("backend mode", self.mode, MODES), ("dtype", self.dtype, DTYPES), ("kernels", self.kernels, KERNELS))
        placements = (("text encoder placement", self.text_encoder, PLACEMENTS), ("VAE placement", self.vae, PLACEMENTS))
        for name, value, allowed in (*choices, *placements):
            if value not in allowed:
                raise RequestError(f"{name} {value!r}: use one of {', '.join(allowed)}.")
        named = isinstance(self.devices, tuple) and self.devices and all(isinstance(name, str) and name for name in self.devices)
        if self.devices != "auto" and not named:
            raise RequestError(f"devices {self.devices!r}: use auto, or names separated by commas, as cuda:0,cuda:1.")
        if len(self.devices) > MAX_RANKS:
            raise RequestError(f"devices: {len(self.devices)} are named, at most {MAX_RANKS} are allowed.")
        if not isinstance(self.layout, str) or not self.layout:
            raise RequestError(f"layout {self.layout!r}: use auto, or a name as cp8ep4.")
        if self.mode == "attach" and not self.address:
            raise RequestError("backend mode attach needs the address that `python -m magi2_core serve` printed: --address ADDRESS.")
        for name, seconds in (("idle minutes", self.idle_minutes), ("step seconds", self.step_seconds)):
            if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= 1e6:
                raise RequestError(f"{name} {seconds!r}: use a number from 0 (never) to 1000000.")

    @property
    def key(self) -> str:
        """Twelve hex digits naming the fleet: equal for specifications that mean the same processes."""
        said = json.dumps({name: getattr(self, name) for name in FLEET_FIELDS}, sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:12]

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BackendSpec":
        """Reads `to_json`. Raises RequestError on an unknown field."""
        values: dict[str, Any] = json.loads(text)
        unknown = sorted(set(values) - {entry.name for entry in fields(cls)})
        if unknown:
            raise RequestError(f"backend specification: the field {unknown[0]!r} is unknown.")
        if isinstance(values.get("devices"), list):
            values["devices"] = tuple(values["devices"])
        spec = cls(**values)
        spec.validate()
        return spec
