"""The schedule against the printed table of the model's facts, and its refusals."""

import pytest
import torch

from magi2_core.errors import RequestError
from magi2_core.sampling.schedule import flow_schedule


def test_flow_schedule_released_preview() -> None:
    schedule = flow_schedule(100, 7.0)
    assert schedule.timesteps[:8] == (999, 998, 996, 995, 993, 992, 990, 989)
    assert schedule.timesteps[-7:] == (344, 308, 269, 225, 177, 124, 65)
    torch.testing.assert_close(schedule.sigmas[:4], torch.tensor([0.99985701, 0.99841505, 0.99694800, 0.99545509]), rtol=0, atol=6e-8)
    torch.testing.assert_close(schedule.sigmas[-4:], torch.tensor([0.17781526, 0.12488838, 0.06597544, 0.0]), rtol=0, atol=2e-8)


def test_flow_schedule_released_refiner() -> None:
    schedule = flow_schedule(5, 5.0)
    assert schedule.timesteps == (999, 952, 882, 768, 555)
    expected = torch.tensor([0.99979985, 0.95215404, 0.88209325, 0.76893473, 0.55524677, 0.0])
    torch.testing.assert_close(schedule.sigmas, expected, rtol=0, atol=6e-8)


@pytest.mark.parametrize("steps", [1, 2, 167, 168, 200, 1000])
@pytest.mark.parametrize("shift", [0.01, 1.0, 7.0, 100.0])
def test_flow_schedule_sigmas_fall_strictly(steps: int, shift: float) -> None:
    sigmas = flow_schedule(steps, shift).sigmas
    assert sigmas.dtype == torch.float32 and len(sigmas) == steps + 1
    assert (sigmas.diff() < 0).all()


@pytest.mark.parametrize(("steps", "shift"), [(0, 7.0), (1001, 7.0), (10, 0.0), (10, -1.0)])
def test_flow_schedule_refuses(steps: int, shift: float) -> None:
    with pytest.raises(RequestError):
        flow_schedule(steps, shift)
