"""What the ComfyUI registry and its Manager read: metadata, dependencies, ignored files, and the published security check."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = [
    line.strip()
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
]
HOST_PACKAGES = {"torch", "torchvision", "torchaudio", "numpy", "transformers", "triton", "flash-attn"}


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~ \[;]", requirement, maxsplit=1)[0].lower()


def test_requirements_are_the_project_dependencies() -> None:
    assert REQUIREMENTS == PROJECT["project"]["dependencies"] == ["einops", "safetensors", "soundfile", "av", "Pillow"]


def test_requirements_cannot_replace_what_the_host_has() -> None:
    assert not HOST_PACKAGES & {_name(item) for item in REQUIREMENTS}
    assert not [item for item in REQUIREMENTS if re.search(r"==|<|~=", item)], "an upper bound downgrades other packs' packages"


def test_extras_hold_the_heavy_packages() -> None:
    extras = {name: {_name(item) for item in items} for name, items in PROJECT["project"]["optional-dependencies"].items()}
    assert extras["standalone"] == {"torch", "transformers", "numpy"}
    assert extras["cuda"] == {"triton", "fa3-fwd"}
    assert extras["musa"] == {"torchada"}


def test_metadata_is_what_the_registry_takes() -> None:
    project, comfy = PROJECT["project"], PROJECT["tool"]["comfy"]
    assert project["name"] == "magi2" and project["license"] == {"text": "Apache-2.0"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert f'"{project["version"]}"' in (ROOT / "magi2_core" / "__init__.py").read_text(encoding="utf-8")
    assert {"PublisherId", "DisplayName", "Icon", "requires-comfyui", "includes"} <= set(comfy)
    assert comfy["DisplayName"] == "MAGI-2" and comfy["requires-comfyui"] == ">=0.3.64"


def test_comfyignore_names_existing_files_and_nothing_the_pack_needs() -> None:
    lines = [line for line in (ROOT / ".comfyignore").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    assert all((ROOT / line).exists() for line in lines)
    needed = {
        "__init__.py",
        "nodes/",
        "magi2_core/",
        "kernels/",
        "web/",
        "locales/",
        "workflows/",
        "requirements.txt",
        "LICENSE",
        "README.md",
    }
    assert not needed & set(lines) and all((ROOT / name).exists() for name in needed)


def test_security_check_of_the_registry_is_clean() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "S102,S307,E702", "--output-format", "json", str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0 and json.loads(result.stdout) == [], result.stdout or result.stderr


def test_help_pages_and_names_exist_in_every_language() -> None:
    docs = {path.name: {page.name for page in path.iterdir()} for path in (ROOT / "web" / "docs").iterdir()}
    assert len(docs) == 15 and all(pages == {"en.md", "ja.md", "zh.md"} for pages in docs.values())
    names = {path.parent.name: json.loads(path.read_text(encoding="utf-8")) for path in (ROOT / "locales").glob("*/nodeDefs.json")}
    assert set(names) == {"en", "ja", "zh"} and all(set(nodes) == set(docs) for nodes in names.values())
    for language, nodes in names.items():
        for node, texts in nodes.items():
            page = (ROOT / "web" / "docs" / node / f"{language}.md").read_text(encoding="utf-8")
            assert page.startswith(f"# {texts['display_name']}\n")
            missing = [
                name
                for name, item in texts.get("inputs", {}).items()
                if f"`{name}`" not in page or item["tooltip"].replace("|", "\\|") not in page
            ]
            assert not missing, f"{node}/{language}: the help page and nodeDefs.json differ at {missing}"
