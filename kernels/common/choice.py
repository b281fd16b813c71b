"""Which implementation the ops run: "reference" (plain PyTorch) or "triton". Chosen once, when a model is built.

The choice is a property of the process, not of a call: it is made before the first op runs and never changes by itself. An
op without the chosen implementation, or tensors that it cannot take, raise; nothing falls back silently.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType


class Choice:
    """One name out of `names` that holds for the process; `check` may refuse a name that cannot be used here."""

    def __init__(self, what: str, names: Sequence[str], check: Callable[[str], None] | None = None) -> None:
        self._what = what
        self._names = tuple(names)
        self._check = check
        self._chosen = "reference"

    def choose(self, name: str) -> None:
        """Makes `name` the choice of this process. Raises ValueError on an unknown one, and what `check` raises."""
        if name not in self._names:
            raise ValueError(f"{self._what} {name!r} is unknown. Use one of {', '.join(self._names)}.")
        if self._check is not None:
            self._check(name)
        self._chosen = name

    def chosen(self) -> str:
        """The name in use, "reference" until one was chosen."""
        return self._chosen

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Runs a block with another choice and restores the one before."""
        before = self._chosen
        self.choose(name)
        try:
            yield
        finally:
            self._chosen = before


IMPLEMENTATIONS = ("reference", "triton")


def _check_package(name: str) -> None:
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise ImportError("kernel implementation 'triton' needs the package triton (pip install triton), or choose 'reference'.")


_choice = Choice("kernel implementation", IMPLEMENTATIONS, _check_package)
choose, chosen, using = _choice.choose, _choice.chosen, _choice.using
"""Which implementation every op of this process runs."""

_loaded: dict[str, ModuleType] = {}
"""Modules found before: a look-up that torch.compile can follow, which an import is not."""


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
