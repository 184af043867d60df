"""A line of a batch: what is taken, what is refused and in which words, and the lines that come out."""

from __future__ import annotations

import io
import json

import pytest
from openai.types.chat import ChatCompletion

from services.batch import lines
from services.batch.lines import BadLine, parse
from services.batch.source import Source
from services.gateway.openai_stream import Answer
from tests.services.batches import a_chat, a_line
from trimtab.errors import InvalidRequest, QueueFull, Violation
from trimtab.messages import ChatMessage, Finish, FinishReason, Timings, Usage, Workload


def raw(line: object) -> bytes:
    return (line if isinstance(line, str) else json.dumps(line)).encode()


def test_a_chat_is_a_batch_request():
    task = parse(3, raw(a_chat("a", max_completion_tokens=7, service_tier="priority")))
    assert (task.line, task.custom_id, task.ask.chat) == (3, "a", True)
    assert task.ask.request.prompt == (ChatMessage("user", "Say a"),)
    assert task.ask.request.sampling.max_tokens == 7
    assert task.ask.request.workload is Workload.BATCH


def test_a_completion_is_one_too():
    assert parse(1, raw(a_line("a"))).ask.request.prompt == "Say a"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "must be a JSON object"),
        (a_line("") | {"custom_id": 7}, "custom_id must be a string"),
        (a_line(""), "custom_id must be a string that is not empty"),
        (a_line("a") | {"urll": 1}, "urll: not known here"),
        (a_line("a") | {"method": "GET"}, 'method must be "POST", not "GET"'),
        (a_line("a") | {"url": "/v1/embeddings"}, "url must be one of /v1/chat/completions, /v1/completions"),
        (a_line("a") | {"url": ["/v1/completions"]}, "url must be one of"),
        (a_line("a") | {"body": "hi"}, "body must be a JSON object"),
        (a_line("a", model=None), "body: model is required"),
        (a_line("a", temprature=1), "body: temprature is not supported"),
        (a_line("a", temperature=9), "body: temperature must be at least 0 and at most 2, not 9"),
        (a_line("a", stream=True), "stream must be false"),
        (a_line("a", prompt="\ud800"), "not valid Unicode"),
        (a_line("a", prompt="x" * (5 << 20)), "4194304 at most"),
        (a_chat("a", messages=[]), "body: messages must be a list"),
    ],
    ids=lambda x: x if isinstance(x, str) and len(x) < 99 else "line",
)
def test_what_can_not_be_sent_is_told_with_its_line(line, words):
    with pytest.raises(BadLine) as caught:
        parse(12, raw(line))
    assert str(caught.value).startswith("line 12: ")
    assert words in str(caught.value)


def test_an_answer_has_openais_members_and_a_body_of_theirs():
    task = parse(1, raw(a_chat("a")))
    end = Finish(FinishReason.STOP, Usage(3, 2, 1), Timings())
    body = Answer(task.ask, "r", "m").whole("Hello\u2028", [], end)
    line = lines.answered(task, "r", body)
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == {
        "id": "batch_req_r",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": body},
        "error": None,
    }
    assert ChatCompletion.model_validate(body).choices[0].message.content == "Hello\u2028"


def test_a_failure_is_told_as_response_and_as_error():
    error = InvalidRequest("no", violations=(Violation("prompt", "is too long"),))
    line = json.loads(lines.failed(parse(1, raw(a_line("a"))), "r", error))
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["message"] == "prompt is too long"
    assert line["error"] == {"code": "invalid_request", "message": "prompt is too long"}
    assert json.loads(lines.failed(parse(1, raw(a_line("a"))), "r", QueueFull("x")))["response"]["status_code"] == 429


def a_source(*contents: bytes) -> Source:
    return Source(io.BytesIO(b"".join(contents)))


def test_every_line_is_judged_before_any_is_taken():
    good, other = raw(a_line("a")) + b"\n", raw(a_line("b"))
    source = a_source(b"\xef\xbb\xbf" + good, b"\n", b"{\n", good, other)
    assert [str(b) for b in source.bad] == [
        "line 3: is not JSON: Expecting property name enclosed in double quotes: line 2 column 1 (char 2)",
        "line 4: custom_id 'a' is that of line 1",
    ]
    assert [(t.line, t.custom_id) for t in source.tasks(set())] == [(1, "a"), (5, "b")]
    assert [t.custom_id for t in source.tasks({"a"})] == ["b"]
    assert (len(source), source.count({"a", "z"})) == (2, 1)


def test_a_file_that_changes_meanwhile_is_noticed():
    file = io.BytesIO(raw(a_line("a")) + b"\n")
    source = Source(file)
    file.seek(0)
    file.write(raw(a_line("b")))
    with pytest.raises(BadLine, match="the file has changed"):
        list(source.tasks(set()))


def test_lines_that_share_an_id_go_by_their_number():
    (bad,) = a_source(raw(a_line("a")) + b"\n", raw(a_line("a"))).bad
    line = json.loads(lines.never_sent(bad))
    assert (line["custom_id"], line["response"], line["error"]["line"]) == (None, None, 2)
    assert line["error"]["code"] == "duplicate_custom_id"
