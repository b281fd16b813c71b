"""Token ids of the embedded checkpoint's tokenizer, the extra split, limits and missing packages."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from magi2_core.errors import CheckpointError, DependencyError, RequestError
from magi2_core.text.caption import add_figure_line
from magi2_core.text.tokenize import count_tokens, load_tokenizer, require_transformers, tokenize_prompt

tokenizers = pytest.importorskip("tokenizers", reason="comes with transformers, which is optional where only latents are decoded")

RED = "a red circle moves to the right over a blue background, low hum"
RED_IDS = (67, 381, 317, 333, 300, 329, 367, 339, 262, 303, 274, 14, 378, 310)
GREEN = "a green square moves to the left over a gray background, middle wind"
GREEN_IDS = (67, 302, 320, 333, 300, 329, 368, 339, 262, 340, 274, 14, 374, 315, 439, 438, 28, 54, 268)
GREEN_IDS += (440, 434, 441, 300, 223, 30, 40, 75, 429, 223, 19, 32)
TAKES_EFFECT = ((0x30, 0x55), (0x1100, 0x11FF), (0x2E80, 0xA4CF), (0xA840, 0xD7AF), (0xF900, 0xFAFF), (0xFE30, 0xFE4F), (0xFF65, 0xFFDC))


@pytest.fixture(scope="module")
def folder(nano_folder: Path) -> Path:
    return nano_folder / "text_encoder"


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return load_tokenizer(folder)


@pytest.mark.parametrize(("prompt", "ids"), [(RED, RED_IDS), (add_figure_line(GREEN), GREEN_IDS)])
def test_tokenize_prompt_nano_ids(tokenizer, prompt: str, ids: tuple[int, ...]) -> None:
    tokens = tokenize_prompt(tokenizer, prompt)
    assert tokens.ids == ids
    assert tokens.attention_mask == (1,) * len(ids)
    assert tokens.offsets[0] == (0, 1) and tokens.offsets[-1][1] == len(prompt)


def test_load_tokenizer_isolates_exactly_the_ranges(tokenizer) -> None:
    edges = {code for low, high in TAKES_EFFECT for code in (low - 1, low, high, high + 1)}
    for code in sorted(edges | {0x20000, 0x1F600, ord("V"), ord("a"), 0x3042}):
        if 0xD800 <= code <= 0xDFFF:
            continue
        character = chr(code)
        split = tokenizer.pre_tokenizer.pre_tokenize_str(f"z{character}z")
        alone = any(span == (1, 2) for _, span in split) and len(split) == 3
        wanted = any(low <= code <= high for low, high in TAKES_EFFECT)
        if wanted:
            assert alone, hex(code)
        elif character.isalpha():
            assert not alone, hex(code)


def test_load_tokenizer_equals_auto_tokenizer_with_split(folder: Path, tokenizer) -> None:
    transformers = require_transformers()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    engine, pre = theirs.backend_tokenizer, tokenizers.pre_tokenizers
    pattern = "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in TAKES_EFFECT) + "]"
    engine.pre_tokenizer = pre.Sequence([pre.Split(tokenizers.Regex(pattern), behavior="isolated"), engine.pre_tokenizer])
    for text in ("The Fox: 12 <Figure 1>!\n\n é e\u0301 ", "雨の夜 한국어 😀 \U00020000 can't", "<|im_end|> x", GREEN):
        encoding = theirs(text, return_offsets_mapping=True)
        ours = tokenize_prompt(tokenizer, text)
        assert list(ours.ids) == encoding["input_ids"], text
        assert list(ours.offsets) == encoding["offset_mapping"], text


def test_tokenize_prompt_normalises_captions(tokenizer) -> None:
    tokens = tokenize_prompt(tokenizer, json.dumps({"global_layer": {"context": "a red circle"}}))
    assert tokens.text == "context: a red circle"


def test_tokenize_prompt_limit(tokenizer) -> None:
    with pytest.raises(RequestError, match="14 tokens, at most 10"):
        tokenize_prompt(tokenizer, RED, max_tokens=10)
    cut = tokenize_prompt(tokenizer, RED, max_tokens=10, truncate=True)
    assert cut.ids == RED_IDS[:10] and len(cut.offsets) == len(cut.attention_mask) == 10
    assert tokenize_prompt(tokenizer, RED, max_tokens=14).ids == RED_IDS


@pytest.mark.parametrize(
    ("prompt", "reason"), [("", "is empty"), ('{"global_layer": {"camera": "x"}}', "known fields are all empty"), ("a \ud800", "surrogate")]
)
def test_tokenize_prompt_refused(tokenizer, prompt: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        tokenize_prompt(tokenizer, prompt)


def test_count_tokens_has_no_limit(folder: Path) -> None:
    assert count_tokens(folder, RED) == len(RED_IDS)
    assert count_tokens(folder, " ".join(["circle"] * 8000)) > 7000


def test_load_tokenizer_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("version", ["4.57.1", "5.4.0", "5"])
def test_require_transformers_too_old(version: str, monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(DependencyError, match=rf"is {version}\..*pip install 'transformers>=5\.5'.*MAGI2_PYTHON"):
        require_transformers()


@pytest.mark.parametrize("version", ["5.5.0", "5.10.0.dev0", "6.0"])
def test_require_transformers_new_enough(version: str, monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert require_transformers().__name__ == "transformers"


def test_require_transformers_absent(monkeypatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(DependencyError, match="is not installed"):
        require_transformers()


def test_load_tokenizer_without_the_package(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DependencyError, match="tokenizers"):
        load_tokenizer(folder)
