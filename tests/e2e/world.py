"""The synthetic world the embedded nano checkpoint was trained on: one object moving over a plain background, with a sound.

A clip is a function of six attributes and a seed. The model's training code drew its clips with the same formulas, so clips
made here are the ground truth the measurements of `metrics.py` are held to. Lists and their order are those of the grammar
in assets/nano/generation.json (a test compares them).
"""

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

WIDTH, HEIGHT, FRAMES, FPS, SECONDS, SAMPLE_RATE = 112, 64, 125, 12.5, 10.0, 44100
SHAPES = ("circle", "square", "triangle")
COLORS = ("red", "green", "blue", "yellow", "purple", "white")
BACKGROUNDS = ("black", "blue", "green", "gray")
MOTIONS = ("right", "left", "up", "down", "still", "bounce")
SOUNDS = ("hum", "beeps", "wind")
PITCHES = ("low", "middle", "high")
VALUES = {"shape": SHAPES, "color": COLORS, "background": BACKGROUNDS, "motion": MOTIONS, "sound": SOUNDS, "pitch": PITCHES}

OBJECT_RGB = torch.tensor([[230, 40, 40], [60, 210, 70], [70, 130, 255], [250, 220, 50], [175, 70, 225], [245, 245, 245]]) / 255
BACKGROUND_RGB = torch.tensor([[15, 15, 15], [25, 45, 140], [20, 95, 50], [120, 120, 120]]) / 255
HUM_HZ, BEEP_HZ, WIND_HZ = (100.0, 200.0, 400.0), (500.0, 1000.0, 2000.0), (300.0, 700.0, 1600.0)
TICK_HZ = 2500.0


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The continuous parameters of a clip, in pixels and seconds: size, start, velocity and, for a bounce, sweep time and phase."""

    radius: float
    half_width: float
    x: float
    y: float
    velocity_x: float = 0.0
    velocity_y: float = 0.0
    sweep: float = 2.5
    phase: float = 0.0
    gust: float = 0.0


def held_out(attributes: dict[str, str]) -> bool:
    """True for the combinations (about 10 %) that were kept out of the nano's training."""
    indices = tuple(values.index(attributes[name]) for name, values in VALUES.items())
    return hashlib.sha256(repr(indices).encode()).digest()[0] < 26


def sample_geometry(attributes: dict[str, str], generator: torch.Generator) -> Geometry:
    """Draws the continuous parameters that go with the attributes."""
    u = torch.rand(10, generator=generator).tolist()
    radius = 9 + 2 * u[0]
    half_width = radius * {"circle": 1.0, "square": 0.88, "triangle": 1.3}[attributes["shape"]]
    x, y, velocity_x, velocity_y = 18 + 76 * u[1], 18 + 30 * u[2], 0.0, 0.0
    near, far = (16 + 14 * u[3], 82 + 14 * u[4]) if attributes["motion"] in ("right", "left") else (17 + 4 * u[3], 46 + 5 * u[4])
    if attributes["motion"] == "right":
        x, velocity_x = near, (far - near) / SECONDS
    elif attributes["motion"] == "left":
        x, velocity_x = far, (near - far) / SECONDS
    elif attributes["motion"] == "down":
        y, velocity_y = near, (far - near) / SECONDS
    elif attributes["motion"] == "up":
        y, velocity_y = far, (near - far) / SECONDS
    return Geometry(
        radius=radius,
        half_width=half_width,
        x=x,
        y=y,
        velocity_x=velocity_x,
        velocity_y=velocity_y,
        sweep=2.2 + 0.6 * u[5],
        phase=2 * u[6],
        gust=u[9],
    )


def position(attributes: dict[str, str], geometry: Geometry, times: Tensor) -> tuple[Tensor, Tensor]:
    """Centre of the object in pixels at `times` (seconds)."""
    y = geometry.y + geometry.velocity_y * times
    if attributes["motion"] != "bounce":
        return geometry.x + geometry.velocity_x * times, y
    sweep = 1 - (torch.remainder(geometry.phase + times / geometry.sweep, 2) - 1).abs()
    return geometry.half_width + 1 + sweep * (WIDTH - 2 * geometry.half_width - 2), y


def coverage(shape: str, x: Tensor, y: Tensor, radius: Tensor | float) -> Tensor:
    """How much of each pixel the object covers, 0 to 1: fp32 [K, HEIGHT, WIDTH] for K centres [K]."""
    dx = (torch.arange(WIDTH) + 0.5)[None, None, :] - x[:, None, None]
    dy = (torch.arange(HEIGHT) + 0.5)[None, :, None] - y[:, None, None]
    if shape == "circle":
        distance = torch.sqrt(dx * dx + dy * dy) - radius
    elif shape == "square":
        distance = torch.maximum(dx.abs(), dy.abs()) - 0.88 * radius
    else:
        distance = torch.maximum(dy.expand_as(dx + dy), math.sqrt(0.75) * dx.abs() - 0.5 * dy) - 0.75 * radius
    return (0.5 - distance).clamp(0, 1)


def render(attributes: dict[str, str], geometry: Geometry) -> Tensor:
    """The picture: uint8 [FRAMES, HEIGHT, WIDTH, 3]."""
    x, y = position(attributes, geometry, torch.arange(FRAMES) / FPS)
    alpha = coverage(attributes["shape"], x, y, geometry.radius)[..., None]
    background = BACKGROUND_RGB[BACKGROUNDS.index(attributes["background"])]
    colour = OBJECT_RGB[COLORS.index(attributes["color"])]
    return ((background + alpha * (colour - background)) * 255).round().to(torch.uint8)


def _hum(times: Tensor, hertz: float) -> Tensor:
    phase = times * hertz * math.tau
    return sum(weight * torch.sin(order * phase) for order, weight in ((1, 1.0), (2, 0.5), (3, 0.3), (5, 0.15))) * 0.22


def _beeps(times: Tensor, hertz: float) -> Tensor:
    """Two a second, 0.2 s long each."""
    phase = times * hertz * math.tau
    cycle = torch.remainder(times, 0.5)
    envelope = ((cycle - 0.1) / 0.01).clamp(0, 1) * ((0.3 - cycle) / 0.01).clamp(0, 1)
    return (torch.sin(phase) + 0.3 * torch.sin(2 * phase)) * envelope * 0.35


def _wind(times: Tensor, hertz: float, gust: float, sample_rate: int, generator: torch.Generator) -> Tensor:
    """Noise in a band of about two thirds of an octave, slowly swelling."""
    noise = torch.randn(len(times), dtype=torch.float64, generator=generator)
    frequencies = torch.fft.rfftfreq(len(times), 1 / sample_rate, dtype=torch.float64).clamp_min(1.0)
    band = torch.exp(-0.5 * (torch.log2(frequencies / hertz) / 0.35) ** 2)
    band = band / band.pow(2).mean().sqrt()
    return torch.fft.irfft(torch.fft.rfft(noise) * band, n=len(times)) * (0.65 + 0.35 * torch.sin(math.tau * (0.3 * times + gust))) * 0.16


def _ticks(times: Tensor, geometry: Geometry) -> Tensor:
    """A short click at each contact with a wall."""
    first = math.floor(geometry.phase) + 1
    clicks = torch.zeros_like(times)
    for contact in range(first, first + 6):
        since = times - (contact - geometry.phase) * geometry.sweep
        click = torch.exp(-since.clamp(0, 1) / 0.02) * torch.sin(math.tau * TICK_HZ * since)
        clicks += torch.where((since >= 0) & (since < 0.15), click, 0.0)
    return clicks


def sound(attributes: dict[str, str], geometry: Geometry, generator: torch.Generator, sample_rate: int = SAMPLE_RATE) -> Tensor:
    """The sound, panned with the object: fp32 [2, SECONDS * sample_rate]."""
    times = torch.arange(round(SECONDS * sample_rate), dtype=torch.float64) / sample_rate
    pitch = PITCHES.index(attributes["pitch"])
    if attributes["sound"] == "hum":
        mono = _hum(times, HUM_HZ[pitch])
    elif attributes["sound"] == "beeps":
        mono = _beeps(times, BEEP_HZ[pitch])
    else:
        mono = _wind(times, WIND_HZ[pitch], geometry.gust, sample_rate, generator)
    if attributes["motion"] == "bounce":
        mono = 0.5 * mono + 0.7 * _ticks(times, geometry)
    fade = (times / 0.03).clamp(0, 1) * ((SECONDS - times) / 0.03).clamp(0, 1)
    x, _ = position(attributes, geometry, times)
    angle = (x / WIDTH).clamp(0.05, 0.95) * (math.pi / 2)
    return (torch.stack([mono * torch.cos(angle), mono * torch.sin(angle)]) * fade).float()


def make_clip(attributes: dict[str, str], seed: int, sample_rate: int = SAMPLE_RATE) -> tuple[Tensor, Tensor]:
    """A whole clip with these attributes: frames uint8 [125, 64, 112, 3] and waveform fp32 [2, S]."""
    generator = torch.Generator().manual_seed(seed)
    geometry = sample_geometry(attributes, generator)
    return render(attributes, geometry), sound(attributes, geometry, generator, sample_rate)
