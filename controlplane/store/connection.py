"""The way to Redis or Valkey: what a URL means, what became of the last call, and errors that say what to do.

Two clients, since a blocking read needs a connection of its own. A command that timed out is sent once more; whoever writes makes that
harmless. Sentinel asks anew who the primary is with each connection, so a failover needs nothing from the caller but another attempt.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable
from typing import Any, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlsplit

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import (
    AuthenticationError,
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
"""`redis+sentinel://[user:password@]host:port[,host:port…]/service[/db][?option=value&…]`; the others as redis-py has them."""
ANSWER_S = 1.5
"""What one command gets; a person waits for the answer."""
NOT_TRIED = "not asked yet"
TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")
"""Query options of `rediss+sentinel://`, for the sentinels and for the primary alike."""
LOGIN_OPTIONS = ("sentinel_username", "sentinel_password")
"""Query options of both, for sentinels that want a password; user and password before the `@` are the primary's."""
OURS = ("decode_responses", "protocol", "socket_timeout")
"""Options of redis-py that are not for a URL: what the store reads and how long it waits depend on them."""
CHECK_SENTINELS = "; check sentinel_username and sentinel_password in the store's URL"
CHECK_LOGIN = "; check user, password and ACL in the store's URL"
NOT_ALLOWED = ("NOPERM", "ACL failure", "can't run this command")
"""What servers call a command that the ACL forbids, inside a script too; the last is Redis 6.2."""
CLOSED = "the handler is closed"
"""What uvloop says, as a RuntimeError, of a write to a connection that was reset a moment before; redis-py lets it through."""
UNREADABLE = (
    "the store's URL can't be read: look at its port, and in user and password write / ? # @ : as %2F %3F %23 %40 %3A"
)


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
        task = asyncio.current_task()
        cancelled = task.cancelling() if task is not None else 0
        try:
            got = await answer
            if task is not None and task.cancelling() > cancelled:
                # redis-py sends by wait_for, which swallows a cancellation in Python 3.11 when the sending is just done.
                raise asyncio.CancelledError
        except NoScriptError:
            raise
        except ResponseError as e:
            if not writes and _forbidden(e):
                raise self._down(e) from e
            # It answers, and says that it takes no writes now: no right to, no replicas, no memory, no disk.
            raise self._refuses(plainly(e)) from e
        except (RedisError, OSError, TimeoutError) as e:
            raise self._down(e) from e
        except RuntimeError as e:
            if CLOSED not in str(e):
                raise
            raise self._down(ConnectionResetError("the connection was reset")) from e
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

    def _down(self, error: Exception) -> StoreUnavailable:
        said = plainly(error)
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
        for client in (self.redis, self.tail):
            await client.aclose()
            if isinstance(client.connection_pool, SentinelConnectionPool):
                for sentinel in client.connection_pool.sentinel_manager.sentinels:
                    await sentinel.aclose()


def with_password(url: str, password: str) -> str:
    """The URL with this password in it, which is as it is; ValueError where another is there already."""
    if not password:
        return url
    scheme, sign, rest = url.partition("://")
    where = re.split("[/?#]", rest, maxsplit=1)[0]
    login, _, hosts = where.rpartition("@")
    user, _, other = login.partition(":")
    if other or _astray(url) or "password" in parse_qs(urlsplit(url).query):
        raise ValueError("the store's URL has a password, and redis_password is one too: leave one of them out")
    return f"{scheme}{sign}{user}:{quote(password, safe='')}@{hosts}{rest[len(where) :]}"


def shown(url: str) -> str:
    """The URL without user, password and options, as logs and people may see it."""
    scheme, sign, rest = url.partition("://")
    if not sign:
        return url.rsplit("@", 1)[-1].split("?", 1)[0]
    if _astray(url):
        return f"{scheme}://…"
    return f"{scheme}://{rest.split('?', 1)[0].rsplit('@', 1)[-1]}"


def _astray(url: str) -> bool:
    """There is an `@`, but not where one ends a password: it may be all of it a password that was written without escapes."""
    rest = url.partition("://")[2]
    return "@" in rest and "@" not in re.split("[/?#]", rest, maxsplit=1)[0]


def plainly(error: Exception) -> str:
    """What went wrong and what to do, for people: redis-py names its own objects and the command that was sent, which say little."""
    text = str(error) or type(error).__name__
    _, sign, said = text.rpartition(" of pipeline caused error: ")
    if sign:
        with contextlib.suppress(ValueError, SyntaxError):
            text = str(ast.literal_eval(said)[0])
    if isinstance(error, ReadOnlyError) or "READONLY" in text:
        return "it is a read-only replica; point the control plane at its primary"
    return text + CHECK_LOGIN if isinstance(error, AuthenticationError) or _forbidden(error) else text


def _forbidden(error: Exception) -> bool:
    if isinstance(error, NoPermissionError):
        return True
    return isinstance(error, ResponseError) and any(sign in str(error) for sign in NOT_ALLOWED)


class _Sentinels(Sentinel):
    """Tells what each sentinel said when none names a primary; redis-py tells the classes of the errors alone."""

    def __init__(self, places: list[tuple[str, int]], options: dict[str, Any]) -> None:
        super().__init__(places, sentinel_kwargs=options)  # type: ignore[no-untyped-call]

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        faults: dict[str, None] = {}
        check = ""
        for sentinel in list(self.sentinels):
            try:
                named: Any = await sentinel.sentinel_masters()
            except RedisError as e:
                faults[str(e) or type(e).__name__] = None
                if isinstance(e, AuthenticationError) or _forbidden(e):
                    check = CHECK_SENTINELS
                continue
            primary = named.get(service_name)
            if primary and self.check_master_state(primary, service_name):
                # It answered, so it is the first to be asked next time.
                self.sentinels.remove(sentinel)
                self.sentinels.insert(0, sentinel)
                return primary["ip"], primary["port"]
            faults["it is down" if primary else "they do not know it"] = None
        raise MasterNotFoundError(f"no sentinel names a primary for {service_name!r}: {', '.join(faults)}{check}")


def _client(url: str, timeout_s: float, retry: Any) -> Any:
    # Shapes of answers differ between RESP2 and RESP3.
    common: dict[str, Any] = {"protocol": 2, "socket_connect_timeout": 1.0, "socket_timeout": timeout_s, "retry": retry}
    try:
        taken = sorted(set(parse_qs(urlsplit(url).query)) & set(OURS))
        if taken:
            raise ValueError(f"{taken[0]} can't be set in the store's URL")
        if not url.startswith(SENTINEL):
            return Redis.from_url(url, **common)
        where = SentinelUrl(url)
    except ValueError as e:
        # The text of the error may hold half a password.
        if _astray(url) or str(e).startswith("Port "):
            raise ValueError(UNREADABLE) from None
        raise
    options = {**common, **where.options}
    # A sentinel that is down must not hold up the next one; it shares TLS with the primary, not its user.
    asked = {**options, **where.login, "retry": Retry(NoBackoff(), 0)}
    sentinel = _Sentinels(where.sentinels, asked)
    named: dict[str, Any] = {"username": where.username, "password": where.password, "db": where.db}
    return sentinel.master_for(where.service, connection_pool_class=SentinelConnectionPool, **options, **named)


class SentinelUrl:
    """A `redis+sentinel://` URL, taken apart. ValueError says what is wrong with it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        user, at, hosts = parts.netloc.rpartition("@")
        name, _, password = user.partition(":") if at else ("", "", "")
        self.username, self.password = unquote(name) or None, unquote(password) or None
        self.sentinels = [_address(each.strip()) for each in hosts.split(",")]
        service, _, db = parts.path.strip("/").partition("/")
        if not service:
            raise ValueError("a sentinel URL names the service, such as redis+sentinel://host:26379/mymaster")
        if db and not db.isdecimal():
            raise ValueError(f"a sentinel URL ends in the number of a database, not {db!r}")
        self.service, self.db = unquote(service), int(db or 0)
        asked = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        known = (*LOGIN_OPTIONS, *TLS_OPTIONS)
        unknown = sorted(set(asked) - set(known))
        if unknown:
            raise ValueError(f"unknown option {unknown[0]!r} of a sentinel URL; known: {', '.join(known)}")
        self.login = {name.removeprefix("sentinel_"): asked[name] for name in LOGIN_OPTIONS if name in asked}
        self.options: dict[str, Any] = {name: asked[name] for name in TLS_OPTIONS if name in asked}
        if parts.scheme.startswith("rediss"):
            self.options["ssl"] = True
        elif self.options:
            raise ValueError("TLS options need rediss+sentinel://")
        if "ssl_check_hostname" in self.options:
            self.options["ssl_check_hostname"] = asked["ssl_check_hostname"].lower() in ("1", "true", "yes")


def _address(said: str) -> tuple[str, int]:
    """HOST, HOST:PORT, and [HOST]:PORT for IPv6."""
    bare = said if said.endswith("]") else said.rpartition(":")[0] or said
    port = said[len(bare) + 1 :] if bare != said else "26379"
    host = bare.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"a sentinel is HOST:PORT with a port from 1 to 65535; look at {host!r}")
    return host, int(port)
