"""Initial noise: one seeded generator, drawn in the released order (A video, B audio, later C for the refiner).

Facts: spec preview.md 5.5, components.md 0. A CPU generator gives the same clip on every card; `device` draws on the
accelerator as the release does, which depends on the card. The shapes drawn so far are all it takes to rebuild the stream.
"""

import hashlib
import math

import torch
from torch import Tensor

from magi2_core.errors import RequestError

CPU_SEEDS = 2**32
"""torch's CPU generator looks at the low 32 bits of a seed only; those of cards take all 64."""


def _generators(seed: int, device: torch.device) -> tuple[torch.Generator, ...]:
    """The released generator; on a CPU two for a larger seed, seeded by a hash of all its bits."""
    if device.type != "cpu" or seed < CPU_SEEDS:
        return (torch.Generator(device).manual_seed(seed),)
    digest = hashlib.sha256(seed.to_bytes(8, "little")).digest()
    return tuple(torch.Generator(device).manual_seed(int.from_bytes(part, "little")) for part in (digest[:4], digest[4:8]))


class NoiseStream:
    """Gaussian draws from one seed; `draws` records their shapes in order.

    Args:
        seed: 0 to 2^64 - 1.
        source: "cpu" or "device".
        device: where the tensors go, and with "device" where they are drawn.
        draws: shapes already drawn: they are drawn again and dropped, so that the stream goes on where it was.
    """

    def __init__(self, seed: int, source: str, device: torch.device, draws: tuple[tuple[int, ...], ...] = ()) -> None:
        if source not in ("cpu", "device"):
            raise RequestError(f"noise {source!r}: use cpu (the same clip on any card) or device.")
        self.source = source
        self.device = device
        self._generators = _generators(seed, device if source == "device" else torch.device("cpu"))
        self.draws: tuple[tuple[int, ...], ...] = ()
        for shape in draws:
            self._draw(tuple(shape))

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        self.draws = (*self.draws, shape)
        parts = [torch.randn(shape, generator=each, device=each.device, dtype=torch.float32) for each in self._generators]
        return parts[0] if len(parts) == 1 else (parts[0] + parts[1]) * math.sqrt(0.5)

    def draw(self, shape: tuple[int, ...], injected: Tensor | None = None, what: str = "noise") -> Tensor:
        """The next draw, fp32 of `shape` on the stream's device; `injected` replaces it, and the stream still advances.

        Raises RequestError when the injected tensor has another shape.
        """
        drawn = self._draw(tuple(shape))
        if injected is None:
            return drawn.to(self.device)
        if tuple(injected.shape) != tuple(shape):
            raise RequestError(f"injected {what} has the shape {tuple(injected.shape)}, this request needs {tuple(shape)}.")
        return injected.to(self.device, torch.float32)
