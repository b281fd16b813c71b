"""Loading on first use, and moving between host and device without losing or copying back the host weights."""

import pytest
import torch
from torch import nn

from magi2_core.pipeline import residence
from magi2_core.pipeline.residence import Residence

META = torch.device("meta")
"""Stands in for an accelerator: a tensor there is really elsewhere, and its data is lost."""


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residence, "empty_cache", lambda device: None)


def make(device: torch.device) -> nn.Module:
    return nn.Linear(3, 2).to(device)


def test_use_loads_once() -> None:
    calls: list[torch.device] = []

    def load(device: torch.device) -> nn.Module:
        calls.append(device)
        return make(device)

    home = Residence("turbo", load, "cpu", META)
    assert not home.is_loaded
    with home.use() as first, home.use() as second:
        assert first is second
    assert calls == [torch.device("cpu")] and home.is_loaded
    home.close()
    assert not home.is_loaded


def test_use_roundtrip_returns_the_host_weights() -> None:
    home = Residence("refiner", make, "roundtrip", META)
    with home.use() as module:
        assert {p.device for p in module.parameters()} == {META}
    kept = [p.clone() for p in module.parameters()]
    assert all(p.device.type == "cpu" for p in module.parameters())
    with pytest.raises(RuntimeError, match="stop"), home.use():
        raise RuntimeError("stop")
    assert all(torch.equal(p, before) for p, before in zip(module.parameters(), kept, strict=True))


def test_use_resident_loads_on_the_device() -> None:
    with Residence("preview", make, "resident", META).use() as module:
        assert {p.device for p in module.parameters()} == {META}
    assert {p.device for p in module.parameters()} == {META}
