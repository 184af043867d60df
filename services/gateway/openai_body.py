"""A JSON object taken apart: each member once and of the right type, and whatever nobody took refused by name."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.openai_errors import refused

UINT32 = (1 << 32) - 1
TOOLS = ("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call")


class Body:
    """A JSON object whose members are taken one by one; what is left at the end was not asked for by anybody."""

    def __init__(self, members: dict[str, Any], path: str = "") -> None:
        self._members = {k: v for k, v in members.items() if v is not None}
        self._path = path

    def name(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str) -> Any:
        return self._members.pop(key, None)

    def required(self, key: str) -> Any:
        value = self.take(key)
        if value is None:
            raise refused(self.name(key), "is required", code="missing_required_parameter")
        return value

    def required_text(self, key: str) -> str:
        """Text that must be there, and not empty."""
        value = self.text(key)
        if not value:
            raise refused(self.name(key), "is required", code="missing_required_parameter")
        return value

    def text(self, key: str) -> str | None:
        value: str | None = self._typed(key, str, "a string")
        return value

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._typed(key, bool, "true or false")
        return value

    def object(self, key: str) -> dict[str, Any] | None:
        value: dict[str, Any] | None = self._typed(key, dict, "an object")
        return value

    def integer(self, key: str, low: int = 0, high: int = UINT32) -> int | None:
        value = self.take(key)
        return None if value is None else integer(self.name(key), value, low, high)

    def number(self, key: str) -> float | None:
        value = self.take(key)
        return None if value is None else number(self.name(key), value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self._typed(key, list, "a list of integers") or []
        return tuple(integer(self.name(key), x, 0, UINT32) for x in value)

    def done(self) -> None:
        """Refuse what nobody took."""
        if not self._members:
            return
        names = [self.name(key) for key in self._members]
        tools = next((key for key in self._members if key in TOOLS), None)
        if tools and not self._path:
            raise refused(
                tools,
                "is not supported: this server has no tool calling yet; send the request without it",
                code="unsupported_parameter",
            )
        more = f" (nor are {', '.join(names[1:])})" if len(names) > 1 else ""
        raise refused(names[0], f"is not supported by this server{more}", code="unsupported_parameter")

    def _typed(self, key: str, kind: type, words: str) -> Any:
        value = self.take(key)
        if value is not None and not isinstance(value, kind):
            raise refused(self.name(key), f"must be {words}, not {shown(value)}", code="invalid_type")
        return value


def integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise refused(name, f"must be an integer, not {shown(value)}", code="invalid_type")
    if not low <= value <= high:
        raise refused(name, f"must be between {low} and {high}, not {shown(value)}")
    return value


def number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refused(name, f"must be a number, not {shown(value)}", code="invalid_type")
    try:
        return float(value)
    except OverflowError:
        raise refused(name, "is too large a number") from None


def shown(value: Any) -> str:
    """A value as an error shows it: short, in JSON's spelling."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
