"""Golden kinds image_preprocess and video_post."""

import re

from torch import Tensor, tensor

from magi2_core.media import frames, image


def run(case) -> dict[str, Tensor]:
    """Every tensor the case compares."""
    return _video_post(case) if case.kind == "video_post" else _image_preprocess(case)


def _video_post(case) -> dict[str, Tensor]:
    (clip,) = (value for value in case.inputs.values() if value.ndim == 4)
    produced = {}
    for name in (name for name, rule in case.spec["compare"].items() if rule != "ignore"):
        width, height = (int(part) for part in re.search(r"(\d+)x(\d+)$", name).groups())
        produced[name] = frames.resize_frames(clip, width, height)
    return produced


def _image_preprocess(case) -> dict[str, Tensor]:
    produced = {}
    for name, golden in case.outputs.items():
        if case.spec["compare"].get(name, "ignore") == "ignore":
            continue
        key, _, form = name.partition(".")
        entry = case.config["cases"][key]
        stem, _, mode = key.partition("__")
        named = case.folder / case.config.get("png", "png/<case>.png").replace("<case>", stem)
        picture = image.load_image(named if named.is_file() else next(named.parent.glob(f"{stem}.*")))
        height, width = entry["gen_hw"]
        arguments = (width, height, mode or "original")
        if form == "resizepad_uint8":
            boxed = image.letterbox(picture, *image.letterbox_size(picture.shape[1], picture.shape[0], *arguments))
            produced[name] = boxed if golden.ndim == 3 else tensor([boxed.shape[1], boxed.shape[0]])
        else:
            stride = int(re.search(r"every(\d+)", form).group(1)) if form else 1
            produced[name] = image.prepare_reference(picture, *arguments)[..., ::stride, ::stride]
    return produced
