"""Reading the header of a message that a model wrote, well-formed or not.

A header is what stands between `<|start|>` and `<|message|>`, cut into sections at its control tokens. Both readers
are total. `read_header` takes a header that reached `<|message|>`; `salvage` one that did not, whose words may be the
message itself. docs/harmony.md lists what is tolerated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rose.frontend.formatters.harmony.messages import CHANNELS
from rose.frontend.formatters.harmony.tokens import CONSTRAIN_NAME

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PLAIN_TYPES = ("json", "code", "text")
_GLUED_RECIPIENT = re.compile(r"\b(assistant|analysis|commentary|final)to=")
_KNOWN_CHANNEL = re.compile(rf"({'|'.join(CHANNELS)})(?![A-Za-z0-9_])")
_LEADING_RECIPIENT = re.compile(r"\s*to=\s*([^\s<|{\[]*)")
_LEADING_ASSISTANT = re.compile(r"\s*assistant(?!\S)")
_LEADING_TYPE = re.compile(r"\s*([A-Za-z]+)(?=\s|[{\[]|$)")

SectionKind = Literal["role", "channel", "constrain", "other"]
Section = tuple[SectionKind, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a header says; None where it says nothing."""

    role: str = "assistant"
    name: str | None = None
    recipient: str | None = None
    channel: str | None = None
    content_type: str | None = None
    is_odd: bool = False
    """The role is missing, or words were left that have no place in a header (kept in content_type)."""


def read_header(sections: Sequence[Section], *, is_explicit: bool) -> Header:
    """Read a header; `is_explicit`: it began with `<|start|>`, so that its first word is the role."""
    role, name, words = _read_role(sections, is_explicit)
    channel, words, junk = _read_channel(words, sections)
    recipient, words, others = _take_recipient(words)
    words = [word for word in words if word != channel]
    if recipient is None:
        recipient, words, is_odd = _bare_recipient(words)
    else:
        is_odd = len(words) > 1
    if name is not None and role == "assistant":  # an unknown role: the name of a tool
        others += [name] if recipient not in (None, name) else []
        recipient, name = (recipient or name), None
        is_odd = True
    is_odd |= bool(junk or others)
    words += junk + others
    return Header(
        role=role,
        name=name,
        recipient=recipient,
        channel=channel,
        content_type=" ".join(words) or None,
        is_odd=is_odd or (is_explicit and not _has_role(sections)),
    )


def salvage(sections: Sequence[Section], *, is_explicit: bool) -> tuple[Header, str]:
    """Read a header without `<|message|>`; return what it says and the text that was meant as content."""
    first, *others = [(kind, _GLUED_RECIPIENT.sub(r"\1 to=", text)) for kind, text in sections]
    found = _Found()
    role, name, rest = "assistant", None, first[1]
    if is_explicit or (_LEADING_ASSISTANT.match(rest) and (others or "to=" in rest)):
        role, name, rest = _salvage_role(rest)
    texts = [found.take_recipient(rest)]
    for kind, text in others:
        if kind == "channel":
            texts.append(found.take_recipient(found.take_channel(text)))
        else:
            texts.append(found.take_type(text) if kind == "constrain" else text)
    text = "".join(texts)
    if found.recipient and not found.content_type:
        text = found.take_plain_type(text)
    header = Header(
        role=role,
        name=name,
        recipient=found.recipient,
        channel=found.channel,
        content_type=found.content_type,
    )
    return header, text if header == Header() and not is_explicit else text.lstrip()


@dataclass(slots=True)
class _Found:
    """What was found so far at the heads of a broken header's sections; each method returns the rest."""

    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None

    def take_channel(self, text: str) -> str:
        text = text.lstrip()
        known = _KNOWN_CHANNEL.match(text)
        word = known.group() if known else (text.split() or [""])[0]
        if word.startswith("to="):
            return text
        if self.channel and word != self.channel and not known:
            return f" {text}"
        self.channel = self.channel or word or None
        return text[len(word) :]

    def take_recipient(self, text: str) -> str:
        match = _LEADING_RECIPIENT.match(text)
        if match is None or (self.recipient and match.group(1) not in ("", self.recipient)):
            return text
        self.recipient = self.recipient or match.group(1) or None
        return text[match.end() :]

    def take_type(self, text: str) -> str:
        match = _LEADING_TYPE.match(text)
        found = CONSTRAIN_NAME + (match.group(1) if match else "")
        is_new = self.content_type is None or found not in self.content_type.split()
        self.content_type = " ".join(filter(None, (self.content_type, found if is_new else None)))
        return text[match.end() :] if match else text

    def take_plain_type(self, text: str) -> str:
        match = _LEADING_TYPE.match(text)
        if match is None or match.group(1) not in _PLAIN_TYPES:
            return text
        self.content_type = match.group(1)
        return text[match.end() :]


def is_recognised(sections: Sequence[Section], *, is_explicit: bool) -> bool:
    """Return whether this can only be a header, although it stands inside a message."""
    if any(kind == "channel" and _KNOWN_CHANNEL.match(text.strip()) for kind, text in sections):
        return True
    return is_explicit and _has_role(sections)


def _has_role(sections: Sequence[Section]) -> bool:
    first = (_words(sections[0][1]) or [""])[0]
    role = first.partition(":")[0]
    return (
        role in _ROLES or "to=assistant" in sections[0][1]
    )  # the latter: a tool, under its own name


def _words(text: str) -> list[str]:
    return _GLUED_RECIPIENT.sub(r"\1 to=", text).split()


def _read_role(sections: Sequence[Section], is_explicit: bool) -> tuple[str, str | None, list[str]]:
    """Return role, name and the words left; role assistant with a name stands for an unknown role."""
    words = _words(sections[0][1])
    if not is_explicit:
        return "assistant", None, words[1:] if words[:1] == ["assistant"] else words
    first = words[0] if words else "assistant"
    role, _, name = first.partition(":")
    if role in _ROLES:
        return role, name or None, words[1:]
    if first in CHANNELS or first.startswith("to="):
        return "assistant", None, words
    if first.removeprefix("assistant") in CHANNELS:
        return "assistant", None, [first.removeprefix("assistant"), *words[1:]]
    is_answer = any("to=assistant" in text for _, text in sections) or any(
        word.startswith("to=") for word in words[1:]
    )
    return ("tool" if is_answer else "assistant"), first, words[1:]


def _read_channel(
    words: list[str], sections: Sequence[Section]
) -> tuple[str | None, list[str], list[str]]:
    """Return the channel, every word that is not one, of the role section first, and what was glued to channels."""
    named: list[str] = []
    for kind, text in sections[1:]:
        found = _words(text)
        if kind == "channel" and found and not found[0].startswith("to="):
            named.append(found.pop(0))
        elif kind == "constrain":
            found = [CONSTRAIN_NAME + "".join(found[:1]), *found[1:]]
        words = words + found
    known = [match.group() for match in map(_KNOWN_CHANNEL.match, named) if match]
    if named:
        channel = known[0] if known else named[0]
        others = [word for word in named if word != channel and word not in CHANNELS]
        junk = [word for word in others if _KNOWN_CHANNEL.match(word)]
        return channel, words + [word for word in others if word not in junk], junk
    if words and words[0] in CHANNELS:
        return words[0], words[1:], []
    return None, words, []


def _take_recipient(words: list[str]) -> tuple[str | None, list[str], list[str]]:
    """Return the first recipient that is marked by to=, the words that are no recipient, and other recipients."""
    recipient, rest, others, is_next = None, [], [], False
    for word in words:
        if is_next or word.startswith("to="):
            value, markup, tail = word.removeprefix("to=").partition("<|")
            is_next = not value and not is_next
            recipient = recipient or value or None
            others += [word] if value not in ("", recipient) else []
            rest += [markup + tail] if markup and word not in others else []
        else:
            rest.append(word)
    return recipient, rest, others


def _bare_recipient(words: list[str]) -> tuple[str | None, list[str], bool]:
    """Read words without to= as the published parser does: [recipient] [content type]."""
    plain = [word for word in words if not word.startswith(CONSTRAIN_NAME)]
    if not plain or (plain == words == [words[0]] and words[0] in _PLAIN_TYPES):
        return None, words, len(words) > 1
    if len(words) <= 2 and words[0] == plain[0]:
        return words[0], words[1:], False
    return None, words, True


def _salvage_role(text: str) -> tuple[str, str | None, str]:
    first = (text.split() or [""])[0]
    role, _, name = first.partition(":")
    if role not in _ROLES:
        return "assistant", None, text
    return role, name or None, text.partition(first)[2]
