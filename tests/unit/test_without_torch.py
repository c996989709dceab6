"""CPU stages start without torch: the import contracts see our own imports, this test also those of the libraries."""

import subprocess
import sys

MODULES = ("gateway.app", "tokenizer.service", "sampler.service", "jobs.worker", "operator.launcher", "operator.cli")


def test_cpu_stages_do_not_import_torch() -> None:
    code = f"import sys, {', '.join(f'services.{each}' for each in MODULES)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
