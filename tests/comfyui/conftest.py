"""One real ComfyUI a test module, with the pack in its custom_nodes; see obtain.py for where it comes from."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # obtain, server, graphs

from obtain import Installation, obtain  # noqa: E402
from server import Server  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder runs a ComfyUI."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("comfyui")


@pytest.fixture(scope="session")
def installation() -> Installation:
    """The ComfyUI to test with; that there is none is an error, not a skip."""
    return obtain()


@pytest.fixture(scope="module")
def server(installation: Installation, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    """A running server for the tests of one module; the module may name more ARGUMENTS. Faults are read from faults.json in its folder."""
    base = tmp_path_factory.mktemp("comfyui")
    started = Server(installation, base, *getattr(request.module, "ARGUMENTS", ()), MAGI2_TEST_FAULTS=str(base / "faults.json"))
    helpers = started.base / "custom_nodes" / "magi2_test_helpers"
    helpers.mkdir()
    (helpers / "__init__.py").write_text((HERE / "helper_nodes.py").read_text(encoding="utf-8"), encoding="utf-8")
    started.start()
    try:
        yield started
    finally:
        started.stop()
        left = started.wait_gone(started.processes, 10)
        for pid in left:
            import os
            import signal

            os.kill(pid, signal.SIGKILL)
        assert not left, f"processes outlived ComfyUI: {left}"
