"""Where the Triton tests run: on the GPU when there is one, else on the CPU in Triton's interpreter."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when a kernel is defined, so before any kernel.py is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def triton_device(request: pytest.FixtureRequest) -> str:
    """Device string for the tensors of a Triton test; tests marked `gpu` are skipped without one."""
    pytest.importorskip("triton", reason="Triton has no wheel for this system")
    if torch.cuda.is_available():
        return "cuda"
    if request.node.get_closest_marker("gpu"):
        pytest.skip("needs a GPU")
    return "cpu"
