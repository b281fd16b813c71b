"""The core of ComfyUI-MAGI2: model, sampling, decoding, checkpoints, backend. Never imports ComfyUI; imports nothing here."""

__version__ = "0.1.0"
