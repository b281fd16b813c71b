"""`doctor`: what this machine has and what is missing: packages, devices, kernels, checkpoints. Exit code 1 when something needed is missing."""

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi2_core import __version__, device, env
from magi2_core.checkpoint import catalog
from magi2_core.errors import CheckpointError, Magi2Error, RequestError

from .cancel import Cancel, leaving

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package the pack uses: `module` is its import name, `pip` its name on the index, `lowest` the oldest version that works.

    `look` says what the imported module has, after a "!" what it should have and lacks.
    """

    module: str
    pip: str
    purpose: str
    needed: bool = True
    lowest: tuple[int, ...] = ()
    look: Callable[[Any], str] | None = None

    @property
    def wanted(self) -> str:
        """What pip is told."""
        return f'"{self.pip}>={".".join(map(str, self.lowest))}"' if self.lowest else self.pip


def _look_at_transformers(module: Any) -> str:
    return "Qwen3.5 text model" if hasattr(module, "Qwen3_5TextModel") else "!it has no Qwen3_5TextModel"


def _look_at_av(module: Any) -> str:
    lacking = [name for name in ("libx264", "aac") if name not in module.codecs_available]
    return f"!its build has no {' and no '.join(lacking)}" if lacking else "H.264 and AAC inside, no ffmpeg program is needed"


PACKAGES = (
    Package(module="torch", pip="torch", purpose="everything", lowest=(2, 5)),
    Package(module="numpy", pip="numpy", purpose="pictures and sound"),
    Package(module="safetensors", pip="safetensors", purpose="checkpoints and latents"),
    Package(module="einops", pip="einops", purpose="the models"),
    Package(module="transformers", pip="transformers", purpose="the text encoder", lowest=(5, 5), look=_look_at_transformers),
    Package(module="av", pip="av", purpose="writing mp4", look=_look_at_av),
    Package(module="PIL", pip="Pillow", purpose="reading pictures"),
    Package(module="soundfile", pip="soundfile", purpose="writing wav"),
    Package(module="triton", pip="triton", purpose="fast kernels on a GPU", needed=False),
    Package(module="flash_attn_interface", pip="fa3-fwd", purpose="FlashAttention 3 on Hopper cards", needed=False),
    Package(module="torchada", pip="torchada", purpose="Moore Threads cards", needed=False),
)


OPS = (
    "modality_rms_norm",
    "qk_norm_rope",
    "swiglu",
    "grouped_linear",
    "hyper_connection",
    "sink_attention",
    "block_attention",
    "moe_routing",
    "multi_head_moe",
)


class Findings:
    """Prints lines and counts what is missing."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.to_install: list[str] = []

    def line(self, text: str = "") -> None:
        """One line on stdout."""
        sys.stdout.write(text + "\n")

    def fail(self, text: str, remedy: str) -> None:
        """A line for something needed that is not right, with what to do."""
        self.line(f"  MISSING  {text}: {remedy}")
        self.missing.append(text)


def run(options: argparse.Namespace) -> int:
    """Runs the command; 0 when all that is needed is there, else 1."""
    if options.write_manifest and not options.checkpoint:
        raise RequestError("--write-manifest declares one checkpoint trusted: name it with --checkpoint.")
    findings = Findings()
    findings.line(f"ComfyUI-MAGI2 {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    findings.line("\npackages")
    with leaving():
        has_torch = all([_check_package(findings, package) for package in PACKAGES][:1])
    if env.worker_python() != env.own_python():
        findings.line(
            f"  the processes of a fleet run in another Python (MAGI2_PYTHON), see what it has: {env.worker_python()} -m magi2_core doctor"
        )
    if has_torch:
        findings.line("\ndevices")
        _check_devices(findings)
    findings.line("\ncheckpoints")
    if has_torch:
        _check_checkpoints(findings, options)
    else:
        for checkpoint in catalog.find_checkpoints():
            findings.line(f"  {checkpoint.name}: {', '.join(checkpoint.components)} in {checkpoint.path} (not opened: torch is missing)")
    findings.line()
    if findings.to_install:
        findings.line(f"install what is missing: {env.own_python()} -m pip install --upgrade {' '.join(findings.to_install)}")
    findings.line("ready" if not findings.missing else f"not ready: {'; '.join(findings.missing)}")
    return int(bool(findings.missing))


def _version(package: Package) -> str:
    """Installed version; "unknown version" of a module that does not say."""
    try:
        return importlib.metadata.version(package.pip)
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(sys.modules[package.module], "__version__", "unknown version"))


def _check_package(findings: Findings, package: Package) -> bool:
    """One line about a package; whether it can be used."""
    try:
        module = importlib.import_module(package.module)
    except Exception as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == package.module
        reason = "" if is_absent else f", cannot be imported ({type(error).__name__}: {' '.join(str(error).split())})"
        if package.needed:
            _fail_package(findings, package, f"{package.pip} ({package.purpose}){reason}")
        else:
            findings.line(f"  absent   {package.pip} (optional: {package.purpose}; pip install {package.wanted}){reason}")
        return False
    version = _version(package)
    if package.lowest and _numbers(version) < package.lowest:
        _fail_package(findings, package, f"{package.pip} {version} is too old ({package.purpose})")
        return False
    note = "" if package.look is None else package.look(module)
    if note.startswith("!"):
        _fail_package(findings, package, f"{package.pip} {version} cannot serve ({package.purpose}): {note[1:]}")
        return False
    findings.line(f"  ok       {package.pip} {version}{f' ({note})' if note else ''}")
    return True


def _fail_package(findings: Findings, package: Package, text: str) -> None:
    findings.fail(text, f"pip install --upgrade {package.wanted}")
    findings.to_install.append(package.wanted)


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")
    return tuple(int(part) for part in parts[:3] if part.isdigit())


def _check_devices(findings: Findings) -> None:
    try:
        devices = device.list_devices()
    except Magi2Error as error:
        findings.fail("device", str(error))
        return
    for found in devices:
        memory = f", {found.free_bytes / 1e9:.1f} of {found.total_bytes / 1e9:.1f} GB free" if found.total_bytes else ""
        findings.line(
            f"  {found.kind if found.kind == 'cpu' else f'{found.kind}:{found.index}'}  {found.name} ({found.architecture}){memory}"
        )
    chosen = device.resolve("auto")
    if chosen.type == "cpu":
        findings.line(
            "  no GPU that this torch can use: the nano runs on the CPU, the released model needs GPUs (README.md says how much memory)"
        )
    findings.line(f"  used by default: {chosen}, {str(device.default_dtype(chosen)).removeprefix('torch.')}")
    _describe_kernels(findings, chosen)


def _describe_kernels(findings: Findings, chosen: "torch.device") -> None:
    """Which implementation the ops run here, and which attention."""
    from magi2_core.pipeline.build import choose_kernels

    try:
        kernels = choose_kernels("auto", chosen)
    except Magi2Error as error:
        findings.fail("kernels", str(error))
        return
    written = [op for op in OPS if importlib.util.find_spec(f"magi2_kernels.{op}.kernel") is not None]
    findings.line(f"  kernels: {kernels} (MAGI2_KERNELS: {env.kernel_choice()}); with a Triton kernel: {', '.join(written) or 'none'}")
    _describe_attention(findings, chosen, kernels)
    findings.line(f"  attention of the refiner: block_attention, {'by PyTorch attention' if kernels == 'triton' else 'plain PyTorch'}")


def _describe_attention(findings: Findings, chosen: "torch.device", kernels: str) -> None:
    """The provider of the preview's attention with the reason, and why the others are not used."""
    from magi2_core.config import PreviewConfig
    from magi2_core.pipeline.accelerate import Target, choose_attention, choose_step

    target = Target(device=chosen, dtype=device.default_dtype(chosen), head_dim=PreviewConfig.head_dim)
    try:
        found = choose_attention("auto", target, kernels)
        findings.line(f"  attention of the preview: {found.name} (MAGI2_ATTENTION: {env.attention_choice()}; {found.reason})")
    except Magi2Error as error:
        findings.fail("attention of the preview", str(error))
    try:
        step = choose_step("auto", chosen)
        findings.line(f"  launch of a preview step: {step} (MAGI2_STEP: {env.acceleration_choice()})")
    except Magi2Error as error:
        findings.fail("launch of a preview step", str(error))


def _check_checkpoints(findings: Findings, options: argparse.Namespace) -> None:
    if options.checkpoint:
        try:
            chosen = [catalog.get_checkpoint(options.checkpoint).path]
        except Magi2Error:
            # A folder that holds nothing yet: the report says what to fetch into it.
            chosen = [Path(options.checkpoint)]
            if not chosen[0].is_dir():
                findings.line(f"  {chosen[0]}: there is no such folder")
    else:
        chosen = [checkpoint.path for checkpoint in catalog.find_checkpoints()]
        others = [str(folder) for folder in env.model_dirs()]
        findings.line(f"  looked in MAGI2_MODELS ({', '.join(others) or 'not set'}) and at the embedded nano")
    from magi2_core.checkpoint.report import report_checkpoint

    for path in chosen:
        report = report_checkpoint(path)
        for line in report.lines():
            findings.line(f"  {line}")
        if not report.is_complete:
            findings.missing.append(f"checkpoint {report.path.name} is not complete")
        elif options.write_manifest or options.verify:
            _checksums(findings, report.path, options)
    if not options.checkpoint and all(path == catalog.EMBEDDED for path in chosen):
        size = catalog.RELEASED_BYTES / 1e9
        findings.line(f"  the released model is not here: {size:.0f} GB, resumable: {catalog.download_line()}")


def _checksums(findings: Findings, path: Path, options: argparse.Namespace) -> None:
    from magi2_core.checkpoint.manifest import verify_manifest, write_manifest

    from .progress import ProgressBar

    bar = ProgressBar()
    with Cancel() as cancel:
        try:
            if options.write_manifest:
                target = write_manifest(path, progress=bar, should_stop=cancel.requested)
                bar.finish()
                findings.line(f"    wrote {target}")
            if options.verify:
                try:
                    faults = verify_manifest(path, progress=bar, should_stop=cancel.requested)
                except CheckpointError as error:
                    bar.finish()
                    findings.line(f"    NOT VERIFIED  {error}")
                    if options.checkpoint:
                        findings.missing.append(f"{path.name} was not verified")
                    return
                bar.finish()
                for fault in faults:
                    findings.line(f"    DAMAGED  {fault.message}")
                if faults:
                    findings.missing.append(f"{len(faults)} file(s) of {path.name} differ from the manifest: download them again")
                else:
                    findings.line("    verified: every file is as the manifest says")
        finally:
            bar.finish()
