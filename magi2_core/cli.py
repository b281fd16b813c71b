"""The command line: `python -m magi2_core ...` in the pack's folder, or `python magi2_core/packages.py magi2_core.cli ...` from anywhere.

Holds the arguments and their help, and turns every error into one line on stderr and an exit code of `magi2_core.errors`.
The bodies live in `magi2_core/commands/` and are imported when their command runs, so `--help` needs no torch.
"""

import argparse
import atexit
import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from magi2_core.commands import cancel, fleet_options, streams

from . import __version__, env
from .errors import DependencyError, Magi2Error, OutOfMemoryError, RequestError

PROGRAM = "python -m magi2_core"

DESCRIPTION = f"""\
Makes a 10-second video with stereo sound from a prompt, or from a prompt and a picture, with MAGI-2 Preview.

A first clip, with the small checkpoint that ships in this folder (under a minute on two idle cores):
  {PROGRAM} generate --prompt "a red circle moves to the right over a blue background, low hum" --output output/circle.mp4
"""

GENERATE = f"""\
Makes one clip: an .mp4 file with stereo sound. The sampled latents are saved beside it before decoding starts.

examples:
  {PROGRAM} generate --prompt "a yellow triangle moves up over a black background, high beeps"
  {PROGRAM} generate --prompt "a green square moves to the left over a gray background, low wind" --image square.png --seed 7
  {PROGRAM} generate --checkpoint /models/MAGI-2-preview --size 1080p --prompt-file scene.txt --output scene.mp4
  {PROGRAM} generate --from-latents scene.latents.safetensors --decoder wan --output scene_quality.mp4
"""

RUN = f"""\
Runs a workflow that was saved in ComfyUI, in the UI or the API format, and fetches the files it writes. Uses the ComfyUI at --server, or
starts one without a window from --comfyui, or takes the one that answers at http://127.0.0.1:8188, or starts the one in COMFYUI_PATH.

examples:
  {PROGRAM} run workflows/magi2_text_to_video.json --set Sampler.seed=7 --output output
  {PROGRAM} run workflows/magi2_image_to_video.json --set "Load Image.image=first.png" --comfyui ~/ComfyUI --output clip.mp4
  {PROGRAM} run workflows/api/magi2_1080p.json --server http://127.0.0.1:8188 --set "Load Model.checkpoint=MAGI-2-preview"
"""

MAKE_TINY = f"""\
Writes a random (untrained, seeded) checkpoint with every component in the released folder layout: for tests of loading and of
parallel runs. Its clips are noise; for clips that mean something use the embedded nano checkpoint (the default of generate).

example:
  {PROGRAM} make-tiny ~/models/magi2-tiny
"""

DOCTOR = f"""\
Says whether this machine can run the pack: devices, package versions, which kernels and attention are used, and which checkpoints
are complete, what is missing and how to get it. Exit code 0 when everything that is needed is there, 1 otherwise.

examples:
  {PROGRAM} doctor
  {PROGRAM} doctor --checkpoint /models/MAGI-2-preview --verify
"""


class _Parser(argparse.ArgumentParser):
    """Reports a wrong argument as a RequestError: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}. See: {self.prog} --help")


def _add_prompt(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to show (one of the first three)")
    group.add_argument("--prompt", metavar="TEXT", help="what the clip shows and sounds like")
    group.add_argument("--prompt-file", metavar="FILE", help="a text file that holds the prompt")
    group.add_argument("--caption", metavar="FILE", help="a JSON file that holds a structured caption")
    group.add_argument("--image", metavar="FILE", help="first frame: a picture (png, jpg, webp ...) the clip starts from")
    group.add_argument("--negative-prompt", metavar="TEXT", help="what the clip must not look or sound like (default: the checkpoint's)")
    group.add_argument(
        "--enhance", action="store_true", help="let a language model write the prompt out first (needs the two options below)"
    )
    group.add_argument("--enhance-url", metavar="URL", help="base URL of an OpenAI-compatible service; its key comes from MAGI2_API_KEY")
    group.add_argument("--enhance-model", metavar="NAME", help="name of the service's model")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how it is made (defaults: the checkpoint's own)")
    group.add_argument("--size", metavar="SIZE", help="272p, 540p, 1080p (540p and the refiner) or WIDTHxHEIGHT, multiples of 16")
    group.add_argument("--orientation", choices=("landscape", "portrait"), help="turns a size preset; portrait swaps width and height")
    group.add_argument("--seed", type=int, metavar="N", help="another seed, another clip (default: 42)")
    group.add_argument("--steps", type=int, metavar="N", help="sampling steps: more is slower and better")
    group.add_argument("--video-guidance", type=float, metavar="X", help="how strictly the picture follows the prompt")
    group.add_argument("--audio-guidance", type=float, metavar="X", help="how strictly the sound follows the prompt")
    group.add_argument("--shift", type=float, metavar="X", help="shift of the noise schedule")
    group.add_argument("--seconds", type=float, metavar="X", help="length; the model is made for 10 seconds")
    group.add_argument("--experimental-seconds", action="store_true", help="allow 2 to 10 seconds (quality untested)")
    group.add_argument("--refine-size", metavar="WxH", help="refine to this size after sampling, e.g. 1920x1088 (implied by --size 1080p)")
    group.add_argument("--refiner-steps", type=int, metavar="N", help="steps of the refiner")
    group.add_argument("--refiner-guidance", type=float, metavar="X", help="guidance of the refiner")
    group.add_argument("--stop-after", type=int, metavar="N", help="stop sampling after N steps and keep the state for --resume")
    group.add_argument("--resume", metavar="FILE", help="go on from the .partial.safetensors file of a stopped run")
    group.add_argument("--from-latents", metavar="FILE", help="skip sampling: decode (or refine, with --refine-size) saved latents")


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where it runs")
    group.add_argument("--checkpoint", metavar="NAME|DIR", help="name or folder of a checkpoint (default: the embedded nano)")
    group.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu, or a card as doctor lists it (default: auto)")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="arithmetic (default: bfloat16 on a card, float32 on a CPU)")
    group.add_argument("--kernels", choices=("auto", "triton", "reference"), help="which kernels (default: MAGI2_KERNELS, else auto)")
    group.add_argument("--deterministic", action="store_true", help="the same bits on every run on this machine (slower)")
    fleet_options.add_backend(group)


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is written")
    group.add_argument("--output", metavar="FILE.mp4", help="the clip (default: the next free output/clip_NNNN.mp4)")
    group.add_argument("--wav", metavar="FILE.wav", help="also write the soundtrack without loss, 24 bit")
    group.add_argument("--output-size", metavar="WxH", help="rescale the decoded frames to exactly this size, e.g. 1920x1080")
    group.add_argument("--decoder", choices=("turbo", "wan"), default="turbo", help="turbo (fast, default) or wan (quality)")
    group.add_argument(
        "--save-latents", action=argparse.BooleanOptionalAction, default=True, help="keep the latents beside the clip (default: yes)"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("workflow", metavar="FILE.json", help="a workflow as ComfyUI saved it (UI format or API format)")
    parser.add_argument(
        "--set",
        action="append",
        metavar="NODE.INPUT=VALUE",
        help="change an input first; NODE is an id, a title or a class; a file is uploaded when the input takes files (may be repeated)",
    )
    parser.add_argument(
        "--output", metavar="DIR|FILE", help="folder for the files it writes, or the name of its only one (default: output)"
    )
    parser.add_argument("--server", metavar="URL", help="a running ComfyUI")
    parser.add_argument("--comfyui", metavar="DIR", help="a ComfyUI folder: start it without a window, and end it afterwards")
    parser.add_argument(
        "--comfyui-python", metavar="FILE", help="interpreter that has ComfyUI's packages (default: COMFYUI_PYTHON, its own venv, this one)"
    )


def _add_command(commands: argparse._SubParsersAction, name: str, summary: str, text: str) -> argparse.ArgumentParser:
    head, _, examples = text.partition("\n\n")
    parser = commands.add_parser(
        name, help=summary, description=head, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def build_parser() -> argparse.ArgumentParser:
    """The parser of every subcommand; `command` names the chosen one."""
    parser = _Parser(prog=PROGRAM, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"ComfyUI-MAGI2 {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    generate = _add_command(commands, "generate", "make a clip from a prompt, or from a prompt and a picture", GENERATE)
    for add in (_add_prompt, _add_sampling, _add_output, _add_machine):
        add(generate)

    saved = _add_command(commands, "run", "run a saved ComfyUI workflow", RUN)
    _add_run(saved)

    tiny = _add_command(commands, "make-tiny", "write a small random checkpoint for tests", MAKE_TINY)
    tiny.add_argument("folder", metavar="DIR", help="folder to write; must be new or empty")
    tiny.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random weights (default: 0)")
    tiny.add_argument(
        "--parallel", action="store_true", help="start from the release's head counts (24 attention, 12 MoE), for parallel runs"
    )
    tiny.add_argument("--overwrite", action="store_true", help="replace the files of an earlier make-tiny in DIR")
    for name, what in TINY_SIZES.items():
        tiny.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=what)

    doctor = _add_command(commands, "doctor", "say what this machine has and what is missing", DOCTOR)
    doctor.add_argument("--checkpoint", metavar="NAME|DIR", help="look at this checkpoint only (default: all that are found)")
    doctor.add_argument(
        "--verify", action="store_true", help="read every file and compare with the checkpoint's SHA-256 manifest (minutes)"
    )
    doctor.add_argument("--write-manifest", action="store_true", help="write the SHA-256 manifest of a checkpoint you trust (minutes)")
    fleet_options.add_commands(lambda name, summary, text: _add_command(commands, name, summary, text), PROGRAM)
    return parser


TINY_SIZES = {
    "num_layers": "layers of the preview transformer",
    "hidden_size": "width of the preview transformer",
    "head_dim": "channels of an attention head; there are hidden-size / head-dim heads",
    "moe_heads": "heads of the mixture of experts",
    "experts": "experts of one MoE head",
    "top_k": "experts a token visits in one head",
    "expert_size": "width inside an expert",
    "text_size": "width of the text features",
    "refiner_layers": "layers of the refiner",
    "refiner_heads": "query heads of the refiner",
    "refiner_groups": "key and value heads of the refiner",
    "shards": "files that hold the preview transformer",
}
"""Sizes of make-tiny that are arguments, with their help."""


def _run(options: argparse.Namespace) -> int:
    name = "fleet" if options.command in fleet_options.COMMANDS else options.command.replace("-", "_")
    try:
        with cancel.leaving():  # an exception inside the C code of an import ends in an abort
            module = importlib.import_module(f"magi2_core.commands.{name}")
        return module.run(options)
    except (Magi2Error, KeyboardInterrupt):
        raise
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("magi2_core", "magi2_kernels"):
            raise
        raise DependencyError(
            f"the package {error.name} is needed. Install it: pip install {error.name}. {PROGRAM} doctor lists all."
        ) from error
    except Exception as error:
        from .device import is_out_of_memory

        if is_out_of_memory(error):
            raise OutOfMemoryError(f"the device ran out of memory ({error}). Use a smaller --size, another --device or cpu.") from error
        raise


def _report(error: BaseException) -> int:
    if isinstance(error, Magi2Error):
        code, text = error.exit_code, " ".join(str(error).splitlines())
    elif isinstance(error, KeyboardInterrupt):
        code, text = cancel.STOPPED, "stopped."
    else:
        code, text = 1, f"unexpected {type(error).__name__}: {' '.join(str(error).splitlines())}. Run again with --debug for the traceback."
    print(f"error: {text}", file=sys.stderr)
    return code


def _command(arguments: list[str]) -> int:
    """Runs one command; its results have left this process when it returns, else that raises."""
    code = RequestError.exit_code
    try:
        if arguments:
            code = _run(build_parser().parse_args(arguments))
        else:
            build_parser().print_help()
    except SystemExit:  # of --help and --version
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the process's exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    env.set_sleeping_threads()
    if argv is None:
        atexit.register(cancel.ignore_interrupts)  # the first that is registered runs last
    with streams.guarded():
        try:
            if env.log_level() not in env.LOG_LEVELS:
                raise RequestError(f"MAGI2_LOG_LEVEL={env.log_level()}: use one of {', '.join(env.LOG_LEVELS)}.")
            code = _command(arguments)
        except (Exception, KeyboardInterrupt) as error:
            if "--debug" in arguments:
                traceback.print_exc()
            code = _report(error)
    if argv is None:
        cancel.leave_on_interrupt(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
