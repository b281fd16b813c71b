"""Kinds text_encoder and prompt_enhancement: the tokenizer, the encoder and the two renderers of captions."""

import json
import re
from functools import partial
from typing import Any

import torch
from torch import Tensor

from magi2_core.text.caption import normalize_prompt
from magi2_core.text.encoder import TextEncoder, figure_feature
from magi2_core.text.enhance import EnhanceSettings, enhance
from magi2_core.text.tokenize import MAX_TOKENS, load_tokenizer, tokenize_prompt

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIGURES = ("<Figure 1>", "<Figure 2>")
JPEG_START = b"\xff\xd8\xff\xe0"


def run(case) -> dict[str, Any]:
    return _enhancement(case) if case.kind == "prompt_enhancement" else _encoder(case)


def _encoder(case) -> dict[str, Tensor]:
    """Every tensor is named <dtype>.<prompt>.<what> or <prompt>.<what>; the prompts are in info.json."""
    prompts = json.loads((case.folder / "info.json").read_text(encoding="utf-8"))["prompts"]
    encoders = {name: TextEncoder.from_folder(case.folder, device="cpu", dtype=dtype) for name, dtype in DTYPES.items()}
    deep = partial(TextEncoder.from_folder, case.folder, device="cpu", full_depth=True)
    tokenizer = load_tokenizer(case.folder)
    produced: dict[str, Tensor] = {}
    for name, rule in case.spec["compare"].items():
        if rule == "ignore" or name in produced:
            continue
        *dtype, tag, what = name.split(".")
        prompt_name, _, limit = tag.partition("_maxlen")
        record, cut = prompts[prompt_name], {"max_tokens": int(limit or MAX_TOKENS), "truncate": True}
        if not dtype:
            tokens = tokenize_prompt(tokenizer, record["prompt"], **cut)
            produced[name] = torch.tensor([tokens.ids if what == "input_ids" else tokens.attention_mask])
        elif what in ("hidden", "special"):
            features = encoders[dtype[0]].encode(record["prompt"], **cut)
            rows = case.outputs[name].shape[0]
            produced[name] = features.features if what == "hidden" else _special(features, record, rows)
        else:
            states = deep(dtype=DTYPES[dtype[0]]).hidden_states(record["prompt"], **cut)
            prefix = f"{dtype[0]}.{tag}."
            produced.update({f"{prefix}all_hidden_{index}": state for index, state in enumerate(states)})
            produced[prefix + "last_hidden_state"] = states[-1]
    return produced


def _special(features, record: dict[str, Any], rows: int) -> Tensor:
    ids = [int(found) for marker in record.get("target_indices", FIGURES) for found in re.findall(r"\d+", marker)]
    return torch.stack([figure_feature(features, record["prompt"], figure) for figure in ids[:rows]])


def _enhancement(case) -> dict[str, str]:
    """The same text as a model's answer and as a prompt. The task is what the set's config.json says, else what the keys say."""
    with open(case.folder / "input.json", encoding="utf-8", newline="") as handle:
        answer = handle.read()
    config = case.folder.parent / "config.json"
    cases = json.loads(config.read_text(encoding="utf-8")).get("cases", {}) if config.is_file() else {}
    task = cases.get(case.folder.name, {}).get("task") or ("t2v" if "global_layer" in json.loads(answer) else "i2v")
    settings = EnhanceSettings(base_url="http://localhost/v1", model="golden")
    image = JPEG_START if task == "i2v" else None
    markdown = enhance("a prompt", settings=settings, key="", image_jpeg=image, transport=lambda body: answer)
    return {"enhancer_markdown.md": markdown, "text_encoder_prompt.txt": normalize_prompt(answer)}
