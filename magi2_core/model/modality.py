"""Modality ids: which block of a per-modality weight a token uses (spec preview.md 2.1, 3.1).

Patches of a reference image are VIDEO tokens; the special token in front of an image and padding are TEXT tokens.
"""

VIDEO = 0
AUDIO = 1
TEXT = 2
NUM_MODALITIES = 3
