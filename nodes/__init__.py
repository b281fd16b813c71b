"""The ComfyUI nodes: the only folder that imports ComfyUI. One line a node class; the entry point takes the list from here."""

from typing import Any


def node_classes() -> list[Any]:
    """Every node class, in the order of the menu. A node is added by its class and one line here."""
    from . import decoding, latents, loader, sampling, text, upkeep

    return [
        loader.LoadModel,
        loader.LoaderOptions,
        text.TextEncode,
        text.PromptEnhance,
        sampling.Sampler,
        sampling.SamplingOptions,
        sampling.Refiner,
        decoding.VAEDecode,
        decoding.DecodeToVideo,
        decoding.AudioMux,
        latents.SaveLatent,
        latents.LoadLatent,
        latents.SplitLatent,
        upkeep.Unload,
        upkeep.Status,
    ]
