"""The default negative prompt, and which one a request uses.

Standard library only. Facts: spec preview.md 6.2 and appendix A: a comma list of visual, sound and voice faults. The
wording is this pack's own; the released list is known by its hash alone, so that a user who pastes it gets it reported.
A checkpoint whose folder names a negative prompt of its own was trained with that one.
"""

import hashlib

RELEASED_SHA256 = "5ac0746de6c7e0388a16122d9c7e751b1cb067242218bf6f41ec1e88271cdcb9"

VISUAL_FAULTS = (
    "blown-out highlights, crushed shadows, wrong exposure, washed-out colours, muddy grey tint, out-of-focus picture, smeared detail, "
    "visible grain, block artefacts, heavy compression, low resolution, flicker, ghosting, jittering edges, burnt-in captions, "
    "watermark, logo, frame border, sketchy or unfinished drawing, ugly composition, misshapen hands, extra or fused fingers, "
    "missing limbs, doubled limbs, twisted joints, distorted face, crossed eyes, melting features, changing identity, "
    "objects passing through each other, floating objects, sudden jumps, frozen picture, motionless people, slideshow, "
    "unmotivated reverse motion, busy background, clutter"
)
SOUND_FAULTS = (
    "background noise, hiss, mains hum, crackle, clicks, clipping, distorted sound, harsh treble, boomy bass, hollow echo, "
    "too much reverb, muffled sound, thin tinny sound, telephone quality, uneven loudness, sudden silence, abrupt cuts, "
    "sound out of step with the picture, unwanted music, unwanted sirens, unwanted crowd, overlapping sounds"
)
VOICE_FAULTS = (
    "flat voice, robotic speech, synthetic voice, mumbling, slurred words, unclear pronunciation, garbled syllables, repeated words, "
    "unnatural pauses, hurried speech, dragging speech, lips not matching the words, wrong speaker, several people talking at once, "
    "changing voice, shouting without reason, off-key singing, heavy breathing noise"
)

DEFAULT_NEGATIVE_PROMPT = ", ".join((VISUAL_FAULTS, SOUND_FAULTS, VOICE_FAULTS))
"""What a request without a negative prompt uses, about 320 tokens."""


def negative_prompt_name(prompt: str) -> str:
    """What logs and metadata call a negative prompt: "released default", "pack default", "empty" or "custom"."""
    if not prompt:
        return "empty"
    if prompt == DEFAULT_NEGATIVE_PROMPT:
        return "pack default"
    return "released default" if hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest() == RELEASED_SHA256 else "custom"
