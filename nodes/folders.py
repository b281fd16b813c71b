"""Where the nodes look for checkpoints and latent files, and where they write: through the host's folder settings only."""

import contextlib
import logging
import os
import re
import shutil
from pathlib import Path

import folder_paths

import magi2_core
from magi2_core.checkpoint import catalog
from magi2_core.errors import RequestError

KEY = "magi2"
"""Folder under models/ and key in extra_model_paths.yaml."""

EXAMPLE = "green_square.png"
"""First frame of the image-to-video template; a template's Load Image finds files of the input folder only."""

log = logging.getLogger("magi2.nodes")

LATENT_SUFFIX = ".safetensors"
LATENT_DEPTH = 2
_LISTED = re.compile(r"(.*?)(?: \[(output|input)\])?", re.DOTALL)
"""A name of `latent_names`; brackets may also stand in the file's own name."""


def register() -> None:
    """Adds models/magi2 to the host's folders; folders of that key from a yaml file stay."""
    folder_paths.add_model_folder_path(KEY, os.path.join(folder_paths.models_dir, KEY))


def offer_example() -> None:
    """Puts the template's picture into the input folder, unless a file of that name is there. A folder that refuses it is only logged."""
    target = Path(folder_paths.get_input_directory()) / EXAMPLE
    if target.exists():
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(magi2_core.__file__).parent / "assets" / EXAMPLE, target)
    except OSError as error:
        log.warning("the example picture %s could not be copied to %s: %s", EXAMPLE, target.parent, error)


def checkpoints() -> tuple[catalog.Checkpoint, ...]:
    """Every checkpoint in the host's folders for the pack, and the embedded one."""
    return catalog.find_checkpoints(folder_paths.get_folder_paths(KEY))


def checkpoint_names() -> list[str]:
    """Names for the widget: the embedded checkpoint first, so that a new node runs as it stands."""
    found = checkpoints()
    return [item.name for item in sorted(found, key=lambda item: not item.is_embedded)] or [catalog.EMBEDDED_NAME]


def get_checkpoint(name: str) -> catalog.Checkpoint:
    """The checkpoint called `name`; a workflow saved on Windows may have backslashes in it. Raises CheckpointError."""
    name = name.strip()
    names = {item.name for item in checkpoints()}
    chosen = next((form for form in (name, name.replace("\\", "/")) if form in names), name)
    return catalog.get_checkpoint(chosen, folder_paths.get_folder_paths(KEY))


def _roots() -> dict[str, Path]:
    return {"output": Path(folder_paths.get_output_directory()), "input": Path(folder_paths.get_input_directory())}


def latent_names() -> list[str]:
    """Latent files in the output and input folders, newest first, as "folder/name [output]"."""
    found: list[tuple[float, str]] = []
    for kind, root in _roots().items():
        for folder, folders, files in os.walk(root):
            depth = len(Path(folder).relative_to(root).parts)
            folders[:] = [] if depth >= LATENT_DEPTH else [name for name in folders if not name.startswith(".")]
            for name in files:
                path = Path(folder, name)
                if name.endswith(LATENT_SUFFIX) and os.path.isfile(path):  # a link may lead nowhere, and hides no node
                    with contextlib.suppress(OSError):  # it may go in this moment
                        found.append((path.stat().st_mtime, f"{path.relative_to(root).as_posix()} [{kind}]"))
    return [name for _, name in sorted(found, reverse=True)]


def latent_path(name: str) -> Path:
    """The file of a name from `latent_names`, a path below the input folder without the bracket. Raises RequestError."""
    for form in dict.fromkeys((name, name.strip(), name.strip().replace("\\", "/"))):
        listed = _LISTED.fullmatch(form)
        assert listed is not None
        root = _roots()[listed[2] or "input"]
        try:
            path = (root / listed[1]).resolve()
            is_inside = path.is_relative_to(root.resolve())
        except (OSError, RuntimeError, ValueError):  # a link to itself, a name that no file can have
            continue
        if not is_inside:
            raise RequestError(f"latent file {name!r}: must lie in ComfyUI's input or output folder.")
        if os.path.isfile(path):
            return path
    raise RequestError(f"latent file {name!r} does not exist. Press R to read the folders again and choose one that is listed.")


def next_output(prefix: str, suffix: str) -> tuple[Path, str]:
    """The next free file of `prefix` in the output folder, and its subfolder as the host names it. Raises RequestError, also for a path
    outside, which the host refuses with a plain Exception."""
    try:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory())
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].strip("* ")
        raise RequestError(
            f"filename_prefix {prefix!r} cannot be used ({reason}). Give a folder and a name below the output folder."
        ) from error
    return Path(folder) / f"{name}_{counter:05}_{suffix}", subfolder


def temporary_file(name: str) -> Path:
    """A path in the host's temporary folder, which it empties when it starts and stops."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name
