"""pip's settings, said in uv's words.

uv reads none of pip's configuration, yet a machine that is set up for pip (a mirror, a folder of wheels, a
certificate) should need no second set-up. Runs before anything is installed: standard library only.
"""

from collections.abc import Mapping, Sequence


def parse_pip_config(listing: str) -> dict[str, str]:
    """`pip config list` as option -> value. The environment beats [install], which beats [global]."""
    rank = {"global": 0, "install": 1, ":env:": 2}
    best: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.strip().rpartition(".")
        if section not in rank:
            continue
        option = option.replace("_", "-").removeprefix("default-")
        if option not in best or rank[section] >= best[option][0]:
            best[option] = (rank[section], value.strip().strip("'\""))
    return {option: value.replace("\\n", " ").strip() for option, (_, value) in best.items()}


def uv_environment(pip: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """The environment in which uv sees the indexes, wheels and certificates that pip sees.

    What the user told uv itself stands. `unsafe-best-match` is how pip treats several indexes.
    """
    out = dict(env)

    def say(name: str, value: str | None, unless: Sequence[str] = ()) -> None:
        if value and not any(out.get(n) for n in (name, *unless)):
            out[name] = value

    say("UV_DEFAULT_INDEX", pip.get("index-url"), unless=("UV_INDEX_URL",))
    if pip.get("extra-index-url") and not out.get("UV_INDEX"):
        say("UV_EXTRA_INDEX_URL", pip["extra-index-url"])
        say("UV_INDEX_STRATEGY", "unsafe-best-match")
    say("UV_FIND_LINKS", ",".join(pip.get("find-links", "").split()))
    say("SSL_CERT_FILE", pip.get("cert"))
    say("UV_INSECURE_HOST", pip.get("trusted-host"))
    say("HTTPS_PROXY", pip.get("proxy"), unless=("https_proxy", "ALL_PROXY", "all_proxy"))
    say("UV_HTTP_TIMEOUT", pip.get("timeout"))
    if pip.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        say("UV_NO_INDEX", "1")
    return out
