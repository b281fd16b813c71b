"""The solver on flows with a known answer; the released traces are goldens (parity, kind schedule)."""

import pytest
import torch

from magi2_core.sampling.schedule import flow_schedule
from magi2_core.sampling.unipc import FlowUniPC


def solve(steps: int, velocity, sample: torch.Tensor, shift: float = 7.0) -> torch.Tensor:
    schedule = flow_schedule(steps, shift)
    solver = FlowUniPC(schedule)
    for step in range(steps):
        sample = solver.step(velocity(sample, schedule.sigmas[step]), sample)
    return sample


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 168, 200])
def test_step_straight_flow_lands_on_its_target(steps: int) -> None:
    target, noise = torch.randn(2, 1, 3, 2, 2, 2, generator=torch.Generator().manual_seed(1))
    final = solve(steps, lambda x, sigma: (x - target) / sigma, noise)
    torch.testing.assert_close(final, target, rtol=0, atol=2e-6)


def test_step_last_state_is_last_estimate() -> None:
    schedule = flow_schedule(4, 7.0)
    solver = FlowUniPC(schedule)
    sample = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(2))
    for step in range(4):
        velocity = torch.sin(3 * sample)
        estimate = sample - schedule.sigmas[step] * velocity
        sample = solver.step(velocity, sample)
    assert torch.equal(sample, estimate)


def test_step_converges_to_the_exact_flow() -> None:
    """Data ~ N(0, 1/4) has the exact flow x(sigma) = z * spread(sigma); half way, doubling the steps divides the error by far more than 2."""
    z = torch.linspace(-2, 2, 9).view(1, 9)

    def spread(sigma: torch.Tensor) -> torch.Tensor:
        return ((1 - sigma) ** 2 / 4 + sigma**2).sqrt()

    errors = []
    for steps in (20, 40, 80):
        schedule = flow_schedule(steps, 3.0)
        solver, sample = FlowUniPC(schedule), z * spread(schedule.sigmas[0])
        for sigma in schedule.sigmas[: steps // 2]:
            x0 = (1 - sigma) / 4 / spread(sigma) ** 2 * sample
            sample = solver.step((sample - x0) / sigma, sample)
        errors.append((sample - z * spread(schedule.sigmas[steps // 2])).abs().max().item())
    assert errors[0] > 3 * errors[1] and errors[1] > 3 * errors[2], errors
