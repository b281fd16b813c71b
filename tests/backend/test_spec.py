"""The specification of a fleet, the environment of its processes, and the plan of its devices."""

from dataclasses import replace
from pathlib import Path

import pytest

from magi2_core import env
from magi2_core.backend import fleet, launcher
from magi2_core.backend.spec import BackendSpec
from magi2_core.errors import CheckpointError, RequestError

SPEC = BackendSpec(checkpoint="/models/x", devices=("cuda:0", "cuda:2"), layout="cp2", idle_minutes=5)


def test_spec_round_trip_and_key() -> None:
    assert BackendSpec.from_json(SPEC.to_json()) == SPEC
    assert SPEC.key == replace(SPEC, mode="keep", idle_minutes=0, step_seconds=1, address="unix:/x").key
    keys = {replace(SPEC, **change).key for change in ({}, {"devices": "auto"}, {"layout": "cp1"}, {"dtype": "float32"}, {"vae": "cpu"})}
    assert len(keys) == 5
    with pytest.raises(RequestError, match="'shell' is unknown"):
        BackendSpec.from_json('{"checkpoint": "x", "shell": "y"}')


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint": ""}, "checkpoint"),
        ({"mode": "always"}, "auto, keep, attach"),
        ({"mode": "attach"}, "serve"),
        ({"devices": ()}, "cuda:0,cuda:1"),
        ({"devices": "cuda:0"}, "cuda:0,cuda:1"),
        ({"devices": ("cpu",) * 65}, "at most 64"),
        ({"layout": ""}, "cp8ep4"),
        ({"dtype": "fp8"}, "bfloat16"),
        ({"vae": "disk"}, "roundtrip"),
        ({"idle_minutes": -1}, "idle minutes"),
        ({"step_seconds": float("nan")}, "step seconds"),
        ({"idle_minutes": True}, "idle minutes"),
    ],
)
def test_spec_refuses(changes: dict, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        replace(SPEC, **changes).validate()


def test_child_environment_is_built_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MAGI2_API_KEY", "SOMETHING"):
        monkeypatch.setenv(name, "host")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    made = env.child_environment({"RANK": "1"})
    assert not {"PYTHONPATH", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "MAGI2_API_KEY", "SOMETHING"} & set(made)
    assert (made["RANK"], made["NCCL_NVLS_ENABLE"], made["NCCL_DEBUG"]) == ("1", "0", "INFO") and "PATH" in made


def test_device_variables_map_what_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa, 5")
    assert launcher.device_variables("cuda:1")["CUDA_VISIBLE_DEVICES"] == "5"
    assert launcher.device_variables("cuda")["CUDA_VISIBLE_DEVICES"] == "GPU-aa"
    assert launcher.device_variables("cpu")["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(RequestError, match="only 2 devices"):
        launcher.device_variables("cuda:2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.delenv("MUSA_VISIBLE_DEVICES", raising=False)
    assert launcher.device_variables("cuda:2")["CUDA_VISIBLE_DEVICES"] == "2"


def test_plan_takes_the_ranks_of_the_layout(tiny: Path) -> None:
    layout, names = fleet.plan(BackendSpec(checkpoint=str(tiny), devices=("cpu",) * 5))
    assert layout.world == 4 or layout.world < 5
    assert len(names) == 5 and layout.reason
    with pytest.raises(RequestError, match="context parallel 9"):
        fleet.plan(BackendSpec(checkpoint=str(tiny), devices=("cpu",) * 2, layout="cp9"))
    with pytest.raises(CheckpointError, match="does not exist"):
        fleet.plan(SPEC)
