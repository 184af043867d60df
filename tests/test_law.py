"""The one law (docs/architecture.md): who may import whom, and what a pure module never touches.

import-linter holds the directions between packages. What it cannot say is here, read from the syntax tree, so
that imports inside functions count too and a new module falls under the law without being listed.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("trimtab", "services", "controlplane", "trimtab_cli")

NOT_PURE = {"trimtab.codec", "trimtab.client", "trimtab.kit", "trimtab.v1"}
"""What in `trimtab` holds no pure decisions; every other module of it is pure, and so is all that is below one."""
NEVER_IN_PURE = {
    *("asyncio", "concurrent", "logging", "multiprocessing", "os", "pathlib", "signal", "socket", "subprocess"),
    *("threading", "time"),
    *("aiohttp", "google", "grpc", "opentelemetry", "prometheus_client", "psutil", "redis", "structlog"),
    *("lightgbm", "torch", "transformers", "vllm"),
}
MAY_SEE_THE_WIRE = {
    *(
        "server",
        "control",
        "push",
        "admin",
        "dispatch",
        "call",
        "delivered",
        "notices",
        "quarantine",
        "stream",
        "attach",
        "endpoint",
        "endpoints",
        "membership",
        "commands",
        "peers",
        "actuators",
        "exchange",
        "view",
        "keda",
    ),
}
"""Names of modules (or of packages around them) that turn wire types into calls; besides codec, kit and client."""
HEAVY = {"lightgbm", "torch", "transformers", "vllm"}
HEAVY_HOMES = ("services.worker.engines.vllm", "controlplane.learn")
"""Modules that are themselves imported late, and so may import heavy things at their top."""


@functools.cache
def modules() -> tuple[tuple[str, frozenset[str], frozenset[str]], ...]:
    """Each with what it imports anywhere, and what it imports when it is imported itself."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not name.startswith("trimtab.v1"):
                tree = ast.parse(path.read_text(), str(path))
                found.append((name, frozenset(imported(ast.walk(tree))), frozenset(imported(at_import(tree)))))
    return tuple(found)


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Full names: `from a.b import c` gives a.b and a.b.c, since c may be a module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: not in functions, not under TYPE_CHECKING."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        yield node
        pending.extend(ast.iter_child_nodes(node))


def is_pure(name: str) -> bool:
    top, *rest = name.split(".")
    return top == "trimtab" and bool(rest) and f"trimtab.{rest[0]}" not in NOT_PURE


def below(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def hold(at_home: Callable[[str], bool], wrong: Callable[[str], bool], *, when_imported: bool = False) -> None:
    """Fail with a line `module: what it imports` for every module that breaks the law without being at home there."""
    broken = []
    for name, anywhere, at_once in modules():
        found = at_once if when_imported else anywhere
        if not at_home(name) and (bad := sorted(i for i in found if wrong(i))):
            broken.append(f"{name}: {', '.join(bad)}")
    assert not broken, "\n" + "\n".join(broken)


def test_import_linter_keeps_every_contract() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_trimtab_itself_is_empty() -> None:
    assert (ROOT / "trimtab" / "__init__.py").read_text().strip() == ""


@pytest.mark.slow
def test_a_pure_module_touches_no_clock_no_wire_no_world() -> None:
    def wrong(found: str) -> bool:
        top, *rest = found.split(".")
        return top in NEVER_IN_PURE or (top == "trimtab" and bool(rest) and not is_pure(f"trimtab.{rest[0]}"))

    hold(lambda name: not is_pure(name), wrong)


def test_only_codec_kit_client_and_the_shells_see_wire_types() -> None:
    def at_home(name: str) -> bool:
        return (
            name in NOT_PURE
            or below(name, "trimtab.kit")
            or below(name, "trimtab.codec")
            or not MAY_SEE_THE_WIRE.isdisjoint(name.split("."))
            or below(name, "services.bench.gateway")  # it weighs the wire itself
        )

    hold(at_home, lambda found: below(found, "trimtab.v1"))


def test_heavy_packages_load_only_where_they_are_needed() -> None:
    def wrong(found: str) -> bool:
        return found.partition(".")[0] in HEAVY

    hold(lambda name: name.startswith(HEAVY_HOMES), wrong, when_imported=True)


def test_nothing_but_the_store_touches_redis() -> None:
    hold(lambda name: "store" in name.split("."), lambda found: below(found, "redis"))
