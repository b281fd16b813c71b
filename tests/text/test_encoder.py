"""The encoder on the embedded checkpoint and on damaged copies of it."""

import functools
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from magi2_core.errors import CheckpointError, DependencyError, RequestError
from magi2_core.text.caption import add_figure_line
from magi2_core.text.encoder import TextEncoder, TextFeatures, build_model, figure_feature
from magi2_core.text.weights import IGNORED, PREFIX

pytest.importorskip("transformers", reason="the text encoder's package is optional where only latents are decoded")

PROMPT = "a red circle moves to the right over a blue background, low hum"
SHARED = Path(os.environ.get("MAGI2_SHARED", Path(__file__).resolve().parents[2].parent / "shared"))


@pytest.fixture(scope="module")
def folder(nano_folder: Path) -> Path:
    return nano_folder / "text_encoder"


@pytest.fixture(scope="module")
def encoder(folder: Path) -> TextEncoder:
    return TextEncoder.from_folder(folder, device="cpu", dtype=torch.float32)


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder, to be damaged."""
    return Path(shutil.copytree(folder, tmp_path / "text_encoder"))


def rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encode_equals_transformers_hidden_states(folder: Path, dtype: torch.dtype) -> None:
    """The skipped layers, norm and mapping of names against transformers' own loading of the same folder."""
    from transformers import Qwen3_5TextModel

    theirs = Qwen3_5TextModel.from_pretrained(folder, dtype=dtype).eval()
    features = TextEncoder.from_folder(folder, device="cpu", dtype=dtype).encode(PROMPT)
    with torch.no_grad():
        states = theirs(input_ids=features.ids, output_hidden_states=True, use_cache=False).hidden_states
    assert features.features.dtype == dtype
    assert torch.equal(features.features, states[-3])
    assert not torch.equal(states[-3], states[-2])


def test_encode_full_depth_gives_the_same_features(folder: Path, encoder: TextEncoder) -> None:
    deep = TextEncoder.from_folder(folder, device="cpu", dtype=torch.float32, full_depth=True)
    states = deep.hidden_states(PROMPT)
    assert len(states) == 5
    assert torch.equal(deep.encode(PROMPT).features, encoder.encode(PROMPT).features)
    assert torch.equal(states[-3], encoder.encode(PROMPT).features)


def test_from_folder_holds_no_unneeded_weights(encoder: TextEncoder) -> None:
    names = list(encoder.model.state_dict())
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"0", "1"}
    assert not any(name.startswith("norm") for name in names)


@pytest.mark.skipif(not (SHARED / "nano" / "golden").is_dir(), reason="the trained checkpoint's golden cases are not beside the checkout")
def test_encode_nano_golden_features(folder: Path) -> None:
    """The golden features are the bfloat16 ones; an fp32 run is 4e-3 away from them."""
    encoder = TextEncoder.from_folder(folder, device="cpu", dtype=torch.bfloat16)
    golden = SHARED / "nano" / "golden"
    cases = json.loads((golden / "cases.json").read_text(encoding="utf-8"))

    def distance(got: torch.Tensor, want: torch.Tensor) -> float:
        assert got.shape == want.shape
        return ((got.float() - want).norm() / want.norm()).item()

    for name, case in cases["cases"].items():
        tensors = load_file(golden / name / "case.safetensors")
        prompt = add_figure_line(case["prompt"]) if "special_token" in tensors else case["prompt"]
        assert prompt == case["encoded_prompt"]
        features = encoder.encode(prompt)
        assert features.ids[0].tolist() == case["input_ids"]
        assert distance(features.features, tensors["txt_feat"]) < 1e-3
        assert distance(encoder.encode(cases["negative_prompt"]).features, tensors["null_txt_feat"]) < 1e-3
        if "special_token" in tensors:
            assert distance(figure_feature(features, prompt, 1), tensors["special_token"][0]) < 1e-3


def test_encode_limits(encoder: TextEncoder) -> None:
    with pytest.raises(RequestError, match="14 tokens, at most 7"):
        encoder.encode(PROMPT, max_tokens=7)
    cut = encoder.encode(PROMPT, max_tokens=7, truncate=True)
    # The first layers are causal: cutting the end changes nothing before it.
    torch.testing.assert_close(cut.features, encoder.encode(PROMPT).features[:, :7], rtol=1e-4, atol=1e-5)
    assert encoder.count_tokens(PROMPT) == 14
    with pytest.raises(RequestError, match="empty"):
        encoder.encode("")


def features_of(text: str, spans: list[tuple[int, int]], dtype: torch.dtype = torch.float32) -> TextFeatures:
    rows = torch.arange(len(spans), dtype=dtype)[None, :, None] + torch.tensor([0.0, 100.0], dtype=dtype)
    return TextFeatures(features=rows, ids=torch.zeros(1, len(spans), dtype=torch.long), offsets=tuple(spans), text=text)


def test_figure_feature_first_occurrence_and_overlap() -> None:
    text = "ab <Figure 1> and <Figure 1>"
    spans = [(0, 2), (2, 5), (5, 13), (0, 0), (13, 17), (17, 28)]
    assert figure_feature(features_of(text, spans), text, 1).tolist() == [1.5, 101.5]


def test_figure_feature_figure_12_is_not_figure_1() -> None:
    text = "<Figure 12>"
    features = features_of(text, [(0, 11)])
    assert figure_feature(features, text, 1).tolist() == [0.0, 0.0]
    assert figure_feature(features, text, 12).tolist() == [0.0, 100.0]


def test_figure_feature_cut_away_is_zero() -> None:
    assert figure_feature(features_of("ab", [(0, 2)]), "ab <Figure 1>", 1).tolist() == [0.0, 0.0]


def test_figure_feature_in_a_caption_and_in_bfloat16() -> None:
    prompt = add_figure_line('{"global_layer": {"context": "c"}}')
    text = "context: c\nThe first frame refers to <Figure 1>"
    start = text.index("<")
    got = figure_feature(features_of(text, [(0, 3), (start, start + 2), (start + 2, len(text))], torch.bfloat16), prompt, 1)
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [1.5, 101.5]


def test_from_folder_missing_tensor(copied: Path) -> None:
    name = PREFIX + "layers.1.mlp.up_proj.weight"
    rewrite(copied, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"text encoder.*{name}"):
        TextEncoder.from_folder(copied, device="cpu")


def test_from_folder_needs_no_skipped_layer_unless_full_depth(copied: Path) -> None:
    def drop(tensors: dict) -> None:
        for name in [name for name in tensors if name.startswith((PREFIX + "layers.3", PREFIX + "norm", *IGNORED))]:
            del tensors[name]

    rewrite(copied, drop)
    assert TextEncoder.from_folder(copied, device="cpu").encode(PROMPT).features.dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"layers\.3"):
        TextEncoder.from_folder(copied, device="cpu", full_depth=True)


@pytest.mark.parametrize("name", [PREFIX + "layers.4.mlp.up_proj.weight", "model.embed_tokens.weight", "surprise"])
def test_from_folder_unknown_tensor(copied: Path, name: str) -> None:
    rewrite(copied, lambda tensors: tensors.update({name: torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors holds the tensor {name}"):
        TextEncoder.from_folder(copied, device="cpu")


@pytest.mark.parametrize("name", ["model.visual.blocks.0.x", "lm_head.weight", "mtp.layers.0.x"])
def test_from_folder_known_parts_are_left_alone(copied: Path, name: str) -> None:
    rewrite(copied, lambda tensors: tensors.update({name: torch.zeros(3)}))
    TextEncoder.from_folder(copied, device="cpu")


@pytest.mark.parametrize(
    ("value", "message"), [(torch.zeros(128, 255), r"shape \(128, 255\), .*\(128, 256\)"), (torch.zeros(128, 256, dtype=torch.int8), "I8")]
)
def test_from_folder_wrong_shape_or_dtype(copied: Path, value: torch.Tensor, message: str) -> None:
    name = PREFIX + "layers.0.mlp.down_proj.weight"
    rewrite(copied, lambda tensors: tensors.update({name: value}))
    with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
        TextEncoder.from_folder(copied, device="cpu")


def test_from_folder_damaged_or_absent_file(copied: Path) -> None:
    path = copied / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no whole"):
        TextEncoder.from_folder(copied, device="cpu")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no model\*\.safetensors"):
        TextEncoder.from_folder(copied, device="cpu")


def test_from_folder_sharded_with_index(copied: Path, encoder: TextEncoder) -> None:
    tensors = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, copied / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = TextEncoder.from_folder(copied, device="cpu", dtype=torch.float32)
    assert torch.equal(loaded.encode(PROMPT).features, encoder.encode(PROMPT).features)
    (copied / "a-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"a-2\.safetensors.*missing"):
        TextEncoder.from_folder(copied, device="cpu")


def test_from_folder_index_outside_the_folder(copied: Path) -> None:
    index = {"weight_map": {PREFIX + "norm.weight": "../text_encoder/model.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="missing"):
        TextEncoder.from_folder(copied, device="cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "'llama'"),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}, "2 layers"),
        ({"layer_types": ["linear_attention"]}, "not usable"),
    ],
)
def test_build_model_unusable_config(folder: Path, change: dict, message: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["text_config"].update(change)
    with pytest.raises(CheckpointError, match=message):
        build_model(values)


def test_build_model_released_size_on_meta() -> None:
    kinds = ["full_attention" if layer % 4 == 3 else "linear_attention" for layer in range(64)]
    text = {
        "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 48, "layer_types": kinds,
    }  # fmt: skip
    model, known = build_model({"text_config": text})
    assert all(parameter.is_meta for parameter in model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    assert 24.8e9 < count < 24.9e9  # 25.6e9 of the full model less two layers and the norm
    assert "layers.63.self_attn.q_proj.weight" in known and "norm.weight" in known


def test_build_model_takes_back_fused_kernels(folder: Path, encoder: TextEncoder, monkeypatch) -> None:
    """As if fla were installed: the model's source file holds wrappers that lead to kernels for GPUs only."""
    source = sys.modules[type(encoder.model).__module__]
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        if not hasattr(source, name):
            continue

        @functools.wraps(getattr(source, name))
        def fused(*args, **kwargs):
            raise AssertionError("a fused kernel ran")

        monkeypatch.setattr(source, name, fused)
    got = TextEncoder.from_folder(folder, device="cpu", dtype=torch.float32).encode(PROMPT)
    assert torch.equal(got.features, encoder.encode(PROMPT).features)


def test_build_model_transformers_without_the_class(folder: Path, monkeypatch) -> None:
    import transformers

    monkeypatch.setitem(sys.modules, "transformers", type(sys)("transformers"))
    assert hasattr(transformers, "Qwen3_5TextModel")
    with pytest.raises(DependencyError, match="Qwen3_5TextModel"):
        build_model(json.loads((folder / "config.json").read_text()))
