r"""Reads records of post-training data sets as turns of a conversation, and writes the turns as text in which only the
assistant's part counts for the loss.

These formats of a record are read (https://huggingface.co/docs/trl/dataset_formats, the ShareGPT and Alpaca
conventions):

- Messages (OpenAI, TRL): `messages: [{role, content}]`. The content is a string or a list of {type: text, text} parts.
  A message may have `tool_calls`, and `reasoning_content` for the assistant's reasoning before its answer.
- ShareGPT: `conversations: [{from, value}]`, with `human`, `gpt`, `system`, `observation`, `function_call`.
- Instructions: `instruction`, `input`, `output`, `history` (Alpaca); `prompt`, `completion`; `question`, `answer`.
- Preferences: `prompt`, `chosen`, `rejected`, each a string or messages. Without a prompt, `chosen` and `rejected` are
  whole conversations, as messages or as a transcript ("\n\nHuman: … \n\nAssistant: …", Anthropic's HH-RLHF).
- OpenAI's preferences: `input.messages`, `preferred_output`, `non_preferred_output`.

The functions under `tools` beside a conversation are written into the system's turn. Tool calls and reasoning
(`<think>`) are written into the assistant's turn. The notation is that of Hermes and Qwen.

A template is plain text with the placeholders `{role}` and `{content}`. They are replaced once and never evaluated, so
content that looks like a placeholder stays content. Content that contains a marker of the template (`<|im_start|>`) is
refused, since a user's turn could otherwise pose as the assistant's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import model_validator

from stages.read.jsonl import MAX_DEPTH, is_too_deep
from stages.stage import StageConfig, signal

#: names of roles in data sets → those of templates
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user", "prompter": "user",
         "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
         "model": "assistant", "bot": "assistant", "ai": "assistant", "function_call": "assistant",
         "tool_call": "assistant", "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
         "tool_response": "tool", "function_response": "tool"}
#: keys of the assistant's reasoning before its answer
REASONING = ("reasoning_content", "reasoning", "thinking")
#: roles whose turns are tool calls
CALLS = ("function_call", "tool_call")
#: longest conversation, turns
MAX_TURNS = 10_000
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
#: special tokens, which nobody types by accident: <|im_start|>, [INST], </s>
_MARKER = re.compile(r"<\|[^<>|\s]{1,64}\|>|<｜[^<>｜\s]{1,64}｜>|<(?:start|end)_of_turn>|\[/?INST\]|</?s>")


#: text of the system's turn about the available tools (templates of Qwen2.5 and Hermes)
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>"""


class Turn(NamedTuple):
    role: str                     # system | user | assistant | tool
    content: str
    learn: bool = True            # False: an answer that does not count for the loss, only context for later turns


class Refused(ValueError):
    """Raised for a record that cannot be read as a conversation. `reason` is the kind of fault in snake_case, such as
    `bad_turn`. `detail` says more about the fault, often with the number of the turn, from 0 ("turn 3 has no text"). It
    may be "", and never quotes the record."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason, self.detail = reason, detail


class Template(StageConfig):
    """Describes how the turns of a conversation become text: `start`, then the turns joined by `separator`, then `end`.

    The text of a turn is made from the entry of `turns` for the turn's role, or from `turn` if there is no such entry.
    `{content}` stands for the turn's content, and `{role}` for the role's entry in `names`, or for the role itself if
    it has no entry. In an assistant's turn, the content and everything the template puts after it count for the loss,
    so that the model also learns where to stop.
    """

    turn: str = signal("{role}: {content}", "text of a turn, with {content} once and {role}")
    turns: dict[str, str] = signal({}, "text of the turns of one role: system, user, assistant, tool")
    names: dict[str, str] = signal({}, "role → text that {role} stands for; without an entry, the role's name")
    start: str = signal("", "text before the first turn")
    separator: str = signal("\n\n", "text between turns")
    end: str = signal("", "text after the last turn")

    @model_validator(mode="after")
    def _complete(self) -> Template:
        for unknown in sorted((self.turns.keys() | self.names.keys()) - set(ROLES.values())):
            raise ValueError(f"template: no role is called '{unknown}'; roles are assistant, system, tool, user")
        for text in (self.turn, *self.turns.values()):
            if len(re.findall(r"\{content\}", text)) != 1:
                raise ValueError(f"template: {text!r} must have {{content}} once")
        return self

    def around(self, role: str) -> tuple[str, str]:
        """Return (text before, text after) the content of a turn with the role `role`."""
        before, _, after = self.turns.get(role, self.turn).partition("{content}")
        name = self.names.get(role, role)
        return before.replace("{role}", name), after.replace("{role}", name)

    def markers(self) -> frozenset[str]:
        """Return the special tokens, such as <|im_start|>, that the template writes around the content of turns."""
        texts = (self.start, self.separator, self.end, *(x for role in set(ROLES.values()) for x in self.around(role)))
        return frozenset(m for text in texts for m in _MARKER.findall(text))


#: chatml: the format of Qwen and others; llama3: Meta's prompt format of Llama 3, without the date that Meta's template
#: adds
TEMPLATES: dict[str, Template] = {
    "chatml": Template(turn="<|im_start|>{role}\n{content}<|im_end|>", separator="\n", end="\n"),
    "llama3": Template(start="<|begin_of_text|>", separator="", names={"tool": "ipython"},
                       turn="<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"),
    "plain": Template(turn="{role}: {content}", turns={"system": "{content}"},
                      names={"user": "User", "assistant": "Assistant", "tool": "Tool"}),
}


def render(turns: Sequence[Turn], template: Template) -> tuple[str, list[dict[str, int]]]:
    """Writes turns as text. Returns (text, spans of the text that count for the loss). Spans are in UTF-8 bytes,
    sorted, not empty and disjoint. Raises `Refused` if the content of a turn contains a marker of the template, such as
    <|im_start|>."""
    markers = template.markers()
    parts: list[str] = []
    spans: list[dict[str, int]] = []
    at = 0

    def append(text: str) -> None:
        nonlocal at
        parts.append(text)
        at += len(text.encode())

    append(template.start)
    for i, turn in enumerate(turns):
        if any(m in turn.content for m in markers):
            raise Refused("marker_in_content", f"turn {i} spells a marker of the template")
        before, after = template.around(turn.role)
        append((template.separator if i else "") + before)
        begin = at
        append(turn.content + after)
        if turn.role == "assistant" and turn.learn and at > begin:
            if spans and spans[-1]["end"] == begin:
                spans[-1]["end"] = at
            else:
                spans.append({"start": begin, "end": at})
    append(template.end)
    return "".join(parts), spans


# -- rows ------------------------------------------------------------------------------------------------------------
def first(row: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the value in a record of the first of `keys` that is present and not null; None if there is no such key. A
    key may be a path with dots."""
    for key in keys:
        value: Any = row.get(key)
        if value is None and "." in key:
            value = row
            for part in key.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def messages(value: Any) -> list[Turn]:
    """Return the turns in a list of messages, which may follow OpenAI's or ShareGPT's convention. Raises Refused if the
    list cannot be read."""
    if not isinstance(value, (list, tuple)):
        raise Refused("bad_turn", f"a list of turns is a {type(value).__name__}")
    if len(value) > MAX_TURNS:
        raise Refused("too_many_turns", f"{len(value)} turns")
    return [turn for i, message in enumerate(value) if (turn := _turn(i, message)) is not None]


def _turn(i: int, message: Any) -> Turn | None:
    """Return message number `i` as a turn; None for a system message without text, which many data sets put before
    every conversation. Raises Refused if the message cannot be read."""
    if not isinstance(message, Mapping):
        raise Refused("bad_turn", f"turn {i} is a {type(message).__name__}")
    name = message.get("role") if message.get("role") is not None else message.get("from")
    role_name = name.strip().lower() if isinstance(name, str) else ""
    role = ROLES.get(role_name)
    if role is None:
        raise Refused("unknown_role", f"turn {i}")
    content = next((message[k] for k in ("content", "value", "text") if message.get(k) is not None), None)
    reasoning = first(message, REASONING)
    if isinstance(content, (list, tuple)):
        content, reasoning = _parts(i, content, reasoning)
    if calls := message.get("tool_calls") or _as_list(message.get("function_call")):
        if not isinstance(calls, (list, tuple)) or not isinstance(content, str | None):
            raise Refused("bad_turn", f"turn {i} has tool calls that are no list, or content that is no text")
        content = "\n".join(filter(None, (content, *map(_call, calls))))
    if content is None and role == "system":
        return None
    if not isinstance(content, str):
        raise Refused("bad_turn", f"turn {i} has no text")
    content = content.strip()
    if role == "assistant" and role_name in CALLS:
        content = _rewritten_calls(content)
    if not content and role in ("user", "assistant"):
        raise Refused("empty_turn", f"turn {i}")
    if role == "assistant" and isinstance(reasoning, str) and reasoning.strip():
        content = f"<think>\n{reasoning.strip()}\n</think>\n\n{content}"
    learn = message.get("train") is not False and 0 not in (message.get("weight"), message.get("loss_weight"))
    return Turn(role, content, learn) if content or role != "system" else None


def _parts(i: int, parts: Sequence[Any], reasoning: Any) -> tuple[str, Any]:
    """Return (text, the assistant's reasoning) of a message whose content is a list of parts. A part is a string, or an
    object with `type` and with `text` or `value`. `reasoning` is returned if no part is reasoning."""
    result: list[str] = []
    for part in parts:
        part = {"text": part} if isinstance(part, str) else part
        text = first(part, ("text", "value")) if isinstance(part, Mapping) else None
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or kind not in ("text", "reasoning", "tool_call"):
            raise Refused("not_text", f"turn {i} holds more than text")
        if kind == "reasoning":
            reasoning = text
        elif kind == "text":
            result.append(text)
        else:
            result.append(("\n" if result else "") + _rewritten_calls(text))
    return "".join(result), reasoning


def _rewritten_calls(content: str) -> str:
    """Return the content of a turn with its tool calls rewritten as Hermes and Qwen write them, if the content is a
    tool call in JSON (ShareGPT's function_call). Other content is returned unchanged."""
    try:
        calls = json.loads(content)
        return "\n".join(map(_call, calls if isinstance(calls, list) else [calls])) or content
    except (ValueError, RecursionError):                    # including Refused
        return content


def _as_list(call: Any) -> list[Any]:
    return [] if call is None else [call]


def _call(call: Any) -> str:
    """Return the text of a tool call as Hermes and Qwen write it."""
    call = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise Refused("bad_turn", "a tool call without a name")
    arguments = _parsed(call.get("arguments", {}), "arguments of a tool call")
    return f"<tool_call>\n{_json_text({'name': call['name'], 'arguments': arguments})}\n</tool_call>"


def _parsed(value: Any, label: str) -> Any:
    """Return a JSON value; a string is parsed as JSON first. Raises Refused, with `label` in the message, if the string
    is not JSON or the value is nested deeper than MAX_DEPTH."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Refused("bad_turn", f"{label} are no JSON") from None
    if is_too_deep(value):
        raise Refused("bad_turn", f"{label} nested deeper than {MAX_DEPTH} levels")
    return value


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=True, default=str)


def with_system(turns: list[Turn], row: Mapping[str, Any], keys: Any) -> list[Turn]:
    """Return the turns with the system prompt and the tools of their record, `row`. If no turn is the system's, the
    system prompt becomes the first turn. The tools are described in the system's turn. `keys` (`RecordsConfig`) says
    which keys of the record hold the system prompt and the tools. Raises Refused if the tools cannot be read."""
    system = first(row, keys.system)
    if isinstance(system, str) and system.strip() and not any(t.role == "system" for t in turns):
        turns = [Turn("system", system.strip()), *turns]
    tools = first(row, keys.tools)
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return turns
    tools = _parsed(tools, "tools")
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, (Mapping, str)) for tool in tools):
        raise Refused("bad_turn", "tools that are no list of functions")
    if not tools:
        return turns
    description = _TOOLS.replace("{tools}", "\n".join(
        tool if isinstance(tool, str) else _json_text(_without_nulls(tool)) for tool in tools))
    if turns and turns[0].role == "system":
        return [turns[0]._replace(content=f"{turns[0].content}\n\n{description}"), *turns[1:]]
    return [Turn("system", description), *turns]


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null. In a table, all descriptions of functions have the same
    keys, so each description has null for the parameters that its function lacks."""
    if isinstance(value, Mapping):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def transcript(text: str) -> list[Turn]:
    """Return the turns of a transcript: "\\n\\nHuman: … \\n\\nAssistant: …". Raises Refused if the text is no
    transcript."""
    pieces = _SPEAKER.split(text)
    if len(pieces) < 3 or pieces[0].strip():
        raise Refused("bad_turn", "neither messages nor a transcript of Human and Assistant, and no prompt")
    if len(pieces) > 2 * MAX_TURNS:
        raise Refused("too_many_turns")
    return messages([{"role": "user" if speaker == "Human" else "assistant", "content": content}
                     for speaker, content in zip(pieces[1::2], pieces[2::2])])


def checked_turns(turns: list[Turn]) -> list[Turn]:
    """Return the turns up to the last turn of the assistant. Raises Refused if the assistant speaks first or not at
    all, or if all turns of the assistant have weight 0 (do not count for the loss)."""
    while turns and turns[-1].role != "assistant":
        turns = turns[:-1]
    if not turns:
        raise Refused("no_answer", "no turn of the assistant")
    if next((t.role for t in turns if t.role != "system"), "") == "assistant":
        raise Refused("starts_with_answer", "the assistant speaks first")
    if not any(t.learn for t in turns if t.role == "assistant"):
        raise Refused("no_answer", "all answers have weight 0")
    return turns


def instruction(row: Mapping[str, Any], keys: Any) -> list[Turn]:
    """Return the turns of a record that consists of history, instruction, input and output. `keys` (`Sft.Config`) says
    which keys of the record hold them. Raises Refused if the record cannot be read."""
    question, context, answer = (first(row, getattr(keys, name)) for name in ("instruction", "input", "output"))
    if question is None or answer is None:
        raise Refused("missing_turns", "neither messages nor an instruction with its output")
    turns = []
    for pair in first(row, keys.history) or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise Refused("bad_turn", "a history that is no list of questions with their answers")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    if isinstance(context, str) and context.strip():
        if not isinstance(question, str):
            raise Refused("bad_turn", "an instruction that is no text")
        question = f"{question.strip()}\n\n{context.strip()}" if question.strip() else context
    turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return with_system(messages(turns), row, keys)


def preference(row: Mapping[str, Any], keys: Any, which: str) -> list[Turn]:
    """Return the turns of a record with a prompt and two answers: the prompt, followed by the answer `which` ("chosen"
    or "rejected"). `keys` (`Preference.Config`) says which keys of the record hold prompt and answers. Raises Refused
    if the record cannot be read."""
    prompt, answer = first(row, keys.prompt), first(row, getattr(keys, which))
    if answer is None:
        raise Refused("missing_turns", f"no {which} answer")
    before = [] if prompt is None else messages(prompt) if not isinstance(prompt, str) else \
        transcript(prompt) if prompt.startswith("\n\nHuman:") else messages([{"role": "user", "content": prompt}])
    before = with_system(before, row, keys)
    if isinstance(answer, str):
        if prompt is None or answer.startswith("\n\nHuman:"):
            return with_system(transcript(answer), row, keys)
        after = messages([{"role": "assistant", "content": answer}])
    else:
        after = messages(answer if isinstance(answer, (list, tuple)) else [answer])
        if any(t.role != "assistant" for t in after):       # UltraFeedback repeats the prompt before the answer
            if any(t.role == "system" for t in after):
                return with_system(after, row, keys)
            return [*(t for t in before if t.role == "system"), *after]
    # both answers share the assistant's earlier turns, which are context and do not count for the loss
    return [*(t._replace(learn=False) for t in before), *after]
