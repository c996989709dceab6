"""`python -m tests.clients.scripted FOLDER SCRIPT`: the pipeline around the scripted model, until
its standard input is closed. It prints its URL.
"""

import signal
import sys
from pathlib import Path

from tests.clients.scripted.pipeline import start_scripted
from tests.conftest import running_redis

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    folder, script = (Path(argument) for argument in sys.argv[1:])
    with running_redis(folder / "redis", None) as url:
        deployment = start_scripted(url, folder, script)
        try:
            print(deployment.url(), flush=True)
            sys.stdin.read()
        finally:
            deployment.stop()
