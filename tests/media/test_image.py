"""Pictures: what loads, what is refused, and the reference tensor."""

import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from magi2_core.errors import DependencyError, RequestError
from magi2_core.media import image


def save(tmp_path: Path, size: tuple[int, int], mode: str = "RGB", name: str = "a.png", **options) -> Path:
    picture = Image.new(mode, size)
    picture.putpixel((0, 0), 255 if len(mode) == 1 else (255,) + (10,) * (len(picture.getbands()) - 1))
    picture.save(tmp_path / name, **options)
    return tmp_path / name


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16"])
def test_load_image_modes(tmp_path: Path, mode: str) -> None:
    loaded = image.load_image(save(tmp_path, (5, 3), mode))
    assert loaded.dtype == torch.uint8 and loaded.shape == (3, 5, 3)


def test_load_image_drops_alpha_uncomposited(tmp_path: Path) -> None:
    Image.new("RGBA", (4, 4), (200, 100, 50, 0)).save(tmp_path / "clear.png")
    assert image.load_image(tmp_path / "clear.png")[0, 0].tolist() == [200, 100, 50]


def test_load_image_scales_16_bit_grey(tmp_path: Path) -> None:
    Image.new("I;16", (4, 4), 0x8000).save(tmp_path / "deep.png")
    assert image.load_image(tmp_path / "deep.png").unique().tolist() == [128]


@pytest.mark.parametrize("mode", ["I", "I;16"])
def test_load_image_keeps_grey_of_8_bits_in_a_wider_file(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (4, 4), 199).save(tmp_path / "wide.tif")
    assert image.load_image(tmp_path / "wide.tif").unique().tolist() == [199]


@pytest.mark.parametrize(("value", "grey"), [(0.5, 128), (1.0, 255), (0.0, 0), (199.0, 199)])
def test_load_image_floating_point_grey(tmp_path: Path, value: float, grey: int) -> None:
    Image.new("F", (4, 4), value).save(tmp_path / "float.tif")
    assert image.load_image(tmp_path / "float.tif").unique().tolist() == [grey]


def test_load_image_floating_point_that_is_no_number(tmp_path: Path) -> None:
    Image.new("F", (4, 4), float("nan")).save(tmp_path / "nan.tif")
    with pytest.raises(RequestError, match="values that are not numbers"):
        image.load_image(tmp_path / "nan.tif")


def test_load_image_turns_by_exif(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.new("RGB", (6, 2), (0, 0, 0))
    picture.putpixel((0, 0), (255, 0, 0))
    picture.save(tmp_path / "turned.png", exif=exif)
    loaded = image.load_image(tmp_path / "turned.png")
    assert loaded.shape == (6, 2, 3)
    assert loaded[0, 1].tolist() == [255, 0, 0]  # orientation 6: the stored left top corner is shown at the right top


def test_load_image_first_frame_of_animation(tmp_path: Path) -> None:
    red, blue = Image.new("RGB", (4, 4), (255, 0, 0)), Image.new("RGB", (4, 4), (0, 0, 255))
    red.save(tmp_path / "two.gif", save_all=True, append_images=[blue])
    assert image.load_image(tmp_path / "two.gif")[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize("content", [b"", b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_load_image_not_a_picture(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.png").write_bytes(content)
    with pytest.raises(RequestError, match=r"broken\.png"):
        image.load_image(tmp_path / "broken.png")


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "gif", "tiff"])
def test_load_image_cut_file(tmp_path: Path, suffix: str) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = tmp_path / f"whole.{suffix}"
    Image.fromarray(torch.randint(0, 256, (64, 64, 3), generator=generator, dtype=torch.uint8).numpy()).save(whole)
    (tmp_path / f"cut.{suffix}").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(RequestError, match=f"cut.{suffix}"):
        image.load_image(tmp_path / f"cut.{suffix}")


def test_load_image_absent_and_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no such file"):
        image.load_image(tmp_path / "absent.png")
    with pytest.raises(RequestError, match="is a folder"):
        image.load_image(tmp_path)


@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1)])
def test_load_image_one_pixel(tmp_path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="at least 2x2"):
        image.load_image(save(tmp_path, size))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(9000, 9000), (10000, 9000), (20000, 20000)])
def test_load_image_too_large_is_refused_undecoded(tmp_path: Path, size: tuple[int, int], monkeypatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("was decoded"))
    (tmp_path / "bomb.ppm").write_bytes(b"P6 %d %d 255\n" % size + bytes(64))
    with pytest.raises(RequestError, match="pixels"):
        image.load_image(tmp_path / "bomb.ppm")


def test_load_image_without_pillow(tmp_path: Path, monkeypatch) -> None:
    path = save(tmp_path, (4, 4))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DependencyError, match=r'pip install "Pillow>='):
        image.load_image(path)


def test_sizes_of_golden_bookkeeping(golden_root: Path) -> None:
    config = json.loads((golden_root / "components" / "image_preprocess" / "config.json").read_text())
    for name, entry in config["cases"].items():
        height, width = entry["gen_hw"]
        if "raises" in entry:
            picture = torch.zeros(entry["size_wh"][1], entry["size_wh"][0], 3, dtype=torch.uint8)
            with pytest.raises(RequestError, match=r"at most 5 times"):
                image.prepare_reference(picture, width, height)
            continue
        mode = name.partition("__")[2] or "original"
        loaded_width, loaded_height = entry["loaded_size_wh"]
        assert list(image.letterbox_size(loaded_width, loaded_height, width, height, mode)) == entry["target_hw"][::-1]
        assert list(image.reference_size(loaded_width, loaded_height, width, height, mode)) == entry["tensor_shape"][:2:-1]
        assert list(image.reference_grid(loaded_width, loaded_height, width, height, mode)) == entry["latent_hw"]
    for name, number in config["multi"]["parse_figure_id"].items():
        assert image.figure_id(name) == number


@pytest.mark.parametrize(
    ("picture", "canvas", "final", "grid"),
    [
        ((2710, 1510), (896, 512), (896, 480), (30, 56)),
        ((2706, 1512), (896, 512), (896, 480), (30, 56)),
        ((1080, 1920), (896, 512), (480, 896), (56, 30)),
        ((1024, 1024), (896, 512), (896, 896), (56, 56)),
        ((2710, 1510), (448, 256), (448, 224), (14, 28)),
        ((112, 64), (112, 64), (96, 64), (4, 6)),
        ((52, 97), (70, 100), (32, 96), (6, 2)),
    ],
)
def test_reference_size_of_spec_table(picture, canvas, final, grid) -> None:
    assert image.reference_size(*picture, *canvas) == final
    assert image.reference_grid(*picture, *canvas) == grid


def test_prepare_reference_is_bf16_in_range() -> None:
    picture = torch.randint(0, 256, (45, 70, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    reference = image.prepare_reference(picture, 96, 64)
    assert reference.shape == (1, 3, 1, 32, 96) and reference.dtype == torch.float32
    assert torch.equal(reference, reference.bfloat16().float()) and reference.abs().max() <= 1


def test_prepare_reference_engine_goldens(golden_root: Path) -> None:
    from safetensors.torch import load_file

    checked = 0
    for folder in sorted((golden_root / "preview").glob("f_engine_i2v*")):
        params = json.loads((folder / "config.json").read_text())["case_params"]
        picture = load_file(folder / "inputs.safetensors")["image_uint8"]
        golden = load_file(folder / "outputs.safetensors")["vae_input"]
        assert torch.equal(image.prepare_reference(picture, params["w"], params["h"]), golden.float())
        checked += 1
    if not checked:
        pytest.skip("no engine goldens here")


def test_letterbox_paints_white_and_centres() -> None:
    boxed = image.letterbox(torch.zeros(10, 40, 3, dtype=torch.uint8), 40, 20)
    assert boxed[:5].unique().tolist() == [255] and boxed[15:].unique().tolist() == [255] and boxed[5:15].unique().tolist() == [0]


def test_reference_size_canvas_too_small() -> None:
    with pytest.raises(RequestError, match="too small"):
        image.reference_size(64, 64, 16, 16)
    with pytest.raises(RequestError, match="square"):
        image.reference_size(64, 64, 64, 64, "crop")


def test_prepare_reference_wrong_tensor() -> None:
    with pytest.raises(RequestError, match="uint8"):
        image.prepare_reference(torch.zeros(32, 32, 3), 96, 64)


def test_parse_figures_orders_keys_as_strings() -> None:
    named = {"<Figure 2>": "b.png", "<Figure 10>": "c.png", "<Figure 1>": "a.png"}
    assert image.parse_figures(json.dumps(named)) == [(10, "c.png"), (1, "a.png"), (2, "b.png")]
    assert image.parse_figures("a.png") == [(1, "a.png")]
    assert image.parse_figures(" ") == image.parse_figures(None) == []
    for broken in ('{"a"', '{"<Figure 1>": 3}'):
        with pytest.raises(RequestError):
            image.parse_figures(broken)


def test_reference_grids_must_agree() -> None:
    assert image.reference_grids([(100, 50), (200, 100)], 96, 64) == [(2, 6), (2, 6)]
    with pytest.raises(RequestError, match="one aspect"):
        image.reference_grids([(100, 50), (50, 100)], 96, 64)
