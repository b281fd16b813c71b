"""Every module imports without the optional packages, and the part that needs one says which; one bare process for each question."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OPTIONAL = ("triton", "torchada", "transformers", "av", "soundfile")

PREAMBLE = f"""
import importlib, importlib.util, json, sys, traceback
from pathlib import Path
ROOT = Path({str(ROOT)!r})

def block(*names):
    # What Python itself does for a module that must not be imported; find_spec then answers None.
    for name in names: sys.modules[name] = None

def register():
    spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
    packages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(packages)
    packages.register()

def modules():
    for top, name in (("magi2_core", "magi2_core"), ("kernels", "magi2_kernels")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if path.match("kernel*.py") or parts == ("__main__",):
                continue
            yield ".".join([name, *(part for part in parts if part != "__init__")])
"""


def run_bare(body: str) -> dict:
    """Runs `body` after PREAMBLE in a new process that cannot see the pack on sys.path; returns the JSON it prints last."""
    result = subprocess.run([sys.executable, "-I", "-c", PREAMBLE + body], capture_output=True, text=True, cwd=ROOT.anchor, timeout=300)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_every_module_without_optional_packages() -> None:
    report = run_bare(f"""
block(*{OPTIONAL!r})
register()
failed, count = {{}}, 0
for name in modules():
    count += 1
    try:
        importlib.import_module(name)
    except BaseException:
        failed[name] = traceback.format_exc(limit=-1)
print(json.dumps({{"failed": failed, "count": count, "loaded": [name for name in {OPTIONAL!r} if sys.modules[name] is not None]}}))
""")
    assert report["failed"] == {}
    assert report["loaded"] == []
    assert report["count"] > 20


def test_import_leaves_without_torch() -> None:
    # The leaves that a process without torch reads: the names, the errors, the sizes, the catalog and the command line's help.
    report = run_bare(f"""
block("torch", "numpy", "safetensors", *{OPTIONAL!r})
register()
for name in ("errors", "env", "config", "shapes", "device", "checkpoint.catalog", "cli"):
    importlib.import_module("magi2_core." + name)
text = importlib.import_module("magi2_core.cli").build_parser().format_help()
print(json.dumps({{"help": text}}))
""")
    assert "generate" in report["help"] and "doctor" in report["help"]


def test_import_as_comfyui_loads_no_model_code() -> None:
    # ComfyUI imports the pack by its path; what the nodes may import then must not bring model code or heavy packages.
    report = run_bare("""
spec = importlib.util.spec_from_file_location(str(ROOT), ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
pack = importlib.util.module_from_spec(spec)
sys.modules[str(ROOT)] = pack
spec.loader.exec_module(pack)
for name in ("request", "config", "errors", "env", "text.enhance", "text.caption", "checkpoint.catalog"):
    importlib.import_module("magi2_core." + name)
for path in (ROOT / "magi2_core" / "media").glob("*.py"):
    importlib.import_module("magi2_core.media" if path.stem == "__init__" else "magi2_core.media." + path.stem)
heavy = ("triton", "transformers", "torchada", "av", "soundfile", "magi2_core.model", "magi2_core.pipeline", "magi2_kernels.swiglu")
print(json.dumps({"loaded": [name for name in heavy if name in sys.modules], "path": str(ROOT) in sys.path}))
""")
    # torch itself imports triton where it is installed: that is not ours to forbid.
    assert [name for name in report["loaded"] if name != "triton"] == []
    assert report["path"] is False


@pytest.fixture(scope="module")
def missing_messages(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What each part says when its package is blocked: part -> [error type, message]."""
    folder = tmp_path_factory.mktemp("missing")
    return run_bare(f"""
block(*{OPTIONAL!r})
register()
import torch
from magi2_core import device
from magi2_core.errors import DependencyError
folder = Path({str(folder)!r})
parts = {{}}
def part(name, call):
    try:
        call()
        parts[name] = ["nothing", ""]
    except BaseException as error:
        parts[name] = [type(error).__name__, str(error)]

def video():
    from magi2_core.media import mux
    mux.write_video(folder / "x.mp4", torch.zeros(2, 16, 16, 3, dtype=torch.uint8), 12.5, None)

def sound():
    from magi2_core.media import mux
    mux.write_wav(folder / "x.wav", torch.zeros(2, 441), 44100)

def text():
    from magi2_core.pipeline.build import build_pipeline
    from magi2_core.request import EncodeRequest
    build_pipeline(ROOT / "magi2_core" / "assets" / "nano", device="cpu").encode(EncodeRequest(prompt="a red circle"))

def triton():
    from magi2_core.pipeline.build import build_pipeline
    build_pipeline(ROOT / "magi2_core" / "assets" / "nano", device="cpu", kernels="triton")

def musa():
    device.is_musa = lambda: True
    device.prepare_platform()

for name, call in (("av", video), ("soundfile", sound), ("transformers", text), ("triton", triton), ("torchada", musa)):
    part(name, call)
print(json.dumps(parts))
""")


@pytest.mark.parametrize("package", OPTIONAL)
def test_use_without_the_package_names_it(missing_messages: dict, package: str) -> None:
    kind, message = missing_messages[package]
    assert kind == "DependencyError", message
    assert package in message and "pip install" in message


def test_use_without_transformers_names_the_version(missing_messages: dict) -> None:
    assert "5.5" in missing_messages["transformers"][1]
