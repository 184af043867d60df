"""Generate `trimtab/v1` from `protos/`, or with `--check` say whether it is what the protos give.

The generated code is committed, so that an installation needs no compiler and an editor sees the types.
mypy-protobuf writes the stubs, because they know grpc.aio. Run with `.venv/bin/python` (make proto).
"""

import argparse
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PACKAGE = Path("trimtab/v1")
INIT = '"""Generated from protos/trimtab/v1 by tools/generate.py; never edited."""\n'


def generate(out: Path) -> dict[Path, str]:
    """Relative path -> text of every generated file."""
    protos = sorted(p.relative_to(PROTOS) for p in (PROTOS / PACKAGE).rglob("*.proto"))
    services = [p for p in protos if "\nservice " in (PROTOS / p).read_text()]
    tools = Path(sys.executable).parent
    common = ["protoc", f"-I{PROTOS}", f"-I{Path(grpc_tools.__file__).parent / '_proto'}"]
    messages = [
        f"--plugin=protoc-gen-mypy={tools / 'protoc-gen-mypy'}",
        f"--python_out={out}",
        f"--mypy_out=quiet:{out}",
    ]
    stubs = [
        f"--plugin=protoc-gen-mypy_grpc={tools / 'protoc-gen-mypy_grpc'}",
        f"--grpc_python_out={out}",
        f"--mypy_grpc_out=quiet:{out}",
    ]
    for flags, inputs in ((messages, protos), (stubs, services)):
        if inputs and protoc.main([*common, *flags, *map(str, inputs)]) != 0:
            raise SystemExit("generate: protoc refused the protos; its message is above")
    files = {p.relative_to(out): p.read_text() for p in sorted(out.rglob("*.py*"))}
    return {folder / "__init__.py": INIT for folder in {PACKAGE, *(p.parent for p in protos)}} | files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if something would change")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        wanted = generate(Path(scratch))
    found = sorted(p for p in (ROOT / PACKAGE).rglob("*.py*") if "__pycache__" not in p.parts)
    present = {p.relative_to(ROOT): p.read_text() for p in found}
    changed = sorted(p for p in wanted.keys() | present.keys() if wanted.get(p) != present.get(p))
    for path in changed:
        print(f"{'differs' if check else 'written' if path in wanted else 'removed'}: {path}")
        if check:
            continue
        if path in wanted:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(wanted[path])
        else:
            (ROOT / path).unlink()
    if check and changed:
        print("generate: the committed code is not what the protos give; run `make proto` and commit the result")
        return 1
    print(f"{len(wanted)} generated files are up to date" if not changed else f"{len(changed)} files changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
