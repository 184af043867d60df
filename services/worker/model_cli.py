"""`python -m services.worker.model`: fetch, verify, path, list and remove what lies in the model cache."""

import argparse
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from services.worker import model


def describe(source: model.Source, *, full: bool = False) -> dict[str, Any]:
    why = model.fault(source.directory, full=full)
    state = "ready" if why is None else "absent" if why == "absent" else "damaged"
    files = source.directory.rglob("*") if state != "absent" else ()
    size = sum(f.stat().st_size for f in files if f.is_file())
    return {"name": source.name, "path": str(source.directory), "state": state, "why": why, "bytes": size}


def sources(name: str) -> list[model.Source]:
    if name == "all":
        return list(dict.fromkeys(model.KNOWN.values()))
    if found := model.KNOWN.get(name.lower()):
        return [found]
    known = ", ".join(model.KNOWN)
    raise model.ModelError(f"{name} is not kept here (known: {known}); directories and hub ids are used as they are")


def show(items: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(items, indent=2))
        return
    for item in items:
        note = f" ({item['why']})" if item["state"] == "damaged" else ""
        print(f"{item['name']}  {item['state']}{note}  {item['bytes'] / 1e6:.1f} MB  {item['path']}")


def remove(as_json: bool, yes: bool) -> int:
    """List what lies in the cache, then remove it; at a terminal, outside CI, ask first."""
    root = model.models_dir()
    found = [p for p in sorted(root.iterdir()) if p.name != ".lock"] if root.is_dir() else []
    items: list[dict[str, Any]] = [{"path": str(p), "bytes": sum(f.stat().st_size for f in _files(p))} for p in found]
    if not as_json:
        for item in items:
            print(f"{item['bytes'] / 1e6:8.1f} MB  {item['path']}")
    if found and not yes and not os.environ.get("CI") and sys.stdin.isatty() and not agreed():
        print("kept")
        return 1
    for path in found:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    if as_json:
        print(json.dumps({"removed": items}, indent=2))
    else:
        print(f"removed {len(items)} entries from {root}" if items else f"nothing cached in {root}")
    return 0


def agreed() -> bool:
    try:
        return input("Remove these? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _files(path: Path) -> list[Path]:
    return [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]


def _stop(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def run(args: argparse.Namespace) -> int:
    if args.command == "remove":
        return remove(args.json, args.yes)
    if args.command == "list":
        show([describe(s) for s in sources("all")], args.json)
        return 0
    wanted = sources(args.name)
    if args.command == "fetch":
        for source in wanted:
            model.fetch(source, full=args.verify, quiet=args.json)
    items = [describe(s, full=args.command == "verify") for s in wanted]
    if args.command == "path" and not args.json:
        print(*(item["path"] for item in items), sep="\n")
    else:
        show(items, args.json)
    ready = all(item["state"] == "ready" for item in items)
    if args.command == "verify" and not ready:
        print("model: run `python -m services.worker.model fetch --verify` to make it anew", file=sys.stderr)
    return 0 if ready else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m services.worker.model", description="The model cache.")
    verbs = ("fetch", "verify", "path", "list", "remove")
    parser.add_argument("command", nargs="?", default="fetch", choices=verbs)
    parser.add_argument("name", nargs="?", default="default")
    parser.add_argument("--json", action="store_true", help="print JSON, no progress")
    parser.add_argument("--verify", action="store_true", help="with fetch: compare every file's sha256, not only sizes")
    parser.add_argument("--yes", action="store_true", help="with remove: do not ask")
    args = parser.parse_args(argv)
    before = signal.signal(signal.SIGTERM, _stop)  # so that a half-made model is cleaned up then, too
    try:
        return run(args)
    except model.ModelError as error:
        print(f"model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("model: interrupted; nothing half-made is left, run it again", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
