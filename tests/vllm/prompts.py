"""The prompts that plain vLLM and the mesh both answer: plain text, chats of several scripts, emoji, stop strings."""

from __future__ import annotations

from typing import Any

TEXTS = [
    "The capital of France is",
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Les trois couleurs du drapeau français sont",
    "日本の首都は",
    "请用中文介绍北京：",
    "Repeat exactly: 🚢⚓️👩‍🚀 🚢⚓️👩‍🚀 🚢⚓️👩‍🚀",
    "Emoji for weather: ☀️ 🌧️ ⛈️ ❄️ ☀️ 🌧️ ⛈️",
    "В чащах юга жил бы цитрус? Да, но",
    "A list of fruits:\n- apple\n- banana\n-",
    '{"name": "Trim", "role": "tab", "tags": [',
    "Q: What does a rudder do?\nA:",
    "SELECT name, age FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. " * 12,
]
CHATS = [
    "What is a trim tab, in one sentence?",
    "Write the Japanese word for ship, then one for sea.",
    "List three emoji that show an animal.",
    "Count from one to ten in French.",
    "Say hello in five languages.",
]
STOPS = ["\n\n", "is", " the", "3", "s "]


def cases() -> list[dict[str, Any]]:
    """{"id", "text" | "chat", "max_tokens", "stop"}; all greedy. The stop strings of chats end most of them early."""
    found: list[dict[str, Any]] = [
        {"id": f"text{i}", "text": t, "max_tokens": 28, "stop": []} for i, t in enumerate(TEXTS)
    ]
    found += [{"id": f"chat{i}", "chat": c, "max_tokens": 28, "stop": []} for i, c in enumerate(CHATS)]
    found += [
        {"id": f"stop{i}", "text": TEXTS[i], "max_tokens": 28, "stop": [s, "zzz never"]} for i, s in enumerate(STOPS)
    ]
    return found
