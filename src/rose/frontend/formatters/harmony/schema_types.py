"""JSON schemas as the TypeScript-like types that Harmony shows the model.

Follows openai-harmony 0.0.8 to the letter, oddities included (no parentheses around arrays of unions, descriptions
of nested objects printed twice), because the model was trained on that text. Total: any JSON value gives a type.
"""

from __future__ import annotations

import json
from typing import Any

_PROPERTY_STEP = " " * 4
_VARIANT_STEP = " " * 3
_TYPE_NAMES = {"number": "number", "integer": "number", "boolean": "boolean"}


def type_text(schema: Any, indent: str = "") -> str:
    """Return the type of a schema, as it stands after `(_: ` or a property's colon."""
    if not isinstance(schema, dict):
        return "any"
    if isinstance(schema.get("oneOf"), list):
        return "".join(
            f"\n{indent} | {_variant_text(v, indent)}{_variant_comment(v, enum_as_json=True)}"
            for v in schema["oneOf"]
        )
    kind = schema.get("type")
    if isinstance(kind, list):
        names = [name for name in kind if isinstance(name, str)]
        return " | ".join("number" if name == "integer" else name for name in names) or "any"
    if kind == "object":
        return _object_text(schema, indent)
    if kind == "string":
        return _string_text(schema)
    if kind == "array":
        return f"{type_text(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
    return _TYPE_NAMES.get(kind, "any") if isinstance(kind, str) else "any"


def _string_text(schema: dict[str, Any]) -> str:
    allowed = schema.get("enum")
    quoted = [f'"{v}"' for v in allowed if isinstance(v, str)] if isinstance(allowed, list) else []
    return " | ".join(quoted) or "string"


def _object_text(schema: dict[str, Any], indent: str) -> str:
    lines = []
    if isinstance(schema.get("description"), str):
        lines.append(f"{indent}// {schema['description']}\n")
    lines.append("{\n")
    properties, required = schema.get("properties"), schema.get("required")
    required = required if isinstance(required, list) else []
    for name, value in properties.items() if isinstance(properties, dict) else ():
        lines.append(_property_text(name, value, is_required=name in required, indent=indent))
    lines.append(f"{indent}}}")
    return "".join(lines)


def _property_text(name: str, schema: Any, *, is_required: bool, indent: str) -> str:
    schema = schema if isinstance(schema, dict) else {}
    mark = "" if is_required else "?"
    is_union = isinstance(schema.get("oneOf"), list)
    head = _comments(schema, indent, has_description=not is_union)
    if is_union:
        return head + _property_union(name + mark, schema, indent)
    kind = type_text(schema, indent + _PROPERTY_STEP)
    null = " | null" if schema.get("nullable") is True and "null" not in kind else ""
    default = f" // default: {_default_text(schema)}" if "default" in schema else ""
    return f"{head}{indent}{name}{mark}: {kind}{null},{default}\n"


def _comments(schema: dict[str, Any], indent: str, *, has_description: bool) -> str:
    """Return the comment lines above a property."""
    lines = []
    if isinstance(schema.get("title"), str):
        lines += [f"// {schema['title']}", "//"]
    if has_description and isinstance(schema.get("description"), str):
        lines.append(f"// {schema['description']}")
    examples = schema.get("examples")
    if isinstance(examples, list) and examples:
        lines.append("// Examples:")
        lines += [f'// - "{example}"' for example in examples if isinstance(example, str)]
    return "".join(f"{indent}{line}\n" for line in lines)


def _property_union(name: str, schema: dict[str, Any], indent: str) -> str:
    variants = schema["oneOf"]
    described = schema.get("description") if isinstance(schema.get("description"), str) else None
    first = variants[0] if variants and isinstance(variants[0], dict) else {}
    is_printed = described is not None and described != first.get("description")
    lines = [f"{indent}// {described}"] if is_printed else []
    if "default" in schema:
        lines.append(f"{indent}// default: {_default_text(schema)}")
    lines.append(f"{indent}{name}:")
    for place, variant in enumerate(variants):
        is_repeated = isinstance(variant, dict) and variant.get("description") == described
        comment = _variant_comment(
            variant, has_description=not (is_repeated or (place == 0 and is_printed))
        )
        lines.append(f"{indent} | {_variant_text(variant, indent)}{comment}")
    lines.append(f"{indent},")
    return "".join(f"{line}\n" for line in lines)


def _variant_text(variant: Any, indent: str) -> str:
    text = type_text(variant, indent + _VARIANT_STEP)
    is_nullable = isinstance(variant, dict) and variant.get("nullable") is True
    return f"{text} | null" if is_nullable and "null" not in text else text


def _variant_comment(
    variant: Any, *, has_description: bool = True, enum_as_json: bool = False
) -> str:
    if not isinstance(variant, dict):
        return ""
    parts = []
    if has_description and isinstance(variant.get("description"), str):
        parts.append(variant["description"])
    if "default" in variant:
        parts.append(f"default: {_default_text(variant, enum_as_json=enum_as_json)}")
    return f" // {' '.join(parts)}" if parts else ""


def _default_text(schema: dict[str, Any], *, enum_as_json: bool = False) -> str:
    value = schema["default"]
    if not isinstance(value, str):
        return compact_json(value)
    if schema.get("enum"):
        return _json_text(value) if enum_as_json else value
    return f'"{value}"'


def compact_json(value: Any) -> str:
    """Return JSON without spaces, numbers as the published renderer writes them."""
    if isinstance(value, dict):
        inner = ",".join(f"{_json_text(k)}:{compact_json(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{','.join(map(compact_json, value))}]"
    if isinstance(value, float) or (
        isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64
    ):
        return _float_text(value)
    return _json_text(value)


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _float_text(value: float) -> str:
    """Write a float with plain digits where Rust does: 0.00001 and 1e20, not 1e-05 and 1e+20."""
    try:
        mantissa, _, exponent = repr(float(value)).partition("e")
    except OverflowError:  # an integer past the largest float
        return str(value)
    if not exponent:
        return mantissa
    if int(exponent) == -5:
        sign, digits = ("-", mantissa[1:]) if mantissa.startswith("-") else ("", mantissa)
        return f"{sign}0.0000{digits.replace('.', '')}"
    return f"{mantissa}e{int(exponent)}"
