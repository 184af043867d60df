"""What a store's URL means, what is wrong with it, and what people and logs may see of it."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.store import open_store
from controlplane.store.connection import Connection, SentinelUrl, shown, with_password


def test_a_sentinel_url_in_full() -> None:
    url = SentinelUrl(
        "rediss+sentinel://ad%40a:p%2Fw@a:1,b,[::1]:3/main/2?ssl_ca_certs=ca.pem&ssl_check_hostname=no"
        "&sentinel_username=s&sentinel_password=p%2Bw"
    )
    assert (url.username, url.password, url.service, url.db) == ("ad@a", "p/w", "main", 2)
    assert url.sentinels == [("a", 1), ("b", 26379), ("::1", 3)]
    assert url.login == {"username": "s", "password": "p+w"}
    assert url.options == {"ssl": True, "ssl_ca_certs": "ca.pem", "ssl_check_hostname": False}


def test_a_sentinel_url_at_its_shortest() -> None:
    url = SentinelUrl("redis+sentinel://a/main")
    assert (url.username, url.password, url.service, url.db) == (None, None, "main", 0)
    assert (url.sentinels, url.login, url.options) == ([("a", 26379)], {}, {})
    assert SentinelUrl("redis+sentinel://:pw@a/main").password == "pw"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://a:1", "names the service"),
        ("redis+sentinel://a:1/", "names the service"),
        ("redis+sentinel:///main", "HOST:PORT"),
        ("redis+sentinel://a,,b/main", "HOST:PORT"),
        ("redis+sentinel://a:x/main", "HOST:PORT"),
        ("redis+sentinel://a:0/main", "1 to 65535"),
        ("redis+sentinel://a:70000/main", "1 to 65535"),
        ("redis+sentinel://a:1/main/x", "number of a database, not 'x'"),
        ("redis+sentinel://a:1/main/1/2", "number of a database, not '1/2'"),
        ("redis+sentinel://a:1/main?socket_keepalive=1", "unknown option 'socket_keepalive'.*sentinel_password"),
        ("redis+sentinel://a:1/main?ssl_ca_certs=ca.pem", "need rediss"),
        ("redis+sentinel://ada:secret/x@a:1/main", "%2F"),
        ("redis://ada:secret/x@a:1/0", "%2F"),
        ("redis://ada:secret?x@a:1/0", "%2F"),
        ("redis://ada:secret", "can't be read"),
        ("redis://a:1/0?protocol=3", "protocol can't be set"),
        ("redis://a:1/0?socket_timeout=1", "socket_timeout can't be set"),
    ],
)
def test_a_url_that_means_nothing_is_an_error_that_shows_no_password(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        open_store(url, "default")
    assert "secret" not in str(caught.value)


HARD = "p@ss/w:rd#?%41 ü"


@pytest.mark.parametrize(
    ("url", "user"),
    [
        ("redis://h:6380/3", None),
        ("redis://ada@h:6380/3", "ada"),
        ("redis://ada:@h:6380/3", "ada"),
        ("rediss://h:6380/3?ssl_ca_certs=ca.pem", None),
        ("unix:///run/valkey.sock?db=3", None),
        ("redis+sentinel://a:1,b:2/main/3?sentinel_password=p", None),
        ("redis+sentinel://ada@a:1,b:2/main/3", "ada"),
    ],
)
def test_a_password_by_itself_goes_to_the_store_as_it_is(url: str, user: str | None) -> None:
    said = with_password(url, HARD)
    at = Connection(said, block_s=1.0)
    asked = at.redis.connection_pool.connection_kwargs
    assert (asked["password"], asked.get("username") or None, asked["db"]) == (HARD, user, 3)
    assert at.shown == shown(url) and with_password(url, "") == url
    assert asked.get("host", "h") == "h" and asked.get("path", "/run/valkey.sock") == "/run/valkey.sock"


@pytest.mark.parametrize(
    "url", ["redis://:other@h", "redis://ada:other@h/0", "redis://h?password=other", "redis://a/b@h"]
)
def test_two_passwords_are_one_too_many(url: str) -> None:
    with pytest.raises(ValueError, match="leave one of them out") as caught:
        open_store(url, "default", password=HARD)
    assert HARD not in str(caught.value) and "other" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("redis://ada:secret@a:1/0?x=secret", "redis://a:1/0"),
        ("redis+sentinel://ada:secret@a:1,b:2/main?sentinel_password=secret", "redis+sentinel://a:1,b:2/main"),
        ("redis+sentinel://a:1/main?sentinel_password=p@secret", "redis+sentinel://…"),
        ("redis://ada:secret?x@a:1/0", "redis://…"),
        ("unix://ada:secret@/run/store.sock?db=1", "unix:///run/store.sock"),
    ],
)
def test_what_is_shown_of_a_url(url: str, seen: str) -> None:
    assert shown(url) == seen


async def test_a_cancellation_that_the_client_swallows_is_not_lost() -> None:
    """As `asyncio.wait_for` does in Python 3.11 when its work is just done."""
    at = Connection("redis://127.0.0.1:1/0", block_s=1.0)
    begun = asyncio.Event()

    async def swallowing() -> str:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "an answer all the same"
        return ""

    asking = asyncio.create_task(at.ask(swallowing()))
    await begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await at.close()
