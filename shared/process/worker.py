"""The inside of a helper process: frames from standard input (length, question), each answered on
standard output (length, pickle).

An empty question is answered with None: whoever asks it sees that the process has imported what it
needs. Ends when its owner does, for then its input ends.
"""

import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import IO

from shared.process.errors import Invalid

MEMORY = 512 << 20  # more than what the process has when it begins

FRAME = struct.Struct("<Q")  # length of what follows


def run_worker(answer: Callable[[bytes], object]) -> None:
    """Answer until the input ends. What `answer` raises as Invalid is an answer, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whoever asked has gone: no answer is owed, nor a traceback
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints does not print into the answers
    serve(sys.stdin.buffer, sink, answer)


def serve(source: IO[bytes], sink: IO[bytes], answer: Callable[[bytes], object]) -> None:
    while len(head := source.read(FRAME.size)) == FRAME.size:
        (length,) = FRAME.unpack(head)
        question = source.read(length)
        if len(question) < length:
            return
        try:
            outcome: object = answer(question) if question else None
        except Invalid as error:
            outcome = error
        packed = pickle.dumps(outcome, 5)
        del question, outcome
        sink.write(FRAME.pack(len(packed)))
        sink.write(packed)
        sink.flush()


def limit_memory(more: int = MEMORY) -> None:
    """more: bytes beyond what the process has now."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + more, size + more))
