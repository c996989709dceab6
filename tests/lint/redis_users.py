"""Files that set the passwords of deploy/redis/users.acl leave no user with the one that everybody knows."""

import re

from tests.lint.problem import ROOT, Problem

ACL = ROOT / "deploy/redis/users.acl"
SETTERS = (ROOT / "docs/operate/secure.md", ROOT / "deploy/docker/make-secrets")
LOOP = re.compile(r" *for \w+ in ([A-Z ]+); do")


def problems() -> list[Problem]:
    users = sorted(re.findall(r">(\w+)_PASSWORD", ACL.read_text()))
    found = []
    for path in SETTERS:
        loops = [(number, match) for number, line in enumerate(path.read_text().splitlines(), 1) if (match := LOOP.fullmatch(line))]
        if len(loops) != 1:
            found.append(Problem(path, 0, f"one loop over the users of users.acl is expected, there are {len(loops)}"))
        found += [
            Problem(path, number, f"sets the passwords of {match[1]}, users.acl has {' '.join(users)}")
            for number, match in loops
            if sorted(match[1].split()) != users
        ]
    return found
