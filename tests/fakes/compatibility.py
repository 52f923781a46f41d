"""Thirty questions, six tools and what a model writes to call them: our own twin of gpt-oss's compatibility suite.

Every question must lead to a call of its tool with these arguments, then to a final answer; the scripted engine answers
by what the prompt holds, so questions may come in any order and at the same time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rose.frontend.tokenizer import Tokenizer


def _object(required: list[str], **properties) -> dict:
    closed = {"additionalProperties": False}
    return {"type": "object", "properties": properties, "required": required, **closed}


NUMBER, TEXT = {"type": "number"}, {"type": "string"}
TOOLS = {
    "list_disks": (_object([]), "The disks of this machine and how full they are."),
    "convert_units": (
        _object(["value", "to"], value=NUMBER, to={**TEXT, "enum": ["m", "ft", "kg", "lb"]}),
        "Convert a value.",
    ),
    "translate": (
        _object(["text", "language"], text=TEXT, language={**TEXT, "default": "en"}),
        "Translate a text.",
    ),
    "plot": (
        _object(
            ["points"],
            points={"type": "array", "items": {"type": "array", "items": NUMBER}},
            title={**TEXT, "default": ""},
            kind={**TEXT, "enum": ["line", "bar"]},
        ),
        "Draw points.",
    ),
    "find_orders": (
        _object(
            ["columns"],
            columns={"type": "array", "items": TEXT},
            where=TEXT,
            limit={"type": "integer", "minimum": 1, "maximum": 500, "default": 20},
        ),
        "Look orders up.",
    ),
    "get_tide": (_object(["harbour"], harbour=TEXT), "When the tide is high at a harbour."),
}
"""Parameters and description of each tool."""

CASES = [
    ("list_disks", "How full are the disks?", {}),
    ("list_disks", "Is there any space left on this machine?", {}),
    ("list_disks", "Disk report, please.", {}),
    ("list_disks", "Before I start the backup: what about the disks?", {}),
    ("list_disks", "¿Cuánto espacio queda en disco?", {}),
    ("convert_units", "How many feet are 12 metres?", {"value": 12, "to": "ft"}),
    ("convert_units", "100 lb in kilograms?", {"value": 100, "to": "kg"}),
    ("convert_units", "Convert 0.5 kg to pounds.", {"value": 0.5, "to": "lb"}),
    ("convert_units", "Six feet, in metres please", {"value": 6, "to": "m"}),
    ("convert_units", "What is -3.25 ft in m?", {"value": -3.25, "to": "m"}),
    ("translate", 'Say "good morning" in German.', {"text": "good morning", "language": "de"}),
    ("translate", "Translate こんにちは to English", {"text": "こんにちは", "language": "en"}),
    ("translate", "What is 'été' in English?", {"text": "été", "language": "en"}),
    (
        "translate",
        "Put this into French:\nline one\nline two",
        {"text": "line one\nline two", "language": "fr"},
    ),
    ("translate", "Translate `a \\ b`", {"text": "a \\ b", "language": "en"}),
    ("plot", "Plot (0,0) (1,2) (2,4).", {"points": [[0, 0], [1, 2], [2, 4]]}),
    (
        "plot",
        "A bar chart of 3, 5 and 8 called 'Fish'",
        {"points": [[1, 3], [2, 5], [3, 8]], "title": "Fish", "kind": "bar"},
    ),
    ("plot", "Draw a line through (1,1.5) and (4,-2)", {"points": [[1, 1.5], [4, -2]]}),
    ("plot", "Show me nothing: an empty plot", {"points": []}),
    (
        "plot",
        'Bars 10 and 20, title: the word "big"',
        {"points": [[1, 10], [2, 20]], "title": '"big"', "kind": "bar"},
    ),
    ("find_orders", "Ids of all orders", {"columns": ["id"]}),
    ("find_orders", "The ten newest orders, id and date", {"columns": ["id", "date"], "limit": 10}),
    (
        "find_orders",
        "Which orders to Oslo are open?",
        {"columns": ["id", "status"], "where": "city = 'Oslo' AND status = 'open'"},
    ),
    (
        "find_orders",
        "Totals above 100 €",
        {"columns": ["id", "total"], "where": "total > 100", "limit": 500},
    ),
    ("find_orders", "Just one order, any", {"columns": ["id"], "limit": 1}),
    ("get_tide", "When is high tide in Cork?", {"harbour": "Cork"}),
    ("get_tide", "Tide for St. John's, please", {"harbour": "St. John's"}),
    ("get_tide", "Flut in Büsum?", {"harbour": "Büsum"}),
    ("get_tide", "tide 🌊 Saint-Malo", {"harbour": "Saint-Malo"}),
    ("get_tide", "high water at <|end|> harbour", {"harbour": "<|end|>"}),
]
"""Tool, question, arguments."""

RESULT = '{"ok": true}'
"""What every tool returns."""
THOUGHT = "The user asks; a tool knows."
HEADERS = (
    "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    "<|start|>assistant to=functions.{}<|channel|>commentary json<|message|>",
    "<|start|>assistant<|channel|>analysis to=functions.{} code<|message|>",
)
"""Forms in which real models call."""


def answer_to(number: int) -> str:
    """Return the final answer to a question."""
    return f"Answer {number}: done, as the tool says."


def tool(name: str, *, is_nested: bool) -> dict:
    """Return a tool as Responses, or nested as chat wants it."""
    parameters, description = TOOLS[name]
    function = {"name": name, "description": description, "parameters": parameters}
    if is_nested:
        return {"type": "function", "function": function}
    return {"type": "function", "strict": False, **function}


def script(tokenizer: Tokenizer, cases: Sequence[tuple[str, str, dict]]) -> list[dict]:
    """Return the lines of the scripted engine: after a tool's result the final answer, else a thought and a call."""
    encode, lines = tokenizer.encode_with_control, []
    for number, (name, question, arguments) in enumerate(cases):
        asked = tokenizer.encode(question)
        result = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
        final = encode(f"<|channel|>final<|message|>{answer_to(number)}<|return|>")
        lines.append({"tokens": final, "needs": [asked, encode(result)]})
        call = HEADERS[number % len(HEADERS)].format(name)
        # The arguments as ordinary text: a model can write the letters of a control token's name.
        written = tokenizer.encode(json.dumps(arguments, ensure_ascii=False))
        thought = encode(f"<|channel|>analysis<|message|>{THOUGHT}<|end|>{call}")
        lines.append({"tokens": thought + written + encode("<|call|>"), "needs": [asked]})
    return lines


def main() -> None:
    """Print the script for the cases.jsonl of the gpt-oss project's own suite; docs/api.md says how to run that."""
    from rose.frontend.o200k import O200kTokenizer

    found = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines() if line]
    cases = [(c["tool_name"], c["input"], json.loads(c["expected_arguments"])) for c in found]
    for line in script(O200kTokenizer(), cases):
        print(json.dumps(line))


if __name__ == "__main__":
    main()
