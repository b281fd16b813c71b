"""Written files, read back by a decoder: counts, rates, colours, timing, tags; and that nothing partial is ever left."""

import math
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from magi2_core.errors import DependencyError, Interrupted, OutputError, RequestError
from magi2_core.media import mux
from magi2_core.media.metadata import FORMAT, SCHEMA

ROOT = Path(__file__).resolve().parent.parent.parent


def clip(count: int, height: int = 32, width: int = 48) -> torch.Tensor:
    """A bright bar that moves one step a frame."""
    frames = torch.full((count, height, width, 3), 40, dtype=torch.uint8)
    for index in range(count):
        frames[index, :, (4 * index) % width : (4 * index) % width + 4] = 220
    return frames


def tone(samples: int, rate: int = 44100, channels: int = 2) -> torch.Tensor:
    return (torch.sin(torch.arange(samples) * (math.tau * 440 / rate)) * 0.5).expand(channels, samples).clone()


def only(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize(
    ("count", "fps", "samples", "rate"),
    [(125, 12.5, 441000, 44100), (249, 25.0, 441000, 44100), (1, 25.0, 1, 44100), (10, 24000 / 1001, 20481, 48000), (3, 30.0, 1025, 22050)],
)
def test_write_video_exact_lengths(tmp_path: Path, count: int, fps: float, samples: int, rate: int) -> None:
    sound = tone(samples, rate)
    result = mux.write_video(tmp_path / "a.mp4", clip(count), fps, waveform=sound[None], sample_rate=rate)
    facts = mux.probe(result.path)
    assert (facts["frames"], facts["samples"], facts["sample_rate"], facts["channels"]) == (count, samples, rate, 2)
    assert Fraction(facts["fps"]).limit_denominator(1001) == Fraction(fps).limit_denominator(1001)
    assert (result.frames, result.samples) == (count, samples)
    assert result.video_seconds == pytest.approx(count / fps) and result.audio_seconds == pytest.approx(samples / rate)
    decoded = mux.read_video(result.path)
    assert decoded.frames.shape == (count, 32, 48, 3) and decoded.waveform.shape == (2, samples)
    if samples > 20000:
        error = (decoded.waveform - sound)[:, 2048:-2048].pow(2).mean().sqrt()
        assert error < 0.03 * sound.pow(2).mean().sqrt()  # AAC alone gives 0.014 here, a shift by one sample 0.06
    assert only(tmp_path) == ["a.mp4"]


def test_write_video_lengths_of_a_clip_agree(tmp_path: Path) -> None:
    for count, fps in ((125, 12.5), (249, 25.0)):
        facts = mux.probe(mux.write_video(tmp_path / "a.mp4", clip(count), fps, waveform=tone(441000)).path)
        assert abs(facts["video_seconds"] - facts["audio_seconds"]) <= 1 / fps + 0.03


def test_write_video_silent_and_chunks(tmp_path: Path) -> None:
    frames = clip(7)
    whole = mux.write_video(tmp_path / "whole.mp4", frames, 12.5)
    parts = mux.write_video(tmp_path / "parts.mp4", (part for part in frames.split(3)), 12.5)
    assert "samples" not in mux.probe(whole.path) and whole.samples == 0 and whole.audio_seconds == 0
    assert torch.equal(mux.read_video(whole.path).frames, mux.read_video(parts.path).frames)
    assert mux.read_video(whole.path).waveform is None


def test_write_video_mono(tmp_path: Path) -> None:
    facts = mux.probe(mux.write_video(tmp_path / "a.mp4", clip(3), 25, waveform=tone(4000, channels=1)).path)
    assert (facts["channels"], facts["samples"]) == (1, 4000)


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 128, 128), (230, 40, 40)])
def test_write_video_colours(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    path = mux.write_video(tmp_path / "a.mp4", torch.tensor(colour, dtype=torch.uint8).expand(2, 64, 112, 3), 12.5).path
    facts = mux.probe(path)
    assert (facts["pixel_format"], facts["color_space"], facts["color_range"]) == ("yuv420p", "bt709", "limited")
    assert (mux.read_video(path).frames.int() - torch.tensor(colour)).abs().max() <= 3


def test_write_video_stores_bt709_luma(tmp_path: Path) -> None:
    import av

    path = mux.write_video(tmp_path / "a.mp4", torch.tensor([255, 0, 0], dtype=torch.uint8).expand(1, 64, 112, 3), 12.5).path
    with av.open(str(path)) as container:
        planes = [bytes(plane)[0] for plane in next(container.decode(video=0)).planes]
    # ITU-R BT.709, limited range: Y = 16 + 219 * 0.2126, Cb = 128 - 224 * 0.2126 / 1.8556, Cr = 240; BT.601 would give Y 81
    assert planes == [pytest.approx(62.6, abs=1), pytest.approx(102.3, abs=1), pytest.approx(240, abs=1)]


def flash_and_click(path: Path) -> tuple[float, float]:
    decoded = mux.read_video(path)
    brightness = decoded.frames.float().mean((1, 2, 3))
    loudness = decoded.waveform.abs().amax(0)
    return float((brightness > 128).nonzero()[0]) / decoded.fps, float((loudness > 0.3).nonzero()[0]) / decoded.sample_rate


@pytest.mark.parametrize(("fps", "count"), [(12.5, 125), (25.0, 249)])
@pytest.mark.parametrize("second", [0.0, 4.0, 9.6])
def test_write_video_flash_and_click_together(tmp_path: Path, fps: float, count: int, second: float) -> None:
    frames = torch.zeros(count, 32, 48, 3, dtype=torch.uint8)
    sound = torch.zeros(2, 441000)
    frames[round(second * fps)] = 255
    start = round(second * 44100)
    sound[:, start : start + 441] = torch.sin(torch.arange(441) * (math.tau * 2000 / 44100)) * 0.9
    path = mux.write_video(tmp_path / "a.mp4", frames, fps, waveform=sound).path
    flash, click = flash_and_click(path)
    assert flash == pytest.approx(second, abs=1e-6) and abs(click - flash) < 0.25 / fps
    moved = torch.roll(sound, 22050, 1) if second < 9 else sound
    mux.replace_audio(path, moved)
    new_flash, new_click = flash_and_click(path)
    assert new_flash == flash and new_click == pytest.approx(click + (0.5 if second < 9 else 0), abs=0.005)


def test_write_video_index_comes_first(tmp_path: Path) -> None:
    content = mux.write_video(tmp_path / "a.mp4", clip(5), 25, waveform=tone(8820)).path.read_bytes()
    assert 0 < content.index(b"moov") < content.index(b"mdat")


def test_write_video_metadata(tmp_path: Path) -> None:
    facts = {"format": FORMAT, "schema": SCHEMA, "prompt": 'é "雪"\n' * 5000, "seed": 2**64 - 1, "settings": {"steps": 25}}
    tags = mux.probe(mux.write_video(tmp_path / "a.mp4", clip(2), 25, metadata=facts).path)
    assert tags["magi2"] == facts and tags["metadata"]["title"] == 'é "雪"'
    assert str(tmp_path) not in str(tags["metadata"])
    mux.replace_audio(tmp_path / "a.mp4", tone(100))
    assert mux.probe(tmp_path / "a.mp4")["magi2"] == facts


def test_write_video_size_and_crf(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (4, 64, 112, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    fine = mux.write_video(tmp_path / "fine.mp4", noise, 25, size=(56, 34)).path
    coarse = mux.write_video(tmp_path / "coarse.mp4", noise, 25, size=(56, 34), crf=40).path
    assert mux.read_video(fine).frames.shape == (4, 34, 56, 3)
    assert coarse.stat().st_size < 0.5 * fine.stat().st_size


def test_write_video_odd_size(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"113x63.*112x62 or 114x64"):
        mux.write_video(tmp_path / "a.mp4", torch.zeros(2, 63, 113, 3, dtype=torch.uint8), 25)
    with pytest.raises(RequestError, match="even"):
        mux.write_video(tmp_path / "a.mp4", clip(2), 25, size=(30, 33))
    assert only(tmp_path) == []


def test_write_video_refuses_wrong_values(tmp_path: Path) -> None:
    frames, path = clip(2), tmp_path / "a.mp4"
    wrong = [
        ({"fps": 0.0}, "fps"),
        ({"fps": float("nan")}, "fps"),
        ({"fps": 25, "crf": 99}, "crf"),
        ({"fps": 25, "waveform": torch.zeros(3, 10)}, r"\[2, samples\]"),
        ({"fps": 25, "waveform": torch.zeros(2, 0)}, r"\[2, samples\]"),
        ({"fps": 25, "waveform": torch.zeros(2, 2, 10)}, r"\[2, samples\]"),
        ({"fps": 25, "waveform": torch.tensor([[0.0, math.nan]])}, "not numbers"),
        ({"fps": 25, "waveform": tone(10), "sample_rate": 51200}, "Resample"),
    ]
    for arguments, text in wrong:
        with pytest.raises(RequestError, match=text):
            mux.write_video(path, frames, **arguments)
    for pictures, text in (([], "no frames"), (frames.float(), "uint8"), ([clip(1), clip(1, 64)], "change size")):
        with pytest.raises(RequestError, match=text):
            mux.write_video(path, pictures, 25)
    with pytest.raises(RequestError, match=r"\.mp4"):
        mux.write_video(tmp_path / "a.avi", frames, 25)
    with pytest.raises(TypeError, match="qp"):
        mux.write_video(path, frames, 25, qp=3)
    assert only(tmp_path) == []


def test_prepare_waveform_clips_and_says_so(caplog) -> None:
    clipped = mux.prepare_waveform(torch.tensor([[0.5, 2.0], [-3.0, 0.0]]), 44100)
    assert clipped.tolist() == [[0.5, 1.0], [-1.0, 0.0]]
    assert "2 of 4" in caplog.text and "3.00" in caplog.text


def test_write_video_cancelled_keeps_old_file(tmp_path: Path) -> None:
    path = mux.write_video(tmp_path / "a.mp4", clip(3), 25).path
    before = path.read_bytes()
    calls = iter([False] * 5 + [True])
    with pytest.raises(Interrupted):
        mux.write_video(path, clip(20), 25, waveform=tone(35280), should_stop=lambda: next(calls))
    assert path.read_bytes() == before and only(tmp_path) == ["a.mp4"]


def test_write_video_error_in_source_leaves_nothing(tmp_path: Path) -> None:
    def source():
        yield clip(5)
        raise ZeroDivisionError("decoder")

    with pytest.raises(ZeroDivisionError):
        mux.write_video(tmp_path / "a.mp4", source(), 25, waveform=tone(8820))
    assert only(tmp_path) == []


FULL_DISK = """
import importlib.util, resource, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("p", Path(sys.argv[1]) / "magi2_core" / "packages.py")
packages = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)
packages.register()
import torch
from magi2_core.errors import OutputError
from magi2_core.media import mux
noise = torch.randint(0, 256, (20, 64, 112, 3), dtype=torch.uint8)
sound = torch.rand(2, 44100)
limit = int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
folder = Path(sys.argv[2])
for write in (lambda: mux.write_video(folder / "a.mp4", noise, 25, waveform=sound), lambda: mux.write_wav(folder / "a.wav", sound)):
    try:
        write()
    except OutputError as error:
        assert "Free space" in str(error) or "free space" in str(error), error
        print("refused")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="uses a POSIX file size limit as the full disk")
@pytest.mark.parametrize("limit", [0, 1000, 100_000])
def test_write_disk_full_leaves_nothing(tmp_path: Path, limit: int) -> None:
    command = [sys.executable, "-c", FULL_DISK, str(ROOT), str(tmp_path), str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused", "refused"], done.stdout + done.stderr
    assert only(tmp_path) == []


def test_write_into_impossible_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for write in (
        lambda: mux.write_video(tmp_path / "file" / "a.mp4", clip(1), 25),
        lambda: mux.write_wav(tmp_path / "file" / "a.wav", tone(9)),
    ):
        with pytest.raises(OutputError, match="another folder"):
            write()


def test_write_video_makes_folders_and_takes_odd_names(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = mux.write_video(Path("new/deep") / "a:%03d é.mp4", clip(1), 25).path
    assert path == tmp_path / "new" / "deep" / "a:%03d é.mp4" and mux.probe(path)["frames"] == 1


def test_replace_audio_copies_picture(tmp_path: Path) -> None:
    import av

    def packets(path: Path) -> list[tuple]:
        with av.open(str(path)) as container:
            return [(float(p.pts * p.time_base), bytes(p)) for p in container.demux(video=0) if p.size]

    source = mux.write_video(tmp_path / "a.mp4", clip(24), 24000 / 1001, waveform=tone(9000)).path
    result = mux.replace_audio(source, tone(30000, 48000), sample_rate=48000, output=tmp_path / "b.mp4")
    assert packets(result.path) == packets(source)
    assert (result.frames, result.samples, mux.probe(result.path)["sample_rate"]) == (24, 30000, 48000)
    assert mux.probe(source)["samples"] == 9000


def test_replace_audio_without_picture(tmp_path: Path) -> None:
    sound = mux.write_wav(tmp_path / "a.wav", tone(100))
    with pytest.raises(RequestError, match="no picture"):
        mux.replace_audio(sound, tone(100), output=tmp_path / "b.mp4")
    assert only(tmp_path) == ["a.wav"]


def test_write_wav_is_lossless_to_24_bits(tmp_path: Path) -> None:
    import soundfile

    sound = torch.rand(2, 5000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    path = mux.write_wav(tmp_path / "a.wav", sound[None])
    back, rate = soundfile.read(str(path), dtype="float32")
    assert rate == 44100 and (torch.from_numpy(back).T - sound).abs().max() <= 2**-23 and only(tmp_path) == ["a.wav"]
    with pytest.raises(RequestError, match=r"\.wav"):
        mux.write_wav(tmp_path / "a.flac", sound)


def test_probe_and_read_video_refuse(tmp_path: Path) -> None:
    (tmp_path / "text.mp4").write_text("no video")
    sound = mux.write_wav(tmp_path / "a.wav", tone(100))
    for path, text in ((tmp_path / "absent.mp4", "no such file"), (tmp_path / "text.mp4", "cannot be opened")):
        with pytest.raises(RequestError, match=text):
            mux.probe(path)
    with pytest.raises(RequestError, match="no frames"):
        mux.read_video(sound)
    assert mux.probe(sound)["samples"] == 100


@pytest.mark.parametrize(("package", "write"), [("av", "write_video"), ("soundfile", "write_wav")])
def test_missing_package(tmp_path: Path, monkeypatch, package: str, write: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    arguments = (clip(1), 25) if write == "write_video" else (tone(10),)
    with pytest.raises(DependencyError, match=f'pip install "{package}>='):
        getattr(mux, write)(tmp_path / ("a.mp4" if write == "write_video" else "a.wav"), *arguments)


def test_import_without_media_packages() -> None:
    code = (
        "import importlib.util, sys\n"
        "for name in ('av', 'PIL', 'soundfile'): sys.modules[name] = None\n"
        f"spec = importlib.util.spec_from_file_location('p', {str(ROOT / 'magi2_core' / 'packages.py')!r})\n"
        "packages = importlib.util.module_from_spec(spec); spec.loader.exec_module(packages); packages.register()\n"
        "from magi2_core.media import files, frames, image, metadata, mux, preview, reading\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
