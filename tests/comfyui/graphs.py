"""API graphs the tests queue. Small: the nano checkpoint, a few steps, its own size or less."""

from typing import Any

PROMPT = "a red circle moves to the right over a blue background, low hum"
UNRELATED = {
    "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 1, "color": 255}},
    "2": {"class_type": "PreviewImage", "inputs": {"images": ["1", 0]}},
}


def sampling(*, steps: int = 2, seed: int = 1, checkpoint: str = "nano", prompt: str = PROMPT, **options: Any) -> dict[str, Any]:
    """Load Model 1, Text Encode 2, Sampling Options 3, Sampler 4. `options` go to Sampling Options; a small size by default, width=height=0 is nano's own."""
    settings = {"shift": 0.0, "deterministic": False, "noise": "cpu", "preview_every": 1, "width": 64, "height": 48, "stop_after": 0}
    return {
        "1": {"class_type": "Magi2LoadModel", "inputs": {"checkpoint": checkpoint}},
        "2": {"class_type": "Magi2TextEncode", "inputs": {"model": ["1", 0], "prompt": prompt, "negative_prompt": ""}},
        "3": {"class_type": "Magi2SamplingOptions", "inputs": {**settings, **options}},
        "4": {
            "class_type": "Magi2Sampler",
            "inputs": {
                "model": ["1", 0],
                "conditioning": ["2", 0],
                "size": "checkpoint default",
                "orientation": "checkpoint default",
                "seed": seed,
                "steps": steps,
                "video_guidance": 0.0,
                "audio_guidance": 0.0,
                "options": ["3", 0],
            },
        },
    }


def to_video(**options: Any) -> dict[str, Any]:
    """`sampling`, then Decode To Video 5 and Save Video 6."""
    return {
        **sampling(**options),
        "5": {"class_type": "Magi2DecodeToVideo", "inputs": {"model": ["1", 0], "latent": ["4", 0], "decoder": "turbo"}},
        "6": {
            "class_type": "SaveVideo",
            "inputs": {"video": ["5", 0], "filename_prefix": "video/clip", "format": "auto", "codec": "auto"},
        },
    }


def to_digest(**options: Any) -> dict[str, Any]:
    """`sampling`, then VAE Decode 5 and a test node 6 that tells shapes and hashes."""
    return {
        **sampling(**options),
        "5": {"class_type": "Magi2VAEDecode", "inputs": {"model": ["1", 0], "latent": ["4", 0], "decoder": "turbo"}},
        "6": {"class_type": "TestDigest", "inputs": {"image": ["5", 0], "audio": ["5", 1], "number": ["5", 2]}},
    }


def to_file(**options: Any) -> dict[str, Any]:
    """`sampling`, then Save Latent 5."""
    return {**sampling(**options), "5": {"class_type": "Magi2SaveLatent", "inputs": {"latent": ["4", 0], "filename_prefix": "magi2/kept"}}}
