"""Rules of the Markdown renderer that are easy to lose; whole captions are in the goldens."""

import pytest

from magi2_core.text.markdown import render_markdown


@pytest.mark.parametrize("value", [{}, {"a": None}, {"a": " \n", "b": [[], {"c": [""]}]}])
def test_render_markdown_nothing_left_is_empty(value: dict) -> None:
    assert render_markdown(value) == ""


def test_render_markdown_false_and_zero_stay() -> None:
    assert render_markdown({"a": False, "b": 0, "c": 10.0, "d": 1e-7}) == "a:false\n\nb:0\n\nc:10.0\n\nd:1e-07\n"


def test_render_markdown_root_keeps_order_objects_do_not() -> None:
    assert render_markdown({"o": {"n": {"x": 1}, "s": 2}, "s": 3}) == "# o\n\ns:2\n\n## n\n\nx:1\n\ns:3\n"


def test_render_markdown_line_breaks_are_spelled_out() -> None:
    assert render_markdown({"a": "1\r\n2\n3\r4\t5"}) == "a:1\\n2\\n3\\r4\\t5\n"


def test_render_markdown_deep_headings_are_emphasis() -> None:
    value: dict = {"k": "v"}
    for name in "gfedcba":
        value = {name: value}
    text = render_markdown(value)
    assert "###### f\n\n*g*\n\nk:v\n" in text and "#######" not in text


def test_render_markdown_inline_list_gets_a_blank_line_before_it() -> None:
    assert render_markdown({"o": {"a": 1, "l": [1, 2], "b": 3}}) == "# o\n\na:1\n\nl:1 | 2\nb:3\n"


def test_render_markdown_nested_lists_count_their_items() -> None:
    assert render_markdown({"m": [[1, 2], [3]]}) == "# m\n\n## m1\n\nitem1:1\nitem2:2\n## m2\n\nitem1:3\n"
