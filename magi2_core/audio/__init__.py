"""The audio decoder: `oobleck` (latents to waveform), `resample` (the model's 51.2 kHz to 44.1 kHz)."""
