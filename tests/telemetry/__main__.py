"""`make verify SUITE=telemetry`: is what the pipeline tells of itself true? Real processes, a real
Prometheus, an OTLP collector; some four minutes.

    python -m tests.telemetry [rules] [traces] [batches] [metrics]

rules: alerts fire for what they are about, by promtool. traces: a request whose compute replica is
killed in the middle is one trace. batches: so is each line of a batch whose worker is killed.
metrics: a pipeline under load, two gateways, replicas killed, scraped by Prometheus (Debian's
package): every expression of the dashboard and of the alerts is evaluated, and counts are compared
with what clients counted.
"""

import sys
import tempfile
from pathlib import Path

from tests.conftest import running_redis
from tests.telemetry.batches import follow_batch
from tests.telemetry.metrics import check_rules, scrape
from tests.telemetry.traces import follow

PARTS = {"rules": check_rules, "traces": follow, "batches": follow_batch, "metrics": scrape}


def main() -> int:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        print(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder) / "redis", None) as url:
            PARTS[name](url, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
