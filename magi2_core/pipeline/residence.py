"""A component that is loaded when first used and is on its device only while it should be: resident, roundtrip or cpu."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from magi2_core.device import empty_cache

CPU = torch.device("cpu")


class Residence:
    """One component.

    Args:
        name: component name, for messages.
        load: makes the loaded module on the device it is given.
        mode: a mode of `placement.MODES`.
        device: where it computes, unless the mode is "cpu".
    """

    def __init__(self, name: str, load: Callable[[torch.device], Any], mode: str, device: torch.device) -> None:
        self.name = name
        self.mode = mode
        self.device = CPU if mode == "cpu" else device
        self._load = load
        self._loaded: Any = None

    @property
    def is_loaded(self) -> bool:
        """Whether its weights are in memory, on any device."""
        return self._loaded is not None

    @contextmanager
    def use(self) -> Iterator[Any]:
        """The loaded component on its device; a roundtrip one leaves the device afterwards."""
        if self._loaded is None:
            self._loaded = self._load(CPU if self.mode == "roundtrip" else self.device)
        if self.mode != "roundtrip" or self.device == CPU:
            yield self._loaded
            return
        homes = _tensors(self._loaded)
        try:
            for table, name, home in homes:
                table[name] = _placed(home, self.device)
            yield self._loaded
        finally:
            for table, name, home in homes:
                table[name] = home
            empty_cache(self.device)

    def close(self) -> None:
        """Drops the weights; the next use loads again."""
        self._loaded = None
        empty_cache(self.device)


def _tensors(component: Any) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Every parameter and buffer with the table that holds it, of a module or of the modules among a plain object's attributes."""
    roots = (
        [component] if isinstance(component, nn.Module) else [value for value in vars(component).values() if isinstance(value, nn.Module)]
    )
    modules = [module for root in roots for module in root.modules()]
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    return [(table, name, tensor) for table in tables for name, tensor in table.items() if tensor is not None]


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    return nn.Parameter(moved, requires_grad=False) if isinstance(tensor, nn.Parameter) else moved
