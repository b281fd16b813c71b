"""Which checkpoints are there and whether they hold what a request needs: names and file existence only.

Imported inside the ComfyUI process: standard library only, no tensor file is opened. The folder layout is that of the
release (spec components.md 1.4b): one folder a component. Sizes and repository are those of the published checkpoint.
"""

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from magi2_core import env
from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError, RequestError

REPOSITORY = "sand-ai/MAGI-2-preview"
REVISION = "2dea51b64db47ee5b4402d36fd90829a0c58913b"
EMBEDDED = Path(__file__).resolve().parent.parent / "assets" / "nano"
EMBEDDED_NAME = "nano"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SEARCH_DEPTH = 2

_SHARD = re.compile(r"^model-(\d{5})-of-(\d{5})\.safetensors$")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where a component lives: `files` must all exist; `sharded` components also need safetensors weights. Bytes are the release's."""

    name: str
    folder: str
    files: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    sharded: bool = False
    released_bytes: int
    purpose: str


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout(name="preview", folder="preview", sharded=True, released_bytes=228_107_858_176, purpose="makes the clip"),
        Layout(name="refiner", folder="refiner", sharded=True, released_bytes=13_485_000_000, purpose="1080p"),
        Layout(
            name="text_encoder",
            folder="text_encoder",
            files=("config.json", "tokenizer_config.json"),
            any_of=("tokenizer.json", "vocab.json"),
            sharded=True,
            released_bytes=56_000_000_000,
            purpose="reads the prompt",
        ),
        Layout(
            name="vae",
            folder="vae",
            files=("Wan2.2_VAE.pth",),
            released_bytes=2_820_000_000,
            purpose="encodes a first picture, decodes in quality mode",
        ),
        Layout(
            name="turbo",
            folder="turbo_vae",
            files=("checkpoint.ckpt", "TurboV3-Wan22-TinyShallow_7_7.json"),
            released_bytes=2_000_000_000,
            purpose="decodes the video",
        ),
        Layout(
            name="audio",
            folder="stable-audio-open-1.0",
            files=("model_config.json", SINGLE_FILE),
            released_bytes=4_850_000_000,
            purpose="decodes the sound",
        ),
    )
}
RELEASED_BYTES = sum(layout.released_bytes for layout in LAYOUTS.values())


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder: `components` are the ones whose files all exist."""

    name: str
    path: Path
    components: tuple[str, ...]
    is_embedded: bool = False


def download_line(folder: Path | str = "MAGI-2-preview", component: str | None = None) -> str:
    """The command that fetches the release into `folder` (all of it or one component); run again, it resumes."""
    part = "" if component is None else f' --include "{LAYOUTS[component].folder}/*"'
    return f'hf download {REPOSITORY} --revision {REVISION}{part} --local-dir "{folder}"'


def layout_of(component: str) -> Layout:
    """The layout of `component`; raises RequestError naming the known ones."""
    if component not in LAYOUTS:
        raise RequestError(f"component {component!r} is unknown. Use one of {', '.join(LAYOUTS)}.")
    return LAYOUTS[component]


def weight_files(component: str, folder: Path) -> list[str]:
    """File names of the safetensors weights in `folder`, whether they exist or not: from the index, else one file, else numbered shards;
    the index itself when there is nothing.

    Raises CheckpointError on an index that is damaged, names something that is not a plain file name, or stands beside a single file.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        if (folder / SINGLE_FILE).is_file():
            raise CheckpointError(f"{component}: {folder} holds both {INDEX_FILE} and {SINGLE_FILE}. Remove the one that does not belong.")
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{component}: {index} has no weight_map. Download this file again.")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if name != os.path.basename(name) or "\\" in name or not name.endswith(".safetensors"):
                raise CheckpointError(f"{component}: {index} names the file {name!r}, expected a .safetensors file in the same folder.")
        return names
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    if not folder.is_dir():
        return [INDEX_FILE]
    totals = {int(match[2]) for entry in os.listdir(folder) if (match := _SHARD.match(entry))}
    if len(totals) > 1:
        raise CheckpointError(f"{component}: {folder} mixes shards of sets of {sorted(totals)} files. Keep one set.")
    if totals:
        total = totals.pop()
        return [f"model-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
    return [INDEX_FILE]


def missing_files(component: str, root: Path) -> list[str]:
    """Files of `component` that are absent under the checkpoint folder `root`, relative to it, in order."""
    layout = layout_of(component)
    folder = Path(root) / layout.folder
    wanted = list(layout.files) + (weight_files(component, folder) if layout.sharded else [])
    missing = [name for name in wanted if not (folder / name).is_file()]
    if layout.any_of and not any((folder / name).is_file() for name in layout.any_of):
        missing.append(layout.any_of[0])
    return [f"{layout.folder}/{name}" for name in missing]


def present_components(root: Path) -> tuple[str, ...]:
    """Components whose files all exist under `root`; one with a damaged index counts as absent (the doctor says why)."""

    def is_present(name: str) -> bool:
        try:
            return not missing_files(name, root)
        except CheckpointError:
            return False

    return tuple(name for name in LAYOUTS if is_present(name))


def is_checkpoint(folder: Path) -> bool:
    """True for a folder with weights of the preview model, the refiner or the Turbo decoder.

    The other folder names (vae, text_encoder, stable-audio-open-1.0) also occur in other models' folders and decide nothing.
    """
    for part in ("preview", "refiner"):
        try:
            entries = os.listdir(folder / part)
        except OSError:
            continue
        if any(entry in (INDEX_FILE, SINGLE_FILE) or _SHARD.match(entry) for entry in entries):
            return True
    return os.path.isfile(folder / "turbo_vae" / "checkpoint.ckpt")  # Path.is_file raises where a folder may not be entered


def _walk(root: Path, depth: int) -> Iterator[Path]:
    if is_checkpoint(root):
        yield root
        return
    if depth == 0:
        return
    try:
        children = sorted(entry.path for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return
    for child in children:
        yield from _walk(Path(child), depth - 1)


def find_checkpoints(roots: Iterable[Path | str] = ()) -> tuple[Checkpoint, ...]:
    """Every checkpoint at or up to two folders below `roots`, then below `MAGI2_MODELS`, then the embedded one.

    Names are folder names; the embedded one is always called "nano". A second folder of one name is called `parent/name`, a
    third by its whole path, so a name in a saved workflow never changes its meaning silently within one set of roots.
    """
    found: dict[Path, Checkpoint] = {}
    taken = {EMBEDDED_NAME}
    for root in [*map(Path, roots), *env.model_dirs()]:
        for folder in _walk(Path(os.path.expanduser(root)), SEARCH_DEPTH):
            path = folder.resolve()
            if path in found or path == EMBEDDED:
                continue
            name = next(name for name in (path.name, f"{path.parent.name}/{path.name}", path.as_posix()) if name not in taken)
            taken.add(name)
            found[path] = Checkpoint(name=name, path=path, components=present_components(path))
    embedded = []
    if is_checkpoint(EMBEDDED):
        embedded.append(Checkpoint(name=EMBEDDED_NAME, path=EMBEDDED, components=present_components(EMBEDDED), is_embedded=True))
    return (*found.values(), *embedded)


def get_checkpoint(name: str, roots: Iterable[Path | str] = ()) -> Checkpoint:
    """The checkpoint called `name`, or the one in the folder `name`. Raises CheckpointError listing what was found."""
    found = find_checkpoints(roots)
    for checkpoint in found:
        if checkpoint.name == name:
            return checkpoint
    folder = Path(os.path.expanduser(name))
    if is_checkpoint(folder):
        path = folder.resolve()
        return Checkpoint(name=path.name, path=path, components=present_components(path), is_embedded=path == EMBEDDED)
    names = ", ".join(checkpoint.name for checkpoint in found) or "none"
    raise CheckpointError(
        f"checkpoint {name!r} was not found (found: {names}). Put it into a models folder, set MAGI2_MODELS, give its path, or get it: "
        f"{download_line()}"
    )


def components_for(
    stages: Iterable[str], *, image: bool = False, decoder: str = "turbo", video: bool = True, audio: bool = True
) -> tuple[str, ...]:
    """Components that the given stages of a request need: `image` = it has a first picture, the rest as in DecodeRequest."""
    needed: dict[str, None] = {}
    for stage in stages:
        if stage == "encode":
            needed["text_encoder"] = None
        elif stage == "preview":
            needed.update({"preview": None} | ({"vae": None} if image else {}))
        elif stage == "refine":
            needed["refiner"] = None
        elif stage == "decode":
            needed.update(({("vae" if decoder == "wan" else "turbo"): None} if video else {}) | ({"audio": None} if audio else {}))
        else:
            raise RequestError(f"stage {stage!r} is unknown. Use encode, preview, refine or decode.")
    return tuple(name for name in LAYOUTS if name in needed)


def check_components(
    folder: Path, stages: Iterable[str], *, image: bool = False, decoder: str = "turbo", video: bool = True, audio: bool = True
) -> tuple[str, ...]:
    """Raises ONE CheckpointError naming every absent component that these stages need and how to get it; returns the needed ones.

    Only file existence is looked at (an index's shards included), so it is quick enough to run before each request.
    """
    folder = Path(folder)
    needed = components_for(stages, image=image, decoder=decoder, video=video, audio=audio)
    problems, fetch = [], []
    for name in needed:
        missing = missing_files(name, folder)
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            problems.append(f"{name} ({LAYOUTS[name].purpose}): no {missing[0]}{more}")
            fetch.append(download_line(folder, name))
    if problems:
        raise CheckpointError(f"checkpoint {folder} lacks what this request needs: {'; '.join(problems)}. Get it: {' && '.join(fetch)}")
    return needed
