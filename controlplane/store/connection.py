"""The way to Redis or Valkey: what a URL means, what became of the last call, and errors that say what to do.

Two clients, since a blocking read needs a connection of its own. A command that timed out is sent once more; whoever writes makes that
harmless. Sentinel asks anew who the primary is with each connection, so a failover needs nothing from the caller but another attempt.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from controlplane.store import StoreState
from controlplane.store.scripts import Script
from trimtab.errors import StoreUnavailable

T = TypeVar("T")
log = structlog.get_logger(__name__)

DIRECT = ("redis://", "rediss://", "unix://")
SENTINEL = ("redis+sentinel://", "rediss+sentinel://")
SCHEMES = (*DIRECT, *SENTINEL)
"""`redis+sentinel://[user:password@]host:port[,host:port…]/service[/db][?option=value]`; the others as redis-py has them."""
ANSWER_S = 1.5
"""What one command gets; a person waits for the answer."""
NOT_TRIED = "not asked yet"
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
"""Query options of `rediss+sentinel://`, for the sentinels and for the primary alike."""


class Connection:
    """`url` as SCHEMES have it; connects at the first call. `block_s` is the longest that a blocking read waits."""

    def __init__(self, url: str, *, block_s: float, wanted: int = 0) -> None:
        self.shown = shown(url)
        self._wanted = wanted
        self._fault: str | None = NOT_TRIED
        self._read_only: str | None = None
        self._since = time.monotonic()
        self.redis = _client(url, ANSWER_S, Retry(ConstantBackoff(0.05), 1))
        self.tail = _client(url, block_s + 3, Retry(NoBackoff(), 0))

    @property
    def state(self) -> StoreState:
        if self._fault is not None:
            away_s = time.monotonic() - self._since
            words = f"{self.shown}: unreachable for {away_s:.0f} s ({self._fault})"
            return StoreState(False, words, False, self._wanted)
        if self._read_only is not None:
            return StoreState(True, f"{self.shown}: takes no writes ({self._read_only})", False, self._wanted)
        return StoreState(True, self.shown, True, self._wanted)

    async def ask(self, answer: Awaitable[T], *, writes: bool = False) -> T:
        """The answer, or StoreUnavailable. NoScriptError is left to whoever sent a script."""
        try:
            got = await answer
        except NoScriptError:
            raise
        except ReadOnlyError as e:
            raise self._refuses("it is a read-only replica; point the control plane at its primary") from e
        except (AuthenticationError, NoPermissionError) as e:
            raise self._down(e, "; check user, password and ACL in the store's URL") from e
        except (ConnectionError, OSError, TimeoutError) as e:
            raise self._down(e) from e
        except ResponseError as e:
            # It answers, and says that it takes no writes now: no replicas, no memory, no disk.
            raise self._refuses(str(e)) from e
        except RedisError as e:
            raise self._down(e) from e
        self._up(writes)
        return got

    async def run(self, script: Script, keys: tuple[str, ...], *args: Any) -> Any:
        """The script's answer; it is sent whole where the server does not know it."""
        return (await self.run_then(script, keys, args))[0]

    async def run_then(
        self, script: Script, keys: tuple[str, ...], args: tuple[Any, ...], *after: tuple[Any, ...]
    ) -> list[Any]:
        """The script's answer and those of the commands `after` it, on one connection: WAIT speaks for the writes of its connection."""

        async def send(command: str, name: str) -> list[Any]:
            async with self.redis.pipeline(transaction=False) as line:
                line.execute_command(command, name, len(keys), *keys, *args)
                for each in after:
                    line.execute_command(*each)
                return list(await line.execute())

        try:
            return await self.ask(send("EVALSHA", script.sha), writes=True)
        except NoScriptError:
            return await self.ask(send("EVAL", script.text), writes=True)

    def _up(self, wrote: bool) -> None:
        if wrote:
            self._read_only = None
        if self._fault is not None:
            self._fault, self._since = None, time.monotonic()
            log.info("store reached", store=self.shown)

    def _down(self, error: Exception, hint: str = "") -> StoreUnavailable:
        said = (str(error) or type(error).__name__) + hint
        if self._fault in (None, NOT_TRIED):
            self._since = time.monotonic()
            log.warning("store away", store=self.shown, error=said)
        self._fault = said
        return self._unusable(said)

    def _refuses(self, said: str) -> StoreUnavailable:
        if self._read_only is None:
            log.warning("store takes no writes", store=self.shown, error=said)
        self._up(False)
        self._read_only = said
        return self._unusable(said)

    def _unusable(self, said: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"the policy store {self.shown} can't be used: {said}; nodes keep the policy that they have. "
            "Look at it again (trimtab policy get) before you repeat a change"
        )

    async def close(self) -> None:
        await self.redis.aclose()
        await self.tail.aclose()


def shown(url: str) -> str:
    """The URL without user, password and options, as logs and people may see it."""
    scheme, sign, rest = url.partition("://")
    if not sign:
        return url.rsplit("@", 1)[-1].split("?", 1)[0]
    return f"{scheme}://{rest.split('?', 1)[0].rsplit('@', 1)[-1]}"


def _client(url: str, timeout_s: float, retry: Any) -> Any:
    # Shapes of answers differ between RESP2 and RESP3.
    common: dict[str, Any] = {"protocol": 2, "socket_connect_timeout": 1.0, "socket_timeout": timeout_s, "retry": retry}
    if not url.startswith(SENTINEL):
        return Redis.from_url(url, **common)
    where = parse_sentinel(url)
    options = {**common, **where.options}
    # A sentinel that is down must not hold up the next one; it shares TLS with the primary, not its user.
    sentinel = Sentinel(where.sentinels, sentinel_kwargs={**options, "retry": Retry(NoBackoff(), 0)})
    named: dict[str, Any] = {"username": where.username, "password": where.password, "db": where.db}
    return sentinel.master_for(where.service, connection_pool_class=SentinelConnectionPool, **options, **named)


class SentinelUrl:
    """A `redis+sentinel://` URL, taken apart. ValueError says what is wrong with it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        user, at, hosts = parts.netloc.rpartition("@")
        name, _, password = user.partition(":") if at else ("", "", "")
        self.username, self.password = unquote(name) or None, unquote(password) or None
        self.sentinels = [_address(each) for each in hosts.split(",")]
        service, _, db = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError("a sentinel URL names the service, such as redis+sentinel://host:26379/mymaster")
        if db and not db.isdigit():
            raise ValueError(f"a sentinel URL ends in the number of a database, not {db!r}")
        self.service, self.db = service, int(db or 0)
        asked = parse_qs(parts.query)
        unknown = sorted(set(asked) - set(TLS_OPTIONS))
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r} of a sentinel URL; known: {', '.join(TLS_OPTIONS)}")
        said: Callable[[str], Any] = lambda text: text.lower() in ("1", "true", "yes")  # noqa: E731
        self.options: dict[str, Any] = {
            name: said(values[-1]) if name == "ssl_check_hostname" else values[-1] for name, values in asked.items()
        }
        if parts.scheme.startswith("rediss"):
            self.options["ssl"] = True
        elif asked:
            raise ValueError("TLS options need rediss+sentinel://")


def parse_sentinel(url: str) -> SentinelUrl:
    return SentinelUrl(url)


def _address(said: str) -> tuple[str, int]:
    host, sign, port = said.strip().rpartition(":")
    if not sign:
        return said.strip(), 26379
    if not port.isdigit():
        raise ValueError(f"{said!r} is not HOST:PORT")
    return host, int(port)
