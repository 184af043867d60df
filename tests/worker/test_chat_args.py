"""`chat_args`: what a worker gives the model's chat template beside the messages, and which plug-ins its engine loads."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.engines.tokenizers import HfTokenizer
from services.worker.engines.vllm import environment
from services.worker.settings import WorkerSettings, chat_arguments
from trimtab.messages import ChatMessage


class Template:
    """As much of a Hugging Face tokenizer as a chat needs; it keeps what it was given."""

    all_special_ids = ()

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}

    def apply_chat_template(self, messages: Any, **given: Any) -> list[int]:
        self.given = given
        return [1, 2, 3]


def test_the_templates_arguments_are_json_by_name():
    assert chat_arguments(["enable_thinking=false", 'reasoning_effort="low"', "depth=2"]) == {
        "enable_thinking": False,
        "reasoning_effort": "low",
        "depth": 2,
    }
    assert WorkerSettings(chat_args=("enable_thinking=false",)).chat_args == ("enable_thinking=false",)


@pytest.mark.parametrize("wrong", ["enable_thinking", "enable_thinking=no", "=1", "a b=1", "tokenize=false"])
def test_what_is_no_argument_or_the_workers_own_is_refused_at_start(wrong):
    with pytest.raises(ValueError, match="worker chat_args"):
        WorkerSettings(chat_args=(wrong,))


def test_a_chat_is_told_them_beside_what_the_worker_says_itself():
    template = Template()
    tokenizer = HfTokenizer(template, 10, {"enable_thinking": False})
    assert tokenizer.encode_chat((ChatMessage("user", "hi"),)) == (1, 2, 3)
    assert template.given == {
        "tokenize": True, "add_generation_prompt": True, "return_dict": False, "enable_thinking": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("before", "loaded"),
    [(None, "trimtab"), ("", "trimtab"), ("trimtab", "trimtab"), ("a,b", "a,b,trimtab"), ("trimtab,a", "a,trimtab")],
)
def test_plug_ins_that_are_named_already_are_loaded_beside_ours(monkeypatch, before, loaded):
    if before is None:
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    else:
        monkeypatch.setenv("VLLM_PLUGINS", before)
    assert environment(1)["VLLM_PLUGINS"] == loaded
