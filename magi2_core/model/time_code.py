"""The time code: 64 numbers that overwrite the first channels of stream 0 of every token (spec preview.md 3.3).

There are no learned time weights. Cosines come before sines (the rotary table has it the other way round).
"""

import ctypes
import math

import torch
from torch import Tensor

MAX_PERIOD = 10000.0
TIMESTEPS = 1000.0


def time_code(tau: Tensor, channels: int) -> Tensor:
    """Cosines and sines of the diffusion time.

    Args:
        tau: fp32 [...], timestep / 1000; 0 for tokens that have no time.
        channels: even.

    Returns:
        fp32 [..., channels]. The phase is tau * 1000 in fp32, as released: not for every timestep the integer again.
    """
    half = channels // 2
    steps = torch.arange(half, dtype=torch.float32, device=tau.device)
    frequencies = torch.exp(-math.log(MAX_PERIOD) * steps / half)
    phase = (tau.float() * TIMESTEPS).unsqueeze(-1) * frequencies
    return torch.cat([phase.cos(), phase.sin()], dim=-1)


def timestep_code(timestep: int, channels: int, device: torch.device | str = "cpu") -> Tensor:
    """fp32 [channels] for an integer timestep 0..1000; 0 gives ones, then zeros."""
    # The quotient is made on the host: a device divides by a constant with its reciprocal, and a copy of it would wait for the device.
    tau = ctypes.c_float(timestep / TIMESTEPS).value
    return time_code(torch.full((), tau, dtype=torch.float32, device=device), channels)
