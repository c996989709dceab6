"""The inside of a helper process: questions from standard input, each answered on standard output.

Each question is answered by a child of its own, forked from a process that has imported the modules
and has read no question. So a question can't affect the next one, and a child that takes too long is
killed at the cost of a fork. A child has bounds of memory, time and files, and may start no process,
unless it is root.

A question is a QUESTION and its bytes; an empty one is answered at once, when the process is ready. A
reply is a REPLY and a value of plain.py. END ends the question that is being answered. The process
ends when its owner does, because its input ends then.
"""

import enum
import gc
import math
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from shared.process.errors import Invalid
from shared.process.plain import Unreadable, pack, unpack

MEMORY = 512 << 20  # in addition to what the process has at the start
FIRST_FREE = 3  # file descriptor, after the standard ones
MAX_FILES = 64  # that a child may have open: some modules are imported late
MAX_ANSWER = 1 << 30  # bytes; the bound on memory is lower

QUESTION = struct.Struct("<dQ")  # its time limit in s, and the number of bytes that follow
REPLY = struct.Struct("<BQ")  # the outcome, and the number of bytes that follow
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
OF_PYTHON = ("PYTHON", "LD_LIBRARY_PATH", "DYLD_")  # prefixes of the variables by which it finds its modules


END = (-1.0, 0)  # as a QUESTION: it cancels the one before


class Outcome(enum.IntEnum):
    ANSWER = 0
    INVALID = 1  # the fields of an Invalid
    OUT_OF_TIME = 2  # or ended by END
    DIED = 3


def environment() -> dict[str, str]:
    """The environment of a helper, without its owner's secrets, such as Redis' password."""
    return ENVIRONMENT | {name: value for name, value in os.environ.items() if name.startswith(OF_PYTHON)}


def outcome_of(reply: bytes, kind: int, classes: Iterable[type] = ()) -> object:
    """A reply's value, which may be an Invalid. Raises Unreadable; TimeoutError for a child that was
    killed by its time limit, EOFError for one that died."""
    if kind == Outcome.OUT_OF_TIME:
        raise TimeoutError
    if kind == Outcome.DIED:
        raise EOFError("the child died")
    value = unpack(reply, classes)
    if kind == Outcome.ANSWER:
        return value
    try:
        message, param, code, status = value
        return Invalid(message, param=param, code=code, status=status)
    except (TypeError, ValueError) as error:
        raise Unreadable(str(error)) from None


def run_worker(answer: Callable[[bytes], object], memory: int = MEMORY) -> None:
    """Answer questions until the input ends. An Invalid that `answer` raises is an answer, too.
    memory: bytes that a child may take."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the owner has gone: it needs no answer, and no traceback
    sink = os.dup(1)
    os.dup2(2, 1)  # so that a print does not go into the answers
    gc.collect()
    gc.freeze()  # the collector does not touch memory shared with children, so it is not copied
    while head := read(QUESTION.size):
        limit_s, length = QUESTION.unpack(head)
        if (limit_s, length) == END:
            continue  # it has been answered meanwhile
        question = read(length)
        if len(question) < length:
            return
        write(sink, ask_child(answer, question, memory, limit_s) if question else framed(Outcome.ANSWER, None))


def read(count: int) -> bytes:
    """Read so many bytes of the input; none at its end. It reads nothing ahead: `ask_child` polls the
    input."""
    data = bytearray()
    while len(data) < count and (piece := os.read(0, count - len(data))):
        data += piece
    return bytes(data) if len(data) == count else b""


def write(sink: int, reply: bytes) -> None:
    view = memoryview(reply)
    while view:
        view = view[os.write(sink, view) :]


def framed(outcome: Outcome, value: object) -> bytes:
    packed = pack(value)
    return REPLY.pack(outcome, len(packed)) + packed


def ask_child(answer: Callable[[bytes], object], question: bytes, memory: int, limit_s: float) -> bytes:
    """The child's reply. The child is killed at its time limit, by END, and at the end of the input."""
    source, sink = os.pipe()
    child = os.fork()
    if not child:
        answer_and_exit(answer, question, sink, memory, limit_s)
    os.close(sink)
    began_at, reply, length = time.monotonic(), bytearray(), 0
    outcome = Outcome.DIED
    while True:
        ready, _, _ = select.select([source, 0], [], [], max(0.0, began_at + limit_s - time.monotonic()))
        if source not in ready:
            outcome = Outcome.OUT_OF_TIME
            if ready:
                read(QUESTION.size)
            break
        piece = os.read(source, 1 << 20)
        reply += piece
        if not length and len(reply) >= REPLY.size:
            length = REPLY.size + REPLY.unpack_from(reply)[1]
        if not piece or (length and len(reply) >= length) or len(reply) > MAX_ANSWER:
            break
    os.close(source)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return bytes(reply) if length and len(reply) == length else framed(outcome, None)


def answer_and_exit(answer: Callable[[bytes], object], question: bytes, sink: int, memory: int, limit_s: float) -> NoReturn:
    """Answer the question, in the child."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # it must not read the next questions
        sink = os.dup2(sink, FIRST_FREE)
        os.closerange(FIRST_FREE + 1, MAX_FILES)  # nor write its parent's replies
        limit(memory, limit_s)
        write(sink, reply_to(answer, question))
        code = 0
    except MemoryError:
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def reply_to(answer: Callable[[bytes], object], question: bytes) -> bytes:
    try:
        return framed(Outcome.ANSWER, answer(question))
    except Invalid as error:
        return framed(Outcome.INVALID, [str(error), error.param, error.code, error.status])


def limit(memory: int, limit_s: float) -> None:
    """Set the child's limits. memory: bytes in addition to what the process has now."""
    bounds = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: math.ceil(limit_s) + 1,  # in case its parent has died
        resource.RLIMIT_NOFILE: MAX_FILES,
        resource.RLIMIT_NPROC: 0,
    }
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            bounds[resource.RLIMIT_AS] = int(file.read().split()[0]) * resource.getpagesize() + memory
    for each, value in bounds.items():
        resource.setrlimit(each, (value, value))
