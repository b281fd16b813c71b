"""Which implementation the ops run: "reference" (plain PyTorch) or "triton". Chosen once, when a model is built.

The choice is a property of the process, not of a call: it is made before the first op runs and never changes by itself. An
op without the chosen implementation, or tensors that it cannot take, raise; nothing falls back silently.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

IMPLEMENTATIONS = ("reference", "triton")

_state = {"chosen": "reference"}


def choose(name: str) -> None:
    """Makes every op of this process use `name`. Raises ValueError on an unknown name, ImportError without Triton."""
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"kernel implementation {name!r} is unknown. Use one of {', '.join(IMPLEMENTATIONS)}.")
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise ImportError("kernel implementation 'triton' needs the package triton (pip install triton), or choose 'reference'.")
    _state["chosen"] = name


def chosen() -> str:
    """Name of the implementation in use."""
    return _state["chosen"]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Runs a block with another choice and restores it: for tests and benchmarks that compare the two."""
    before = chosen()
    choose(name)
    try:
        yield
    finally:
        _state["chosen"] = before
