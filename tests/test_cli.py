"""The command line on the embedded checkpoint at a tiny size: files written, resume, cancel, decode again, doctor, help, progress bar."""

import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from magi2_core import cli
from magi2_core.commands import doctor
from magi2_core.commands.progress import ProgressBar, clock_text, describe
from magi2_core.media.reading import probe
from magi2_core.request import Progress, load_latents

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "a red circle moves to the right over a blue background, low hum"
QUICK = ["generate", "--prompt", PROMPT, "--size", "32x32", "--steps", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One clip of 32x32 pixels with its sound, made by the command line."""
    output = tmp_path_factory.mktemp("clip") / "clip.mp4"
    assert cli.main([*QUICK, "--output", str(output), "--wav", str(output.with_suffix(".wav"))]) == 0
    return output


def test_generate_writes_clip_sound_and_latents(clip: Path) -> None:
    facts = probe(clip)
    assert (facts["width"], facts["height"], facts["frames"], facts["fps"]) == (32, 32, 125, 12.5)
    assert (facts["sample_rate"], facts["samples"], facts["channels"]) == (44100, 441000, 2)
    assert abs(facts["video_seconds"] - facts["audio_seconds"]) <= 1 / 12.5 + 0.03
    latents = load_latents(clip.with_name("clip.latents.safetensors"))
    assert latents.seed == 42 and latents.prompt == PROMPT
    assert facts["magi2"]["latents_sha256"] == latents.sha256() and facts["magi2"]["prompt"] == PROMPT
    assert sorted(path.name for path in clip.parent.iterdir()) == ["clip.latents.safetensors", "clip.mp4", "clip.wav"]


def test_generate_default_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*QUICK, "--stop-after", "1", "--output", str(tmp_path / "clip.mp4")]) == 0
    assert "using the embedded nano" in capsys.readouterr().err


def test_generate_resume_equals_one_run(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, partial = tmp_path / "clip.mp4", tmp_path / "clip.partial.safetensors"
    assert cli.main([*QUICK, "--stop-after", "2", "--output", str(output)]) == 0
    assert partial.is_file() and not output.exists()
    assert f"--resume {partial}" in capsys.readouterr().err
    assert cli.main(["generate", "--resume", str(partial), "--device", "cpu", "--output", str(output)]) == 0
    resumed, whole = (load_latents(path.with_name("clip.latents.safetensors")) for path in (output, clip))
    assert resumed.sha256() == whole.sha256()


def test_generate_names_the_whole_command_that_goes_on(
    tmp_path: Path, nano_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, picture = tmp_path / "clip.mp4", tmp_path / "first frame.png"
    Image.new("RGB", (40, 40), "green").save(picture)
    refine = ["--checkpoint", str(nano_folder), "--image", str(picture), "--refine-size", "64x64", "--refiner-steps", "3"]
    written = ["--output", str(output), "--wav", str(tmp_path / "clip.wav"), "--output-size", "48x40", "--deterministic"]
    assert cli.main([*QUICK, *refine, *written, "--steps", "2", "--stop-after", "1"]) == 0
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if "go on with: " in line]

    def press(bar: ProgressBar, event: Progress) -> None:
        if event.stage == "refine":
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "__call__", press)
        assert cli.main(shlex.split(line.split("go on with: ")[1])) == 130
    line = capsys.readouterr().err.splitlines()[-1]
    assert "--refine-size 64x64" in line and "--deterministic" in line
    assert cli.main(shlex.split(line.split("go on with: ")[1])) == 0
    assert probe(output)["width"] == 48 and (tmp_path / "clip.wav").is_file()
    assert load_latents(tmp_path / "clip.refined.safetensors").width == 64


def test_generate_ctrl_c_keeps_the_state(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(bar: ProgressBar, event: Progress) -> None:
        if event.stage == "preview" and event.step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    output, partial = tmp_path / "clip.mp4", tmp_path / "clip.partial.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "__call__", press)
        assert cli.main([*QUICK, "--output", str(output)]) == 130
    message = capsys.readouterr().err
    assert "error: " in message and "Traceback" not in message and f"--resume {partial}" in message
    assert [path.name for path in tmp_path.iterdir()] == [partial.name]
    assert load_latents(partial).solver.step == 2
    assert cli.main(["generate", "--resume", str(partial), "--device", "cpu", "--output", str(output)]) == 0
    assert load_latents(tmp_path / "clip.latents.safetensors").sha256() == load_latents(clip.with_name("clip.latents.safetensors")).sha256()


def test_generate_from_latents_decodes_again(clip: Path, tmp_path: Path) -> None:
    latents, output = clip.with_name("clip.latents.safetensors"), tmp_path / "again.mp4"
    arguments = ["--from-latents", str(latents), "--device", "cpu", "--output", str(output), "--output-size", "50x40"]
    assert cli.main(["generate", *arguments]) == 0
    facts = probe(output)
    assert (facts["width"], facts["height"], facts["frames"]) == (50, 40, 125)
    assert facts["magi2"]["latents_sha256"] == load_latents(latents).sha256()


def test_generate_from_latents_refines(clip: Path, tmp_path: Path) -> None:
    latents, output = clip.with_name("clip.latents.safetensors"), tmp_path / "refined.mp4"
    arguments = [
        "--from-latents",
        str(latents),
        "--refine-size",
        "64x64",
        "--refiner-steps",
        "1",
        "--device",
        "cpu",
        "--output",
        str(output),
    ]
    assert cli.main(["generate", *arguments]) == 0
    facts = probe(output)
    assert (facts["width"], facts["height"], facts["frames"], facts["fps"]) == (64, 64, 249, 25.0)
    assert load_latents(tmp_path / "refined.refined.safetensors").stage == "refine"


def test_generate_seed_decides_the_clip(clip: Path, tmp_path: Path) -> None:
    hashes = []
    for seed in ("42", "43"):
        output = tmp_path / f"{seed}.mp4"
        assert cli.main([*QUICK, "--seed", seed, "--output", str(output)]) == 0
        hashes.append(load_latents(tmp_path / f"{seed}.latents.safetensors").sha256())
    assert hashes[0] == load_latents(clip.with_name("clip.latents.safetensors")).sha256() != hashes[1]


def test_generate_without_output_takes_the_next_free_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "clip_0001.mp4").touch()
    assert cli.main([*QUICK, "--stop-after", "1"]) == 0
    assert (tmp_path / "output" / "clip_0002.partial.safetensors").is_file()


ASCII_PROBE = """
import sys
sys.path.insert(0, sys.argv[1])
import packages
del sys.path[0]
packages.register()
from magi2_core import cli
from magi2_core.commands import fleet

def stop(plan, *rest):
    sys.stdout.write(plan.encode.prompt + " " + plan.files.video.name)
    raise KeyboardInterrupt

fleet.open_pipeline = stop
sys.exit(cli.main(["generate", "--device", "cpu", "--prompt", sys.argv[2], "--output", sys.argv[3]]))
"""


def test_generate_under_an_ascii_locale(tmp_path: Path) -> None:
    """A prompt is the UTF-8 that was typed whatever the locale; a stdout that cannot show it does not fail the run."""
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    line = [sys.executable, "-c", ASCII_PROBE, str(ROOT / "magi2_core"), "ein Kreis \u00e9 \u56fe", str(tmp_path / "\u00fc.mp4")]
    done = subprocess.run(line, env=env, capture_output=True, timeout=300, check=False)
    assert done.returncode == 130, done.stderr.decode()
    assert b"ein Kreis \\xe9 \\u56fe" in done.stdout and b".mp4" in done.stdout


def test_main_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", None)
        patched.setattr(sys, "stderr", None)
        assert cli.main([*QUICK, "--output", "/nowhere-that-exists/clip.txt"]) == 2
        assert cli.main(["doctor"]) in (0, 1)


def test_doctor_complete_checkpoint(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MAGI2_MODELS", raising=False)
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "ready" in text.splitlines()[-1]
    for word in ("torch", "transformers", "devices", "kernels", "attention", "hf download", "nano"):
        assert word in text


def test_doctor_packages_say_what_is_wrong_and_the_line_that_mends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "magi2_broken_module.py").write_text("raise OSError('libmissing.so: cannot open')")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = next(package for package in doctor.PACKAGES if package.module == "av")
    monkeypatch.setattr("av.codecs_available", {"aac"})
    wrong = (
        doctor.Package(module="magi2_no_such_module", pip="no-such", purpose="testing", lowest=(1, 2)),
        doctor.Package(module="magi2_broken_module", pip="broken", purpose="testing"),
        package,
    )
    monkeypatch.setattr(doctor, "PACKAGES", (doctor.PACKAGES[0], *wrong))
    assert cli.main(["doctor", "--checkpoint", "nano"]) == 1
    text = capsys.readouterr().out
    assert 'MISSING  no-such (testing): pip install --upgrade "no-such>=1.2"' in text
    assert "broken (testing), cannot be imported (OSError: libmissing.so: cannot open)" in text
    assert "(writing mp4): its build has no libx264" in text
    assert f'{sys.executable} -m pip install --upgrade "no-such>=1.2" broken av' in text


def test_doctor_missing_component(tmp_path: Path, nano_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "half"
    shutil.copytree(nano_folder, folder, ignore=shutil.ignore_patterns("checkpoint.ckpt"))
    assert cli.main(["doctor", "--checkpoint", str(folder)]) == 1
    text = capsys.readouterr().out
    assert "turbo_vae/checkpoint.ckpt" in text and "hf download" in text and "not ready" in text.splitlines()[-1]


def test_doctor_verify_without_a_manifest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all checkpoints: a line, the report goes on to its end; of a named one: not ready."""
    monkeypatch.delenv("MAGI2_MODELS", raising=False)
    assert cli.main(["doctor", "--verify"]) == 0
    text = capsys.readouterr().out
    assert "NOT VERIFIED" in text and "magi2_manifest.json is missing" in text and text.rstrip().endswith("ready")
    assert cli.main(["doctor", "--verify", "--checkpoint", "nano"]) == 1
    assert "not ready: nano was not verified" in capsys.readouterr().out


def test_doctor_write_manifest_wants_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--write-manifest"]) == 2
    assert "name it with --checkpoint" in capsys.readouterr().err


def test_doctor_verify_finds_a_flipped_bit(tmp_path: Path, nano_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(nano_folder, folder)
    assert cli.main(["doctor", "--checkpoint", str(folder), "--write-manifest", "--verify"]) == 0
    assert "verified" in capsys.readouterr().out
    victim = folder / "refiner" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    assert cli.main(["doctor", "--checkpoint", str(folder), "--verify"]) == 1
    assert "refiner/model.safetensors: SHA-256" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "make-tiny", "doctor"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "example" in text and f"python -m magi2_core {command}" in text


@pytest.mark.parametrize(
    ("arguments", "message"), [(["paint"], "invalid choice: 'paint'"), (["doctor", "--fast"], "unrecognized arguments")]
)
def test_main_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_main_unexpected_error_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(options: object) -> int:
        raise ValueError("first line\nsecond line")

    monkeypatch.setattr("magi2_core.commands.doctor.run", fail)
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().err
    assert text == "error: unexpected ValueError: first line second line. Run again with --debug for the traceback.\n"


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        (["-m", "magi2_core", "--version"], ROOT),
        ([str(ROOT / "magi2_core" / "packages.py"), "magi2_core.cli", "--version"], Path(ROOT.anchor)),
    ],
)
def test_start_lines(command: list[str], folder: Path) -> None:
    result = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0 and result.stdout.startswith("ComfyUI-MAGI2 ")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_progress_bar_on_a_terminal_redraws_one_line() -> None:
    stream = Terminal()
    bar = ProgressBar(stream)
    for step in (1, 2):
        bar(Progress(stage="preview", step=step, total=2, seconds_per_step=1.5, eta_seconds=1.5 * (2 - step)))
    bar.finish()
    first, second = stream.getvalue().removeprefix("\r").rstrip("\n").split("\r")
    assert first == "[############............] preview   1/2  1.50 s/step  ETA 0:02"
    assert second.rstrip() == "[########################] preview   2/2  1.50 s/step  ETA 0:00"


def test_progress_bar_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    bar = ProgressBar(stream)
    bar(Progress(stage="load", step=3, total=40, seconds_per_step=12.5, eta_seconds=460.0, message="text_encoder: shard 3/40"))
    assert 40 < len(stream.getvalue().lstrip("\r")) < 60


def test_progress_bar_in_a_file_prints_few_lines() -> None:
    stream, now = io.StringIO(), [0.0]
    bar = ProgressBar(stream, lambda: now[0])
    for step in range(1, 101):
        now[0] += 1.0
        bar(Progress(stage="preview", step=step, total=100))
    lines = stream.getvalue().splitlines()
    assert lines[0].split()[1] == "1/100" and lines[-1].split()[1] == "100/100"
    assert 10 <= len(lines) <= 12 and "\r" not in stream.getvalue()


def test_describe_names_stage_step_and_message() -> None:
    assert describe(Progress(stage="encode", step=0, total=0, message="loading")) == "encode    loading"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (75, "1:15"), (3675, "1:01:15")])
def test_clock_text(seconds: float, text: str) -> None:
    assert clock_text(seconds) == text


def test_log_level_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MAGI2_LOG_LEVEL", "loud")
    assert cli.main(["ps"]) == 2
    assert "MAGI2_LOG_LEVEL=LOUD: use one of DEBUG, INFO" in capsys.readouterr().err
    monkeypatch.setenv("MAGI2_LOG_LEVEL", "")
    assert cli.main(["ps"]) == 0


def test_doctor_tells_choices_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("MAGI2_STEP", "bogus")
    assert cli.main(["doctor", "--checkpoint", str(tmp_path / "absent")]) == 1
    out = capsys.readouterr().out
    assert "MISSING  launch of a preview step: MAGI2_STEP=bogus: use auto" in out and "attention of the preview: reference" in out
    assert f"{tmp_path / 'absent'}: there is no such folder" in out
