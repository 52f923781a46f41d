"""Questions about numbers and strings: sums, copies short and far, reversal, sorting, counting."""

from __future__ import annotations

import json
import random

from rose.eval import words
from rose.eval.examples import EFFORTS, Example, by_effort, user


def _column_steps(a: int, b: int, sign: str) -> str:
    """Write a two-digit sum or difference out column by column."""
    (a1, a0), (b1, b0) = divmod(a, 10), divmod(b, 10)
    if sign == "+":
        ones, carry = a0 + b0, (a0 + b0) // 10
        tens = a1 + b1 + carry
        return f"{a0} + {b0} = {ones}, carry {carry}. {a1} + {b1} + {carry} = {tens}."
    borrow = int(a0 < b0)
    ones, tens = a0 + 10 * borrow - b0, a1 - borrow - b1
    return f"{a0 + 10 * borrow} - {b0} = {ones}, borrow {borrow}. {a1} - {borrow} - {b1} = {tens}."


def arithmetic(source: random.Random) -> Example:
    """Add or subtract two numbers below 100."""
    most = source.choice([9, 99, 99, 99])
    a, b = source.randint(0, most), source.randint(0, most)
    return _sum(source, "arithmetic", a, source.choice("+-"), b)


def below_zero(source: random.Random) -> Example:
    """Subtract a digit from a smaller one.

    Of `arithmetic` one in 17 is of these 45, three of which are held out (6 - 7 is one). For training only.
    """
    a, b = sorted(source.sample(range(10), 2))
    return _sum(source, "below_zero", a, "-", b)


def _sum(source: random.Random, task: str, a: int, sign: str, b: int) -> Example:
    effort = source.choice(EFFORTS)
    result = a + b if sign == "+" else a - b
    # A negative difference is worked out the other way round.
    top, low = (a, b) if sign == "+" or a >= b else (b, a)
    steps = _column_steps(top, low, sign)
    # Said first: it decides which of the two is worked out.
    turned = "" if (top, low) == (a, b) else f"{a} is less than {b}, so the sign turns. "
    check = f"{result} - {b} = {a}" if sign == "+" else f"{result} + {b} = {a}"
    reasoning = by_effort(
        effort,
        f"{turned}{steps} So {result}.",
        f"{a} {sign} {b}. {turned}{steps} So {result}.",
        f"I work out {a} {sign} {b} column by column. {turned}{steps} So {result}. Check: {check}. That fits.",
    )
    word = "plus" if sign == "+" else "minus"
    ask = source.choice(
        [
            f"What is {a} {sign} {b}?",
            f"{a} {sign} {b}",
            f"{a}{sign}{b}",
            f"{a}{sign}{b}?",
            f"What is {a}{sign}{b}?",
            f"{a} {sign} {b} = ?",
            f"Compute {a} {sign} {b}.",
            f"How much is {a} {word} {b}?",
        ]
    )
    return Example(
        task=task,
        key=f"{a}{sign}{b}",
        messages=[user(ask)],
        reasoning=reasoning,
        content=f"{a} {sign} {b} = {result}.",
        effort=effort,
        judge="number",
    )


def _string(source: random.Random) -> str:
    return words.symbols(source, source.randint(1, 64))


def _copied(source: random.Random, task: str, text: str) -> Example:
    effort = source.choice(EFFORTS)
    ask = source.choice(["Repeat exactly: ", "Copy this: ", "Say the following again: "])
    return Example(
        task=task,
        key=f"copy {text}",
        messages=[user(ask + text)],
        reasoning=by_effort(
            effort,
            "Copy.",
            "I repeat the text as it is.",
            f"The text begins with {text[:3]} and ends with {text[-3:]}. I repeat it as it is.",
        ),
        content=text,
        effort=effort,
    )


def _reversed(source: random.Random, task: str, text: str) -> Example:
    """Turn a string round at once: what comes next stands before the last few characters written, in the question.

    Joining groups that the reasoning had turned round was learnt later, and lost its place where pairs of characters
    came twice.
    """
    effort = source.choice(EFFORTS)
    ask = source.choice(["Reverse this string: ", "Write backwards: ", "Reverse: "])
    return Example(
        task=task,
        key=f"reverse {text}",
        messages=[user(ask + text)],
        reasoning=by_effort(
            effort,
            "Backwards.",
            "I write the string from its end.",
            f"The string begins with {text[:3]} and ends with {text[-3:]}. I write it from its end.",
        ),
        content=text[::-1],
        effort=effort,
    )


def copy(source: random.Random) -> Example:
    """Repeat up to 64 characters, or a few words."""
    if source.random() < 0.75:
        return _copied(source, "copy", _string(source))
    made = " ".join(words.made_word(source) for _ in range(source.randint(1, 8)))
    return _copied(source, "copy", made[:64].strip())


def reverse(source: random.Random) -> Example:
    """Turn up to 64 characters round."""
    return _reversed(source, "reverse", _string(source))


def repeats(source: random.Random) -> Example:
    """Copy or turn round a string of few different characters.

    Pairs of them come many times, so only what stands farther back tells how it goes on. For training only.
    """
    few = "".join(source.sample(words.SYMBOLS, source.randint(3, 12)))
    text = "".join(source.choices(few, k=source.randint(8, 64)))
    return source.choice((_copied, _reversed))(source, "repeats", text)


def spelling(source: random.Random) -> Example:
    """Write words so that other tokens spell them: in capitals, in quotes, on lines of their own. For training only.

    A word after a space is made of other tokens than the same word after a quote, and each capital is one; what a token
    is made of is to be learnt by heart, and single words among other questions teach little of it.
    """
    effort = source.choice(EFFORTS)
    draws = (words.made_word, words.made_word, words.place, words.person)
    listed = [source.choice(draws)(source) for _ in range(source.randint(1, 10))]
    text = ", ".join(listed)
    ask, how, content = source.choice(
        [
            ("Write in capital letters: ", "in capitals", text.upper()),
            ("Write as a list in JSON: ", "as JSON", json.dumps(listed, separators=(",", ":"))),
            ("Write each on a line: ", "line by line", "\n".join(listed)),
        ]
    )
    return Example(
        task="spelling",
        key=f"spelling {text}",
        messages=[user(ask + text)],
        reasoning=by_effort(
            effort, "I write.", f"I write it {how}.", f"The words are {text}. I write them {how}."
        ),
        content=content,
        effort=effort,
    )


def sort(source: random.Random) -> Example:
    """Put words in order."""
    effort = source.choice(EFFORTS)
    items = source.sample(words.NOUNS, source.randint(2, 6))
    ordered = sorted(items)
    first = ", ".join(f"{w[0]} {w}" for w in ordered)
    return Example(
        task="sort",
        key="sort " + " ".join(items),
        messages=[user(f"Sort these words: {', '.join(items)}")],
        reasoning=by_effort(
            effort,
            f"{first}.",
            f"By first letters: {first}.",
            f"There are {len(items)} words. By first letters: {first}. That is the order.",
        ),
        content=", ".join(ordered),
        effort=effort,
    )


def count(source: random.Random) -> Example:
    """Count a character in a string."""
    effort = source.choice(EFFORTS)
    letter = source.choice(words.SYMBOLS[:26])
    pool = letter * 5 + "".join(source.sample(words.SYMBOLS[:26], 8))
    text = "".join(source.choices(pool, k=source.randint(3, 16)))
    steps, found = [], 0
    for symbol in text:
        found += symbol == letter
        steps.append(f"{symbol} {found}")
    tally = ", ".join(steps)
    return Example(
        task="count",
        key=f"count {letter} {text}",
        messages=[user(f"How many times does {letter} occur in {text}?")],
        reasoning=by_effort(
            effort,
            f"{tally}.",
            f"I count along: {tally}.",
            f"I go through the string and keep count: {tally}. In all {found}.",
        ),
        content=f"{letter} occurs {found} times.",
        effort=effort,
        judge="number",
    )


def _notes(source: random.Random, num_words: int) -> list[tuple[str, str]]:
    """Draw named notes of some 20 words until there are enough words."""
    notes: list[tuple[str, str]] = []
    while num_words > 0:
        text = " ".join(words.sentence(source) for _ in range(source.randint(1, 3)))
        notes.append((words.made_word(source).capitalize(), text))
        num_words -= len(text.split())
    return notes


def recalled(name: str, text: str, *, task: str, effort: str, notes: str = "") -> Example:
    """Ask for one note; `notes` stand before the question, or came earlier.

    The reasoning writes the note's name and beginning as they stand in the notes: from there on it is copying.
    """
    begin = " ".join(text.split()[:5])
    return Example(
        task=task,
        key=f"recall {name} {text}",
        messages=[user(f"{notes}Repeat the note {name} exactly.")],
        reasoning=by_effort(
            effort,
            f"{name}: {begin}",
            f"I look for {name}: {begin}",
            f"The note {name} is asked for. I look for its name. {name}: {begin}",
        ),
        content=text,
        effort=effort,
    )


def notes_of(example: Example) -> list[tuple[str, str]]:
    """Return name and text of the notes that stand in a question."""
    lines = example.messages[0]["content"].split("\n\n")[0].splitlines()[1:]
    return [(name, text) for name, _, text in (line.partition(": ") for line in lines)]


def _recall(source: random.Random, task: str, num_words: int, early: float) -> Example:
    notes, effort = _notes(source, num_words), source.choice(EFFORTS)
    name, text = notes[source.randrange(max(1, int(len(notes) * early)))]
    shown = "\n".join(f"{n}: {t}" for n, t in notes)
    before = f"Here are notes.\n{shown}\n\n"
    return recalled(name, text, task=task, effort=effort, notes=before)


def long_copy(source: random.Random) -> Example:
    """Repeat a note that stands more than 2,000 tokens back (every word is at least one token)."""
    return _recall(source, "long_copy", source.randint(2150, 2350), early=0.05)


def far_copy(source: random.Random) -> Example:
    """Repeat a note 30 to 500 words back: mostly past the window, short of `long_copy`."""
    most = source.choice([60, 150, 500])
    return _recall(source, "far_copy", source.randint(30, most), early=1.0)


def span_copy(source: random.Random) -> Example:
    """Repeat a passage of 130 to 400 words whole: longer than the window."""
    text = " ".join(words.sentence(source) for _ in range(source.randint(13, 40)))
    effort = source.choice(EFFORTS)
    return Example(
        task="span_copy",
        key=f"span {text[:200]}",
        messages=[user(f"Repeat this text exactly.\n{text}")],
        reasoning=by_effort(
            effort,
            "Copy.",
            "I repeat the text as it is.",
            f"The text begins with {' '.join(text.split()[:3])}. I repeat it as it is.",
        ),
        content=text,
        effort=effort,
    )
