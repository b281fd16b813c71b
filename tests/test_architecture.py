"""The house rules from the syntax tree: who may import whom, the one reader of the environment, the one namer of devices, sizes."""

import ast
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FIRST_PARTY = {"magi2_core": ROOT / "magi2_core", "magi2_kernels": ROOT / "kernels", "magi2_nodes": ROOT / "nodes"}

LEAVES = {"request", "latent_file", "config", "config_values", "errors", "env", "device", "shapes", "trained", "whole_file"}
"""Modules at the top of magi2_core that everybody may import; they import the standard library, torch and each other."""

BELOW = {
    "kernels": set(),
    "model": {"kernels"},
    "sampling": set(),
    "text": {"kernels"},
    "vae": {"kernels"},
    "audio": {"kernels"},
    "media": set(),
    "host": set(),
    "parallel": {"kernels", "model"},
    "checkpoint": {"kernels", "model", "parallel", "text", "vae", "audio"},
    "pipeline": {"kernels", "model", "parallel", "checkpoint", "sampling", "text", "vae", "audio", "media"},
    "backend": {"kernels", "model", "parallel", "checkpoint", "pipeline", "sampling", "text", "vae", "audio", "media", "packages"},
    "commands": {"kernels", "checkpoint", "pipeline", "text", "media", "backend", "host", "packages"},
    "nodes": {
        "text.enhance",
        "text.caption",
        "checkpoint.catalog",
        "backend.client",
        "backend.spec",
        "backend.files",
        "backend.runtime",
        "media",
    },
    "cli": {"commands", "backend"},
    "__main__": {"cli", "packages"},
    "packages": set(),
}
"""Package (a folder, or a module at the top of magi2_core) -> the packages it may import besides itself and the leaves."""

NARROWER = {
    "checkpoint.catalog": set(),
    "text.enhance": {"text"},
    "text.caption": {"text"},
}
"""Modules that the ComfyUI process imports, or that must stay light: what they may import besides the leaves."""

COMFYUI_PROCESS = ("backend.client", "text.enhance", "text.caption", "checkpoint.catalog", "media", "nodes")
NOT_IN_COMFYUI = {"kernels", "model", "sampling", "vae", "audio", "parallel", "pipeline", "text.encoder", "checkpoint.load"}
"""What the nodes import, and what must not come along with it when it is imported."""

KERNEL_EXTERNAL = {"torch", "triton"}
HEAVY = {"triton", "torchada", "transformers", "av", "soundfile", "PIL", "tokenizers"}
"""Packages whose absence must not break an import: only inside functions (files that `is_triton` names may import triton)."""

COMFYUI = {"folder_paths", "nodes", "server", "execution", "latent_preview", "node_helpers"}

# kernels/ may not import device.py, and its tuning tables are keyed by architecture: there "musa" is a key like "sm_90".
TUNING_KEYS = {"musa"}
DEVICE_WORDS = re.compile(r"(cuda|musa|nccl|mccl|gloo)(:\d*)?")
DEVICE_ATTRIBUTES = {"cuda", "musa"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "unsetenv"}

MAX_FILE, MAX_FUNCTION, MAX_TRITON, MAX_PARAMETERS, MAX_DEPTH = 400, 60, 150, 8, 3
FILE_LIMITS = {"magi2_core/model/preview.py": 200, "magi2_core/sampling/denoise.py": 120}
NODE_FILE, NODE_EXECUTE = 250, 25

EXEMPT: dict[str, str] = {
    "magi2_core/model/velocity.py::__init__": "the facts of one request, each by keyword; a dataclass would only repeat them",
    "magi2_core/pipeline/build.py::build_pipeline": "what a caller may choose, each by keyword with a default",
}
"""`path` or `path::function` -> why a size limit does not hold there."""


def is_triton(path: Path) -> bool:
    """Whether a file holds Triton kernels: kernel.py, and kernel_*.py beside it where that would be too long."""
    return path.match("kernel.py") or path.match("kernel_*.py")


@dataclass(frozen=True)
class Imported:
    """One import statement: absolute dotted name, line, relative level as written, and whether it runs at import time."""

    name: str
    line: int
    level: int
    eager: bool


@dataclass(frozen=True)
class Source:
    """One source file of the pack."""

    path: Path

    @property
    def label(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def package(self) -> str:
        """Key of BELOW."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        return parts[0] if parts[0] != "magi2_core" else parts[1]

    @cached_property
    def module(self) -> str:
        """Dotted name below magi2_core ("checkpoint.catalog"), or with the top folder elsewhere ("kernels.swiglu")."""
        parts = self.path.relative_to(ROOT).with_suffix("").parts
        parts = parts[1:] if parts[0] == "magi2_core" else parts
        return ".".join(part for part in parts if part != "__init__")

    @cached_property
    def imports(self) -> list[Imported]:
        parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names, level = [alias.name for alias in node.names], 0
            elif isinstance(node, ast.ImportFrom):
                level = node.level
                base = self._absolute(node)
                names = [f"{base}.{alias.name}" for alias in node.names]
            else:
                continue
            found += [Imported(name, node.lineno, level, not _deferred(node, parents)) for name in names]
        return found

    def _absolute(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        folder = self.path.parent
        for _ in range(node.level - 1):
            folder = folder.parent
        parts = folder.relative_to(ROOT).parts
        top = {"kernels": "magi2_kernels", "nodes": "magi2_nodes"}.get(parts[0], parts[0]) if parts else "?"
        return ".".join([top, *parts[1:], *([node.module] if node.module else [])])


def _deferred(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """True inside a function or an `if TYPE_CHECKING` block."""
    while node in parents:
        node = parents[node]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return True
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            return True
    return False


SOURCES = [Source(path) for top in ("magi2_core", "kernels", "nodes") for path in sorted((ROOT / top).rglob("*.py"))]
each_source = pytest.mark.parametrize("source", SOURCES, ids=[source.label for source in SOURCES])


def _target(name: str) -> str | None:
    """Dotted name below its package of a first-party import ("model.rope", "kernels.swiglu"), None for another one."""
    top, _, rest = name.partition(".")
    if top == "magi2_kernels":
        return f"kernels.{rest}".rstrip(".")
    if top == "magi2_nodes":
        return f"nodes.{rest}".rstrip(".")
    return rest if top == "magi2_core" else None


def _within(name: str, allowed: set[str]) -> bool:
    return any(name == entry or name.startswith(entry + ".") for entry in allowed)


def forbidden_imports(source: Source) -> list[str]:
    """Imports of `source` that the layering does not allow, as readable lines."""
    package = source.package
    own = {package} if package not in LEAVES else set()
    allowed = LEAVES | {"__version__"} | own | BELOW.get(package, set())
    if source.module in NARROWER:
        allowed = LEAVES | {"__version__"} | NARROWER[source.module]
    if package in ("kernels", "packages"):
        allowed = own
    wrong = []
    for item in source.imports:
        target = _target(item.name)
        if target and not _within(target, allowed):
            wrong.append(f"{source.label}:{item.line} imports {item.name}")
    return wrong


def test_sources_found() -> None:
    assert len(SOURCES) > 20


def test_packages_are_known() -> None:
    packages = {source.package for source in SOURCES} - {"__init__"}
    assert packages <= set(BELOW) | LEAVES, f"give {sorted(packages - set(BELOW) - LEAVES)} a line in BELOW"


@each_source
def test_imports_follow_the_layers(source: Source) -> None:
    assert not forbidden_imports(source)


@each_source
def test_imports_kernels_use_torch_and_triton_only(source: Source) -> None:
    if source.package != "kernels":
        return
    outside = {item.name.split(".")[0] for item in source.imports} - KERNEL_EXTERNAL - {"magi2_kernels"} - set(sys.stdlib_module_names)
    assert not outside


@each_source
def test_imports_model_knows_no_rank(source: Source) -> None:
    if source.package != "model":
        return
    assert not [item for item in source.imports if item.name.startswith("torch.distributed")]
    assert not re.search(r"\btorch\.distributed\b|\bget_rank\b|\bget_world_size\b", _code(source))


@each_source
def test_imports_collectives_only_in_parallel(source: Source) -> None:
    if source.package in ("parallel", "backend"):
        return
    assert not [item for item in source.imports if item.name.startswith("torch.distributed")]


@each_source
def test_imports_comfyui_only_in_nodes(source: Source) -> None:
    if source.package == "nodes":
        return
    tops = {item.name.split(".")[0] for item in source.imports if item.level == 0}
    assert not {name for name in tops if name.startswith("comfy") or name in COMFYUI}


@each_source
def test_imports_absolute_between_packages_relative_inside(source: Source) -> None:
    # kernels/ is one package whose ops share kernels/common; in magi2_core every folder is a package.
    deepest = 2 if source.package == "kernels" else 1
    assert not [f"line {item.line}: level {item.level}" for item in source.imports if item.level > deepest]
    if source.path.parent == ROOT / "magi2_core":
        crossing = [item for item in source.imports if item.level and (_target(item.name) or "").split(".")[0] in BELOW.keys() - {"cli"}]
        assert not [
            f"line {item.line}: {item.name}" for item in crossing if (ROOT / "magi2_core" / _target(item.name).split(".")[0]).is_dir()
        ]
    elif source.package not in ("kernels", "nodes"):
        own = f"magi2_core.{source.package}."
        assert not [f"line {item.line}: {item.name}" for item in source.imports if not item.level and item.name.startswith(own)]


@each_source
def test_imports_heavy_packages_inside_functions(source: Source) -> None:
    if is_triton(source.path):
        return
    eager = {f"line {item.line}: {item.name}" for item in source.imports if item.eager and item.name.split(".")[0] in HEAVY}
    assert not eager


def loaded_by(start: set[str]) -> set[str]:
    """Modules that importing `start` (modules or packages, as in BELOW) imports from the pack, itself included."""
    modules = {source.module: source for source in SOURCES}
    todo = [name for name in modules if _within(name, start)]
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name in found:
            continue
        found.add(name)
        for item in modules[name].imports:
            target = _target(item.name) if item.eager else None
            while target and target not in modules:
                target = target.rpartition(".")[0]
            todo += [target] if target else []
    return found


def test_imports_of_the_comfyui_process_hold_no_model_code() -> None:
    loaded = loaded_by(set(COMFYUI_PROCESS))
    assert "request" in loaded and "checkpoint.catalog" in loaded
    assert not {name for name in loaded if _within(name, NOT_IN_COMFYUI)}


def _code(source: Source) -> str:
    """The file without comments and docstrings."""
    return ast.unparse(_without_docstrings(source.tree))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    tree = ast.parse(ast.unparse(tree))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [item for item in body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def environment_readers(source: Source) -> list[int]:
    """Lines that name the environment."""
    lines = [node.lineno for node in ast.walk(source.tree) if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT]
    return lines + [item.line for item in source.imports if item.name.split(".")[-1] in ENVIRONMENT and item.name.startswith("os.")]


def device_namers(source: Source) -> list[int]:
    """Lines that name an accelerator or a collective library in code."""
    allowed = TUNING_KEYS if source.package == "kernels" else set()
    lines = []
    for node in ast.walk(_without_docstrings(source.tree)):
        word = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        is_word = DEVICE_WORDS.fullmatch(word) is not None and word not in allowed
        if is_word or (isinstance(node, ast.Attribute) and node.attr in DEVICE_ATTRIBUTES):
            lines.append(node.lineno)
    return lines


@each_source
def test_environment_is_read_in_env_only(source: Source) -> None:
    if source.label != "magi2_core/env.py":
        assert not environment_readers(source)


@each_source
def test_devices_are_named_in_device_only(source: Source) -> None:
    if source.label != "magi2_core/device.py":
        assert not device_namers(source)


def test_rules_see_a_violation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rule that finds nothing anywhere proves nothing: a file that breaks them all must be seen.
    folder = tmp_path / "magi2_core" / "model"
    folder.mkdir(parents=True)
    bad = folder / "bad.py"
    bad.write_text(
        '"""Doc."""\nimport os\nimport transformers\nfrom magi2_core.parallel import groups\n'
        'device = "cuda:0"\nvalue = os.environ["X"]\nfrom ..errors import Magi2Error\n'
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    source = Source(bad)
    assert forbidden_imports(source) == ["magi2_core/model/bad.py:4 imports magi2_core.parallel.groups"]
    assert environment_readers(source) and device_namers(source)
    with pytest.raises(AssertionError):
        test_imports_heavy_packages_inside_functions(source)
    with pytest.raises(AssertionError):
        test_imports_absolute_between_packages_relative_inside(source)


def _functions(source: Source) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in named if name not in ("self", "cls")])


@each_source
def test_sizes(source: Source) -> None:
    triton = is_triton(source.path)
    limit = NODE_FILE if source.package == "nodes" else FILE_LIMITS.get(source.label, MAX_FILE)
    lines = source.text.count("\n")
    problems = [] if lines <= limit or source.label in EXEMPT else [f"{source.label}: {lines} lines, at most {limit}"]
    for function in _functions(source):
        where = f"{source.label}::{function.name}"
        if where in EXEMPT:
            continue
        most = MAX_TRITON if triton else NODE_EXECUTE if source.package == "nodes" and function.name == "execute" else MAX_FUNCTION
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > most:
            problems.append(f"{where}: {length} lines, at most {most}")
        if not triton and _parameters(function) > MAX_PARAMETERS:
            problems.append(f"{where}: {_parameters(function)} parameters, at most {MAX_PARAMETERS}; use a dataclass")
    assert not problems


@each_source
def test_files_open_with_a_docstring(source: Source) -> None:
    assert ast.get_docstring(source.tree)


@each_source
def test_folders_are_shallow(source: Source) -> None:
    assert len(source.path.relative_to(ROOT).parts) - 1 <= MAX_DEPTH


def test_exemptions_are_needed() -> None:
    labels = {source.label: source for source in SOURCES}
    for entry, reason in EXEMPT.items():
        path, _, function = entry.partition("::")
        assert reason and path in labels
        assert not function or function in {node.name for node in _functions(labels[path])}


def test_tracked_text_names_no_machine_path() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|root)/")
    files = [*ROOT.glob("*.md"), *ROOT.glob("*.sh"), *(ROOT / ".ci").glob("*"), *(source.path for source in SOURCES)]
    assert not [str(path) for path in files if path.is_file() and pattern.search(path.read_text(encoding="utf-8"))]
