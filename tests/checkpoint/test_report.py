"""What the doctor says about a checkpoint."""

import shutil

from magi2_core.checkpoint.report import report_checkpoint


def test_report_checkpoint_whole(nano_copy):
    report = report_checkpoint(nano_copy)
    assert report.is_complete and report.missing_bytes == 0
    assert {part.name: part.tensors for part in report.components} == {
        "preview": 251, "refiner": 47, "text_encoder": 53, "vae": 196, "turbo": 60, "audio": 365,
    }  # fmt: skip
    assert {part.name: part.dtypes for part in report.components}["turbo"] == {"bfloat16": 60}
    assert "hf download" not in "\n".join(report.lines())


def test_report_checkpoint_missing_incomplete_damaged(nano_copy):
    (nano_copy / "preview" / "model-00001-of-00002.safetensors").unlink()
    shutil.rmtree(nano_copy / "refiner")
    with open(nano_copy / "stable-audio-open-1.0" / "model.safetensors", "r+b") as handle:
        handle.truncate(100_000)
    with open(nano_copy / "vae" / "Wan2.2_VAE.pth", "r+b") as handle:
        handle.truncate(100_000)
    report = report_checkpoint(nano_copy)
    states = {part.name: part.state for part in report.components}
    assert states == {
        "preview": "incomplete",
        "refiner": "missing",
        "text_encoder": "ok",
        "vae": "damaged",
        "turbo": "ok",
        "audio": "damaged",
    }
    text = "\n".join(report.lines())
    for words in (
        "missing: preview/model-00001-of-00002.safetensors (needed for: makes the clip)",
        "fault: audio:",
        "fault: vae:",
        "revision 2dea51b64db47ee5b4402d36fd90829a0c58913b, 307.3 GB in all",
        'hf download sand-ai/MAGI-2-preview --revision 2dea51b64db47ee5b4402d36fd90829a0c58913b --include "refiner/*" --local-dir',
    ):
        assert words in text
    assert '--include "turbo_vae/*"' not in text
    assert 228e9 + 13e9 + 2.8e9 + 4.8e9 - 20e6 < report.missing_bytes < 250e9


def test_report_checkpoint_nothing_there(tmp_path):
    report = report_checkpoint(tmp_path / "new" / "MAGI-2-preview")
    assert {part.state for part in report.components} == {"missing"} and report.free_bytes > 0
    lines = [line for line in report.lines() if "hf download" in line]
    assert len(lines) == 1 and "--include" not in lines[0] and str(tmp_path) in lines[0]
    assert any("free on this disk" in line for line in report.lines())
