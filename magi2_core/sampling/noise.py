"""Initial noise: one seeded generator, drawn in the released order (A video, B audio, later C for the refiner).

Facts: spec preview.md 5.5, components.md 0. A CPU generator gives the same clip on every card; `device` draws on the
accelerator as the release does, which depends on the card. The shapes drawn so far are all it takes to rebuild the stream.
"""

import torch
from torch import Tensor

from magi2_core.errors import RequestError


class NoiseStream:
    """Gaussian draws from one generator; `draws` records their shapes in order.

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
        self._generator = torch.Generator(device if source == "device" else "cpu").manual_seed(seed)
        self.draws: tuple[tuple[int, ...], ...] = ()
        for shape in draws:
            self._draw(tuple(shape))

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        self.draws = (*self.draws, shape)
        return torch.randn(shape, generator=self._generator, device=self._generator.device, dtype=torch.float32)

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
