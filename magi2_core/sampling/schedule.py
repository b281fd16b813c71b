"""The flow-matching schedule of both stages: sigmas for the solver, truncated integer timesteps for the model.

Facts: spec preview.md 5.1, components.md 1.9. The start is sigma 0.999 rounded to fp32, shifted in float64; the solver uses
the exact sigmas, the model the truncated timesteps. Steps are counted by position: with 168 steps or more at shift 7 the
first two timesteps are both 999, and a look-up by value would then skip the first step and run off the end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from magi2_core.errors import RequestError
from magi2_core.request import check_steps

SIGMA_MAX = float(torch.tensor(0.999, dtype=torch.float32))
"""0.9990000128746033, the released start before the shift."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """`sigmas` fp32 [N + 1] on the CPU, the last is 0; `timesteps` the N integers the model sees."""

    sigmas: Tensor
    timesteps: tuple[int, ...]
    shift: float

    @property
    def num_inference_steps(self) -> int:
        """N."""
        return len(self.timesteps)


def flow_schedule(num_inference_steps: int, shift: float) -> Schedule:
    """Schedule of N steps: sigma = shift u / (1 + (shift - 1) u), u evenly from 0.999 down to 0 (0 itself excluded).

    Raises RequestError when `num_inference_steps` is outside 1..1000 or `shift` is not positive.
    """
    check_steps(num_inference_steps)
    if not shift > 0:
        raise RequestError(f"shift {shift!r}: must be positive; the released values are 7 (preview) and 5 (refiner).")
    spacing = -SIGMA_MAX / num_inference_steps
    even = [step * spacing + SIGMA_MAX for step in range(num_inference_steps)]
    shifted = [shift * u / (1 + (shift - 1) * u) for u in even]
    return Schedule(
        sigmas=torch.tensor([*shifted, 0.0], dtype=torch.float64).to(torch.float32),
        timesteps=tuple(int(1000 * sigma) for sigma in shifted),
        shift=shift,
    )
