"""Metrics: the dashboard and the alerts ask for what /metrics has, and for nothing else."""

import json
import re

import yaml

from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.pipeline_state import PipelineState
from services.requests.store.batches.figures import BatchFigures
from shared.process.stage_settings import StageSettings
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from tests.lint.problem import ROOT, Problem, line_of

DASHBOARD = ROOT / "deploy/observability/grafana/dashboards/penstock.json"
ALERTS = ROOT / "deploy/observability/alerts.yml"
SEVERITIES = ("info", "warning", "critical")
OF_HISTOGRAM = ("_bucket", "_count", "_sum")


def problems() -> list[Problem]:
    shown = series()
    return [*of_dashboard(shown), *of_alerts(shown)]


def series() -> set[str]:
    """The names of all series of /metrics, with their suffixes."""
    counted = Metrics({"home": Stage("gateway", StageSettings(redis_url="unix:///nowhere"))}).registry.collect()
    states = PipelineState((Replica("compute", "c", "here", 1, 0.0),), {}, {}, BatchFigures()).collect()
    suffixes = {"counter": ("_total",), "histogram": OF_HISTOGRAM, "gauge": ("",)}
    return {family.name + suffix for family in (*counted, *states) for suffix in suffixes[family.type]}


def of_dashboard(shown: set[str]) -> list[Problem]:
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    found = [Problem(DASHBOARD, 0, f"{len(panels)} panels, more than 20 are expected")] if len(panels) <= 20 else []
    if len({panel["id"] for panel in panels}) != len(panels):
        found.append(Problem(DASHBOARD, 0, "two panels have one id"))
    asked = {name for panel in panels for target in panel["targets"] for name in names(target["expr"])}
    return found + [
        Problem(DASHBOARD, line_of(DASHBOARD, name), f"/metrics has no {name}") for name in sorted(asked - shown)
    ]


def of_alerts(shown: set[str]) -> list[Problem]:
    rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
    found = [Problem(ALERTS, 0, f"{len(rules)} rules, more than 10 are expected")] if len(rules) <= 10 else []
    for rule in rules:
        line = line_of(ALERTS, rule["alert"])
        found += [Problem(ALERTS, line, f"/metrics has no {name}") for name in sorted(names(rule["expr"]) - shown)]
        if not rule["annotations"]["summary"] or rule["labels"]["severity"] not in SEVERITIES:
            found.append(Problem(ALERTS, line, f"{rule['alert']} needs a summary and a severity of {SEVERITIES}"))
    return found


def names(expression: str) -> set[str]:
    return set(re.findall(r"\bpenstock_\w+", expression))
