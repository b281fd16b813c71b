"""`generate`: a prompt, or a prompt and a picture, becomes an mp4 with stereo sound, stage by stage.

Everything that needs no weights is checked first (plan.py). Latents are written as soon as a stage has made them, so a
later failure or Ctrl-C loses nothing: sampling can be resumed, decoding and refining repeated with --from-latents.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from magi2_core import env
from magi2_core.checkpoint.manifest import is_made_by
from magi2_core.config import GenerationDefaults
from magi2_core.errors import EnhanceError, Interrupted, Magi2Error, OutputError, RequestError
from magi2_core.media import mux
from magi2_core.media.image import encode_jpeg
from magi2_core.media.metadata import build_metadata
from magi2_core.pipeline.hooks import StageHooks
from magi2_core.request import Clip, Latents, save_latents
from magi2_core.text.enhance import EnhanceSettings, enhance
from magi2_core.trained import describe_untrained

from . import fleet
from .cancel import Cancel
from .plan import REFINER_OPTIONS, Plan, fill_sample, free_clips, make_plan
from .progress import ProgressBar, clock_text


def say(text: str) -> None:
    """One line for the user, on stderr: stdout holds the results only."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def run(options: argparse.Namespace) -> int:
    """Runs the command; raises Magi2Error. Returns 0."""
    fleet.settle(options)
    plan = make_plan(options)
    if plan.checkpoint.is_embedded and not options.checkpoint:
        say("No --checkpoint given: using the embedded nano, a small trained model of one moving shape with a sound (see README.md).")
    start = plan.latents or (plan.sample and plan.sample.resume)
    made_by = start.checkpoint_hash if start else ""
    if made_by and not is_made_by(made_by, plan.checkpoint.path):
        if options.resume:
            raise RequestError(
                f"--resume {options.resume}: made with another checkpoint than {plan.checkpoint.name}. Name it: --checkpoint."
            )
        say(
            f"These latents were made with another checkpoint than {plan.checkpoint.name}: the clip may be noise (choose with --checkpoint)."
        )
    if options.enhance:
        plan = _enhanced(plan, options)
    beyond = describe_untrained(plan.checkpoint.name, GenerationDefaults.from_folder(plan.checkpoint.path), *plan.requests)
    if beyond:
        say(beyond)
    with _own_name(plan, options) as named:
        _run_stages(named, options)
    return 0


@contextmanager
def _own_name(plan: Plan, options: argparse.Namespace) -> Iterator[Plan]:
    """The plan, under a name that no other run at this time has when the name is not the user's."""
    if options.output is not None:
        yield plan
        return
    for video in free_clips():
        files = replace(plan.files, video=video)
        reservation = files.reservation()
        try:
            if not reservation.take():
                continue
        except OSError as error:
            raise OutputError(f"{reservation.path} cannot be written ({error.strerror or error}). Choose another --output.") from None
        try:
            if files.is_free:  # still: a run that held the name may have just ended
                yield replace(plan, files=files)
                return
        finally:
            reservation.release()


def _run_stages(plan: Plan, options: argparse.Namespace) -> None:
    started = time.monotonic()
    bar = ProgressBar()
    with Cancel() as cancel:
        hooks = StageHooks(progress=bar, should_stop=cancel.requested, on_partial=lambda latents: _keep(plan, options, latents, bar))
        try:
            _generate(plan, options, hooks, bar)
        finally:
            bar.finish()
    say(f"done in {clock_text(time.monotonic() - started)}")


def _enhanced(plan: Plan, options: argparse.Namespace) -> Plan:
    """The plan with the prompt written out by the service; the service is asked before any weights are read."""
    if plan.encode is None:
        return plan
    settings = EnhanceSettings(base_url=options.enhance_url, model=options.enhance_model)
    say(f"asking {options.enhance_model} to write the prompt out ...")
    picture = None if plan.encode.image is None else encode_jpeg(plan.encode.image)
    prompt = enhance(plan.encode.prompt, settings=settings, key=env.api_key(), image_jpeg=picture)
    if not prompt.strip():
        raise EnhanceError(f"{options.enhance_model} answered with an empty caption. Try again, or leave out --enhance.")
    say(prompt)
    return replace(plan, encode=replace(plan.encode, prompt=prompt))


def _keep(plan: Plan, options: argparse.Namespace, latents: Latents, bar: ProgressBar) -> None:
    """Saves the state of a cut run."""
    bar.finish()
    path = plan.files.beside("partial")
    save_latents(latents, path)
    say(f"kept the state of the stopped run in {path}; go on with: {_again(plan, options, 'resume', path, True)}")


USUAL: dict[str, Any] = {
    "output": None, "wav": None, "output_size": None, "decoder": "turbo", "device": "auto", "dtype": None, "kernels": None,
    "backend": "local", "address": None, "devices": "auto", "layout": "auto",
}  # fmt: skip
"""Options of where a run works and what it writes, and their defaults."""


def _again(plan: Plan, options: argparse.Namespace, way: str, path: Path, needs_text: bool) -> str:
    """The command that goes on from saved latents, with the arguments that they do not hold. `needs_text`: more is sampled or refined."""
    given = {way: path, "checkpoint": options.checkpoint}
    if needs_text:
        given["image"] = options.image
        if plan.refine is not None:
            given |= {"refine_size": f"{plan.refine.width}x{plan.refine.height}"}
            given |= {name: getattr(options, name) for name in REFINER_OPTIONS}
    given |= {name: getattr(options, name) for name, usual in USUAL.items() if getattr(options, name) != usual}
    words = [word for name, value in given.items() if value is not None for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--deterministic"] * options.deterministic + ["--no-save-latents"] * (not options.save_latents)
    return shlex.join(["generate", *words])


def _generate(plan: Plan, options: argparse.Namespace, hooks: StageHooks, bar: ProgressBar) -> None:
    pipeline = fleet.open_pipeline(plan, options, hooks)
    conditioning = None if plan.encode is None else pipeline.encode(plan.encode)
    latents = plan.latents
    if plan.sample is not None:
        assert conditioning is not None
        latents = pipeline.sample(fill_sample(plan, conditioning))
        if latents.solver is not None:
            _keep(plan, options, latents, bar)
            return
    assert latents is not None
    saved = _save(plan, options, latents, "latents") if plan.sample is not None else Path(options.from_latents)
    try:
        if plan.refine is not None:
            assert conditioning is not None
            latents = pipeline.refine(replace(plan.refine, conditioning=conditioning, latents=latents))
            saved = _save(plan, options, latents, "refined")
        clip = pipeline.decode(replace(plan.decode, latents=latents))
        bar.finish()
        _write(plan, latents, clip, hooks)
    except Magi2Error as error:
        if saved is None:
            raise
        again = _again(plan, options, "from_latents", saved, plan.refine is not None and latents.stage == "preview")
        raise type(error)(f"{error} The latents are kept; go on with: {again}") from error
    _say_result(plan.files.video, latents, clip)


def _save(plan: Plan, options: argparse.Namespace, latents: Latents, kind: str) -> Path | None:
    if not options.save_latents:
        return None
    path = plan.files.beside(kind)
    save_latents(latents, path)
    return path


def _write(plan: Plan, latents: Latents, clip: Clip, hooks: StageHooks) -> None:
    files = plan.files
    if hooks.should_stop():
        raise Interrupted("stopped before the clip was written.")
    if files.wav is not None:
        assert clip.waveform is not None
        mux.write_wav(files.wav, clip.waveform, clip.sample_rate)
    assert clip.frames is not None
    mux.write_video(
        files.video,
        clip.frames,
        clip.fps,
        waveform=clip.waveform,
        sample_rate=clip.sample_rate,
        metadata=build_metadata(latents, {"decoder": plan.decode.decoder}),
        should_stop=hooks.should_stop,
    )


def _say_result(video: Path, latents: Latents, clip: Clip) -> None:
    assert clip.frames is not None
    count, height, width = clip.frames.shape[:3]
    try:
        sys.stdout.write(
            f"{video}: {width}x{height}, {count} frames at {clip.fps:g} fps, seed {latents.seed}, latents {latents.sha256()}\n"
        )
        sys.stdout.flush()
    except OutputError as error:
        raise OutputError(f"{error} The clip itself is whole: {video}") from None
