"""Questions that take a tool or a schema: calls with nested arguments, answers from results, JSON extraction."""

from __future__ import annotations

import json
import random
from typing import Any

from rose.eval import words
from rose.eval.examples import EFFORTS, Example, by_effort, user


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


WEATHER = _tool(
    "get_weather",
    "Get the current weather of a city.",
    _object({"city": {"type": "string", "description": "Name of the city"}}),
)
"""The tool of `rose demo` and of docs/api.md."""
FORECAST = _tool(
    "get_forecast",
    "Get the weather of the next days.",
    _object(
        {
            "place": _object({"city": {"type": "string"}, "country": {"type": "string"}}),
            "days": {"type": "integer"},
        }
    ),
)
CALCULATOR = _tool(
    "calculate",
    "Compute with two numbers.",
    _object(
        {
            "operation": {"type": "string", "enum": ["add", "subtract", "multiply", "divide"]},
            "values": {"type": "array", "items": {"type": "number"}},
        }
    ),
)
SEARCH = _tool(
    "search",
    "Search documents.",
    _object(
        {
            "query": {"type": "string"},
            "filters": _object({"year_from": {"type": "integer"}, "language": {"type": "string"}}),
            "limit": {"type": "integer"},
        }
    ),
)
TOOLS = (WEATHER, FORECAST, CALCULATOR, SEARCH)
LANGUAGES = ("English", "French", "German", "Spanish")
_OPERATIONS = {"add": "plus", "subtract": "minus", "multiply": "times", "divide": "divided by"}


def compact(value: Any) -> str:
    """Write JSON without blanks, as the model is taught to."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _some_tools(source: random.Random, needed: dict[str, Any]) -> list[dict[str, Any]]:
    """Offer the needed tool, alone or among others, in any order."""
    others = [tool for tool in (*TOOLS, _made(source).tool) if tool is not needed]
    tools = [needed, *source.sample(others, source.choice([0, 0, 1, 2, 3]))]
    source.shuffle(tools)
    return tools


class _Case:
    """A question, the call it takes, a result and the answer that follows from it."""

    is_turned = False
    """Asks for the arguments in another order than the tool's schema."""

    def __init__(
        self, tool: dict[str, Any], ask: str, arguments: dict[str, Any], result: Any, answer: str
    ) -> None:
        self.tool, self.ask, self.arguments = tool, ask, arguments
        self.result, self.answer = result, answer
        self.name = tool["function"]["name"]


def _weather(source: random.Random) -> _Case:
    city, sky, degrees = words.place(source), source.choice(words.SKIES), source.randint(-19, 42)
    ask = source.choice(
        [
            f"What is the weather in {city}?",
            f"How is the weather in {city} today?",
            f"Is it warm in {city}?",
            f"What's the weather like in {city}?",
        ]
    )
    answer = f"In {city} it is {degrees} °C and {sky}."
    return _Case(WEATHER, ask, {"city": city}, {"degrees": degrees, "sky": sky}, answer)


def _forecast(source: random.Random) -> _Case:
    city, country = words.place(source), source.choice(words.COUNTRIES)
    days, sky = source.randint(2, 14), source.choice(words.SKIES)
    low = source.randint(-9, 25)
    high = low + source.randint(1, 12)
    ask = source.choice(
        [
            f"What will the weather be in {city}, {country}, for the next {days} days?",
            f"Give me a forecast of {days} days for {city} in {country}.",
        ]
    )
    arguments = {"place": {"city": city, "country": country}, "days": days}
    result = {"sky": sky, "low": low, "high": high}
    answer = f"In {city} it will be {sky}, {low} to {high} °C, for {days} days."
    return _Case(FORECAST, ask, arguments, result, answer)


def _calculate(source: random.Random) -> _Case:
    operation = source.choice(list(_OPERATIONS))
    a, b = source.randint(100, 9999), source.randint(11, 999)
    a = a * b if operation == "divide" else a
    value = {"add": a + b, "subtract": a - b, "multiply": a * b, "divide": a // b}[operation]
    word = _OPERATIONS[operation]
    ask = source.choice([f"What is {a} {word} {b}?", f"Calculate {a} {word} {b}."])
    arguments = {"operation": operation, "values": [a, b]}
    return _Case(CALCULATOR, ask, arguments, {"result": value}, f"{a} {word} {b} is {value}.")


def _search(source: random.Random) -> _Case:
    topic = source.choice(words.TOPICS) if source.random() < 0.5 else words.made_word(source)
    year, limit = source.randint(1980, 2025), source.randint(1, 20)
    language, title = source.choice(LANGUAGES), words.sentence(source).rstrip(".")
    ask = source.choice(
        [
            f"Find {limit} documents in {language} about {topic} since {year}.",
            f"Search for {topic}: {limit} results in {language}, from {year} on.",
        ]
    )
    filters = {"year_from": year, "language": language}
    arguments = {"query": topic, "filters": filters, "limit": limit}
    return _Case(SEARCH, ask, arguments, [{"title": title}], f'I found "{title}".')


def _value(source: random.Random, kind: str) -> Any:
    if kind == "integer":
        return source.randint(0, 999)
    if kind == "boolean":
        return source.random() < 0.5
    return source.choice(words.NOUNS) if source.random() < 0.5 else words.made_word(source)


def _made(source: random.Random) -> _Case:
    """Draw a tool that no other question has, so that reading the definition is what is learnt."""
    thing = source.choice(words.NOUNS) if source.random() < 0.5 else words.made_word(source)
    name = f"{source.choice(words.DEEDS)}_{thing}"
    keys = source.sample(words.PROPERTIES, source.randint(1, 3))
    kinds = {key: source.choice(["string", "string", "integer", "boolean"]) for key in keys}
    description = source.choice(["", f"{words.made_word(source).capitalize()} {thing}."])
    tool = _tool(name, description, _object({key: {"type": kinds[key]} for key in keys}))
    arguments = {key: _value(source, kinds[key]) for key in keys}
    in_order = [f"{key} {str(value).lower()}" for key, value in arguments.items()]
    shown = list(in_order)
    source.shuffle(shown)
    listed = " and ".join(shown)
    ask = source.choice(
        [f"Use {name} with {listed}.", f"Call {name}: {listed}.", f"Please {name}, {listed}."]
    )
    status = words.made_word(source)
    case = _Case(tool, ask, arguments, {"status": status}, f"{name} says: {status}.")
    case.is_turned = shown != in_order
    return case


def _case(source: random.Random) -> _Case:
    return source.choice((_weather, _weather, _forecast, _calculate, _search, _made, _made))(source)


def _before_call(case: _Case, effort: str) -> str:
    return by_effort(
        effort,
        f"I call {case.name}.",
        f"The user asks for something that {case.name} can tell. I call it.",
        f"The user asks: {case.ask} The tool {case.name} can tell. Its arguments are "
        f"{compact(case.arguments)}. I call it.",
    )


def tool_call(source: random.Random) -> Example:
    """Call the right tool with the right arguments."""
    return _called("tool_call", _case(source), source)


def turned_call(source: random.Random) -> Example:
    """Call a made-up tool whose arguments are asked for in another order than the schema's. For training only.

    One `tool_call` in eight is such a one.
    """
    case = _made(source)
    while not case.is_turned:
        case = _made(source)
    return _called("turned_call", case, source)


def _called(task: str, case: _Case, source: random.Random) -> Example:
    effort = source.choice(EFFORTS)
    return Example(
        task=task,
        key=f"call {case.name} {compact(case.arguments)}",
        messages=[user(case.ask)],
        tools=_some_tools(source, case.tool),
        reasoning=_before_call(case, effort),
        call=(case.name, case.arguments),
        effort=effort,
        judge="call",
    )


def tool_missing(source: random.Random) -> Example:
    """Say that no tool can tell, where none or only others are offered (as under tool_choice none)."""
    case, effort = _case(source), source.choice(EFFORTS)
    others = [tool for tool in (*TOOLS, _made(source).tool) if tool is not case.tool]
    return Example(
        task="tool_missing",
        key=f"missing {case.ask}",
        messages=[user(case.ask)],
        tools=source.sample(others, source.choice([0, 0, 1, 2])),
        reasoning=by_effort(
            effort,
            "No tool for it.",
            "None of my tools can tell that. I say so.",
            f"The user asks: {case.ask} None of my tools can tell that. I say so.",
        ),
        content=f"I have no tool for this: {case.ask}",
        effort=effort,
    )


def tool_result(source: random.Random) -> Example:
    """Answer out of what the tool returned."""
    case, effort = _case(source), source.choice(EFFORTS)
    arguments, result = compact(case.arguments), compact(case.result)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": case.name, "arguments": arguments},
    }
    said = {
        "role": "assistant",
        "reasoning_content": _before_call(case, effort),
        "tool_calls": [call],
    }
    return Example(
        task="tool_result",
        key=f"result {case.name} {arguments} {result}",
        messages=[
            user(case.ask),
            said,
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ],
        tools=_some_tools(source, case.tool),
        reasoning=by_effort(
            effort,
            "The result is there.",
            f"The tool says {result}.",
            f"The tool {case.name} says {result}. That answers the question: {case.ask}",
        ),
        content=case.answer,
        effort=effort,
    )


def _person_facts(source: random.Random) -> tuple[str, dict[str, Any]]:
    facts = {
        "name": words.person(source),
        "age": source.randint(18, 90),
        "city": words.place(source),
        "job": source.choice(words.JOBS),
    }
    text = source.choice(
        [
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "The {job} {name}, {age}, comes from {city}.",
            "In {city} there is a {job} named {name}, who is {age} years old.",
        ]
    )
    return text.format(**facts), facts


def _order_facts(source: random.Random) -> tuple[str, dict[str, Any]]:
    item, number = source.choice(words.NOUNS), source.randint(1, 99)
    street, city = words.made_word(source).capitalize() + " Street", words.place(source)
    house = source.randint(1, 250)
    text = source.choice(
        [
            f"Please send {number} units of {item} to {house} {street} in {city}.",
            f"Order: {item}, {number} units, for {house} {street}, {city}.",
        ]
    )
    address = {"street": street, "house": house, "city": city}
    return text, {"item": item, "number": number, "address": address}


def _schema_of(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return _object({name: _schema_of(inner) for name, inner in value.items()})
    return {"type": "integer" if isinstance(value, int) else "string"}


def json_extraction(source: random.Random) -> Example:
    """Give the facts of a text as JSON under a schema."""
    effort = source.choice(EFFORTS)
    text, facts = source.choice((_person_facts, _order_facts))(source)
    kept = source.sample(list(facts), source.randint(2, len(facts)))
    wanted = {name: facts[name] for name in kept}
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "facts", "schema": _schema_of(wanted)},
    }
    ask = f"Extract the facts: {text}"
    if source.random() < 0.2:  # said in words, for those who give no schema
        schema, ask = None, f"Extract {', '.join(kept)} as JSON: {text}"
    return Example(
        task="json",
        key=f"json {text} {kept}",
        messages=[user(ask)],
        response_format=schema,
        reasoning=by_effort(
            effort,
            "As JSON.",
            f"Wanted are {', '.join(kept)}.",
            f"Wanted are {', '.join(kept)}. I take them from the text: {text}",
        ),
        content=compact(wanted),
        effort=effort,
        judge="json",
    )
