"""The users of deploy/redis/users.acl on a server of a test: each stage of a Deployment is one of
them, so a command that its user may not give ends it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

ACL = Path(__file__).parent.parent / "deploy/redis/users.acl"

# Of the categories whose commands reach beyond their own connection and keys, all that a user may
# give. What is about a connection alone, whoever may have it
RISKY = ("admin", "connection", "dangerous", "pubsub", "scripting")
OWN_CONNECTION = {
    "auth",
    "client|capa",
    "client|getname",
    "client|getredir",
    "client|help",
    "client|id",
    "client|import-source",
    "client|info",
    "client|no-touch",
    "client|reply",
    "client|setinfo",
    "client|setname",
    "client|trackinginfo",
    "hello",
    "ping",
    "quit",
    "reset",
    "select",
}
SCRIPTS = {"eval", "evalsha"}
MAY = {
    "gateway": SCRIPTS | {"bgrewriteaof", "info"},
    "tokenizer": SCRIPTS,
    "compute": SCRIPTS,
    "sampler": SCRIPTS,
    "encoder": SCRIPTS,
    "jobs": SCRIPTS | {"info", "script|load"},
    "keda": {
        "command|count",
        "command|docs",
        "command|getkeys",
        "command|getkeysandflags",
        "command|help",
        "command|info",
        "command|list",
        "info",
    },
}


def rules_by_user() -> Iterator[tuple[str, list[str]]]:
    """The rules of each user that has a password, as ACL SETUSER takes them."""
    for line in ACL.read_text().splitlines():
        _, user, rules = line.split(" ", 2)
        if user != "default":
            yield user, re.findall(r"\([^)]*\)|\S+", rules)  # a selector in parentheses is one rule


def password_of(user: str) -> str:
    """As the file has it before it is put into use."""
    return f"{user.upper()}_PASSWORD"


def add_users(url: str) -> set[str]:
    """Make them at a server that has none yet. Returns their names."""
    with redis.Redis.from_url(url) as client:
        for user, rules in rules_by_user():
            client.execute_command("ACL", "SETUSER", user, *rules)
    return {user for user, _ in rules_by_user()}


def as_user(url: str, user: str) -> str:
    """The URL of a Unix socket, for one of them."""
    return url.replace("unix://", f"unix://{user}:{password_of(user)}@", 1)


def risky_commands(client: Any) -> dict[str, list[str]]:
    """All commands of the server that are RISKY, by name, with as many arguments as each must have."""
    names = {name.decode() for category in RISKY for name in client.execute_command("ACL", "CAT", category)}
    raw: Any
    with redis.Redis(connection_pool=client.connection_pool) as raw:
        raw.response_callbacks.pop("COMMAND", None)
        found = {name: raw.execute_command("COMMAND", "INFO", name)[0] for name in names}
    arguments = {
        name: [*name.split("|"), *["x"] * (abs(info[1]) - len(name.split("|")))] for name, info in found.items()
    }
    return {
        name: each
        for name, each in sorted(arguments.items())
        if not any(other.startswith(f"{name}|") for other in names)
    }
