"""A few dozen Harmony conversations to overfit on: weather through a tool, small sums, small talk."""

import datetime
import random

from rose.cli.demo import WEATHER_TOOL  # the demo offers what was trained, to the letter

CITIES = (
    "Paris", "Oslo", "Lima", "Tokyo", "Cairo", "Berlin", "Madrid", "Toronto", "Nairobi", "Sydney",
    "Vienna", "Lisbon",
)  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy")
TALK = {
    "Hello!": ("A greeting. I greet back.", "Hello! How can I help you?"),
    "Who are you?": ("They ask who I am.", "I am a tiny model that lives inside rose."),
    "What is rose?": ("They ask about rose.", "Rose is an engine that serves gpt-oss models on H200 GPUs."),
    "Name a prime.": ("Seven is prime.", "Seven."),
    "Thank you!": ("They thank me.", "You are welcome."),
    "Name a colour.": ("Any colour will do.", "Green."),
    "Say something short.": ("Short it is.", "Small is beautiful."),
    "What is a sink?": (
        "They mean attention sinks.",
        "A trained logit per head that takes a share of the softmax and has no value.",
    ),
    "How many layers do you have?": ("I have four layers.", "Four: two with a window and two with full attention."),
    "Goodbye!": ("They leave.", "Goodbye, and come back soon."),
    "Tell me a joke.": ("A joke about tokens.", "Why did the token stop? It had reached its end."),
    "Is it cold in space?": ("A fact about space.", "Yes, about three degrees above absolute zero."),
}  # fmt: skip


def _weather(random_: random.Random) -> tuple[dict, str]:
    city, sky = random_.choice(CITIES), random_.choice(SKIES)
    degrees = random_.randint(-9, 39)
    question = {"role": "user", "content": f"What is the weather in {city}?"}
    body = {"messages": [question], "tools": [WEATHER_TOOL]}
    thought = f"The user wants the weather in {city}. I call get_weather."
    arguments = f'{{"city":"{city}"}}'
    call = (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{arguments}<|call|>"
    )
    if random_.random() < 0.4:
        return body, call
    tool_call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": arguments},
    }
    body["messages"] += [
        {"role": "assistant", "reasoning_content": thought, "tool_calls": [tool_call]},
        {
            "role": "tool",
            "tool_call_id": "call_1",
            "content": f'{{"degrees":{degrees},"sky":"{sky}"}}',
        },
    ]
    return body, (
        f"<|channel|>analysis<|message|>The tool says {degrees} and {sky}.<|end|><|start|>assistant"
        f"<|channel|>final<|message|>In {city} it is {degrees} °C and {sky}.<|return|>"
    )


def _sum(random_: random.Random) -> tuple[dict, str]:
    a, b = random_.randint(1, 9), random_.randint(1, 9)
    body = {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}]}
    return body, (
        f"<|channel|>analysis<|message|>{a} plus {b} is {a + b}.<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{a} + {b} = {a + b}.<|return|>"
    )


def _talk(random_: random.Random) -> tuple[dict, str]:
    question = random_.choice(sorted(TALK))
    thought, answer = TALK[question]
    body = {"messages": [{"role": "user", "content": question}]}
    return body, (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
        f"<|channel|>final<|message|>{answer}<|return|>"
    )


def draw(random_: random.Random) -> tuple[dict, str]:
    """Draw a chat-completions body and the answer, Harmony text that follows `<|start|>assistant`."""
    body, answer = random_.choice((_weather, _weather, _sum, _talk))(random_)
    day = datetime.date(2025, 1, 1) + datetime.timedelta(days=random_.randint(0, 3650))
    body["conversation_date"] = day.isoformat()
    return body, answer
