"""Names of negative prompts."""

from magi2_core.text import negative


def test_negative_prompt_name_default_empty_custom() -> None:
    assert negative.negative_prompt_name(negative.DEFAULT_NEGATIVE_PROMPT) == "pack default"
    assert negative.negative_prompt_name("") == "empty"
    assert negative.negative_prompt_name("blur \ud800") == "custom"


def test_negative_prompt_name_released_by_hash(monkeypatch) -> None:
    monkeypatch.setattr(negative, "RELEASED_SHA256", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")
    assert negative.negative_prompt_name("abc") == "released default"
    assert negative.negative_prompt_name("abc ") == "custom"


def test_default_negative_prompt_is_one_short_line_of_own_words() -> None:
    text = negative.DEFAULT_NEGATIVE_PROMPT
    assert "\n" not in text and 500 < len(text) < 1721
    assert len(set(text.split(", "))) == len(text.split(", "))
