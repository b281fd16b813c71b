"""Nodes the tests put into the server beside the pack: they hand the pack's nodes what no ordinary node would."""

import asyncio


class _Raising:
    """A VIDEO that raises when it is read."""

    def __init__(self, kind):
        self.kind = kind

    def get_stream_source(self):
        raise {"SystemExit": SystemExit, "CancelledError": asyncio.CancelledError, "GeneratorExit": GeneratorExit}[self.kind]("on purpose")


class RaisingVideo:
    """Makes a _Raising."""

    CATEGORY = "magi2 tests"
    RETURN_TYPES = ("VIDEO",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - the host's name
        return {"required": {"kind": (["SystemExit", "CancelledError", "GeneratorExit"],)}}

    def make(self, kind):
        return (_Raising(kind),)


class Batch:
    """A batch of pictures [count, height, width, 4] with alpha, each of its own colour."""

    CATEGORY = "magi2 tests"
    RETURN_TYPES = ("IMAGE",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - the host's name
        return {"required": {"count": ("INT", {"default": 2}), "width": ("INT", {"default": 100}), "height": ("INT", {"default": 60})}}

    def make(self, count, width, height):
        import torch

        images = torch.ones(count, height, width, 4)
        for number in range(count):
            images[number, ..., :3] = torch.tensor([0.1, 0.2 + 0.1 * number, 0.9])
        return (images,)


class Digest:
    """Text with shapes and a hash of whatever comes in."""

    CATEGORY = "magi2 tests"
    RETURN_TYPES = ()
    OUTPUT_NODE = True
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - the host's name
        return {
            "optional": {
                name: (kind,) for name, kind in (("image", "IMAGE"), ("audio", "AUDIO"), ("latent", "LATENT"), ("number", "FLOAT"))
            }
        }

    def make(self, image=None, audio=None, latent=None, number=None):
        import hashlib

        lines = []
        for name, tensor in (
            ("image", image),
            ("audio", None if audio is None else audio["waveform"]),
            ("latent", None if latent is None else latent["samples"]),
        ):
            if tensor is not None:
                digest = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
                lines.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {digest}")
        if audio is not None:
            lines.append(f"rate {audio['sample_rate']}")
        if number is not None:
            lines.append(f"number {number}")
        return {"ui": {"text": lines}}


class Name:
    """A text for a list widget that is wired."""

    CATEGORY = "magi2 tests"
    RETURN_TYPES = ("COMBO",)
    FUNCTION = "make"

    @classmethod
    def INPUT_TYPES(cls):  # noqa: N802 - the host's name
        return {"required": {"name": ("STRING", {"default": ""})}}

    def make(self, name):
        return (name,)


NODE_CLASS_MAPPINGS = {"TestName": Name, "TestRaisingVideo": RaisingVideo, "TestBatch": Batch, "TestDigest": Digest}
