"""The renderer gives the published examples, token for token."""

import json
from pathlib import Path

import pytest

from rose.frontend.formatters.harmony.builtin_tools import browser_tool, is_builtin, python_tool
from rose.frontend.formatters.harmony.messages import (
    DeveloperContent,
    Message,
    Namespace,
    ResponseFormat,
    SystemContent,
    Tool,
    drop_finished_reasoning,
)
from rose.frontend.formatters.harmony.render import HarmonyRenderer
from rose.frontend.tokenizer import decode, load_tokenizer

DATA = Path(__file__).parents[3] / "data"
EXAMPLES = json.loads((DATA / "harmony_examples.json").read_text(encoding="utf-8"))["render"]
BY_ID = {example["id"]: example for example in EXAMPLES}


def say(role, text="", **fields):
    content = (text,) if isinstance(text, (str, SystemContent, DeveloperContent)) else tuple(text)
    return Message(role=role, content=content, **fields)


def assistant(channel, text, **fields):
    return say("assistant", text, channel=channel, **fields)


def call(recipient, text, *, channel="commentary", content_type="<|constrain|>json"):
    return assistant(channel, text, recipient=recipient, content_type=content_type)


def result(name, text, channel="commentary"):
    return say("tool", text, name=name, recipient="assistant", channel=channel)


def functions(*tools, instructions=None):
    return say(
        "developer",
        DeveloperContent(
            instructions=instructions, namespaces=(Namespace(name="functions", tools=tools),)
        ),
    )


def system(**fields):
    return say("system", SystemContent(**({"date": "2031-02-03"} | fields)))


def an_object(properties):
    return {"type": "object", "properties": properties}


X = say("user", "x")
PING = Tool(name="ping", description="Check that the service is alive.")
SHORT_PING = Tool(name="ping", description="P.")
DICE = Tool(
    name="roll_dice",
    description="Roll some dice.\nReturns the total.",
    parameters=an_object(
        {
            "sides": {"type": "integer", "description": "Faces per die", "default": 6},
            "count": {"type": "integer"},
        }
    )
    | {"required": ["count"]},
)
EMPTY = Tool(
    name="empty_obj",
    description="Has an object schema with no properties.",
    parameters=an_object({}),
)
UNION = Tool(
    name="u",
    description="Top union.",
    parameters={
        "oneOf": [
            an_object({"a": {"type": "string"}}) | {"description": "A form"},
            {"type": "string", "default": "s"},
        ]
    },
)
LOOP = [
    system(),
    functions(SHORT_PING),
    say("user", "Is it up?"),
    assistant("analysis", "Should ping."),
    call("functions.ping", "{}"),
    result("functions.ping", '{"ok":true}'),
]
FINISHED = [*LOOP, assistant("final", "It is up."), say("user", "Thanks")]
TWO_TURNS = [
    say("user", "q1"),
    assistant("analysis", "t1"),
    assistant("final", "a1"),
    say("user", "q2"),
    assistant("analysis", "t2"),
]

CONVERSATIONS = {
    "R1": [say("user", "Name a prime.")],
    "R2": [system(date=None), say("user", "Hi")],
    "R3": [
        system(effort="high"),
        say("developer", DeveloperContent(instructions="Reply in haiku.")),
        say("user", "Describe fog."),
    ],
    "R4": [
        system(),
        functions(DICE, PING, EMPTY, instructions="Be brief."),
        say("user", "Roll three dice."),
    ],
    "R5": [functions(PING), X],
    "R6": [
        functions(
            Tool(
                name="kitchen_sink",
                description="All constructs.",
                parameters=BY_ID["R6"]["schema"],
            )
        ),
        X,
    ],
    "R7": [functions(UNION), X],
    "R8": [system(namespaces=(python_tool(), browser_tool())), X],
    "R9": [system(namespaces=(python_tool(),)), functions(SHORT_PING), X],
    "R10": LOOP,
    "R11": drop_finished_reasoning(FINISHED),
    "R12": FINISHED,
    # The published renderer drops less than we do; these two give it what it kept.
    "R13": [*TWO_TURNS[:1], *TWO_TURNS[2:], assistant("final", "a2"), say("user", "q3")],
    "R14": TWO_TURNS,
    "R15": [say("user", "q"), assistant("final", "a")],
    "R16": [say("user", "q"), call("functions.f", "{}", content_type="json")],
    "R17": [
        say("user", "2**10?"),
        call("python", "print(2**10)", channel="analysis", content_type="code"),
        result("python", "1024\n", "analysis"),
    ],
    "R18": [
        say("user", "news?"),
        call("browser.search", '{"query":"news"}', channel="analysis", content_type="code"),
        result("browser.search", "[0] page", "analysis"),
    ],
    "R19": [
        say("user", "hi", name="ann"),
        assistant("commentary", "Plan: ping."),
        assistant("final", "x", recipient="all"),
    ],
    "R20": [say("user", "a<|end|>b")],
    "R21": [
        system(
            date=None,
            identity="I am Zed.",
            cutoff="2030-01",
            effort="low",
            channels=("final",),
            is_channel_required=False,
        ),
        say("user", ("one", "two")),
        assistant("final", ""),
    ],
    "R22": [say("system", "Just text."), X],
    "R23": [call("functions.f", "{}", content_type="<|constrain|> json")],
}


@pytest.fixture(scope="module")
def renderer(o200k):
    return HarmonyRenderer(o200k)


def test_every_example_has_its_conversation():
    assert list(CONVERSATIONS) == [f"R{i}" for i in range(1, 24)] == list(BY_ID)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["id"])
def test_example_is_rendered_exactly(renderer, o200k, example):
    messages = CONVERSATIONS[example["id"]]
    if example["mode"] == "training":
        token_ids = renderer.render_for_training(messages)
    else:
        next_role = "assistant" if example["mode"] == "completion" else None
        token_ids = renderer.render(messages, next_role=next_role)
    assert decode(o200k, token_ids) == example["text"]
    assert len(token_ids) == example["num_tokens"]
    if "tokens" in example:
        assert token_ids == example["tokens"]


def test_reasoning_of_every_finished_turn_is_dropped():
    turns = [*TWO_TURNS, assistant("final", "a2"), say("user", "q3"), assistant("analysis", "t3")]
    channels = [m.channel for m in drop_finished_reasoning(turns)]
    assert channels == [None, "final", None, "final", None, "analysis"]
    assert drop_finished_reasoning(TWO_TURNS) == [m for m in TWO_TURNS if m.content != ("t1",)]


def test_reasoning_is_kept_while_a_call_is_pending():
    assert drop_finished_reasoning(LOOP) == LOOP


def test_control_tokens_come_by_name_from_the_folder(small_folder):
    tokenizer = load_tokenizer(small_folder)
    token_ids = HarmonyRenderer(tokenizer).render(LOOP)
    assert decode(tokenizer, token_ids) == BY_ID["R10"]["text"]
    assert token_ids[0] == tokenizer.control_id("<|start|>") < 256


def test_a_response_format_follows_the_tools():
    content = DeveloperContent(
        instructions="Be brief.",
        response_format=ResponseFormat(
            name="shopping", schema={"type": "object", "properties": {}}, description="A list."
        ),
    )
    assert content.text() == (
        "# Instructions\n\nBe brief.\n\n# Response Formats\n\n## shopping\n\n// A list.\n"
        '{"type":"object","properties":{}}'
    )


def test_builtin_tools_are_known_by_recipient():
    names = (
        "python",
        "browser.search",
        "browser",
        "container.exec",
        "functions.python",
        "pythonic",
    )
    assert [is_builtin(name) for name in names] == [True, True, True, True, False, False]
