"""Reading the distilled decoder's JSON."""

import json

import pytest

from magi2_core.errors import CheckpointError
from magi2_core.vae.turbo_config import TurboConfig

FILE = "TurboV3-Wan22-TinyShallow_7_7.json"


@pytest.fixture
def values(nano_folder):
    return json.loads((nano_folder / "turbo_vae" / FILE).read_text())


def test_from_file_embedded(nano_folder):
    config = TurboConfig.from_file(nano_folder / "turbo_vae" / FILE)
    assert (config.first_chunk_size, config.step_size, config.temporal_factor) == (7, 7, 4)
    assert config.decoder_block_out_channels == (16, 32, 48, 64)


def test_from_file_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.json"):
        TurboConfig.from_file(tmp_path / "absent.json")


@pytest.mark.parametrize("name", ["first_chunk_size", "decoder_block_out_channels", "use_unpatchify"])
def test_from_dict_missing_field(values, name):
    del values[name]
    with pytest.raises(CheckpointError, match=f"x.json: {name} is missing"):
        TurboConfig.from_dict(values, "x.json")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("step_size", "7", "expected int"),
        ("step_size", 0, "at least 1"),
        ("decoder_layers_per_block", 2, "a list of int"),
        ("decoder_is_dw_conv", [0] * 5, "a list of bool"),
        ("decoder_layers_per_block", [2, 2, 2, 3], "list lengths"),
        ("decoder_causal", True, "only false"),
        ("patch_size", 4, "only 1x2"),
        ("latent_channels", 16, "expected 48"),
        ("use_unpatchify", 1, "expected bool"),
    ],
)
def test_from_dict_refuses(values, name, value, text):
    with pytest.raises(CheckpointError, match=text):
        TurboConfig.from_dict(values | {name: value})


def test_temporal_factor_counts_blocks_that_double_time(values):
    assert TurboConfig.from_dict(values | {"decoder_spatio_only": [False, True, True, False]}).temporal_factor == 2
