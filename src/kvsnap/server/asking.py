"""A request for an answer: every member is checked; what would change the answer and is not done is refused."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvsnap.conversation import Message
from kvsnap.errors import InputError
from kvsnap.layout import Sampler
from kvsnap.server.refusals import RefusalError
from kvsnap.server.settings import Settings

__all__ = ["Asked", "integer_of", "object_of", "parse"]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SAMPLER = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
_TAKEN = frozenset((
    "messages", "model", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "tools",
    "tool_choice", *_SAMPLER,
))  # fmt: skip
_IGNORED = frozenset((
    "user", "metadata", "store", "parallel_tool_calls", "service_tier", "reasoning_effort", "prediction", "verbosity",
    "safety_identifier", "prompt_cache_key",
))  # fmt: skip
_NEAR = 0.85
"""How like two names are, from 0 to 1, of which one is taken for the other misspelt."""
_MOST_STOPS, _LONGEST_STOP, _DEEPEST = 16, 1000, 32
_NOTHING: tuple[Any, ...] = (None, False, [], {})
# Members that ask for what is not done, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": _NOTHING,
    "logprobs": _NOTHING,
    "top_logprobs": (None, 0),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, [], ["text"]),
    "audio": _NOTHING,
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": _NOTHING,
    "best_of": (None, 1),
    "echo": _NOTHING,
    "suffix": (None, ""),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one request asks for."""

    messages: tuple[Message, ...]
    max_tokens: int
    stop: tuple[str, ...]
    sampler: Sampler
    template: Mapping[str, Any]
    stream: bool
    usage: bool


def object_of(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of a body; an empty body is an empty one. Raise `RefusalError` saying where it is none."""
    if not raw.strip():
        return {}
    try:
        found = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RefusalError(400, f"the body is not UTF-8: {error.reason}", code="invalid_json") from error
    except (ValueError, RecursionError) as error:
        where = f": {error}" if isinstance(error, ValueError) else ": it nests too deep"
        raise RefusalError(400, f"the body is not JSON{where}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise RefusalError(400, "the body is not a JSON object", code="invalid_json")
    level: list[Any] = [found]
    for _ in range(_DEEPEST):
        inside = [x for value in level for x in (value.values() if isinstance(value, dict) else value)]
        level = [x for x in inside if isinstance(x, (dict, list))]
    if level:
        raise RefusalError(400, f"the body nests deeper than {_DEEPEST} levels", code="invalid_json")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def parse(raw: bytes, settings: Settings) -> Asked:
    """Return what a body asks for. Raise `RefusalError` naming the member that is wrong or not supported."""
    body = object_of(raw)
    for name, allowed in _REFUSED.items():
        if name in body and not _is_one_of(body[name], allowed):
            raise RefusalError(400, f"{name} is not supported here", param=name, code="unsupported_parameter")
    _check_names(body)
    _check_model(body, settings)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", "an object")
    return Asked(
        messages=_messages(body, settings.limits.messages),
        max_tokens=_max_tokens(body, settings.limits.max_tokens),
        stop=_stops(body.get("stop")),
        sampler=_sampler(body, settings.sampler),
        template=_tools(body),
        stream=_flag(body, "stream"),
        usage=_flag(options or {}, "include_usage"),
    )


def _check_names(body: Mapping[str, Any]) -> None:
    """Refuse a member whose name is nearly that of one that counts; others that are not known change nothing."""
    for name in body.keys() - _TAKEN - _REFUSED.keys() - _IGNORED:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), (*_TAKEN, *_REFUSED), 1, _NEAR)
        if near:
            raise RefusalError(400, f"there is no member {name[:80]!r}; {near[0]} is meant, perhaps", param=name[:80],
                               code="unsupported_parameter")  # fmt: skip


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed)


def _wrong(param: str, expected: str) -> RefusalError:
    return RefusalError(400, f"{param} is not what it should be", param=param, code="invalid_value", expected=expected)


def _check_model(body: Mapping[str, Any], settings: Settings) -> None:
    name = body.get("model", settings.model)
    if not isinstance(name, str):
        raise _wrong("model", "a text")
    if name != settings.model:
        raise RefusalError(
            404, "no such model here", param="model", code="model_not_found", expected=settings.model, found=name[:200]
        )


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, "true or false")
    return bool(value)


def integer_of(body: Mapping[str, Any], name: str) -> int | None:
    """Return a whole number of a body; None where there is none. Raise `RefusalError` for another value."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise _wrong(name, "a whole number")
    return value


def _max_tokens(body: Mapping[str, Any], most: int) -> int:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    value = integer_of(body, name)
    if value is None:
        return most
    if not 1 <= value <= most:
        raise RefusalError(
            400, f"{name} is out of range", param=name, code="invalid_value", expected=f"1 to {most}", found=value
        )
    return value


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) and 0 < len(s) <= _LONGEST_STOP for s in stops):
        raise _wrong("stop", f"a text, or a list of texts, of 1 to {_LONGEST_STOP} characters")
    if len(stops) > _MOST_STOPS:
        raise _wrong("stop", f"at most {_MOST_STOPS} texts")
    return tuple(stops)


def _sampler(body: Mapping[str, Any], default: Sampler) -> Sampler:
    given = {name: body[name] for name in _SAMPLER if body.get(name) is not None}
    if isinstance(given.get("seed"), int) and -(2**63) <= given["seed"] < 0:
        given["seed"] += 2**64
    sampler = default
    for name, value in given.items():
        if isinstance(value, bool):
            raise _wrong(name, "a number")
        try:
            sampler = replace(sampler, **{name: value})
        except InputError as error:
            raise RefusalError(
                400, error.message, param=name, code="invalid_value", expected=error.expected, found=str(value)[:80]
            ) from error
    return sampler


def _tools(body: Mapping[str, Any]) -> Mapping[str, Any]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise RefusalError(
            400, "a call of a tool cannot be demanded", param="tool_choice", code="unsupported_parameter"
        )
    if not tools or choice == "none":
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _wrong("tools", "a list of objects")
    return {"tools": tools}


# -- messages --------------------------------------------------------------------------------------------------------


def _messages(body: Mapping[str, Any], most: int) -> tuple[Message, ...]:
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _wrong("messages", "a list of one message or more")
    if len(given) > most:
        raise RefusalError(400, "too many messages", param="messages", code="invalid_value",
                      expected=f"at most {most}", found=len(given))  # fmt: skip
    return tuple(_message(message, f"messages[{place}]") for place, message in enumerate(given))


def _message(given: Any, where: str) -> Message:
    if not isinstance(given, dict):
        raise _wrong(where, "an object with role and content")
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise _wrong(f"{where}.role", ", ".join(_ROLES))
    made: dict[str, Any] = {"role": _ROLES[role], "content": _content(given.get("content"), f"{where}.content")}
    if made["content"] is None:
        if role != "assistant" or not given.get("tool_calls"):
            raise _wrong(f"{where}.content", "a text, or a list of parts of type text")
        made["content"] = ""
    for name, kind in (("name", str), ("tool_call_id", str), ("tool_calls", list)):
        if given.get(name):
            if not isinstance(given[name], kind):
                raise _wrong(f"{where}.{name}", "a text" if kind is str else "a list")
            made[name] = given[name]
    for name in ("audio", "function_call", "refusal"):
        if given.get(name):
            raise RefusalError(
                400, f"{name} in a message is not supported", param=f"{where}.{name}", code="unsupported_parameter"
            )
    return made


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a text, or a list of parts of type text")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise RefusalError(
                400, "only parts of type text are supported", param=f"{where}[{place}]", code="unsupported_parameter",
                found=str(kind)[:80],
            )  # fmt: skip
        if not isinstance(part.get("text"), str):
            raise _wrong(f"{where}[{place}].text", "a text")
        texts.append(part["text"])
    return "".join(texts)
