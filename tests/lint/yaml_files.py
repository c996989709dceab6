"""Every YAML file of the repository can be read."""

import yaml

from tests.lint.pages import ROOT

PLACES = ("*.yml", ".github/**/*.yml", "deploy/**/*.yml", ".pre-commit-config.yaml")


def problems() -> list[str]:
    found = []
    for path in sorted(path for place in PLACES for path in ROOT.glob(place)):
        try:
            list(yaml.compose_all(path.read_text(encoding="utf-8")))
        except yaml.YAMLError as error:
            found.append(f"{path.relative_to(ROOT)}: {' '.join(str(error).split())}")
    return found
