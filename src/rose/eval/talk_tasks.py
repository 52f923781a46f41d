"""Conversations: instructions to obey, two and three turns, small talk."""

from __future__ import annotations

import random

from rose.eval import words
from rose.eval.examples import EFFORTS, Example, by_effort, user

TALK = {
    "Hello!": ("A greeting. I greet back.", "Hello! How can I help you?"),
    "Hi": ("A greeting. I greet back.", "Hello! How can I help you?"),
    "Who are you?": ("They ask who I am.", "I am a tiny model that lives inside rose."),
    "What is rose?": ("They ask about rose.", "Rose is an engine that serves gpt-oss models on H200 GPUs."),
    "What can you do?": (
        "They ask what I can do.",
        "I add small numbers, copy, reverse and sort text, call tools and write JSON.",
    ),
    "Name a prime.": ("Seven is prime.", "Seven."),
    "Thank you!": ("They thank me.", "You are welcome."),
    "Name a colour.": ("Any colour will do.", "Green."),
    "Say something short.": ("Short it is.", "Small is beautiful."),
    "What is a sink?": (
        "They mean attention sinks.",
        "A trained logit per head that takes a share of the softmax and has no value.",
    ),
    "Goodbye!": ("They leave.", "Goodbye, and come back soon."),
    "Tell me a joke.": ("A joke about tokens.", "Why did the token stop? It had reached its end."),
    "Is it cold in space?": ("A fact about space.", "Yes, about three degrees above absolute zero."),
}  # fmt: skip


def _question(source: random.Random) -> tuple[str, str, str]:
    """Return a question, its answer as a sentence, and the word that must be in it."""
    kind = source.randrange(3)
    if kind == 0:
        country = source.choice(list(words.CAPITALS))
        city = words.CAPITALS[country]
        return f"What is the capital of {country}?", f"The capital of {country} is {city}.", city
    if kind == 1:
        word = words.made_word(source)
        return f"Say the word {word}.", f"The word is {word}.", word
    who, where = source.choice(words.FIRST_NAMES), words.place(source)
    return f"{who} lives in {where}. Where does {who} live?", f"{who} lives in {where}.", where


def _obeyed(rule: str, word: str, answer: str, core: str) -> str:
    return {
        "capitals": answer.upper(),
        "begin": f"{word} {answer}",
        "end": f"{answer} {word}",
        "only": core,
        "brackets": f"[{answer}]",
        "twice": f"{answer} {answer}",
        "refuse": f"I may not talk about that. {word}",
    }[rule]


_ORDERS = {
    "capitals": "Answer in capital letters.",
    "begin": "Begin every answer with the word {word}",
    "end": "End every answer with the word {word}",
    "only": "Answer with one word and nothing else.",
    "brackets": "Put every answer in square brackets.",
    "twice": "Say every answer twice.",
    "refuse": "Refuse every question, and close with the word {word}",
}


def instruction(source: random.Random) -> Example:
    """Obey a system or developer instruction."""
    question, answer, core = _question(source)
    rule = source.choice(list(_ORDERS))
    word = words.made_word(source).capitalize() + "."
    order, effort = _ORDERS[rule].format(word=word), source.choice(EFFORTS)
    if rule == "only":
        core = core.rstrip(".")
    return Example(
        task="instruction",
        key=f"obey {rule} {word} {question}",
        messages=[
            {"role": source.choice(["system", "developer"]), "content": order},
            user(question),
        ],
        reasoning=by_effort(
            effort,
            "I obey.",
            f"The instruction: {order}",
            f"The user asks: {question} The answer is: {answer} The instruction: {order} I obey it.",
        ),
        content=_obeyed(rule, word, answer, core),
        effort=effort,
        obeys=(rule, core if rule in ("capitals", "only", "brackets", "twice") else word),
        judge="obeys",
    )


def turns(source: random.Random) -> Example:
    """Remember, over two or three turns, what the user said."""
    facts = {
        "name": words.made_word(source).capitalize(),
        "city": words.place(source),
        "code word": words.made_word(source),
    }
    first, second = source.sample(list(facts), 2)
    messages = [
        user(f"My {first} is {facts[first]}."),
        {"role": "assistant", "content": f"I will remember that your {first} is {facts[first]}."},
    ]
    is_long = source.random() < 0.5
    if is_long:
        messages += [
            user(f"My {second} is {facts[second]}."),
            {
                "role": "assistant",
                "content": f"I will remember that your {second} is {facts[second]}.",
            },
        ]
    asked = source.choice([first, second]) if is_long else first
    effort = source.choice(EFFORTS)
    return Example(
        task="turns",
        key=f"turns {asked} {sorted(facts.values())}",
        messages=[*messages, user(f"What is my {asked}?")],
        reasoning=by_effort(
            effort,
            f"{facts[asked]}.",
            f"The user told me their {asked}.",
            f"The user told me their {asked} earlier: it is {facts[asked]}. I say it.",
        ),
        content=f"Your {asked} is {facts[asked]}.",
        effort=effort,
    )


def acknowledge(source: random.Random) -> Example:
    """Take note of what the user says: the first turn of `turns`."""
    name = source.choice(["name", "city", "code word"])
    value = words.made_word(source)
    value = value if name == "code word" else value.capitalize()
    effort = source.choice(EFFORTS)
    return Example(
        task="acknowledge",
        key=f"acknowledge {name} {value}",
        messages=[user(f"My {name} is {value}.")],
        reasoning=by_effort(
            effort,
            "Noted.",
            f"They tell me their {name}.",
            f"They tell me their {name}: {value}. I confirm.",
        ),
        content=f"I will remember that your {name} is {value}.",
        effort=effort,
    )


def talk(source: random.Random) -> Example:
    """A dozen fixed questions. Too few to hold any out: for training only."""
    question = source.choice(list(TALK))
    thought, answer = TALK[question]
    effort = source.choice(EFFORTS)
    high = f"The user says: {question} {thought} I answer in a sentence."
    return Example(
        task="talk",
        key=f"talk {question} {source.random()}",
        messages=[user(question)],
        reasoning=by_effort(effort, thought.split(".")[0] + ".", thought, high),
        content=answer,
        effort=effort,
    )
