"""`python -m services.gateway.body_worker`: the gateway's helper, which parses long bodies, so that no body stalls the streams of others.

Reads frames from standard input (kind, length, body), answers each on standard output with a length and the pickled outcome: the checked body, or
Invalid. Ends when its gateway does, for then its input ends.
"""

import gc
import os
import pickle
import signal
import struct
import sys
from typing import IO

from services.gateway.openai.parse import BODIES, parse
from shared.errors import Invalid

REQUEST = struct.Struct("<BQ")  # index into KINDS, length of the body
REPLY = struct.Struct("<Q")  # length of the pickle
KINDS = tuple(BODIES)


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    while len(head := source.read(REQUEST.size)) == REQUEST.size:
        kind, length = REQUEST.unpack(head)
        data = source.read(length)
        if len(data) < length:
            return
        try:
            outcome: object = parse(KINDS[kind], data)
        except Invalid as error:
            outcome = error
        packed = pickle.dumps(outcome, 5)
        sink.write(REPLY.pack(len(packed)))
        sink.write(packed)
        sink.flush()
        del data, outcome, packed
        gc.collect()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not print into the replies
    gc.disable()  # millions of small objects at once, freed as soon as they are checked: looking for cycles among them doubles the time
    serve(sys.stdin.buffer, sink)


if __name__ == "__main__":
    main()
