"""Requests that nobody should send: made from the API's own description, so that every route and
every field has its share.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MODEL = "penstock-demo"
# What no field, or hardly one, takes
NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    -(2**63) - 1,
    10**400,
    1e308,
    -0.0,
    0.1,
    "",
    " ",
    "\x00",
    "é" * 300,
    "a" * 70_000,
    "\u202e\ufeff",
    "../../etc/passwd",
    "${jndi:ldap://x}",
    "{{ 7 * 7 }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "' OR 1=1 --",
    "\r\nX-Injected: yes",
    "1e999",
    "NaN",
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": {}},
    [1, "a", None, {}],
    ["a"] * 3000,
    {"a": {"a": {"a": {"a": {"a": 1}}}}},
    {"type": "json_schema"},
    {"type": "object", "$ref": "#"},
    {"type": "\x00"},
    [[[[[[[[]]]]]]]],
    {"__class__": "x"},
]
# Bodies that are not JSON, or not JSON that anybody wants
RAW: list[bytes] = [
    b"",
    b"{",
    b"}",
    b"null",
    b"[]",
    b'"x"',
    b"0",
    b"{}{}",
    b"\x00",
    b"\xff\xfe{\x00}\x00",
    b"\xef\xbb\xbf{}",
    b'{"model": "\xc3\x28"}',
    b'{"model": "\\ud800"}',
    b'{"a": NaN}',
    b'{"a": 1e999}',
    b'{"a": ' + b"9" * 5000 + b"}",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"model": 1, "model": 2}',
    b"model=x&prompt=y",
    b"<xml/>",
    b"\x1f\x8b\x08\x00",
    b'{"messages": [' + b"{}," * 20_000 + b"{}]}",
    b'{"prompt": "' + b"\\u0000" * 20_000 + b'"}',
    bytes(range(256)) * 40,
]
PATH_IDS = [
    "x",
    "%00",
    "..%2f..%2fhealth",
    "%ff%fe",
    "resp_" + "0" * 32,
    "a" * 4000,
    "%F0%9F%92%A9",
    "chatcmpl-1",
    "'",
    "*",
    "resp_1.0",
    "%0d%0aX:%20y",
    "-1",
    "{}",
    "inflight:x",
]
QUERIES = [
    "",
    "?stream=true",
    "?stream=maybe",
    "?starting_after=-1",
    "?starting_after=" + "9" * 400,
    "?limit=0",
    "?limit=1e9",
    "?order=up",
    "?after=%00",
    "?" + "a=b&" * 500,
]
HEADERS: list[dict[str, str]] = [
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Type": "multipart/form-data"},
    {"Content-Encoding": "gzip"},
    {"Last-Event-ID": "-1"},
    {"Last-Event-ID": "9" * 300},
    {"Last-Event-ID": "1,2,3,4"},
    {"X-Request-Id": "x" * 5000},
    {"Accept": "nothing/atall"},
    {"Expect": "200-maybe"},
    {"Range": "bytes=0-"},
    {"Host": ""},
    {"X-Forwarded-For": "127.0.0.1"},
    {"traceparent": "00-zz-zz-01"},
    {"Cookie": "a=" + "b" * 4000},
]
# Connections that break the rules of HTTP: %s is the headers with the key
BROKEN: list[bytes] = [
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"GET\r\n\r\n",
    b"\r\n" * 50,
    b"GET /v1/models HTTP/9.9\r\n%s\r\n",
    b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: -5\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: 5\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: 99999999999999999999\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\nGET /metrics "
    b"HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n%sTransfer-Encoding: chunked\r\n\r\nZZZ\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\n%sContent-Length: 99999999\r\n\r\n{",
    b"GET /v1/models HTTP/1.1\r\nBad Header: y\r\n%s\r\n",
    b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 200_000 + b"\r\n%s\r\n",
    b"GET " + b"/" * 100_000 + b" HTTP/1.1\r\n%s\r\n",
    b"GET /v1/models HTTP/1.1\n%s\n\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: y\r\n%s\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET http://169.254.169.254/ HTTP/1.1\r\n%s\r\n",
    b"CONNECT example.com:443 HTTP/1.1\r\n%s\r\n",
]
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
SHORT = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 1, "num_predict": 1}
MESSAGES = [{"role": "user", "content": "x"}]
VALUES = {"model": MODEL, "messages": MESSAGES, "prompt": "x", "input": "x", "tokens": [1], "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class Case:
    """One request; `why` names what is wrong with it."""

    why: str
    method: str
    path: str
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    has_key: bool = True


def make_cases(api: dict[str, Any], seed: int) -> Iterator[Case]:
    """Without end, in an order that the seed decides. api: the OpenAPI description."""
    rng = random.Random(seed)
    routes = [
        (path, method.upper(), route) for path, methods in api["paths"].items() for method, route in methods.items()
    ]
    makers = (of_field, of_field, of_field, of_body, of_path, of_method, of_headers, of_key)
    while True:
        path, method, route = rng.choice(routes)
        yield rng.choice(makers)(rng, path, method, properties_of(api, route))


def properties_of(api: dict[str, Any], route: dict[str, Any]) -> list[str]:
    """The fields of the route's body."""
    schema = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    schema = schema.get("oneOf", [schema])[0]
    if "$ref" in schema:
        schema = api["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return sorted(schema.get("properties", {}))


def filled(rng: random.Random, path: str) -> str:
    """The path with something for each of its parameters."""
    while "{" in path:
        before, _, rest = path.partition("{")
        path = before + rng.choice(PATH_IDS) + rest.partition("}")[2]
    return path


def of_field(rng: random.Random, path: str, method: str, names: list[str]) -> Case:
    """A good body but for one field, or two."""
    body = {name: value for name, value in VALUES.items() if name in names} | {
        name: 1 for name in SHORT if name in names
    }
    wrong = rng.sample(names, min(len(names), rng.choice((1, 1, 2)))) if names else []
    body |= {name: rng.choice(NASTY) for name in wrong} or {"no_such_field": rng.choice(NASTY)}
    return Case(f"field {','.join(wrong)}", method, filled(rng, path), json.dumps(body).encode())


def of_body(rng: random.Random, path: str, method: str, _: list[str]) -> Case:
    content = rng.choice(RAW) if rng.random() < 0.8 else rng.randbytes(rng.choice((1, 50, 5000)))
    return Case("body", method, filled(rng, path), content)


def of_path(rng: random.Random, path: str, method: str, _: list[str]) -> Case:
    return Case(
        "path",
        method,
        filled(rng, path) + rng.choice((*QUERIES, "/", "/" + rng.choice(PATH_IDS), "%00")),
        b"{}" if method == "POST" else b"",
    )


def of_method(rng: random.Random, path: str, _: str, __: list[str]) -> Case:
    return Case("method", rng.choice(METHODS), filled(rng, path), rng.choice((b"", b"{}")))


def of_headers(rng: random.Random, path: str, method: str, _: list[str]) -> Case:
    return Case("headers", method, filled(rng, path), b"{}" if method == "POST" else b"", rng.choice(HEADERS))


def of_key(rng: random.Random, path: str, method: str, names: list[str]) -> Case:
    case = of_field(rng, path, method, names)
    wrong = rng.choice(
        (
            "",
            "Bearer",
            "Bearer ",
            "Bearer x",
            "Basic eDp4",
            "Bearer " + "k" * 5000,
            "Bearer sk-penstock-" + "A" * 43,
            "bearer\tx",
        )
    )
    return Case("key", method, case.path, case.content, {"Authorization": wrong} if wrong else {}, has_key=False)
