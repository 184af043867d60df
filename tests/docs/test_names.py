"""Every command, option, target, variable, field, metric, file and link that a document names is there; and the reader that says so can
tell when one is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import commands, markdown
from tests.docs.expressions import ROOT
from tests.docs.names import METRIC, VARIABLE, documents, faults, is_path, metrics, options, settings, variables
from trimtab_cli.config import faults as config_faults

HERE = ROOT / "docs" / "a-document.md"
WRONG = {
    "`trimtab polcy get`": "trimtab has no verb polcy",
    "`trimtab policy gett`": "trimtab policy has no verb gett",
    "`trimtab policy get --nod w0`": "trimtab policy get has no option --nod",
    "`trimtab drain w0 w1`": "trimtab drain takes no 'w1'",
    "`trimtab drain w0 --deadline soon`": "'soon' is no span of time",
    "`trimtab bench speed`": "'speed' is not one of",
    "`trimtab policy pin|unpinn batch.active`": "trimtab policy has no verb unpinn",
    "`.venv/bin/trimtab fleet --all`": "trimtab fleet has no option --all",
    "`trimtab policy set batch.activ=8`": "there is no field or setting batch.activ",
    "`trimtab policy set batch.active=many`": "batch.active",
    "`trimtab rollout restart --set worker.rows=8`": "[worker] has no setting rows, and the chart no such value",
    "`trimtab up -- --rows 8`": "trimtab up -- has no option --rows",
    "`TRIMTAB_MESH=x trimtab fleet`": "nobody reads TRIMTAB_MESH",
    "`kubectl exec pod/c0 -- trimtab flet`": "trimtab has no verb flet",
    "`python -m services.wrker`": "there is no module services.wrker",
    "`python -m services.worker --modl x`": "python -m services.worker has no option --modl",
    "`trimtab-worker --modl x`": "trimtab-worker has no option --modl",
    "`deploy/bare-metal/install.sh --rolle worker`": "install.sh has no option --rolle",
    "`make upp`": "make has no target upp",
    "`make setup chek`": "make has no target chek",
    "```console\ntrimtab drain --deadline 1s\n```": "trimtab drain: W is missing",
    "```console\ntrimtab policy\n```": "trimtab policy: a verb is missing",
    "```console\ntrimtab policy set batch.active=8 \\\n  --reeson x\n```": "trimtab policy set has no option --reeson",
    "```console\ntrimtab fleet | jq . && trimtab tops\n```": "trimtab has no verb tops",
    "```console\ntrimtab policy show --yml > policy.yaml\n```": "trimtab policy show has no option --yml",
    "```console\ntrimtab chat 'what\n```": "no shell takes it",
    "set TRIMTAB_WORKER_MODLE": "nobody reads TRIMTAB_WORKER_MODLE",
    "set `TRIMTAB_STOKEN`": "nobody reads TRIMTAB_STOKEN",
    "`TRIMTAB_TSL_*`": "nobody reads TRIMTAB_TSL_",
    "`batch.activ` is the field": "the policy has no field batch.activ",
    "`worker.rows` is the setting": "[worker] has no setting rows, and the chart no such value",
    "`networkPolicy.clientz` are let in": "the chart has no value networkPolicy.clientz",
    "`gateway.autoscalling` is off": "[gateway] has no setting autoscalling, and the chart no such value",
    "`vllm_dor` in\n`[worker]`": "[worker] has no setting vllm_dor",
    "`[control] acces = FILE` names it": "[control] has no setting acces",
    "`workers_limits` of `[up]`": "[up] has no setting workers_limits",
    "| setting of `[control]` | what |\n|---|---|\n| `redis` | x |\n| `rediss` | x |\n": "4: [control] has no setting rediss",
    "```toml\n[worker]\nmodel = 'x'\nrows = 8\n```": "4: [worker] has no setting rows",
    "`--drane-s` says so": "no command has the option --drane-s",
    "`trimtab_worker_runing`": "no process exports trimtab_worker_runing",
    "`trimtab_control_denied`": "no process exports trimtab_control_denied",
    "`vllm:num_requests`": "no process exports vllm:num_requests",
    "```promql\nsum(pool:trimtab_effective_token_ratio:1m)\n```": "no process exports pool:trimtab_effective_token_ratio:1m",
    "`services/worker/gates.py` decides": "there is no file services/worker/gates.py",
    "`gates.py` decides": "there is no file gates.py",
    "`deploy/prometheus/rules.yml`": "there is no file deploy/prometheus/rules.yml",
    "`trimtab/{policy,snapshots}.py`": "there is no file trimtab/{policy,snapshots}.py",
    "[this](operation.md)": "a link leads to operation.md, which is not there",
    "[this](operations.md#setings)": "a link leads to #setings, which operations.md does not have",
    "# One\n\n[this](#two)": "a link leads to #two, which a-document.md does not have",
    "[this][1]\n\n[1]: ../READMEE.md": "a link leads to ../READMEE.md, which is not there",
}
RIGHT = """
# Two words, and `code`

`trimtab policy set batch.active=8 --for node/W --reason "as it was"`, `trimtab policy pin|unpin FIELD`, `trimtab bench NAME [--quick]`,
`trimtab rollout restart --set worker.max_num_seqs=32`, `trimtab up -- --dtype float32`, `make up ARGS="--workers 2"`, `trimtab VERB --help`,
`kubectl exec deploy/control -- trimtab fleet`, `python -m services.worker.model list`, `TRIMTAB_TLS_*`, TRIMTAB_<SECTION>_<KEY>, `--drain-s`,
`trimtab_worker_running`, `pool:trimtab_effective_token_ratio:5m`, `trimtab_cli/config.py`, `engines/vllm.py`, `trimtab/{policy,snapshot}.py`,
`policy.yaml`, `networkPolicy.clients`, `gateway.autoscaling`, `serving`,
`batch.active`, `worker.max_num_seqs`, `docs/*.md`, `application/json`, [this](operations.md#settings),
[that](#two-words-and-code), [other](https://example.org/x#y).

```console
TRIMTAB_TOKEN=x trimtab policy apply -f - <policy.yaml 2>&1 | tee log && trimtab why  # a comment that says trimtab nonsense
trimtab policy set batch.active=8 \\
  --reason "it's too much"
```

```yaml
trimtab: nonsense
```

`vllm_door` in `[worker]`, `preset = "none"` in `[up]`, `[control] access = FILE`.

| setting of `[control]` | what it is |
|---|---|
| `redis` | a store |

```toml
[worker]
#model = "default"
```
"""


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_is_there(document: Path) -> None:
    assert faults(document.read_text(), document) == []


@pytest.mark.parametrize(("sample", "fault"), WRONG.items(), ids=WRONG)
def test_a_name_that_is_not_there_is_found(sample: str, fault: str) -> None:
    (found, *_) = faults(sample, HERE) or [""]
    assert fault in found


def test_what_is_there_is_no_fault() -> None:
    assert faults(RIGHT, HERE) == []


def test_a_fault_says_its_line() -> None:
    assert faults("one\n\n```console\ntrimtab x\n```\n\nand `make y`\n", HERE) == [
        "4: `trimtab x`: trimtab has no verb x",
        "7: `make y`: make has no target y",
    ]


def test_there_is_much_to_look_at() -> None:
    """Else a form that no longer matches would find every document right."""
    texts = {path: path.read_text() for path in documents()}
    pieces = [piece for path, text in texts.items() if path.suffix == ".md" for piece in markdown.code(text)]
    assert len(texts) > 20
    assert sum(commands.count(p.text) for p in pieces) > 150
    assert sum(len(METRIC.findall(p.text)) for p in pieces) > 80
    assert sum(1 for path, text in texts.items() if path.suffix == ".md" for _ in markdown.links(text)) > 25
    assert sum(p.text.endswith(".py") for p in pieces if p.block is None) > 80
    assert sum(1 for text in texts.values() for _ in settings(text)) > 8
    assert (len(options()) > 100, len(variables()) > 80, len(metrics()) > 100) == (True, True, True)


FOR_TESTS = {"TRIMTAB_FAULTS"}
"""Of drills' engines; no operator sets it."""


def test_what_an_operator_is_told_to_set_config_check_knows() -> None:
    named = {name for path in documents() for name in VARIABLE.findall(path.read_text()) if not name.endswith("_")}
    strange = {name for name in named for fault in config_faults({}, None, {name: "x"}) if "nobody reads" in fault}
    assert strange == FOR_TESTS


def test_headings_are_named_as_github_names_them() -> None:
    text = "# A `b` (c): d_e\n\n## Again\n\n## Again\n\n```\n# none\n```\n## See [this](x.md)\n"
    assert markdown.anchors(text) == {"a-b-c-d_e", "again", "again-1", "see-this"}


def test_a_file_may_be_named_by_the_end_of_its_path() -> None:
    assert [is_path(said) for said in ("snapshot.py", "codec/__init__.py", "shot.py", "docs", "docs/", "mine.yaml")] == [
        True, True, False, True, True, True,
    ]  # fmt: skip


def test_every_verb_of_the_command_has_a_word_in_the_documents() -> None:
    from trimtab_cli.__main__ import VERBS

    text = " ".join(path.read_text() for path in documents())
    assert [verb for verb in VERBS if not re.search(rf"trimtab {verb}\b", text)] == []
