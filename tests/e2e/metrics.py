"""Measures a decoded clip of the nano world: what is seen and heard in it, to be compared with what its prompt asked for.

`measure_clip` looks only at pixels and samples; `sample_prompt` and `expected_from_prompt` know the grammar of
assets/nano/generation.json. Thresholds are in pixels of the 112x64 canvas; other sizes are brought to it first.
"""

import functools
import importlib.util
import json
import math
import random
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HERE = Path(__file__).resolve().parent
NANO = HERE.parent.parent / "magi2_core" / "assets" / "nano"


def _load_world() -> Any:
    name = "magi2_e2e_world"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / "world.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


world = _load_world()

SEEN_DIFFERENCE = 0.18
"""A pixel belongs to the object when a channel differs this much from the background."""

MIN_AREA = 40
"""Pixels an object covers at least to count as visible in a frame."""

AREA_OF_UNIT = {"circle": math.pi, "square": 4 * 0.88**2, "triangle": 3 * math.sqrt(3) * 0.75**2}
"""Area of a shape of radius 1, to guess the radius from the visible area."""

BINS_HZ, HOP_SECONDS, BINS = 12.5, 0.02, 800
"""Spectrum that sounds are compared in: up to 10 kHz."""


def grammar() -> dict[str, Any]:
    """The grammar of the prompts the nano was trained on."""
    return json.loads((NANO / "generation.json").read_text(encoding="utf-8"))["grammar"]


def sample_prompt(rng: random.Random, seen: bool | None = None) -> tuple[str, dict[str, str]]:
    """Draws a prompt and the attributes it asks for; `seen` True or False keeps to trained or to held-out combinations."""
    words = grammar()
    while True:
        attributes = {name: rng.choice(values) for name, values in world.VALUES.items()}
        if seen is None or world.held_out(attributes) != seen:
            break
    pitch = rng.choice(words["pitches"][attributes["pitch"]])
    fields = {
        "s": attributes["shape"],
        "c": attributes["color"],
        "b": attributes["background"],
        "m": rng.choice(words["motions"][attributes["motion"]]),
        "a": rng.choice(words["sounds"][attributes["sound"]]).format(p=pitch),
    }
    return rng.choice(words["templates"]).format(**fields), attributes


def expected_from_prompt(prompt: str) -> dict[str, str]:
    """The attributes a prompt of the grammar asks for. Raises ValueError for any other text."""
    words = grammar()
    motions = {phrase: name for name, phrases in words["motions"].items() for phrase in phrases}
    sounds = {
        phrase.format(p=spoken): (kind, pitch)
        for kind, phrases in words["sounds"].items()
        for phrase in phrases
        for pitch, ways in words["pitches"].items()
        for spoken in ways
    }
    choices = {"s": words["shapes"], "c": words["colors"], "b": words["backgrounds"], "m": motions, "a": sounds}
    groups = {f"{{{key}}}": f"(?P<{key}>{'|'.join(sorted(map(re.escape, some), key=len, reverse=True))})" for key, some in choices.items()}
    for template in words["templates"]:
        pattern = "".join(groups.get(part, re.escape(part)) for part in re.split(r"(\{\w\})", template))
        match = re.fullmatch(pattern, prompt)
        if match:
            kind, pitch = sounds[match["a"]]
            seen = {"shape": match["s"], "color": match["c"], "background": match["b"], "motion": motions[match["m"]]}
            return {**seen, "sound": kind, "pitch": pitch}
    raise ValueError(f"not a sentence of the grammar: {prompt!r}")


def measure_clip(frames: Tensor, waveform: Tensor, sample_rate: int) -> dict[str, str | None]:
    """Names what a clip shows and sounds like.

    Args:
        frames: uint8 [T, H, W, 3], a decoded file.
        waveform: float [2, S].
        sample_rate: of the waveform, at least 22050.

    Returns shape, color, background, motion, sound and pitch; the first, second and fourth are None when no object is
    visible in half of the frames, the last two when there is silence.
    """
    kind, pitch = _measure_sound(waveform, sample_rate)
    return {**_measure_picture(frames), "sound": kind, "pitch": pitch}


def _measure_picture(frames: Tensor) -> dict[str, str | None]:
    video = frames.float() / 255
    if tuple(frames.shape[1:3]) != (world.HEIGHT, world.WIDTH):
        video = F.interpolate(video.permute(0, 3, 1, 2), size=(world.HEIGHT, world.WIDTH), mode="area").permute(0, 2, 3, 1)
    border = torch.cat([video[:, 0], video[:, -1], video[:, :, 0], video[:, :, -1]], 1).reshape(-1, 3)
    background = border.median(0).values
    difference = (video - background).abs().amax(-1)
    mask = difference > SEEN_DIFFERENCE
    area = mask.sum((1, 2)).float()
    visible = area > MIN_AREA
    measured: dict[str, str | None] = {
        "shape": None,
        "color": None,
        "background": _nearest(background, world.BACKGROUND_RGB, world.BACKGROUNDS),
    }
    measured["motion"] = None
    if visible.float().mean() < 0.5:
        return measured
    core = difference > 0.6 * difference.flatten(1).amax(1)[:, None, None]
    colour = video[core & visible[:, None, None]].median(0).values
    x = (mask.sum(1) * (torch.arange(world.WIDTH) + 0.5)).sum(1) / area.clamp_min(1)
    y = (mask.sum(2) * (torch.arange(world.HEIGHT) + 0.5)).sum(1) / area.clamp_min(1)
    measured["color"] = _nearest(colour, world.OBJECT_RGB, world.COLORS)
    measured["motion"] = _motion(x[visible], y[visible])
    measured["shape"] = _shape(mask, area, x, y, visible)
    return measured


def _nearest(colour: Tensor, palette: Tensor, names: tuple[str, ...]) -> str:
    return names[int((palette - colour).pow(2).sum(1).argmin())]


def _motion(x: Tensor, y: Tensor) -> str:
    """From the track of the visible centres: a bounce covers its range more than once, the others end away from where they began."""
    ends = min(5, len(x))
    net_x, net_y = float(x[-ends:].mean() - x[:ends].mean()), float(y[-ends:].mean() - y[:ends].mean())
    smooth = F.avg_pool1d(x[None, None], ends, 1)[0, 0]
    path, span = float(smooth.diff().abs().sum()), float(x.max() - x.min())
    if span > 35 and path > 1.6 * abs(net_x) and path > 1.5 * span:
        return "bounce"
    if max(abs(net_x), abs(net_y)) < 8:
        return "still"
    if abs(net_x) > abs(net_y):
        return "right" if net_x > 0 else "left"
    return "down" if net_y > 0 else "up"


def _shape(mask: Tensor, area: Tensor, x: Tensor, y: Tensor, visible: Tensor) -> str:
    """The shape whose outline of the same area overlaps best, summed over every 20th frame."""
    picked = [index for index in range(5, len(mask), 20) if visible[index]] or visible.nonzero()[:1, 0].tolist()
    scores = dict.fromkeys(world.SHAPES, 0.0)
    for index in picked:
        for shape in world.SHAPES:
            # a triangle's reference point is not its centroid: try a few offsets
            offsets = torch.tensor([-1.5, 0.0, 1.5, 3.0] if shape == "triangle" else [0.0])
            radius = math.sqrt(float(area[index]) / AREA_OF_UNIT[shape])
            outline = world.coverage(shape, x[index].expand(len(offsets)), y[index] + offsets, radius) > 1 / 3
            shared, joined = (outline & mask[index]).sum((1, 2)), (outline | mask[index]).sum((1, 2))
            scores[shape] += float((shared / joined.clamp_min(1)).max())
    return max(scores, key=scores.__getitem__)


def _spectrum(waveform: Tensor, sample_rate: int) -> Tensor:
    """Mean magnitude in bins of 12.5 Hz up to 10 kHz, compressed and of unit length [BINS]."""
    size, hop = round(sample_rate / BINS_HZ), round(sample_rate * HOP_SECONDS)
    bins = torch.stft(waveform.float().mean(0), size, hop, window=torch.hann_window(size), return_complex=True).abs().mean(1)[:BINS]
    return F.normalize(F.avg_pool1d(bins.sqrt()[None, None], 3, 1, 1)[0, 0], dim=0)


@functools.cache
def _sound_templates(sample_rate: int) -> dict[tuple[str, str], Tensor]:
    """Spectra of the nine sounds of a resting object."""
    still = {"shape": "circle", "color": "red", "background": "black", "motion": "still"}
    return {
        (kind, pitch): _spectrum(world.make_clip({**still, "sound": kind, "pitch": pitch}, seed=3, sample_rate=sample_rate)[1], sample_rate)
        for kind in world.SOUNDS
        for pitch in world.PITCHES
    }


def _measure_sound(waveform: Tensor, sample_rate: int) -> tuple[str | None, str | None]:
    if float(waveform.float().pow(2).mean().sqrt()) < 1e-3:
        return None, None
    heard = _spectrum(waveform, sample_rate)
    templates = _sound_templates(sample_rate)
    return max(templates, key=lambda name: float(heard @ templates[name][: len(heard)]))
