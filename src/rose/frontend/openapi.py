"""The API described as OpenAPI 3.1, made from the structs that read requests and write answers.

`OPERATIONS` says which struct belongs to which route; a test holds it to the routes there are. Nothing is described by
hand that a struct or a limit of `parsing.py` says.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

import rose
from rose.frontend import parsing
from rose.frontend.errors import KINDS, ErrorBody
from rose.frontend.reasoning import MODES
from rose.frontend.responses import parsing as responses_parsing
from rose.frontend.responses import schemas as responses
from rose.frontend.schemas import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChoiceFields,
    Completion,
    CompletionRequest,
    Health,
    Message,
    Model,
    ModelList,
    SamplingFields,
    Tool,
)
from rose.frontend.token_schemas import (
    Detokenized,
    DetokenizeRequest,
    RenderedPrompts,
    TokenCompletion,
    Tokenized,
    TokenizeRequest,
    TokenRequest,
)
from rose.protocol.request import MAX_SALT_CHARACTERS, MAX_TIMEOUT_SECONDS
from rose.protocol.sampling_params import MAX_BIASES, MAX_TOP_LOGPROBS
from rose.utils.field_docs import field_docs

REF = "#/components/schemas/{name}"
Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one route."""

    method: str
    path: str
    summary: str
    request: type | None = None
    answer: type | None = None
    """None: see `media_type`."""
    chunk: type | None = None
    """Of a streamed answer; Any where it has one of many forms."""
    media_type: str = "application/json"
    query: tuple[tuple[str, Schema], ...] = ()
    is_open: bool = False
    """Asked without a key."""


def _schema(kind: type | None) -> Schema:
    if kind is None:
        return {"type": "string"}
    return {"type": "object"} if kind is dict else {"$ref": REF.format(name=kind.__name__)}


class InputTokensRequest(responses.ResponsesRequest, kw_only=True):
    """Body of POST /v1/responses/input_tokens: what a prompt is made of; the model may be left out."""

    model: str | None = None  # type: ignore[assignment]


_INCLUDE = ("include", {"type": "array", "items": {"enum": list(responses_parsing.INCLUDES)}})
_RESPONSE = "/v1/responses/{response_id}"
OPERATIONS = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Answer a conversation",
        request=ChatRequest,
        answer=ChatCompletion,
        chunk=ChatChunk,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="Answer a conversation that the server can keep",
        request=responses.ResponsesRequest,
        answer=responses.ResponseBody,
        chunk=dict,
    ),
    Operation(
        method="get",
        path=_RESPONSE,
        summary="Read a kept response, or its events again",
        answer=responses.ResponseBody,
        chunk=dict,
        query=(
            ("stream", {"type": "boolean"}),
            ("starting_after", {"type": "integer", "minimum": 0}),
            _INCLUDE,
        ),
    ),
    Operation(
        method="delete",
        path=_RESPONSE,
        summary="Forget a response",
        answer=responses.DeletedResponse,
    ),
    Operation(
        method="post",
        path=_RESPONSE + "/cancel",
        summary="End a response that is made in the background",
        answer=responses.ResponseBody,
    ),
    Operation(
        method="get",
        path=_RESPONSE + "/input_items",
        summary="List what a response was made from",
        answer=responses.ItemList,
        query=(
            ("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
            ("order", {"enum": ["asc", "desc"]}),
            ("after", {"type": "string"}),
            _INCLUDE,
        ),
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        summary="Count the tokens of a request's prompt",
        request=InputTokensRequest,
        answer=responses.InputTokens,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue a text",
        request=CompletionRequest,
        answer=Completion,
        chunk=Completion,
    ),
    Operation(
        method="post",
        path="/v1/generate",
        summary="Continue token ids with token ids",
        request=TokenRequest,
        answer=TokenCompletion,
        chunk=TokenCompletion,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions/render",
        summary="Show the prompt of a conversation",
        request=ChatRequest,
        answer=RenderedPrompts,
    ),
    Operation(
        method="post",
        path="/v1/completions/render",
        summary="Show the prompts of a completion",
        request=CompletionRequest,
        answer=RenderedPrompts,
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="Text to token ids",
        request=TokenizeRequest,
        answer=Tokenized,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="Token ids to text",
        request=DetokenizeRequest,
        answer=Detokenized,
    ),
    Operation(method="get", path="/v1/models", summary="List the names", answer=ModelList),
    Operation(method="get", path="/v1/models/{name}", summary="Look one up", answer=Model),
    Operation(method="get", path="/health", summary="Does it live?", answer=Health, is_open=True),
    Operation(
        method="get", path="/ready", summary="Does it take requests?", answer=Health, is_open=True
    ),
    Operation(
        method="get", path="/metrics", summary="Numbers for Prometheus", media_type="text/plain"
    ),
    Operation(method="get", path="/openapi.json", summary="This description", answer=dict),
    Operation(method="get", path="/docs", summary="This page", media_type="text/html"),
)


def _number(kind: str, **bounds: float) -> Schema:
    return {"type": [kind, "null"], **bounds}


_STOP = {"type": "string", "minLength": 1, "maxLength": parsing.MAX_STOP_CHARACTERS}
_TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
EXAMPLES: dict[type, dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "2+2?"}], "temperature": 0},
    CompletionRequest: {"prompt": "Once upon a time", "max_tokens": 32},
    TokenRequest: {"prompt_token_ids": [13225], "max_tokens": 8},
    TokenizeRequest: {"prompt": "Hello", "return_token_strs": True},
    DetokenizeRequest: {"tokens": [13225]},
    responses.ResponsesRequest: {"input": "2+2?", "reasoning": {"effort": "low"}},
    InputTokensRequest: {"input": "2+2?"},
}
"""A body of each kind; the server's model is added."""
# Struct -> field of it and of what inherits from it -> what its type alone does not say.
NARROWER: dict[type, dict[str, Schema]] = {
    SamplingFields: {
        "temperature": _number("number", minimum=0, maximum=100),
        "top_p": _number("number", exclusiveMinimum=0, maximum=1),
        "top_k": _number("integer", minimum=-1, maximum=2**63 - 1),
        "min_p": _number("number", minimum=0, maximum=1),
        "repetition_penalty": _number("number", minimum=0.01, maximum=100),
        "frequency_penalty": _number("number", minimum=-2, maximum=2),
        "presence_penalty": _number("number", minimum=-2, maximum=2),
        "min_tokens": _number("integer", minimum=0, maximum=2**31 - 1),
        "seed": _number("integer", minimum=-(2**63), maximum=2**63 - 1),
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        },
        "stop": {
            "anyOf": [
                _STOP,
                {"type": "array", "items": _STOP, "maxItems": parsing.MAX_STOPS},
                {"type": "null"},
            ]
        },
        "cache_salt": {"type": ["string", "null"], "maxLength": MAX_SALT_CHARACTERS},
        "timeout": _number("number", exclusiveMinimum=0, exclusiveMaximum=MAX_TIMEOUT_SECONDS),
    },
    ChoiceFields: {
        "n": _number("integer", minimum=1, maximum=parsing.MAX_CHOICES),
        "max_tokens": _number("integer", minimum=1),
    },
    ChatRequest: {
        "messages": {
            "type": "array",
            "items": {"$ref": REF.format(name="Message")},
            "minItems": 1,
            "maxItems": parsing.MAX_MESSAGES,
        },
        "tools": {
            "type": ["array", "null"],
            "items": {"$ref": REF.format(name="Tool")},
            "maxItems": parsing.MAX_TOOLS,
        },
        "top_logprobs": _number("integer", minimum=0, maximum=MAX_TOP_LOGPROBS),
        "max_completion_tokens": _number("integer", minimum=1),
        "reasoning_mode": {"enum": [*MODES, None]},
    },
    TokenRequest: {
        "prompt_token_ids": {"type": "array", "items": _TOKEN_ID, "minItems": 1},
        "stop_token_ids": {"type": ["array", "null"], "items": _TOKEN_ID},
        "logprobs": _number("integer", minimum=0, maximum=MAX_TOP_LOGPROBS),
    },
    DetokenizeRequest: {"tokens": {"type": "array", "items": _TOKEN_ID}},
    responses.ResponsesRequest: {
        "tools": {
            "type": ["array", "null"],
            "items": {"anyOf": [_schema(responses.FunctionTool), _schema(responses.NamespaceTool)]},
        },
        "top_logprobs": _number("integer", minimum=0, maximum=MAX_TOP_LOGPROBS),
    },
}
_READ_ONE_BY_ONE = (Message, Tool)
"""Structs that no other struct names by their type."""
_IGNORED: dict[type, frozenset[str]] = {
    ChatRequest: parsing.IGNORED,
    CompletionRequest: parsing.IGNORED,
    TokenRequest: parsing.IGNORED,
    TokenizeRequest: parsing.IGNORED,
    DetokenizeRequest: parsing.IGNORED,
    responses.ResponsesRequest: responses_parsing.IGNORED,
    InputTokensRequest: responses_parsing.IGNORED,
}


def document(model_names: Sequence[str], *, has_keys: bool) -> Schema:
    """Return the description of a server with these models; `has_keys`: it asks for a key."""
    described: Schema = {
        "openapi": "3.1.0",
        "info": {
            "title": "rose",
            "version": rose.__version__,
            "description": "OpenAI's API for gpt-oss, and what belongs to serving it.",
        },
        "paths": {},
        "components": {"schemas": _components(model_names)},
    }
    if has_keys:
        described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        described["security"] = [{"key": []}]
    for operation in OPERATIONS:
        methods = described["paths"].setdefault(operation.path, {})
        methods[operation.method] = _operation(operation, model_names, has_keys=has_keys)
    return described


def _operation(operation: Operation, model_names: Sequence[str], *, has_keys: bool) -> Schema:
    content = {operation.media_type: {"schema": _schema(operation.answer)}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(_schema(operation.chunk))}
    described: Schema = {
        "operationId": f"{operation.method} {operation.path}",
        "summary": operation.summary,
        "parameters": [
            *_path_parameters(operation.path, model_names),
            *_query_parameters(operation.query),
        ],
        "responses": {"200": {"description": "The answer", "content": content}},
    }
    if operation.request is not None:
        example = {"model": model_names[0], **EXAMPLES[operation.request]}
        body = {"schema": _schema(operation.request), "example": example}
        described["requestBody"] = {"required": True, "content": {"application/json": body}}
    for status, codes in sorted(_statuses(operation, has_keys=has_keys).items()):
        error = {"application/json": {"schema": REF_ERROR}}
        described["responses"][str(status)] = {"description": ", ".join(codes), "content": error}
    if operation.is_open:
        described["security"] = []
        described["responses"]["503"] = {"description": "no", "content": content}
    return described


REF_ERROR = {"$ref": REF.format(name=ErrorBody.__name__)}


def _statuses(operation: Operation, *, has_keys: bool) -> dict[int, list[str]]:
    """Return the errors that an operation may answer with: status to codes."""
    found: dict[int, list[str]] = {}
    for code, kind in KINDS.items():
        is_body = operation.request is not None or "{" in operation.path
        is_always = kind.status in (403, 431, 500) or (kind.status == 401 and has_keys)
        if is_always or (is_body and kind.status not in (401, 403, 405, 431, 499, 500)):
            found.setdefault(kind.status, []).append(kind.name or code)
    return found


def _path_parameters(path: str, model_names: Sequence[str]) -> Iterator[Schema]:
    for part in path.split("/"):
        if part.startswith("{"):
            schema: Schema = {"type": "string", "minLength": 1}
            if part == "{name}":
                schema["enum"] = list(model_names)
            yield {"name": part[1:-1], "in": "path", "required": True, "schema": schema}


def _query_parameters(query: Iterable[tuple[str, Schema]]) -> Iterator[Schema]:
    for name, schema in query:
        yield {"name": name, "in": "query", "required": False, "schema": schema}


def _event(data: Schema) -> Schema:
    """Return the form of a server-sent event. Its data is JSON, but for [DONE] at the end of some streams, which is
    why no contentSchema says so."""
    text = {"type": "string", "description": "JSON of x-data, or [DONE]"}
    return {"type": "object", "properties": {"data": text}, "x-data": data}


def _components(model_names: Sequence[str]) -> dict[str, Schema]:
    roots = {kind for o in OPERATIONS for kind in (o.request, o.answer, o.chunk)} - {None, dict}
    structs = list(
        dict.fromkeys(s for r in (*roots, *_READ_ONE_BY_ONE, ErrorBody) for s in _structs(r))
    )
    _, components = msgspec.json.schema_components(
        [_readable(struct) for struct in structs], ref_template=REF
    )
    for struct in structs:
        _complete(components[struct.__name__], struct, model_names)
    return dict(sorted(components.items()))


def _complete(schema: Schema, struct: type, model_names: Sequence[str]) -> None:
    """Add what msgspec does not know: docs of fields, narrower types, names that change nothing, no other names."""
    properties = schema["properties"]
    for name, annotation in _unions(struct).items():
        properties[name] = _union_schema(annotation)
    for name, narrower in _narrower(struct).items():
        properties[name] = {**narrower}
    if struct in _IGNORED and "model" in properties:
        optional = [] if "model" in schema.get("required", []) else [None]
        properties["model"] = {"enum": [*model_names, *optional]}
    for base in struct.__mro__:
        for name, text in field_docs(base).items():
            if name in properties:
                properties[name].setdefault("description", text)
    if struct in _IGNORED:
        for name in sorted(_IGNORED[struct] - set(properties)):
            properties[name] = {"description": "Accepted and without effect."}
        schema["additionalProperties"] = False


def _narrower(struct: type) -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    if struct is InputTokensRequest:
        # Fields that say how to generate are accepted there and not looked at.
        return {"tools": NARROWER[responses.ResponsesRequest]["tools"]}
    for base in reversed(struct.__mro__):
        found |= NARROWER.get(base, {})
    return found


def _readable(struct: type) -> type:
    """Return a struct that msgspec can describe: unions of untagged structs it cannot, `_union_schema` does."""
    hidden = _unions(struct)
    if not hidden:
        return struct
    fields = [
        (f.name, Any if f.name in hidden else f.type, f.default)
        if f.default is not msgspec.NODEFAULT
        else (f.name, Any if f.name in hidden else f.type)
        for f in msgspec.structs.fields(struct)
    ]
    plain = msgspec.defstruct(struct.__name__, fields, kw_only=True)
    plain.__doc__ = struct.__doc__
    return plain


def _unions(struct: type) -> dict[str, Any]:
    """Return the fields that hold one of several structs."""
    hints = typing.get_type_hints(struct)
    return {name: hint for name, hint in hints.items() if len(_structs_of(hint)) > 1}


def _union_schema(annotation: Any) -> Schema:
    if annotation is type(None):
        return {"type": "null"}
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is list:
        return {"type": "array", "items": _union_schema(arguments[0])}
    return {"anyOf": [_union_schema(a) for a in arguments]} if arguments else _schema(annotation)


def _structs(root: Any) -> Iterator[type]:
    """Yield a struct and those below it."""
    pending, seen = [root], set()
    while pending:
        struct = pending.pop()
        if struct in seen:
            continue
        seen.add(struct)
        yield struct
        for annotation in typing.get_type_hints(struct).values():
            pending += _structs_of(annotation)


def _structs_of(annotation: Any) -> list[type]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return [annotation]
    return [s for argument in typing.get_args(annotation) for s in _structs_of(argument)]
