"""Every component of the embedded checkpoint through the component loaders, and one fault of each kind refused by them."""

import json
import math
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from magi2_core.checkpoint import components
from magi2_core.checkpoint.catalog import LAYOUTS
from magi2_core.checkpoint.report import report_checkpoint
from magi2_core.checkpoint.slices import expert_slices
from magi2_core.config import PreviewConfig, RefinerConfig
from magi2_core.config_values import read_json
from magi2_core.errors import CheckpointError, Interrupted
from magi2_core.model.preview import PreviewTransformer
from magi2_core.model.refiner import RefinerTransformer

COUNTS = {"preview": 251, "refiner": 47, "vae": 196, "turbo": 60}
LOADERS = {name: getattr(components, f"load_{name}") for name in LAYOUTS}


def stored(root, name) -> dict[str, torch.Tensor]:
    state = {}
    for file in (root / name).glob("*.safetensors"):
        state |= load_file(str(file))
    return state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["preview", "refiner"])
def test_load_transformer_holds_what_the_files_hold(nano_folder, name, dtype):
    result = LOADERS[name](nano_folder, device="cpu", dtype=dtype)
    state, loaded = stored(nano_folder, name), result.module.state_dict()
    assert len(state) == COUNTS[name] and set(loaded) == set(state)
    for key, value in state.items():
        assert loaded[key].dtype == (torch.float32 if value.dtype == torch.float32 else dtype)
        assert torch.equal(loaded[key], value.to(loaded[key].dtype)), key
    assert result.bytes_read == sum(value.nbytes for value in state.values())


def test_load_preview_on_the_cpu_is_float32_by_default(nano_folder):
    module = components.load_preview(nano_folder, device="cpu").module
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_load_preview_expert_ranks_join_to_the_whole(nano_folder, size):
    """4 heads over 2, 3 or 4 ranks; with 3 the heads are 2, 2 and none."""
    state = stored(nano_folder, "preview")
    parts = [
        components.load_preview(nano_folder, device="cpu", dtype=torch.bfloat16, expert_rank=rank, expert_size=size) for rank in range(size)
    ]
    split = [key for key in state if ".moe_mlp." in key]
    assert len(split) == 4 * 6
    for key, value in state.items():
        got = [part.module.state_dict()[key] for part in parts]
        assert torch.equal(torch.cat(got), value) if key in split else all(torch.equal(each, value) for each in got), key
    whole = sum(value.nbytes for key, value in state.items() if key not in split)
    assert sum(part.bytes_read for part in parts) == size * whole + sum(state[key].nbytes for key in split)


def test_load_vae_halves(nano_folder):
    state = torch.load(nano_folder / "vae" / "Wan2.2_VAE.pth", weights_only=True)
    for options in ({}, {"decoder": False}, {"encoder": False}):
        result = components.load_vae(nano_folder, device="cpu", **options)
        loaded = result.module.state_dict()
        assert loaded and all(torch.equal(value, state[key]) for key, value in loaded.items())
        assert (len(loaded) == 196) == (not options)
        assert result.bytes_read == sum(value.nbytes for value in loaded.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_load_turbo_values(nano_folder, dtype):
    state = torch.load(nano_folder / "turbo_vae" / "checkpoint.ckpt", weights_only=True)["ema_state_dict"]
    loaded = components.load_turbo(nano_folder, device="cpu", dtype=dtype).module.state_dict()
    assert len(loaded) == 60
    assert all(torch.equal(value, state[f"module.{key}"].to(dtype)) for key, value in loaded.items())


def test_load_audio_folds(nano_folder):
    state = load_file(str(nano_folder / "stable-audio-open-1.0" / "model.safetensors"))
    loaded = components.load_audio(nano_folder, device="cpu").module.state_dict()
    v, g = (state[f"pretransform.model.decoder.layers.0.weight_{leaf}"] for leaf in "vg")
    torch.testing.assert_close(loaded["decoder.layers.0.weight"], g * v / v.norm(dim=(1, 2), keepdim=True))
    assert not any(key.endswith(("weight_g", "weight_v")) for key in loaded)


def test_load_text_encoder_counts_what_it_reads(nano_folder):
    result = components.load_text_encoder(nano_folder, device="cpu")
    state = load_file(str(nano_folder / "text_encoder" / "model.safetensors"))
    read = [key for key in state if ".language_model." in key and ".layers.2." not in key and ".layers.3." not in key]
    read.remove("model.language_model.norm.weight")
    assert result.bytes_read == sum(state[key].nbytes for key in read)
    assert result.module.encode("a red circle").features.dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_load_progress_and_cancel(nano_folder, name):
    events = []
    LOADERS[name](nano_folder, device="cpu", progress=events.append)
    assert events[-1].stage == "load" and events[-1].step == events[-1].total
    assert events[-1].message == f"{name}: shard {events[-1].total}/{events[-1].total}"
    with pytest.raises(Interrupted, match=f"loading of {name} was cancelled"):
        LOADERS[name](nano_folder, device="cpu", should_stop=lambda: True)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_load_missing_file(nano_copy, name):
    layout = LAYOUTS[name]
    file = "model-00001-of-00002.safetensors" if name == "preview" else "model.safetensors" if layout.sharded else layout.files[0]
    (nano_copy / layout.folder / file).unlink()
    with pytest.raises(CheckpointError, match=f"^{name}: .*{layout.folder}/.* is missing"):
        LOADERS[name](nano_copy, device="cpu")


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_load_truncated_file(nano_copy, name):
    layout = LAYOUTS[name]
    file = max((nano_copy / layout.folder).iterdir(), key=lambda path: path.stat().st_size)
    with open(file, "r+b") as handle:
        handle.truncate(file.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=f"{file.name}.*(is cut|is damaged|cannot be read)"):
        LOADERS[name](nano_copy, device="cpu")
    (part,) = [part for part in report_checkpoint(nano_copy).components if part.name == name]
    assert part.state == "damaged" and file.name in part.fault


def damage(root, name, key, value) -> None:
    """Replaces, drops (None) or adds one tensor of a component, whatever its file kind."""
    layout = LAYOUTS[name]
    if name in ("vae", "turbo"):
        file = root / layout.folder / layout.files[0]
        loaded = torch.load(file, weights_only=True)
        state = loaded["ema_state_dict"] if name == "turbo" else loaded
        change(state, key, value)
        torch.save(loaded, file)
        return
    file = next(file for file in sorted((root / layout.folder).glob("*.safetensors")) if value is not None or key in load_file(str(file)))
    for candidate in (root / layout.folder).glob("*.safetensors"):
        if key in load_file(str(candidate)):
            file = candidate
    state = load_file(str(file))
    change(state, key, value)
    save_file(state, str(file))
    index = root / layout.folder / "model.safetensors.index.json"
    if index.is_file():
        values = json.loads(index.read_text())
        change(values["weight_map"], key, None if value is None else file.name)
        index.write_text(json.dumps(values))


def change(state, key, value) -> None:
    if value is None:
        del state[key]
    else:
        state[key] = value


KEYS = {
    "preview": "block.layers.3.mlp.moe_mlp.W_down",
    "refiner": "block.layers.1.mlp.up_gate_proj.weight",
    "text_encoder": "model.language_model.layers.1.mlp.up_proj.weight",
    "vae": "decoder.conv1.weight",
    "turbo": "module.decoder.conv_in.conv.weight",
    "audio": "pretransform.model.decoder.layers.0.bias",
}
FOREIGN = {"vae": "decoder.ghost", "turbo": "module.decoder.ghost", "audio": "pretransform.model.decoder.ghost"}


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "integer"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_load_refuses_one_wrong_tensor(nano_copy, name, fault):
    key = FOREIGN.get(name, "ghost.weight") if fault == "unknown" else KEYS[name]
    value = {"missing": None, "unknown": torch.zeros(2), "shape": torch.zeros(3, 5), "integer": torch.zeros(1, dtype=torch.int32)}[fault]
    damage(nano_copy, name, key, value)
    with pytest.raises(CheckpointError) as caught:
        LOADERS[name](nano_copy, device="cpu")
    message = str(caught.value)
    tensor = key.removeprefix("module.").removeprefix("pretransform.model.")
    assert tensor in message and str(nano_copy / LAYOUTS[name].folder) in message, message


@pytest.mark.parametrize(("name", "key", "dtype"), [
    ("preview", "block.layers.3.mlp.moe_mlp.W_down", "float32"),
    ("preview", "block.layers.3.mlp.moe_mlp.gate", "bfloat16"),
    ("refiner", "block.layers.1.mlp.down_proj.weight", "float16"),
    ("refiner", "pre_adapter.rope.bands", "bfloat16"),
])  # fmt: skip
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_load_transformer_refuses_a_wrong_dtype(nano_copy, name, key, dtype, wanted):
    """The file's dtype is checked whatever the model is built in."""
    damage(nano_copy, name, key, stored(nano_copy, name)[key].to(getattr(torch, dtype)))
    with pytest.raises(CheckpointError, match=f"^{name}: .*safetensors, tensor {key}: dtype is torch.{dtype}, expected torch."):
        LOADERS[name](nano_copy, device="cpu", dtype=wanted)


@pytest.mark.parametrize("name", ["preview", "refiner", "vae", "turbo", "audio"])
def test_check_component_finds_a_wrong_shape_without_loading(nano_copy, name):
    components.check_component(name, nano_copy)
    damage(nano_copy, name, KEYS[name], torch.zeros(3, 5))
    with pytest.raises(CheckpointError, match=r"shape is \[3, 5\], expected"):
        components.check_component(name, nano_copy)
    assert [part.name for part in report_checkpoint(nano_copy).components if part.state == "damaged"] == [name]


def test_check_component_audio_half_a_pair(nano_copy):
    """The header check agrees with the loader about names, and finds a weight_v without its weight_g."""
    assert set(components.check_component("audio", nano_copy).tensors) == set(
        components.load_audio(nano_copy, device="cpu").module.state_dict()
    )
    damage(nano_copy, "audio", "pretransform.model.decoder.layers.0.weight_g", None)
    for call in (components.check_component, lambda name, root: components.load_audio(root, device="cpu")):
        with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.weight_g"):
            call("audio", nano_copy)


def test_config_of_a_release_folder_is_the_released_one(tmp_path):
    assert components.preview_config(tmp_path).moe.num_heads == 12
    assert components.refiner_config(tmp_path).num_layers == 30
    assert components.wan_config(tmp_path).dim == 160


def test_load_preview_config_with_other_sizes(nano_copy):
    path = nano_copy / "preview" / "config.json"
    path.write_text(path.read_text().replace('"expert_intermediate_size": 64', '"expert_intermediate_size": 128'))
    with pytest.raises(CheckpointError, match=r"W_.*: shape is \[32, .*expected .*config.json"):
        components.load_preview(nano_copy, device="cpu")
    path.write_text(path.read_text().replace("bfloat16", "int4"))
    with pytest.raises(CheckpointError, match="params_dtype is 'int4'"):
        components.load_preview(nano_copy, device="cpu")


@pytest.mark.parametrize(("name", "shards", "count", "elements", "gigabytes"), [
    ("preview", 56, 1371, 113_934_953_536, 228.107858176),
    ("refiner", 3, 281, 6_720_075_280, 13.485),
])  # fmt: skip
def test_check_component_of_the_released_layout(tmp_path, toy, name, shards, count, elements, gigabytes):
    """A folder of the released sizes without config.json (its data are holes): numbers of spec preview.md 2.1 and components.md 1.2."""
    with torch.device("meta"):
        module = PreviewTransformer(PreviewConfig()) if name == "preview" else RefinerTransformer(RefinerConfig())
    state = module.state_dict()
    codes = {torch.bfloat16: "BF16", torch.float32: "F32"}
    folder, weight_map = tmp_path / name, {}
    folder.mkdir()
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = list(state)[number::shards]
        try:
            toy.sparse(folder / file, {key: (codes[state[key].dtype], list(state[key].shape), state[key].nbytes) for key in part})
        except OSError as error:
            pytest.skip(f"this file system has no files with holes of this size: {error}")
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = components.check_component(name, tmp_path)
    assert len(files.tensors) == count
    assert sum(math.prod(entry.shape) for entry in files.tensors.values()) == elements
    assert files.total_bytes / 1e9 == pytest.approx(gigabytes, abs=0 if name == "preview" else 5e-4)
    if name == "preview":
        rule = expert_slices(PreviewConfig().moe, 2, 4)
        parts = {key: part for key in files.tensors if (part := rule(key)) is not None}
        assert len(parts) == 36 * 6 and {part.stop - part.start for part in parts.values()} == {768}
        matrices = sum(files.tensors[key].nbytes // 4 for key in parts if ".W_" in key)
        assert round(matrices / 1e9, 1) == 54.4  # table of spec preview.md 7.3, expert parallel 4
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("preview", "attn_softcap", "x", "holds a value of a wrong kind"),
        ("preview", "moe_config", [1], r"moe_config is \[1\], expected an object"),
        ("preview", "num_layers", 10**30, "num_layers is 1000000000000000000000000000000, expected 1 to 1000"),
        ("preview", "num_layers", 2**31, "num_layers is 2147483648, expected 1 to 1000"),
        ("preview", "num_layers", True, "num_layers is True, expected int"),
        ("preview", "hidden_size", 10**30, "hidden_size is 10+, expected 1 to 1048576"),
        ("preview", "time_channels", -1, "time_channels is -1, expected 1 to 1048576"),
        ("preview", "time_channels", 17, "time_channels 17 is odd"),
        ("preview", "sinkhorn_iterations", 10**9, "sinkhorn_iterations is 1000000000, expected 0 to 1000"),
        ("preview", "intermediate_factor", float("nan"), "intermediate_factor is nan, expected"),
        ("preview", "intermediate_factor", 0.5, "gives the dense MLP no channel"),
        ("preview", "attn_gating", {"enable": "7"}, "attn_gating.enable is '7'"),
        ("preview", "attn_sinks", False, "attn_sinks is False, expected an object"),
        ("preview", "moe_config", {"route_scale": float("nan")}, "route_scale is nan, expected"),
        ("preview", "moe_config", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, expected"),
        ("preview", "moe_config", {"split_merge_intermediate_size": -3}, "split_merge_intermediate_size is -3, expected"),
        ("preview", "video_in_channels", 16, "video_in_channels 16 and audio_in_channels 64; latents of this model have 48 and 64"),
        ("preview", "params_dtype", "float64", "params_dtype is 'float64', expected one of bfloat16, float32"),
        ("preview", "mhc_config", {"num_stream": None}, "holds a value of a wrong kind"),
        ("preview", "head_dim", 0, "head_dim is 0, expected 1 to"),
        ("preview", "intermediate_factor", "4", "intermediate_factor is '4', expected float"),
        ("refiner", "arch", 5, "arch is 5, expected an object"),
        ("refiner", "arch", {"num_layers": 2**31}, "num_layers is 2147483648, expected 1 to 1000"),
        ("refiner", "arch", {"local_attn_layers": [99]}, "local_attn_layers has 99, expected layers 0 to"),
        ("refiner", "arch", {"post_norm_layers": ["0"]}, "post_norm_layers has '0'"),
        ("refiner", "data_proxy", ["a"], r"data_proxy is \['a'\], expected an object"),
        ("refiner", "data_proxy", {"patch_size": 0}, "patch_size is 0, expected 1 to"),
        ("refiner", "data_proxy", {"patch_size": 2}, "the refiner is built for 1 and 1"),
        ("refiner", "data_proxy", {"spatial_rope_interpolation": "7"}, "spatial_rope_interpolation is '7'"),
        ("refiner", "data_proxy", {"attn_config": {"mode": "window", "block_t_size": 0}}, "block_t_size is 0, expected 1 to"),
        ("refiner", "data_proxy", {"attn_config": {"mode": "window", "block_h_radius": -1}}, "block_h_radius is -1, expected 0 to"),
        ("refiner", "data_proxy", {"attn_config": {"mode": "window", "window": {"level": "7"}}}, "attention window level is '7'"),
    ],
)
def test_config_value_of_a_wrong_kind(nano_folder, tmp_path, name, key, value, message):
    path = tmp_path / name / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**json.loads((nano_folder / name / "config.json").read_text()), key: value}))
    with pytest.raises(CheckpointError, match=message):
        getattr(components, f"{name}_config")(tmp_path)


def test_config_values_that_may_be_null_or_at_the_top():
    values = {"attn_softcap": None, "moe_config": {"split_merge_intermediate_size": None}}
    assert PreviewConfig.from_dict(values) == PreviewConfig()
    attention = {"mode": "dense"}
    for said, wanted in ((None, 11), (3, 3)):
        config = RefinerConfig.from_dict({"arch": {"num_layers": 4}, "attn_config": attention, "frame_receptive_field": said})
        assert config.window.dense_frame_receptive_field == wanted and config.mm_layers == (0, 1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_config_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="is no file"):
        read_json(tmp_path / "config.json")
