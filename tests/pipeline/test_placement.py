"""Placement plans on made-up and released sizes, and the memory estimates behind them."""

import pytest

from magi2_core.config import PreviewConfig, RefinerConfig
from magi2_core.errors import OutOfMemoryError, RequestError
from magi2_core.pipeline.placement import (
    Footprint,
    plan_placement,
    preview_tokens,
    preview_working_bytes,
    refiner_working_bytes,
    what_would_fit,
)
from magi2_core.shapes import VideoShape

GB = 10**9
RANK = {
    "preview": Footprint(weights=47 * GB, working=8 * GB),
    "refiner": Footprint(weights=13 * GB, working=25 * GB),
    "text_encoder": Footprint(weights=51 * GB, working=3 * GB),
    "vae": Footprint(weights=3 * GB, working=2 * GB),
    "turbo": Footprint(weights=GB // 4, working=20 * GB),
    "audio": Footprint(weights=GB // 3, working=GB),
}
"""One of eight ranks of the released checkpoint (spec components.md 9)."""


def test_plan_placement_large_card_keeps_everything() -> None:
    assert plan_placement(RANK, 141 * GB) == dict.fromkeys(RANK, "resident")


def test_plan_placement_text_encoder_leaves_first() -> None:
    plan = plan_placement(RANK, 139 * GB)
    assert plan.pop("text_encoder") == "roundtrip"
    assert set(plan.values()) == {"resident"}


def test_plan_placement_encoding_never_evicts_the_denoiser() -> None:
    sizes = {name: size for name, size in RANK.items() if name != "refiner"}
    plan = plan_placement(sizes, 80 * GB)
    assert plan["preview"] == "resident"
    assert plan["text_encoder"] == "cpu"


def test_plan_placement_refiner_may_evict_the_denoiser() -> None:
    plan = plan_placement(RANK, 70 * GB)
    assert (plan["preview"], plan["refiner"]) == ("roundtrip", "roundtrip")


def test_plan_placement_text_encoder_roundtrip_when_it_fits_beside() -> None:
    sizes = {"preview": Footprint(weights=10 * GB, working=30 * GB), "text_encoder": Footprint(weights=30 * GB, working=GB)}
    assert plan_placement(sizes, 45 * GB) == {"preview": "resident", "text_encoder": "roundtrip"}


def test_plan_placement_refuses_weights_that_do_not_fit() -> None:
    with pytest.raises(OutOfMemoryError, match=r"preview needs .* 2 or more devices"):
        plan_placement({"preview": Footprint(weights=228 * GB)}, 141 * GB)


def test_plan_placement_working_memory_alone_is_not_refused() -> None:
    sizes = {"preview": Footprint(weights=10 * GB, working=90 * GB), "turbo": Footprint(weights=GB, working=GB)}
    assert plan_placement(sizes, 40 * GB) == {"preview": "resident", "turbo": "roundtrip"}


def test_plan_placement_without_a_device() -> None:
    assert set(plan_placement(RANK, None).values()) == {"cpu"}


def test_plan_placement_fixed_modes() -> None:
    plan = plan_placement(RANK, 141 * GB, {"text_encoder": "cpu", "vae": "roundtrip"})
    assert (plan["text_encoder"], plan["vae"]) == ("cpu", "roundtrip")
    for fixed in ({"text_encoder": "gpu"}, {"encoder": "cpu"}):
        with pytest.raises(RequestError):
            plan_placement(RANK, 141 * GB, fixed)


def test_working_bytes_near_the_listed_intermediates() -> None:
    """The text lists 14,688 tokens a rank at 540p: some 3 to 6 GB; the refiner's 64.5k tokens: some 25 GB when chunked less than here."""
    assert 2 * GB < preview_working_bytes(PreviewConfig(), 14688) < 6 * GB
    assert 5 * GB < refiner_working_bytes(RefinerConfig(), 64500) < 25 * GB


def test_preview_tokens_of_the_published_case() -> None:
    shape = VideoShape(width=896, height=512)
    assert preview_tokens(shape.latent(), shape.audio_latents(), 1865, 417) == 117470
    assert preview_tokens(shape.latent(), shape.audio_latents(), 1865, 417, image=1681) == 120832


def test_what_would_fit_names_presets() -> None:
    config = PreviewConfig()
    assert "272p" in what_would_fit(config, 12 * GB) and "540p" not in what_would_fit(config, 12 * GB)
    assert "540p" in what_would_fit(config, 60 * GB)
    assert "no size preset" in what_would_fit(config, GB)
