"""Which implementation the ops run: "reference" (plain PyTorch) or "triton". Chosen once, when a model is built.

The choice is a property of the process, not of a call: it is made before the first op runs and never changes by itself. An
op without the chosen implementation, or tensors that it cannot take, raise; nothing falls back silently.
"""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

IMPLEMENTATIONS = ("reference", "triton")

_state = {"chosen": "reference"}
_loaded: dict[str, ModuleType] = {}
"""Modules found before: a look-up that torch.compile can follow, which an import is not."""


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


def implementation(op: str, files: Mapping[str, str]) -> ModuleType:
    """The module that runs op `op` under the current choice.

    Args:
        op: dotted name of the op's package (its `__name__`).
        files: implementation name -> module inside the package, e.g. {"reference": "reference", "triton": "kernel"}.

    Raises RuntimeError when the op lacks the chosen implementation.
    """
    file = files.get(chosen())
    if file is None:
        raise RuntimeError(
            f"{op} has no {chosen()!r} implementation, only {', '.join(files)}: choose one of these when the model is built."
        )
    name = f"{op}.{file}"
    module = _loaded.get(name)
    if module is None:
        module = _loaded[name] = importlib.import_module(name)
    return module
