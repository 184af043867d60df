"""Settings: fixed at start, loaded by one rule, and never the same thing as a policy field (DESIGN §8)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import pytest

from trimtab.kit.config import SECTIONS as FILE_SECTIONS
from trimtab.kit.config import ConfigError, load, setting
from trimtab.policy import FIELDS
from trimtab_cli.config import SECTIONS


@dataclass(frozen=True)
class Kettle:
    """A process's settings, as any."""

    litres: int = setting(1, "how much")
    heat: float = setting(0.5, "how hot")
    name: str = setting("k", "which")
    loud: bool = setting(False, "whistles")
    labels: tuple[str, ...] = setting((), "tags")
    limit: int | None = setting(None, "none is unlimited")

    def __post_init__(self) -> None:
        if self.litres < 0:
            raise ValueError("worker litres must not be negative")


def a_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trimtab.toml"
    path.write_text(text)
    return path


def test_no_setting_is_a_policy_field() -> None:
    names = {f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)}
    policy = {path.split(".")[1] for path in FIELDS} | {path.replace(".", "_") for path in FIELDS}
    assert names & policy == set()


def test_every_section_of_the_file_has_settings() -> None:
    assert set(SECTIONS) == set(FILE_SECTIONS)


@pytest.mark.parametrize("cls", SECTIONS.values())
def test_every_setting_says_what_it_is(cls: type) -> None:
    assert [f.name for f in dataclasses.fields(cls) if not f.metadata.get("help")] == []


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = a_file(tmp_path, '[worker]\nlitres = 2\nheat = 0.2\nname = "file"\n')
    env = {"TRIMTAB_WORKER_LITRES": "3", "TRIMTAB_WORKER_HEAT": "0.3", "TRIMTAB_GATEWAY_NAME": "other"}
    got = load(Kettle, "worker", flags={"litres": "4", "heat": None}, env=env, file=file)
    assert got == Kettle(litres=4, heat=0.3, name="file", loud=False)


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    file = a_file(tmp_path, "[worker]\nlitres = 1.5\nlowd = true\n")
    env = {"TRIMTAB_WORKER_HEAT": "hot", "TRIMTAB_WORKER_LOUD": "perhaps"}
    with pytest.raises(ConfigError) as e:
        load(Kettle, "worker", flags={"limit": "x"}, env=env, file=file)
    assert e.value.faults == [
        f"{file} [worker]: litres must be a whole number, not 1.5",
        f"{file} [worker]: unknown key lowd; did you mean loud?",
        "environment: TRIMTAB_WORKER_HEAT must be a number, not 'hot'",
        "environment: TRIMTAB_WORKER_LOUD must be true or false, not 'perhaps'",
        "command line: --limit must be a whole number, not 'x'",
    ]


def test_an_unknown_section_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown section \[wroker\]; did you mean worker\?"):
        load(Kettle, "worker", env={}, file=a_file(tmp_path, "[wroker]\n"))


def test_a_value_that_the_whole_refuses_is_a_fault_too() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        load(Kettle, "worker", env={"TRIMTAB_WORKER_LITRES": "-1"})


def test_lists_and_absent_values_are_read(tmp_path: Path) -> None:
    file = a_file(tmp_path, '[worker]\nlabels = ["a=1", "b=2"]\n')
    assert load(Kettle, "worker", env={"TRIMTAB_WORKER_LIMIT": ""}, file=file) == Kettle(labels=("a=1", "b=2"))
    assert load(Kettle, "worker", env={"TRIMTAB_WORKER_LABELS": "c=3, d=4"}).labels == ("c=3", "d=4")


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("worker", "listen", "7100", "worker listen must be host:port"),
        ("worker", "metrics", "localhost:x", "worker metrics must be host:port"),
        ("worker", "control", "", "worker control must name a control plane"),
        ("worker", "log_level", "loud", "worker log_level must be one of"),
        ("worker", "node_id", "a/b", "worker node_id must be letters"),
        ("gateway", "http", "nowhere", "gateway http must be host:port"),
        ("gateway", "control", "one:1,two", "gateway control must be host:port"),
        ("gateway", "realtime_deadline_s", "-1", "above 0"),
        ("gateway", "max_body_bytes", "99999999", "max_body_bytes must be between"),
        ("control", "listen", "", "control listen must be host:port"),
    ],
)
def test_a_value_that_no_process_could_use_is_told_before_any_starts(
    section: str, key: str, value: str, words: str
) -> None:
    cls = SECTIONS[section]
    with pytest.raises(ConfigError, match=words):
        load(cls, section, flags={key: value}, env={})
