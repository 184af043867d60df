"""What a model's own files say of it, and its tokenizer's files in one archive: for gateways that tokenise by themselves.

Read once, at the start of what needs it. An engine without files (the simulated one) has none, and says nothing in their place.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TOKENIZER = (
    "*token*.json", "config.json", "generation_config.json", "vocab.json", "merges.txt", "chat_template.json", "*.jinja", "*.model",
    "*.tiktoken",
)  # fmt: skip
"""What makes a tokenizer, by the names that the transformers library gives its files."""
OLDEST = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`path` is what the engine loads, a directory or a hub's name; unknown facts are empty, an unknown token is 0."""

    path: str = ""
    directory: Path | None = None
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    bos_token_id: int = 0
    pad_token_id: int = 0
    sampling_defaults: str = ""
    """JSON of what generation_config.json sets; empty where it sets nothing."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A zip of the tokenizer's files. The same files give the same bytes."""

    data: bytes
    sha256: str


def read(path: str) -> ModelFiles:
    """Of a directory, or of a hub's name whose files are in the local cache."""
    directory = _directory(path)
    if directory is None:
        return ModelFiles(path)
    config, generation = _json(directory / "config.json"), _json(directory / "generation_config.json")
    defaults = {name: generation[name] for name in SAMPLING_DEFAULTS if generation.get(name) is not None}
    return ModelFiles(
        path,
        directory,
        model_type=str(config.get("model_type", "")),
        architectures=tuple(config.get("architectures") or ()),
        bos_token_id=_one(config.get("bos_token_id")),
        pad_token_id=_one(config.get("pad_token_id")),
        sampling_defaults=json.dumps(defaults, separators=(",", ":")) if defaults else "",
    )


def tokenizer_archive(directory: Path) -> Archive:
    """A second or so for a large vocabulary: run it off the event loop. FileNotFoundError where there is no such file."""
    names = sorted({p.name for pattern in TOKENIZER for p in directory.glob(pattern) if p.is_file()})
    if not names:
        raise FileNotFoundError(f"{directory} holds no tokenizer's files")
    box = io.BytesIO()
    with zipfile.ZipFile(box, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name, OLDEST)
            archive.writestr(entry, (directory / name).read_bytes(), zipfile.ZIP_DEFLATED)
    data = box.getvalue()
    return Archive(data, hashlib.sha256(data).hexdigest())


def _directory(path: str) -> Path | None:
    if not path:
        return None
    if Path(path).is_dir():
        return Path(path)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(path, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def _json(file: Path) -> dict[str, Any]:
    """What it holds; nothing where it is missing or no object, since the engine itself has loaded the model by then."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _one(token: Any) -> int:
    """Some configurations list several."""
    first = token[0] if isinstance(token, list) and token else token
    return first if isinstance(first, int) else 0
