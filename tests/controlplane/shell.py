"""A shell for tests: types verbs at a control plane that runs in the test's own event loop."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import click
from click.testing import CliRunner, Result

from controlplane.cli import fleet
from controlplane.cli_history import policy
from tests.controlplane.mesh import Mesh

ROOT = click.Group(commands={"policy": policy, "fleet": fleet})


@dataclass
class Shell:
    """Types verbs at a mesh. A verb runs an event loop of its own, so it runs in a thread."""

    mesh: Mesh

    async def __call__(self, *words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, ROOT, [*words, "--control", self.mesh.address])

    async def json(self, *words: str) -> Any:
        result = await self(*words, "--json")
        return json.loads(result.stdout)
