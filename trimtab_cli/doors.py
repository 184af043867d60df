"""How `trimtab up` itself goes through the doors of its mesh: with TRIMTAB_KEY at the gateway's and TRIMTAB_TOKEN at the control plane's."""

from __future__ import annotations

import os

from controlplane.admin.client import AdminClient
from controlplane.cli import TOKEN
from trimtab.client import Client
from trimtab.kit.cli import own_key


def gateway(address: str) -> Client:
    """ValueError for a key that no header can hold."""
    # The gateway is this machine's own, whatever the address that it listens on.
    return Client(address, key=own_key(), insecure_key=True)


def control(address: str) -> AdminClient:
    """Of the replicas at `address`."""
    return AdminClient(address, token=os.environ.get(TOKEN, "").strip())
