"""The users of deploy/redis/users.acl may do what their stages' code does, and no more; and files that
set their passwords leave none with the one that everybody knows.

A stage's commands are those that the modules it imports call, by redis-py's methods or in scripts,
and those that libraries send.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import redis

from shared.wire.script import load_script
from tests.lint.problem import ROOT, Problem, line_of
from tests.lint.requirements import STAGES

ACL = ROOT / "deploy/redis/users.acl"
SETTERS = (ROOT / "docs/operate/secure.md", ROOT / "deploy/docker/make-secrets")
LOOP = re.compile(r" *for \w+ in ([A-Z ]+); do")

# What every user's line begins with. CLIENT's subcommands are denied by name: Redis 7.0 does not
# start where one is allowed that it doesn't know, as SETINFO
BEGINNING = "resetchannels -@all +client -@admin -@dangerous -client|caching -client|tracking"
# that redis-py sends by itself, to connect and around a pipeline
OF_EVERY_CLIENT = {"exec", "hello", "multi", "ping", "select"}
# that Celery's transport sends beside those
OF_LIBRARIES = {
    "gateway": {"del", "exists", "llen", "lpush", "pexpire", "sadd", "smembers"},
    "jobs": {
        "brpop",
        "del",
        "exists",
        "hdel",
        "hget",
        "hset",
        "llen",
        "lpush",
        "pexpire",
        "rpop",
        "rpush",
        "sadd",
        "script|load",
        "smembers",
        "unwatch",
        "watch",
        "zadd",
        "zrem",
        "zrevrangebyscore",
    },
}
# KEDA's Go client: of a cluster it asks for the commands, to know where their keys are; for a lag
# it wants to know the version
KEDA = {"cluster|slots", "command", "hello", "info", "ping", "select", "xinfo|groups", "xpending"}

METHODS = {name for name, _ in inspect.getmembers(redis.Redis, inspect.isfunction) if not name.startswith("_")}
SPELT = {"delete": "del", "scan_iter": "scan", "xgroup_create": "xgroup|create", "xpending_range": "xpending"}
# names of methods that other objects have, too: only of what is called like a client
COMMON = {
    "append",
    "auth",
    "client",
    "close",
    "command",
    "copy",
    "delete",
    "digest",
    "dump",
    "eval",
    "exists",
    "from_pool",
    "from_url",
    "ft",
    "get",
    "graph",
    "info",
    "json",
    "keys",
    "load",
    "lock",
    "monitor",
    "move",
    "object",
    "persist",
    "pipeline",
    "rename",
    "reset",
    "restore",
    "save",
    "select",
    "set",
    "shutdown",
    "sort",
    "sync",
    "time",
    "topk",
    "touch",
    "transaction",
    "type",
    "unlink",
    "wait",
    "watch",
}
CLIENTS = {"client", "home", "pipe"}
NO_COMMANDS = {"close", "execute_command", "from_pool", "from_url", "pipeline", "reset"}
SUBCOMMANDS = "CREATE|DELCONSUMER|CONSUMERS|GROUPS|STREAM"
LOADED = re.compile(r'\bload_script\("(\w+)"\)')
CALL = re.compile(rf"\bp?call\('([A-Z]+)'(?:, *'({SUBCOMMANDS})')?")


def problems() -> list[Problem]:
    needed, found = {stage: commands_of(stage) for stage in STAGES} | {"keda": KEDA}, list(unset_passwords())
    for user, names in allowed_by_user(ACL.read_text()):
        line = line_of(ACL, f"user {user} ")
        if names is None:
            found.append(
                Problem(ACL, line, f"after its password, {user} has {BEGINNING}, then commands by name, then keys")
            )
            continue
        for what, commands in (("lacks", needed[user] - names), ("does not need", names - needed[user])):
            if commands:
                found.append(Problem(ACL, line, f"{user} {what} {' '.join(f'+{each}' for each in sorted(commands))}"))
    return found


def allowed_by_user(acl: str) -> Iterator[tuple[str, set[str] | None]]:
    """The commands that each user but the operator has by name; None: it has more than that."""
    for line in acl.splitlines():
        _, user, rules = line.split(" ", 2)
        if user in ("default", "operator"):
            continue
        beginning, _, rest = rules.partition(f" {BEGINNING} ")
        names = [rule for rule in rest.split() if rule[0] in "+-" or rule.startswith("(")]
        yield (
            user,
            {name[1:] for name in names}
            if rest and len(beginning.split()) == 2 and all(re.fullmatch(r"\+[a-z|]+", name) for name in names)
            else None,
        )


def commands_of(stage: str) -> set[str]:
    """The commands that the code of a stage, and what it imports, sends to Redis."""
    graph = grimp.build_graph("services", "shared", exclude_type_checking_imports=True)
    package = f"services.{stage}"
    modules = {package, *graph.find_descendants(package), *graph.find_upstream_modules(package, as_package=True)}
    commands = {command for module in modules for command in called_in(path_of(module).read_text(encoding="utf-8"))}
    return commands | OF_EVERY_CLIENT | OF_LIBRARIES.get(stage, set()) | ({"evalsha"} if "eval" in commands else set())


def path_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def called_in(source: str) -> Iterator[str]:
    for script in LOADED.findall(source):
        for command, subcommand in CALL.findall(load_script(script).text):
            yield f"{command}|{subcommand}".rstrip("|").lower()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        method, of = node.func.attr, node.func.value
        name = (of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else "").lstrip("_")
        if method == "execute_command" and isinstance(node.args[0], ast.Constant):
            yield str(node.args[0].value).replace(" ", "|").lower()
        elif method in METHODS - NO_COMMANDS and (method not in COMMON or name in CLIENTS):
            yield SPELT.get(method, method)


def unset_passwords() -> Iterator[Problem]:
    users = sorted(re.findall(r">(\w+)_PASSWORD", ACL.read_text()))
    for path in SETTERS:
        loops = [
            (number, match)
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if (match := LOOP.fullmatch(line))
        ]
        if len(loops) != 1:
            yield Problem(path, 0, f"one loop over the users of users.acl is expected, there are {len(loops)}")
        for number, match in loops:
            if sorted(match[1].split()) != users:
                yield Problem(path, number, f"sets the passwords of {match[1]}, users.acl has {' '.join(users)}")
