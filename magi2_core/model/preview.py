"""The preview transformer: packed video, audio and text tokens in, flow velocities out (spec preview.md 3).

The modules are named as in the checkpoint. Three callables are seams that a parallel run replaces and this file knows nothing
of: `split` here, `core` in attention.py, `dispatcher` in moe.py. See README.md for the picture.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from magi2_core.config import PreviewConfig

from .adapters import PostAdapter, PreAdapter
from .block import PreviewBlock, PreviewLayer
from .hyper_connection import HyperState, join_streams, split_streams
from .packing import PackedInputs


class TokenSplit(Protocol):
    """Which rows of the packed sequence are computed here. `multiple`: the packed length must be one of it."""

    multiple: int

    def take(self, inputs: PackedInputs) -> PackedInputs: ...

    def gather(self, velocities: Tensor) -> Tensor: ...


class WholeSequence:
    """All rows are here."""

    multiple = 1

    def take(self, inputs: PackedInputs) -> PackedInputs:
        return inputs

    def gather(self, velocities: Tensor) -> Tensor:
        return velocities


class PreviewTransformer(nn.Module):
    """The 114-billion-parameter denoiser (with the released configuration).

    `dtype` is the type of the matrices and of the streams: bfloat16 as released, or float32. Embeddings, norms, router,
    sinks, hyper-connection weights and heads are float32 in both.
    """

    split: TokenSplit

    def __init__(self, config: PreviewConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        config.check()
        self.config, self.dtype = config, dtype
        self.pre_adapter = PreAdapter(config)
        self.block = PreviewBlock(config, dtype)
        self.post_adapter = PostAdapter(config)
        self.split = WholeSequence()

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.pre_adapter.rope.bands.device

    def finish_loading(self) -> "PreviewTransformer":
        """Call once when all weights are in and the kernels are chosen: checks what a forward relies on, freezes the weights,
        prepares the forms of them that the kernels read."""
        missing = [name for name, tensor in self.state_dict().items() if tensor.is_meta]
        if missing:
            raise RuntimeError(
                f"{len(missing)} weights are not loaded, the first is {missing[0]}: load every tensor of the checkpoint first."
            )
        self.requires_grad_(False).eval()
        for layer in self.block.layers:
            assert isinstance(layer, PreviewLayer)
            layer.prepare(self.dtype)
        return self

    def _embedded(self, inputs: PackedInputs) -> Tensor:
        return split_streams(self.pre_adapter(inputs.pieces, inputs.total, self.dtype), self.config.num_streams)

    def forward(self, inputs: PackedInputs) -> Tensor:
        """One evaluation of all rows.

        Args:
            inputs: tokens and context of the whole packed sequence.

        Returns:
            fp32 [S, 64]: velocities of video rows in columns 0..47, of audio rows in 0..63, zeros elsewhere.
        """
        local = self.split.take(inputs)
        # No names for what is done with: the streams are the largest tensors of a step, and a name would keep them to the end.
        streams = self.block(HyperState(self._embedded(local)), local.context)
        return self.split.gather(self.post_adapter(join_streams(streams), local.context.segments))
