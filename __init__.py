"""ComfyUI entry of ComfyUI-MAGI2: registers the pack's two import names; ComfyUI itself is imported only when it asks for the nodes."""

import importlib.util
from pathlib import Path
from typing import Any

_spec = importlib.util.spec_from_file_location("magi2_packages", Path(__file__).resolve().parent / "magi2_core" / "packages.py")
assert _spec is not None and _spec.loader is not None
_packages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_packages)
_packages.register()

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """The pack's extension; registers its folders and routes."""
    from .nodes.extension import make_extension

    return make_extension()
