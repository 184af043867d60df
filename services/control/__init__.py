"""A node's side of the control stream: the link, and the policy that comes over it. For workers and gateways alike."""

from services.control.keeper import PolicyKeeper
from services.control.link import ControlLink

__all__ = ["ControlLink", "PolicyKeeper"]
