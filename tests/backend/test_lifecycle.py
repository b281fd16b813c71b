"""How a fleet begins and ends: with its owner in mode auto, by itself in mode keep, by command; and what a head finds in its way."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import magi2_core
from magi2_core import cli
from magi2_core.backend import launcher, runtime
from magi2_core.backend.client import BackendClient, BackendSpec, DecodeToFileRequest, pool
from magi2_core.errors import BackendDiedError, CheckpointError, OutputError, RequestError
from magi2_core.request import DecodeRequest, save_latents

OWNER = Path(__file__).resolve().parent / "owner.py"
START = Path(magi2_core.__file__).parent / "packages.py"


def start_owner(tiny: Path, folder: Path, mode: str, way: str) -> tuple[subprocess.Popen, dict]:
    process = subprocess.Popen([sys.executable, str(OWNER), str(tiny), str(folder), mode, way], stdout=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line, "the owner ended before its job ran"
    return process, json.loads(line)


@pytest.mark.parametrize("way", ["SIGKILL", "SIGTERM", "SIGINT", "execv", "exit"])
def test_fleet_is_gone_when_its_owner_is(tiny: Path, folder: Path, way: str) -> None:
    shared = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()
    process, said = start_owner(tiny, folder, "auto", way if way in ("execv", "exit") else "wait")
    begun = time.monotonic()
    if way.startswith("SIG"):
        process.send_signal(getattr(signal, way))
    assert runtime.wait_gone(said["pids"], 5), f"alive after {time.monotonic() - begun:.1f} s"
    process.kill()
    process.wait()
    assert not [path.name for path in folder.iterdir() if path.name.startswith(said["key"]) and path.is_file()]
    if shared:
        assert not {path for path in set(Path("/dev/shm").iterdir()) - shared if "torch" in path.name or "magi2" in path.name}


def test_kept_fleet_outlives_its_owner_and_is_found_again(tiny: Path, folder: Path, sample: Callable) -> None:
    process, said = start_owner(tiny, folder, "keep", "exit")
    process.wait(20)
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu", "cpu"), mode="keep"), folder)
    begun = time.monotonic()
    client.connect()
    status = client.status()
    assert time.monotonic() - begun < 2
    assert [status["pid"], status["fleet"]["generation"], status["fleet"]["up"]] == [said["pids"][0], 1, True]
    job = client.submit(sample())
    stages = set()
    while (event := job.next_event(60)) is not None and event.kind == "progress":
        stages.add(event.value.stage)
    assert event.kind == "done" and "load" not in stages and "start" not in stages
    client.close()
    again = BackendClient(client.spec, folder)
    again.connect()
    assert again.status()["pid"] == said["pids"][0]
    again.shutdown()
    assert runtime.wait_gone(said["pids"], 5)
    assert not [path.name for path in folder.iterdir() if path.suffix in (".json", ".sock", ".token")]


def test_stale_files_are_passed_over(tiny: Path, folder: Path) -> None:
    spec = BackendSpec(checkpoint=str(tiny), devices=("cpu",), mode="keep")
    # A record of a process that is gone, of one whose pid was taken by another (this one), and a dead socket.
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for pid, started in ((dead.pid, 5), (os.getpid(), runtime.start_ticks(os.getpid()) + 1)):
        record = runtime.RuntimeFile(
            key=spec.key, pid=pid, started=started, address=f"unix:{folder}/{spec.key}.sock", mode="keep", version="0", protocol=1, spec={}
        )
        runtime.write_runtime_file(folder, record)
        (folder / f"{spec.key}.sock").touch()
        client = BackendClient(spec, folder)
        client.connect()
        assert client.status()["pid"] not in (dead.pid, os.getpid())
        client.shutdown()


def test_head_of_another_version_is_named(tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = BackendSpec(checkpoint=str(tiny), devices=("cpu",), mode="keep")
    old = BackendClient(spec, folder)
    old.connect()
    with monkeypatch.context() as patch:
        patch.setattr(magi2_core, "__version__", "99.0")
        with pytest.raises(RequestError, match=rf"client is version 99.*kill {spec.key}"):
            BackendClient(spec, folder).connect()
    pid = old.status()["pid"]
    second = BackendClient(replace(spec, idle_minutes=1), folder)
    second.connect()  # another idle time is no other fleet
    assert second.status()["pid"] == pid
    assert launcher.start_head(spec, spec.key, folder).process.wait(20) == launcher.HEAD_EXISTS  # two heads of one name cannot be
    assert old.ping()
    old.shutdown()


def test_head_says_why_it_cannot_start(tiny: Path, folder: Path, tmp_path: Path) -> None:
    spec = BackendSpec(checkpoint=str(tiny), devices=("cpu",), mode="keep")
    (folder / f"{spec.key}.sock").mkdir()
    with pytest.raises((OutputError, BackendDiedError), match="sock"):
        BackendClient(spec, folder).connect()
    (folder / f"{spec.key}.sock").rmdir()
    with pytest.raises(RequestError, match="shorter"):
        BackendClient(spec, tmp_path / ("long" * 30)).connect()
    assert not runtime.list_runtime_files(folder)


def test_runtime_directory_must_be_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runtime.prepare(tmp_path / "run")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o750)
    with pytest.raises(RequestError, match="chmod 700"):
        runtime.prepare(made)
    made.chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.stat(made).st_uid + 1)
        with pytest.raises(RequestError, match="belongs to the user"):
            runtime.prepare(made)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(RequestError, match="not a directory"):
        runtime.prepare(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises((RequestError, OutputError)):
        runtime.prepare(tmp_path / "file")


def test_files_are_private(tiny: Path, folder: Path, sample: Callable, tmp_path: Path) -> None:
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu",)), folder)
    latents = client.submit(sample(num_inference_steps=1)).result(120)
    request = DecodeToFileRequest(decode=DecodeRequest(latents=latents, audio=False), path=str(tmp_path / "clip.mp4"))
    client.submit(request).result(60)
    umask = os.umask(0o022)
    os.umask(umask)
    assert (tmp_path / "clip.mp4").stat().st_mode & 0o777 == 0o666 & ~umask  # what the user asked for is the user's as ever
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.rglob("*")}
    assert len(modes) > 5 and all(mode & 0o077 == 0 for mode in modes.values()), modes
    client.close()


def test_worker_that_cannot_start_says_why(tiny: Path, folder: Path, sample: Callable) -> None:
    for changes, kind, words in (
        ({"checkpoint": str(tiny / "nothing")}, CheckpointError, "does not exist"),
        ({"layout": "cp5"}, RequestError, "cp5|must divide"),
        ({"devices": ("cpu",), "kernels": "triton"}, RequestError, "bfloat16|triton"),
    ):
        client = BackendClient(BackendSpec(**{"checkpoint": str(tiny), "devices": ("cpu",) * 2, **changes}), folder)
        with pytest.raises(kind, match=words):
            client.submit(sample()).result(60)
        assert client.ping() and not client.is_warm()
        client.close()


def test_idle_fleet_is_released_and_a_kept_head_goes(tiny: Path, folder: Path, sample: Callable, helper) -> None:
    spec = BackendSpec(checkpoint=str(tiny), devices=("cpu",), mode="keep", idle_minutes=0.5 / 60)
    client = BackendClient(spec, folder)
    client.submit(sample(num_inference_steps=1)).result(120)
    pids = helper.pids(client)
    assert runtime.wait_gone(pids[1:], 10) and client.ping()
    client.close()
    assert runtime.wait_gone(pids[:1], 10)


def test_released_kept_head_goes_with_its_last_client(tiny: Path, folder: Path, sample: Callable, helper) -> None:
    client = BackendClient(BackendSpec(checkpoint=str(tiny), devices=("cpu",), mode="keep", idle_minutes=0), folder)
    client.submit(sample(num_inference_steps=1)).result(120)
    pids = helper.pids(client)
    client.release()
    time.sleep(1.5)  # the head looks twice a second whether it is still wanted
    assert runtime.wait_gone(pids[1:], 5) and client.ping()
    client.submit(sample(num_inference_steps=1)).result(120)
    client.release()
    client.close()
    assert runtime.wait_gone(pids[:1], 5)


def test_pool_gives_one_client_a_specification(tiny: Path, folder: Path, sample: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGI2_RUNTIME_DIR", str(folder))
    spec = BackendSpec(checkpoint=str(tiny), devices=("cpu",))
    client = pool.get(spec)
    assert pool.get(BackendSpec(checkpoint=str(tiny), devices=("cpu",))) is client and not pool.is_warm(spec)
    client.submit(sample(num_inference_steps=1)).result(120)
    assert pool.is_warm(spec) and [status["fleet"]["up"] for status in pool.statuses()] == [True]
    assert pool.release_all() == 1 and not pool.is_warm(spec) and pool.release_all() == 0
    pool.close()
    assert pool.statuses() == []


def serve(folder: Path, *arguments: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, str(START), "magi2_core.cli", "serve", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "MAGI2_RUNTIME_DIR": str(folder)})
    return process, process.stdout.readline().strip()


def test_serve_attach_ps_kill(tiny: Path, folder: Path, sample: Callable, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("MAGI2_RUNTIME_DIR", str(folder))
    process, address = serve(folder, "--checkpoint", str(tiny), "--devices", "cpu", "--listen", "tcp:127.0.0.1:0")
    assert address.startswith("tcp:127.0.0.1:") and not address.endswith(":0")
    client = BackendClient(BackendSpec(checkpoint="", mode="attach", address=address), folder)
    latents = client.submit(sample(num_inference_steps=1)).result(120)
    clip = client.submit(DecodeRequest(latents=latents)).result(60)
    assert clip.frames.shape == (25, 32, 32, 3) and clip.waveform is not None  # through the socket: no file is shared over TCP
    assert not list(folder.rglob("*.frames")) and client.status()["kept"] == 0
    with monkeypatch.context() as patch:
        patch.setenv("MAGI2_TOKEN", "0" * 64)
        with pytest.raises(RequestError, match="token"):
            BackendClient(client.spec, folder).connect()
    taken = ["serve", "--checkpoint", str(tiny), "--devices", "cpu,cpu", "--listen", address]
    assert cli.main(taken) == OutputError.exit_code and "in use" in capsys.readouterr().err
    assert cli.main(["serve", "--checkpoint", str(tiny), "--devices", "cpu"]) == 7 and "runs already" in capsys.readouterr().err

    assert cli.main(["ps"]) == 0
    (line,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert (line["pid"], line["state"], line["ranks"], line["layout"]) == (process.pid, "warm", 1, "cp1")
    assert cli.main(["kill", "0123"]) == RequestError.exit_code and "no fleet" in capsys.readouterr().err
    assert cli.main(["kill"]) == RequestError.exit_code and "--all" in capsys.readouterr().err
    assert cli.main(["kill", line["key"]]) == 0 and line["key"] in capsys.readouterr().out
    assert process.wait(10) == 0
    assert cli.main(["ps"]) == 0 and capsys.readouterr().out == ""
    with pytest.raises(BackendDiedError, match="serve"):
        BackendClient(client.spec, folder).submit(sample())


def test_generate_on_a_fleet(tiny: Path, folder: Path, sample: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    monkeypatch.setenv("MAGI2_RUNTIME_DIR", str(folder))
    process, address = serve(folder, "--checkpoint", str(tiny), "--devices", "cpu")
    client = BackendClient(BackendSpec(checkpoint="", mode="attach", address=address), folder)
    latents = client.submit(sample(num_inference_steps=1)).result(120)
    save_latents(latents, tmp_path / "made.safetensors")
    decode = ["generate", "--from-latents", str(tmp_path / "made.safetensors"), "--checkpoint", str(tiny), "--backend", "attach"]
    assert cli.main([*decode, "--address", address, "--output", str(tmp_path / "clip.mp4")]) == 0
    assert "25 frames" in capsys.readouterr().out and client.status()["recent"][-1]["stage"] == "decode"
    assert cli.main([*decode, "--output", str(tmp_path / "clip2.mp4")]) == RequestError.exit_code and "address" in capsys.readouterr().err
    local = [*decode, "--device", "cpu", "--address", address, "--output", str(tmp_path / "clip2.mp4")]
    assert cli.main(local) == RequestError.exit_code and "--devices" in capsys.readouterr().err
    pool.close()
    client.shutdown()
    assert process.wait(10) == 0


def test_kill_ends_a_head_that_does_not_answer(tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("MAGI2_RUNTIME_DIR", str(folder))
    monkeypatch.setattr("magi2_core.backend.client.CALL_SECONDS", 1.0)
    monkeypatch.setattr("magi2_core.commands.fleet.STOP_SECONDS", 1.0)
    process, _ = serve(folder, "--checkpoint", str(tiny), "--devices", "cpu")
    process.send_signal(signal.SIGSTOP)
    assert cli.main(["kill", "--all"]) == 0
    assert process.wait(10) == -9
    assert not [path.name for path in folder.iterdir() if path.suffix in (".json", ".sock")]


def test_serve_ends_on_ctrl_c(tiny: Path, folder: Path) -> None:
    process, address = serve(folder, "--checkpoint", str(tiny), "--devices", "cpu")
    assert address.startswith("unix:")
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0 and not Path(address.removeprefix("unix:")).exists()


def test_a_fleet_that_is_ended_says_so_to_its_jobs(tiny: Path, folder: Path, sample: Callable) -> None:
    process, address = serve(folder, "--checkpoint", str(tiny), "--devices", "cpu")
    client = BackendClient(BackendSpec(checkpoint="", mode="attach", address=address), folder)
    running = client.submit(sample(num_inference_steps=900))
    waiting = client.submit(sample(num_inference_steps=900))
    while (event := running.next_event(60)) is not None and not (event.kind == "progress" and event.value.stage == "preview"):
        pass
    assert event is not None
    other = BackendClient(client.spec, folder)
    other.connect()
    other.shutdown()
    for job in (running, waiting):
        with pytest.raises(BackendDiedError, match=r"fleet [0-9a-f]{12} was ended while the job ran or waited \(`kill`"):
            job.result(20)
    assert process.wait(10) == 0


def test_generate_takes_the_checkpoint_of_the_fleet_it_attaches_to(
    tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.setenv("MAGI2_RUNTIME_DIR", str(folder))
    process, address = serve(folder, "--checkpoint", str(tiny), "--devices", "cpu")
    attach = ["generate", "--prompt", "x", "--backend", "attach", "--address", address, "--steps", "1", "--output", str(tmp_path / "a.mp4")]
    assert cli.main([*attach, "--checkpoint", "nano"]) == RequestError.exit_code
    assert str(tiny) in capsys.readouterr().err
    assert cli.main([*attach, "--size", "32x32", "--stop-after", "1"]) == 0
    said = capsys.readouterr()
    assert "nano" not in said.err
    pool.close()
    assert cli.main(["kill", "--all"]) == 0
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    "options,named",
    [
        (["--layout", "cp2ep2"], "--layout"),
        (["--devices", "cpu,cpu"], "--devices"),
        (["--address", "unix:/x.sock"], "--backend attach"),
        (["--backend", "keep", "--address", "unix:/x.sock"], "--backend attach"),
        (["--backend", "attach", "--address", "unix:/x.sock", "--layout", "cp2ep2"], "serve"),
        (["--backend", "attach", "--address", "unix:/x.sock", "--dtype", "bfloat16"], "serve"),
    ],
)
def test_generate_refuses_options_of_a_fleet_it_would_not_look_at(options: list[str], named: str, capsys) -> None:
    assert cli.main(["generate", "--prompt", "x", *options]) == RequestError.exit_code
    assert named in capsys.readouterr().err
