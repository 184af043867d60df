"""The settings of `trimtab up`. Ports and engine details are the processes' own settings."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.kit.config import NAME_WORDS, is_name, refuse, setting

AUTO, NONE, SMALL = "auto", "none", "small"
PRESETS = (AUTO, NONE, SMALL)


@dataclass(frozen=True)
class UpSettings:
    mesh: str = setting("default", "mesh to run; names its state directory and its keys in the store")
    workers: int = setting(1, "workers to start")
    workers_limit: int = setting(8, "workers at most, where the policy's scale.max_workers lets the pool grow")
    controls: int = setting(1, "replicas of the control plane to start; one takes over from another")
    engine: str = setting("", "vllm, or simulated (needs no model); empty means as [worker] says")
    model: str = setting("", "local path or hub id; empty means as [worker] says")
    max_num_seqs: int | None = setting(None, "rows of each engine's batch; none means as [worker] says")
    redis: str = setting("", "store to use, redis:// or rediss:// or unix://; empty starts an embedded Valkey")
    prompt: bool = setting(True, "end the start by sending one prompt through the gateway")
    preset: str = setting(
        AUTO,
        "policy preset to write once up, never over fields that somebody has set: small, none, or auto (small where the window is "
        "16384 tokens at most, unless --no-prompt)",
    )
    ready_s: float = setting(600.0, "seconds that each process may take until it is healthy")

    def __post_init__(self) -> None:
        wrong = []
        if not is_name(self.mesh):
            wrong.append(f"up mesh {NAME_WORDS}, not {self.mesh!r}")
        if not 1 <= self.workers <= 64:
            wrong.append(f"up workers must be 1 to 64, not {self.workers}")
        if not 1 <= self.workers_limit <= 64:
            wrong.append(f"up workers_limit must be 1 to 64, not {self.workers_limit}")
        if not 1 <= self.controls <= 9:
            wrong.append(f"up controls must be 1 to 9, not {self.controls}")
        if self.preset not in PRESETS:
            wrong.append(f"up preset must be {', '.join(PRESETS[:-1])} or {PRESETS[-1]}, not {self.preset!r}")
        if not self.ready_s > 0:
            wrong.append(f"up ready_s must be above 0, not {self.ready_s}")
        refuse(wrong)
