"""Where checkpoints are found, by which names, and a ComfyUI in which the heavy packages are missing."""

import shutil
from pathlib import Path

import graphs
import pytest
from obtain import Installation
from server import Server

from magi2_core.checkpoint import catalog

HERE = Path(__file__).resolve().parent
HEAVY = ("triton", "torchada", "transformers", "av", "soundfile", "einops", "tokenizers", "PIL")

BLOCK = f"""
# As if the packages were not installed, for the pack alone: ComfyUI itself cannot start without some of them.
import builtins, importlib, sys
HEAVY = {HEAVY!r}
def is_ours(level=2):
    name = sys._getframe(level).f_globals.get("__name__", "")
    return name.startswith(("magi2_core", "magi2_kernels")) or "ComfyUI-MAGI2" in name
plain, by_name = builtins.__import__, importlib.import_module
def guarded(name, *rest, **options):
    if name.partition(".")[0] in HEAVY and is_ours():
        raise ImportError("No module named " + repr(name))
    return plain(name, *rest, **options)
def guarded_by_name(name, *rest):
    if name.partition(".")[0] in HEAVY and is_ours():
        raise ImportError("No module named " + repr(name))
    return by_name(name, *rest)
builtins.__import__, importlib.import_module = guarded, guarded_by_name
"""

WITHOUT_TRANSFORMERS = """#!/bin/sh
PYTHONPATH={folder} exec {python} "$@"
"""


@pytest.fixture(scope="module")
def bare(installation: Installation, tmp_path_factory: pytest.TempPathFactory):
    """A server whose pack finds no heavy package, whose workers find no transformers, with previews off and a yaml model folder."""
    base = tmp_path_factory.mktemp("bare")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for folder in (elsewhere / "group" / "tiny", base / "models" / "magi2" / "tiny"):
        shutil.copytree(catalog.EMBEDDED, folder)
    (base / "paths.yaml").write_text(f"other:\n  base_path: {elsewhere}\n  magi2: .\n")
    blocker = base / "custom_nodes" / "aa_block"
    blocker.mkdir(parents=True)
    (blocker / "__init__.py").write_text("NODE_CLASS_MAPPINGS = {}\n")
    (blocker / "prestartup_script.py").write_text(BLOCK)
    hidden = base / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.modules['transformers'] = None\n")
    python = base / "python-without-transformers"
    python.write_text(WITHOUT_TRANSFORMERS.format(folder=hidden, python=installation.python))
    python.chmod(0o755)
    arguments = ("--extra-model-paths-config", str(base / "paths.yaml"), "--preview-method", "none")
    started = Server(installation, base, *arguments, MAGI2_PYTHON=str(python)).start()
    yield started
    started.stop()
    assert started.wait_gone(started.processes, 10) == {}


def test_nodes_are_listed_without_heavy_packages(bare: Server) -> None:
    assert len([name for name in bare.get("/object_info") if name.startswith("Magi2")]) == 15
    assert "IMPORT FAILED" not in "".join(line for line in bare.log_tail(200).splitlines() if "MAGI2" in line)


def test_running_without_transformers_explains(bare: Server) -> None:
    run = bare.run(graphs.to_file(steps=1))
    assert run.status == "error" and run.error["node_id"] == "2"
    text = run.error["exception_message"]
    assert "transformers" in text and "5.5" in text and "pip install" in text


def test_writing_without_av_explains(bare: Server) -> None:
    graph = {
        "1": {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 64, "batch_size": 2, "color": 255}},
        "2": {"class_type": "EmptyAudio", "inputs": {"duration": 1.0, "sample_rate": 44100, "channels": 2}},
        "3": {"class_type": "Magi2AudioMux", "inputs": {"audio": ["2", 0], "images": ["1", 0], "fps": 12.5}},
        "4": {"class_type": "SaveVideo", "inputs": {"video": ["3", 0], "filename_prefix": "video/x", "format": "auto", "codec": "auto"}},
    }
    run = bare.run(graph)
    assert run.status == "error" and run.error["node_id"] == "3" and "pip install" in run.error["exception_message"]


def test_checkpoints_of_yaml_and_models_folder_are_listed(bare: Server) -> None:
    names = bare.get("/object_info/Magi2LoadModel")["Magi2LoadModel"]["input"]["required"]["checkpoint"][1]["options"]
    assert (names[0] == "nano" and {"tiny", "group/tiny"} <= set(names)) or {"tiny", "magi2/tiny"} <= set(names), names


def test_windows_style_name_is_found(bare: Server) -> None:
    names = bare.get("/object_info/Magi2LoadModel")["Magi2LoadModel"]["input"]["required"]["checkpoint"][1]["options"]
    nested = next(name for name in names if "/" in name)
    run = bare.run(graphs.to_file(steps=1, checkpoint=nested.replace("/", "\\")))
    assert run.error["node_id"] == "2"  # the loader took it; the text encoder has no transformers here
