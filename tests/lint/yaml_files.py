"""Every YAML file of the repository can be read."""

import yaml

from tests.lint.problem import ROOT, Problem

PLACES = ("*.yml", ".github/**/*.yml", "deploy/**/*.yml", ".pre-commit-config.yaml")


def problems() -> list[Problem]:
    found = []
    for path in sorted(path for place in PLACES for path in ROOT.glob(place)):
        try:
            list(yaml.compose_all(path.read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            found.append(Problem(path, 0, " ".join(str(error).split())))
    return found
