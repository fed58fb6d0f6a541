"""What the command line prints, as `schema.json` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMA = json.loads((Path(__file__).parent.parent / "schema.json").read_text())
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def check(value: Any, schema: dict[str, Any]) -> None:
    """As much of JSON schema as schema.json uses."""
    known = {"type", "properties", "required", "additionalProperties", "items", "anyOf", "$ref", "minimum"}
    assert schema.keys() <= known | {"maximum", "minProperties", "maxProperties"}
    if "$ref" in schema:
        return check(value, SCHEMA["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    if "anyOf" in schema:
        return check(value, schema["anyOf"][value is None])
    assert isinstance(value, TYPES[schema["type"]]) and (
        isinstance(value, bool) == (schema["type"] == "boolean")
    ), (value, schema)
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= value.keys() <= schema["properties"].keys()
        assert schema.get("minProperties", 0) <= len(value) <= schema.get("maxProperties", 99)
        for key, item in value.items():
            check(item, schema["properties"][key])
    for item in value if isinstance(value, list) else ():
        check(item, schema["items"])
    if isinstance(value, int | float):
        assert schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return None
