"""Generated chat bodies, and the same conversations for openai-harmony, mapped independently of rose."""

import random

WORDS = [
    "weather", "Oslo", "naïve", "日本語", "😀", "🇳🇴", "a\n\nb", "  two  ", "<|end|>", "<|start|>system<|message|>",
    "<|channel|>final", "I'm", "DON'T", "12345", "{}", '{"a": 1}', "\t", "é" * 9, "ø", "<|return|>", "'", "\r\n",
    "👩‍👩‍👧",
]  # fmt: skip
NAMES = ["get_weather", "ping", "find_text", "listFiles", "a-b", "x9", "roll_dice"]


class Bodies:
    """A seeded source of bodies."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def text(self, most=8):
        return self.draw.choice(["", " "]).join(
            self.draw.choices(WORDS, k=self.draw.randint(1, most))
        )

    def body(self):
        names = self.draw.sample(NAMES, self.draw.randint(0, 4))
        body = {"messages": self.messages(names), "tools": [self.tool(name) for name in names]}
        if not names and self.draw.random() < 0.5:
            body["tools"] = None
        if self.draw.random() < 0.5:
            body["conversation_date"] = "2026-01-15"
        if self.draw.random() < 0.7:
            body["reasoning_effort"] = self.draw.choice(["low", "medium", "high"])
        return body

    def messages(self, names):
        messages = []
        if self.draw.random() < 0.6:
            role = self.draw.choice(["system", "developer"])
            messages.append({"role": role, "content": self.text()})
        for _ in range(self.draw.randint(1, 4)):
            messages += self.turn(names, number=len(messages))
        if self.draw.random() < 0.4:
            messages.append({"role": "user", "content": self.text()})
        return messages

    def turn(self, names, number):
        """One turn of a user, some calls of tools, and perhaps an answer."""
        turn = [{"role": "user", "content": self.content()}]
        for step in range(self.draw.randint(0, 2) if names else 0):
            ids = [f"c{number}_{step}_{i}" for i in range(self.draw.randint(1, 2))]
            call = {"role": "assistant", "content": self.draw.choice([None, None, self.text()])}
            call["tool_calls"] = [self.call(i, self.draw.choice(names)) for i in ids]
            turn.append(self.with_reasoning(call))
            turn += [{"role": "tool", "tool_call_id": i, "content": self.content()} for i in ids]
        if self.draw.random() < 0.75:
            turn.append(self.with_reasoning({"role": "assistant", "content": self.content()}))
        return turn

    def content(self):
        if self.draw.random() < 0.75:
            return self.text()
        return [{"type": "text", "text": self.text(3)} for _ in range(self.draw.randint(1, 3))]

    def with_reasoning(self, message):
        if self.draw.random() < 0.7:
            message[self.draw.choice(["reasoning", "reasoning_content"])] = self.text()
        return message

    def call(self, call_id, name):
        return {
            "id": call_id,
            "type": "function",
            "function": {
                "name": name,
                "arguments": self.draw.choice(["{}", '{"a":1}', self.text()]),
            },
        }

    def tool(self, name):
        function = {"name": name}
        if self.draw.random() < 0.8:
            function["description"] = self.draw.choice(
                ["", "One line.", "Two\nlines\n\nor more\n", self.text()]
            )
        if self.draw.random() < 0.85:
            function["parameters"] = self.schema(0) | {"type": "object"}
        return {"type": "function", "function": function}

    def schema(self, depth):
        """A schema with every construct that the format renders, and some that it ignores."""
        kinds = [
            "string",
            "number",
            "integer",
            "boolean",
            "array",
            "object",
            "null",
            ["integer", "null"],
            None,
        ]
        fields = {"type": self.draw.choice(kinds)} if self.draw.random() < 0.9 else {}
        for key, chance, value in (
            ("description", 0.5, self.draw.choice(["Short", "two\nlines", "<|end|>", "é"])),
            ("title", 0.15, "Title"),
            ("default", 0.25, self.value()),
            ("enum", 0.2, self.draw.choice([["x", "y"], [], [1, "z"], [1.5]])),
            ("nullable", 0.15, self.draw.choice([True, False])),
            ("examples", 0.1, ["e1", 2, "e3"]),
            ("const", 0.05, "fixed"),
            ("minimum", 0.1, 3),
        ):
            if self.draw.random() < chance:
                fields[key] = value
        if depth < 3:
            self.add_inner(fields, depth)
        keys = list(fields)
        self.draw.shuffle(keys)
        return {key: fields[key] for key in keys}

    def add_inner(self, fields, depth):
        if self.draw.random() < 0.7 or depth == 0:
            names = [f"p_{i}" for i in range(self.draw.randint(0, 4))]
            fields["properties"] = {name: self.schema(depth + 1) for name in names}
            fields["required"] = self.draw.sample(names, self.draw.randint(0, len(names)))
        if self.draw.random() < 0.4:
            fields["items"] = self.schema(depth + 1)
        if self.draw.random() < 0.15:
            fields["oneOf"] = [self.schema(depth + 1) for _ in range(self.draw.randint(1, 3))]

    def value(self):
        values = ["text", 'q"q', 3, 1.5, 1e20, 1e-5, True, None, [1, 2], {"z": 1, "a": ["é"]}, []]
        return self.draw.choice(values)


def strip_finished_reasoning(messages):
    """Return the messages without the reasoning of turns that ended in an answer."""
    answers = [
        i for i, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")
    ]
    last = answers[-1] if answers else -1
    drop = ("reasoning", "reasoning_content")
    return [
        {k: v for k, v in m.items() if i > last or k not in drop} for i, m in enumerate(messages)
    ]


def oracle_tokens(oracle, body):
    """Render a body by openai-harmony."""
    from openai_harmony import (
        Author,
        Conversation,
        DeveloperContent,
        Message,
        ReasoningEffort,
        Role,
        SystemContent,
        TextContent,
        ToolDescription,
    )

    def say(role, content, **fields):
        texts = [content] if isinstance(content, str) else [p["text"] for p in content]
        author = Author(role=role, name=fields.pop("name", None))
        return Message(author=author, content=[TextContent(text=t) for t in texts], **fields)

    effort = ReasoningEffort(body.get("reasoning_effort", "medium").capitalize())
    system = SystemContent(
        reasoning_effort=effort, conversation_start_date=body.get("conversation_date")
    )
    out = [Message(author=Author(role=Role.SYSTEM), content=[system])]
    listed = strip_finished_reasoning(body["messages"])
    developer, tools = DeveloperContent(), [t["function"] for t in body["tools"] or []]
    if listed[0]["role"] in ("system", "developer"):
        developer = developer.with_instructions(listed.pop(0)["content"])
    if tools:
        described = [
            ToolDescription(
                name=t["name"], description=t.get("description", ""), parameters=t.get("parameters")
            )
            for t in tools
        ]
        developer = developer.with_function_tools(described)
    if developer != DeveloperContent():
        out.append(Message(author=Author(role=Role.DEVELOPER), content=[developer]))
    names = {}
    for m in listed:
        if m["role"] == "user":
            out.append(say(Role.USER, m["content"]))
        elif m["role"] == "tool":
            name = f"functions.{names[m['tool_call_id']]}"
            fields = {"recipient": "assistant", "channel": "commentary"}
            out.append(say(Role.TOOL, m["content"], name=name, **fields))
        else:
            thought = m.get("reasoning") or m.get("reasoning_content")
            out += [say(Role.ASSISTANT, thought, channel="analysis")] if thought else []
            calls = m.get("tool_calls", [])
            if m["content"]:
                channel = "commentary" if calls else "final"
                out.append(say(Role.ASSISTANT, m["content"], channel=channel))
            for call in calls:
                name = call["function"]["name"]
                names[call["id"]] = name
                fields = {"channel": "commentary", "content_type": "<|constrain|>json"}
                recipient = f"functions.{name}"
                arguments = call["function"]["arguments"]
                out.append(say(Role.ASSISTANT, arguments, recipient=recipient, **fields))
    return oracle.render_conversation_for_completion(Conversation(messages=out), Role.ASSISTANT)
