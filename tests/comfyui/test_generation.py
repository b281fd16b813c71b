"""Clips made through /prompt on a real ComfyUI: events, status lines, previews, caching, files, and the rules for pictures."""

import copy
import io
import json
from pathlib import Path
from typing import Any

import graphs
import numpy as np
import pytest
from PIL import Image
from server import Run, Server

from magi2_core.media.reading import probe, read_video
from magi2_core.request import load_latents

HERE = Path(__file__).resolve().parent
FIRST = graphs.to_video(steps=3, width=0, height=0)


@pytest.fixture(scope="module")
def clip(server: Server) -> Run:
    """The first text-to-video run of the module: starts the fleet."""
    return server.run(FIRST)


def saved_video(server: Server, run: Run, node: str = "6") -> Path:
    """The file Save Video wrote."""
    entry = run.outputs(node)["images"][0]
    return server.base / "output" / entry["subfolder"] / entry["filename"]


def test_text_to_video_writes_a_clip_with_sound(server: Server, clip: Run) -> None:
    assert clip.status == "success"
    facts = probe(saved_video(server, clip))
    assert (facts["width"], facts["height"], facts["frames"], facts["fps"]) == (112, 64, 125, 12.5)
    assert facts["audio_codec"] == "aac" and facts["channels"] == 2
    assert abs(facts["video_seconds"] - facts["audio_seconds"]) < 1 / 12.5
    assert facts["magi2"]["prompt"] == graphs.PROMPT and facts["magi2"]["seed"] == 1


def test_text_to_video_events(clip: Run) -> None:
    kinds = [event["type"] for event in clip.events]
    assert kinds.index("execution_start") < kinds.index("progress") < kinds.index("execution_success")
    steps = [event["data"]["value"] for event in clip.events if event["type"] == "progress" and event["data"]["node"] == "4"]
    assert {1, 2, 3} <= set(steps)
    totals = {event["data"]["max"] for event in clip.events if event["type"] == "progress" and event["data"]["node"] == "4"}
    assert 3 in totals
    executed = [event["data"]["node"] for event in clip.events if event["type"] == "executed"]
    assert "6" in executed


def test_text_to_video_status_lines(clip: Run) -> None:
    lines = [text for node, text in clip.texts if node == "4"]
    assert any("step 2/3" in line and "s/step" in line and "left" in line for line in lines), clip.texts
    assert any("loading" in line for _, line in clip.texts), clip.texts
    assert any("window" in line for node, line in clip.texts if node == "5"), clip.texts


def test_text_to_video_previews_are_animated_and_show_the_clip(server: Server, clip: Run) -> None:
    pictures = [data for facts, data in clip.previews if facts["node_id"] == "4"]
    assert 1 <= len(pictures) <= 3
    picture = Image.open(io.BytesIO(pictures[-1]))
    assert picture.format == "WEBP" and picture.n_frames > 4
    assert max(picture.size) <= 512 and picture.size[0] > picture.size[1]
    picture.seek(picture.n_frames - 1)
    shown = np.asarray(picture.convert("RGB"), np.float32).mean((0, 1))
    decoded = read_video(saved_video(server, clip)).frames[-1].float().mean((0, 1)).numpy()
    assert np.abs(shown - decoded).max() < 25, (shown, decoded)


def test_repeated_prompt_takes_everything_from_the_cache(server: Server, clip: Run) -> None:
    again = server.run(FIRST)
    assert again.status == "success"
    assert {"1", "2", "3", "4", "5", "6"} <= again.cached


def test_changed_seed_runs_from_the_sampler_only(server: Server, clip: Run) -> None:
    run = server.run(graphs.to_video(steps=3, width=0, height=0, seed=2))
    assert run.status == "success"
    assert {"1", "2", "3"} <= run.cached and not {"4", "5"} & run.cached


def test_request_beyond_the_training_is_the_last_line_of_its_node(server: Server, clip: Run) -> None:
    assert not any("not trained" in text for _, text in clip.texts)
    run = server.run(graphs.to_digest(prompt="a red dragon", seed=9))
    last = dict(run.texts)
    assert 'nano was not trained for "dragon"' in last["2"] and "64x48 pixels (but for 112x64)" in last["4"]
    assert 'nano was not trained for "dragon"' in server.log_tail(400)


def test_decode_to_tensors_and_file_agree(server: Server) -> None:
    run = server.run(graphs.to_digest(steps=2))
    text = run.outputs("6")["text"]
    assert text[0].startswith("image (125, 48, 64, 3) torch.float32")
    assert text[1].startswith("audio (1, 2, 441000) ") and text[2:] == ["rate 44100", "number 12.5"]


def test_first_frame_batch_alpha_and_aspect(server: Server) -> None:
    graph = graphs.to_file(steps=2)
    graph["7"] = {"class_type": "TestBatch", "inputs": {"count": 3, "width": 101, "height": 130}}
    graph["2"]["inputs"]["first_frame"] = ["7", 0]
    run = server.run(graph)
    assert run.status == "success", run.history["status"]
    assert any("batch of 3" in text and "first" in text for node, text in run.texts if node == "2")
    entry = run.outputs("5")["latents"][0]
    latents = load_latents(server.base / "output" / entry["subfolder"] / entry["filename"])
    assert latents.settings["has_image"] is True and latents.video.shape[1] == 48


def test_latents_saved_split_loaded_and_decoded(server: Server) -> None:
    graph = graphs.to_file(steps=2)
    graph["8"] = {"class_type": "Magi2SplitLatent", "inputs": {"latent": ["4", 0]}}
    for number, slot in (("9", 0), ("10", 1)):
        graph[number] = {"class_type": "TestDigest", "inputs": {"latent": ["8", slot]}}
    run = server.run(graph)
    assert run.outputs("9")["text"][0].startswith("latent (1, 48, 32, 3, 4)")
    assert run.outputs("10")["text"][0].startswith("latent (1, 64, 250)")
    entry = run.outputs("5")["latents"][0]
    name = f"{entry['subfolder']}/{entry['filename']} [output]"
    info = server.get("/object_info/Magi2LoadLatent")["Magi2LoadLatent"]
    assert name in info["input"]["required"]["latent_file"][1]["options"]
    digests = []
    for written in (name, name.replace("/", "\\")):  # as a workflow saved on Windows has it
        loaded = {
            "1": {"class_type": "Magi2LoadModel", "inputs": {"checkpoint": "nano"}},
            "2": {"class_type": "Magi2LoadLatent", "inputs": {"latent_file": written}},
            "3": {"class_type": "Magi2VAEDecode", "inputs": {"model": ["1", 0], "latent": ["2", 0], "decoder": "turbo"}},
            "4": {"class_type": "TestDigest", "inputs": {"image": ["3", 0]}},
        }
        digests.append(server.run(loaded).outputs("4")["text"])
    fresh = server.run(graphs.to_digest(steps=2)).outputs("6")["text"]
    assert digests[0] == digests[1] == fresh[:1]


def test_latent_names_outside_the_folders_are_refused(server: Server) -> None:
    for name in ("../user/comfyui.db", "/etc/passwd", "..\\..\\x.safetensors [output]", "nothing.safetensors"):
        graph = {
            "1": {"class_type": "Magi2LoadLatent", "inputs": {"latent_file": name}},
            "2": {"class_type": "Magi2SaveLatent", "inputs": {"latent": ["1", 0], "filename_prefix": "x"}},
        }
        status, answer = server.post("/prompt", {"prompt": graph})
        assert status == 400 and "latent file" in json.dumps(answer), (name, answer)


def test_cut_sampling_goes_on_to_the_same_latents(server: Server) -> None:
    whole = server.run(graphs.to_file(steps=4, deterministic=True, seed=5))
    cut = server.run(graphs.to_file(steps=4, deterministic=True, seed=5, stop_after=2))
    names = [run.outputs("5")["latents"][0] for run in (whole, cut)]
    graph = graphs.to_file(steps=4, deterministic=True, seed=5)
    graph["7"] = {"class_type": "Magi2LoadLatent", "inputs": {"latent_file": f"{names[1]['subfolder']}/{names[1]['filename']} [output]"}}
    graph["3"]["inputs"]["resume"] = ["7", 0]
    resumed = server.run(graph)
    assert resumed.status == "success", resumed.history["status"]
    files = [server.base / "output" / entry["subfolder"] / entry["filename"] for entry in (*names, resumed.outputs("5")["latents"][0])]
    latents = [load_latents(path) for path in files]
    assert latents[1].solver is not None and latents[1].solver.step == 2
    assert latents[0].sha256() == latents[2].sha256() != latents[1].sha256()


def test_audio_mux_joins_and_replaces(server: Server) -> None:
    graph = graphs.to_digest(steps=2)
    graph["7"] = {"class_type": "Magi2AudioMux", "inputs": {"audio": ["5", 1], "images": ["5", 0], "fps": ["5", 2]}}
    graph["8"] = {"class_type": "Magi2AudioMux", "inputs": {"audio": ["5", 1], "video": ["7", 0]}}
    for node, source in (("9", "7"), ("10", "8")):
        graph[node] = {
            "class_type": "SaveVideo",
            "inputs": {"video": [source, 0], "filename_prefix": f"video/mux{node}", "format": "auto", "codec": "auto"},
        }
    run = server.run(graph)
    assert run.status == "success", run.history["status"]
    facts = [probe(saved_video(server, run, node)) for node in ("9", "10")]
    for fact in facts:
        assert (fact["frames"], fact["fps"], fact["audio_codec"]) == (125, 12.5, "aac")
        assert abs(fact["video_seconds"] - fact["audio_seconds"]) < 1 / 12.5


def test_audio_mux_needs_fps(server: Server) -> None:
    # wired, so that it is not known when the prompt is queued
    graph = graphs.to_digest(steps=2)
    graph["7"] = {"class_type": "Magi2AudioMux", "inputs": {"audio": ["5", 1], "images": ["5", 0], "fps": ["9", 0]}}
    graph["9"] = {"class_type": "PrimitiveFloat", "inputs": {"value": 0.0}}
    graph["8"] = {
        "class_type": "SaveVideo",
        "inputs": {"video": ["7", 0], "filename_prefix": "video/none", "format": "auto", "codec": "auto"},
    }
    run = server.run(graph)
    assert run.status == "error" and "fps" in run.error["exception_message"] and run.error["node_id"] == "7"


def test_two_queued_prompts_both_finish(server: Server) -> None:
    first = server.queue(graphs.to_file(steps=3, seed=11))
    second = server.queue(graphs.to_file(steps=3, seed=12))
    for prompt in (first, second):
        assert server.wait(prompt)["status"]["status_str"] == "success"


def test_status_node_names_fleet_and_checkpoints(server: Server, clip: Run) -> None:
    graph: dict[str, Any] = {"1": {"class_type": "Magi2Status", "inputs": {}}}
    first = server.run(graph)
    text = first.outputs("1")["text"][0]
    assert "fleet nano: " in text and "rank 0 on cpu" in text and "checkpoint nano: complete" in text
    assert "1" not in server.run(graph).cached


def test_prompt_saved_by_version_0_1_0_still_runs(server: Server) -> None:
    saved = json.loads((HERE / "saved_0_1_0.json").read_text())
    covered = {node["class_type"] for node in saved.values()}
    ours = set(json.loads((HERE / "schema.json").read_text()))
    assert covered >= ours - {"Magi2PromptEnhance", "Magi2LoadLatent"}  # those need a server, and a file
    run = server.run(copy.deepcopy(saved))
    assert run.status == "success", run.history["status"]
