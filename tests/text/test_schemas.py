"""The schemas against full captions of the golden set, and strict mode's two demands."""

import json
from pathlib import Path
from typing import Any

import pytest

from magi2_core.text.schemas import caption_schema, response_format

FIXTURES = Path(__file__).parent / "fixtures"
TYPES = {"string": str, "number": (int, float), "integer": int, "array": list, "object": dict}


def mismatches(schema: dict[str, Any], value: Any, where: str = "$") -> list[str]:
    if not isinstance(value, TYPES[schema["type"]]):
        return [f"{where}: {type(value).__name__}"]
    if schema["type"] == "array":
        return [line for index, item in enumerate(value) for line in mismatches(schema["items"], item, f"{where}[{index}]")]
    if schema["type"] != "object":
        return []
    properties = schema["properties"]
    lines = [f"{where}.{name}" for name in set(properties) ^ set(value)]
    return lines + [line for name in set(properties) & set(value) for line in mismatches(properties[name], value[name], f"{where}.{name}")]


def objects(schema: dict[str, Any]):
    if schema["type"] == "array":
        yield from objects(schema["items"])
    if schema["type"] == "object":
        yield schema
        for entry in schema["properties"].values():
            yield from objects(entry)


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_caption_schema_full_caption_fits(task: str) -> None:
    caption = json.loads((FIXTURES / f"{task}_full.json").read_text(encoding="utf-8"))
    assert mismatches(caption_schema(task), caption) == []


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_response_format_is_strict_everywhere(task: str) -> None:
    wanted = response_format(task)
    assert wanted["type"] == "json_schema" and wanted["json_schema"]["strict"] is True
    assert wanted["json_schema"]["name"] == f"{task.upper()}EnhanceResult"
    found = list(objects(wanted["json_schema"]["schema"]))
    assert len(found) > 5
    for schema in found:
        assert schema["required"] == list(schema["properties"]) and schema["additionalProperties"] is False
