"""The gateway and the fake workers of tests/gateway, for what runs in front of them."""

from tests.gateway.conftest import _state_dir as _state_dir
from tests.gateway.conftest import start_gateway as start_gateway
from tests.gateway.conftest import start_worker as start_worker
