"""A tiny checkpoint, a short runtime directory and fleets of CPU workers; faults are armed through the file that the workers read."""

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from magi2_core.backend import runtime
from magi2_core.backend.client import BackendClient, BackendSpec
from magi2_core.checkpoint.tiny import TinySizes, make_tiny
from magi2_core.request import Conditioning, Latents, RefineRequest, SampleRequest

TEXT_SIZE = 64


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of the smallest sizes that 1, 2 and 4 ranks can share."""
    sizes = TinySizes(text_size=TEXT_SIZE, wan_size=4, audio_size=4)
    return make_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint", sizes=sizes)


@pytest.fixture(scope="session")
def conditioning() -> Conditioning:
    """Random text features: no text encoder is needed."""
    generator = torch.Generator().manual_seed(3)
    text, negative = (torch.randn(1, length, TEXT_SIZE, generator=generator).to(torch.bfloat16) for length in (9, 4))
    return Conditioning(text=text, negative=negative, prompt="a test", prompt_hash="0" * 16)


@pytest.fixture(scope="session")
def sample(conditioning: Conditioning) -> Callable[..., SampleRequest]:
    """Makes the smallest sampling request; arguments replace fields."""

    def make(**changes: object) -> SampleRequest:
        base = {"conditioning": conditioning, "width": 32, "height": 32, "seconds": 2.0, "experimental_seconds": True}
        return SampleRequest(**{**base, "num_inference_steps": 4, "deterministic": True, **changes})

    return make


@pytest.fixture(scope="session")
def refine(conditioning: Conditioning) -> Callable[[Latents], RefineRequest]:
    """Makes a refiner request for latents."""
    return lambda latents: RefineRequest(conditioning=conditioning, latents=latents, width=48, height=48, num_inference_steps=3)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Two workers on two cores: one thread each, whatever the test process uses."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A runtime directory with a short name: a socket's name has 100 bytes at most."""
    path = Path(tempfile.mkdtemp(prefix="m2-", dir="/tmp" if Path("/tmp").is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Faults:
    """The file of faults: `arm` replaces what is due."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def arm(self, kind: str, rank: int, stage: str, step: int = 0) -> None:
        """The rank meets the fault once, at the first boundary of the stage with that many finished steps."""
        self.file.write_text(json.dumps([{"kind": kind, "rank": rank, "stage": stage, "step": step, "tag": uuid.uuid4().hex}]))

    def has_fired(self) -> bool:
        """Whether some rank has met it."""
        tag = json.loads(self.file.read_text())[0]["tag"]
        return any(tag in path.name for path in self.file.parent.glob(f"{self.file.name}.fired.*"))


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """Lets the fleets of this module meet faults."""
    made = Faults(tmp_path_factory.mktemp("faults") / "faults.json")
    made.file.write_text("[]")
    os.environ["MAGI2_TEST_FAULTS"] = str(made.file)
    yield made
    del os.environ["MAGI2_TEST_FAULTS"]


@pytest.fixture(scope="module")
def fleet(tiny: Path, folder: Path, faults: Faults) -> Iterator[BackendClient]:
    """Two CPU workers, warm for the whole module."""
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu", "cpu"), step_seconds=3), folder)
    yield client
    pids = all_pids(client)
    client.close()
    assert runtime.wait_gone(pids, 5), "processes survived the end of their client"
    left = [path.name for path in folder.rglob("*") if path.is_file() and path.suffix not in (".log", ".lock")]
    assert left == []


def all_pids(client: BackendClient) -> list[int]:
    """Head, workers; empty when there is no head."""
    if not client.is_connected:
        return []
    status = client.status()
    return [status["pid"], status["fleet"]["driver_pid"], *(rank["pid"] for rank in status["fleet"]["ranks"])]


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Waits until the condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


class Help:
    """Functions for the tests of this folder, which is no package."""

    pids = staticmethod(all_pids)
    wait_for = staticmethod(wait_for)


@pytest.fixture(scope="session")
def helper() -> type[Help]:
    """The functions above."""
    return Help
