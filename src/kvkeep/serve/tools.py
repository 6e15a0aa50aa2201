"""Tool calls in the text of an answer: `<tool_call>{…}</tool_call>` (Hermes, Qwen) or one JSON object (Llama 3)."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvkeep.engine.detokenizer import overlap
from kvkeep.serve.grammar import FEW_BLANKS


@dataclass(frozen=True)
class ToolFormat:
    """How a model was trained to call a tool."""

    begin: str
    end: str
    arguments: str  # the name of that field

    def grammar(self, functions: list[dict[str, Any]]) -> str:
        """The grammar of an answer that is one call of one of these functions, in llguidance's Lark."""
        parts = [self._schema(each["function"]) for each in functions]
        named = {name: part for _, definitions in parts for name, part in definitions.items()}
        before, after = (json.dumps(mark) for mark in (self.begin + "\n", "\n" + self.end))
        schema = json.dumps({"anyOf": [call for call, _ in parts], "$defs": named} | FEW_BLANKS)
        return f"start: {before} call {after}\ncall: %json {schema}" if self.begin else f"start: %json {schema}"

    def _schema(self, function: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The schema of a call, and the definitions it refers to, which are named by the function at the root."""
        text = json.dumps(function.get("parameters") or {"type": "object", "properties": {}})
        arguments = json.loads(text.replace('"$ref": "#/$defs/', f'"$ref": "#/$defs/{function["name"]}:'))
        definitions = arguments.pop("$defs") if isinstance(arguments.get("$defs"), dict) else {}
        named = {f"{function['name']}:{name}": part for name, part in definitions.items()}
        fields = {"name": {"const": function["name"]}, self.arguments: arguments}
        call = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        return call, named


HERMES = ToolFormat("<tool_call>", "</tool_call>", "arguments")
LLAMA = ToolFormat("", "", "parameters")


def tool_format(template: Any) -> ToolFormat | None:
    """The format that a chat template has for tools; None: it takes none."""
    if not isinstance(template, str) or "tools" not in template:
        return None
    return HERMES if HERMES.begin in template else LLAMA


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @classmethod
    def parse(cls, text: str) -> ToolCall | None:
        with suppress(ValueError, AttributeError, KeyError, TypeError, RecursionError):
            call = json.loads(text)
            arguments = call.get("arguments", call.get("parameters"))
            if isinstance(arguments, dict):
                return cls(str(call["name"]), json.dumps(arguments, ensure_ascii=False))
        return None


@dataclass
class ToolParser:
    """Parts text from calls while an answer is decoded. What may become a call is held back until that is known."""

    form: ToolFormat
    parallel: bool = True  # several calls; else all but the first are left out
    held: str = ""
    shown: bool = False
    called: int = 0

    def feed(self, text: str, done: bool) -> tuple[str, list[ToolCall]]:
        """Take more text. -> text to show, and calls that are complete"""
        self.held += text
        text, calls = self._tagged(done) if self.form.begin else self._bare(done)
        calls = calls if self.parallel else calls[: 1 - self.called]
        self.called += len(calls)
        return text, calls

    def _tagged(self, done: bool) -> tuple[str, list[ToolCall]]:
        text, calls = "", list[ToolCall]()
        while self.form.begin in self.held:
            before, _, rest = self.held.partition(self.form.begin)
            inside, end, after = rest.partition(self.form.end)
            if not end and not done:
                self.held = self.held[len(before) :]
                return text + before, calls
            call = ToolCall.parse(inside)
            text += before if call else before + self.form.begin + inside + end
            calls += [call] if call else []
            self.held = after
        ready = len(self.held) - (0 if done else overlap(self.held, self.form.begin))
        shown, self.held = self.held[:ready], self.held[ready:]
        return text + ("" if calls and not shown.strip() else shown), calls

    def _bare(self, done: bool) -> tuple[str, list[ToolCall]]:
        """A call is all of the answer, or none of it."""
        self.shown = self.shown or not self.held.lstrip().startswith("{") and bool(self.held.strip())
        if not self.shown and not done:
            return "", []
        text, self.held = self.held, ""
        call = None if self.shown else ToolCall.parse(text)
        return ("", [call]) if call else (text, [])
