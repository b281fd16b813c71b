"""One pipeline over the embedded checkpoint for the whole folder: fp32 on the CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from magi2_core.pipeline.build import Pipeline, build_pipeline
from magi2_core.request import Conditioning, EncodeRequest

PROMPT = "a red circle moves to the right over a blue background, low hum"


@pytest.fixture(scope="session")
def nano(nano_folder: Path) -> Iterator[Pipeline]:
    pipeline = build_pipeline(nano_folder, device="cpu", dtype="float32")
    yield pipeline
    pipeline.close()


@pytest.fixture(scope="session")
def conditioning(nano: Pipeline) -> Conditioning:
    return nano.encode(EncodeRequest(prompt=PROMPT))
