"""FlowUniPC: the released multistep solver (order 2, "bh2", x0 prediction, corrector on every step, first order at the end).

Facts: spec preview.md 5.2. Rounding is part of the definition: sigma, alpha, lambda, h and expm1 are 0-d fp32 CPU tensors,
while r and the 2x2 system live on the latent's device, copied there without waiting for it (a division by a CPU scalar would become a product with its reciprocal
there). One object solves one modality and is pure state: `history`, `previous` and `order` are all it takes to go on.
"""

import torch
from torch import Tensor

from magi2_core.request import SolverState

from .schedule import Schedule


class FlowUniPC:
    """Steps one latent along a schedule.

    Args:
        schedule: sigmas and their number.
        position: finished steps; 0 for a fresh run.
        history: x0 estimates of the last steps, at most two, oldest first, fp32, shape of the latent.
        previous: the corrected state that entered the last predictor.
        order: order of the last predictor.
    """

    def __init__(
        self, schedule: Schedule, *, position: int = 0, history: tuple[Tensor, ...] = (), previous: Tensor | None = None, order: int = 0
    ) -> None:
        assert position == 0 or (previous is not None and len(history) == min(2, position) and order >= 1)
        self.position = position
        self.history = history
        self.previous = previous
        self.order = order
        self._steps = schedule.num_inference_steps
        self._sigma = schedule.sigmas
        self._alpha = 1 - schedule.sigmas
        self._lambda = torch.log(self._alpha) - torch.log(self._sigma)

    @classmethod
    def resumed(cls, schedule: Schedule, state: SolverState, name: str) -> "FlowUniPC":
        """The solver of the modality `name` as `state` left it."""
        return cls(schedule, position=state.step, history=state.history.get(name, ()), previous=state.previous.get(name), order=state.order)

    def step(self, velocity: Tensor, sample: Tensor) -> Tensor:
        """One solver step from position k to k + 1.

        Args:
            velocity: fp32, guided velocity at `sample`.
            sample: fp32, the state of position k.

        Returns: the state of position k + 1; after the last step this is exactly the last x0 estimate.
        """
        k = self.position
        assert k < self._steps
        x0 = sample - self._sigma[k] * velocity
        if k > 0:
            sample = self._correct(k, x0)
        self.history = (*self.history, x0)[-2:]
        self.previous = sample
        self.order = min(2, self._steps - k, k + 1)
        self.position = k + 1
        return self._predict(k, sample)

    def _correct(self, k: int, x0: Tensor) -> Tensor:
        """The state of position k again, now that the x0 estimate there is known."""
        assert self.previous is not None
        sigma, alpha, lam = self._sigma, self._alpha, self._lambda
        last = self.history[-1]
        h = lam[k] - lam[k - 1]
        growth = torch.expm1(-h)
        base = sigma[k] / sigma[k - 1] * self.previous - alpha[k] * growth * last
        change = x0 - last
        if self.order == 1:
            return base - alpha[k] * growth * (0.5 * change)
        ratio = ((lam[k - 2] - lam[k - 1]) / h).to(x0.device, non_blocking=True)
        slope = (self.history[-2] - last) / ratio
        rho = self._corrector_weights(h, growth, ratio)
        return base - alpha[k] * growth * (rho[0] * slope + rho[1] * change)

    @staticmethod
    def _corrector_weights(h: Tensor, growth: Tensor, ratio: Tensor) -> Tensor:
        """Solves [[1, 1], [r, 1]] rho = b on the device of `ratio`; fp32 [2]."""
        first = growth / -h - 1
        second = first / -h - 0.5
        right = torch.stack([first / growth, second * 2 / growth]).to(ratio.device, non_blocking=True)
        one = torch.ones_like(ratio)
        # solve_ex: solve reads back whether the matrix was singular, which waits for the device.
        return torch.linalg.solve_ex(torch.stack([torch.stack([one, one]), torch.stack([ratio, one])]), right).result

    def _predict(self, k: int, sample: Tensor) -> Tensor:
        """The state of position k + 1 from the corrected state of position k."""
        sigma, alpha, lam = self._sigma, self._alpha, self._lambda
        x0 = self.history[-1]
        h = lam[k + 1] - lam[k]
        growth = torch.expm1(-h)
        base = sigma[k + 1] / sigma[k] * sample - alpha[k + 1] * growth * x0
        if self.order == 1:
            return base
        ratio = ((lam[k - 1] - lam[k]) / h).to(x0.device, non_blocking=True)
        return base - alpha[k + 1] * growth * (0.5 * ((self.history[-2] - x0) / ratio))
