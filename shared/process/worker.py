"""The inside of a helper process: questions from standard input, each answered on standard output.

A question is answered by a child, forked from a process that has imported its modules and has read no
question. By default each question has a child of its own, so it sees nothing of the others; a kept
child answers until one of them ends it. A child that takes too long is killed at the cost of a fork.
It has bounds of memory, time and files, and may start nothing, unless it is root.

A question is a QUESTION and its bytes; an empty one is answered as soon as the process is ready. A
reply is a REPLY and a value of plain.py. END ends the question that is being answered. The process
ends when its owner does, for then its input ends.
"""

import enum
import fcntl
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

MEMORY = 512 << 20  # more than what the process has when it begins
FIRST_FREE = 3  # file descriptor, behind the standard ones
MAX_FILES = 64  # open at once in a child: modules that are imported late
OUT_OF_CPU = (signal.SIGXCPU, signal.SIGPROF)  # signals that end a process whose processor time is used up
MAX_ANSWER = 1 << 30  # bytes; the bound on memory is tighter

QUESTION = struct.Struct("<dQ")  # its time limit in s, and the number of bytes that follow
REPLY = struct.Struct("<BQ")  # the outcome, and the number of bytes that follow
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
OF_PYTHON = ("PYTHON", "LD_LIBRARY_PATH", "DYLD_")  # beginnings of the variables with which it finds its modules

END = (-1.0, 0)  # as a QUESTION: it cancels the one before


class Outcome(enum.IntEnum):
    ANSWER = 0
    INVALID = 1  # the fields of an Invalid
    OUT_OF_TIME = 2  # or ended by END
    DIED = 3


def environment() -> dict[str, str]:
    """A helper's environment: nothing that its owner knows, such as Redis' password."""
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


def run_worker(answer: Callable[[bytes], object], memory: int = MEMORY, *, is_kept: bool = False) -> None:
    """Answer until the input ends. An Invalid that `answer` raises is an answer, too.

    memory: bytes that a child may take. is_kept: whether a child that has answered a question gets the
    next one, too: for questions that may know of each other.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sink = os.dup(1)
    os.dup2(2, 1)  # a module that prints does not print into the answers
    gc.collect()
    gc.freeze()  # the children share these objects: a collection would copy them
    child: ForkedChild | None = None
    while head := read(0, QUESTION.size):
        limit_s, length = QUESTION.unpack(head)
        if (limit_s, length) == END:
            continue  # the question has been answered meanwhile
        question = read(0, length)
        if len(question) < length:
            return
        reply = framed(Outcome.ANSWER, None)
        if question:
            child = child or ForkedChild(answer, memory, is_kept=is_kept)
            reply = child.ask(question, limit_s)
            child = None if child.has_ended else child
        try:
            write(sink, reply)
        except BrokenPipeError:  # the owner has gone
            return


def read(source: int, count: int) -> bytes:
    """Exactly so many bytes; empty at the end. Nothing is read ahead: `ForkedChild.ask` waits for more."""
    data = bytearray()
    while len(data) < count and (piece := os.read(source, count - len(data))):
        data += piece
    return bytes(data) if len(data) == count else b""


def write(sink: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sink, view) :]


def framed(outcome: Outcome, value: object) -> bytes:
    packed = pack(value)
    return REPLY.pack(outcome, len(packed)) + packed


class ForkedChild:
    """A fork of this process that answers one question, or, if it is kept, one after the other."""

    def __init__(self, answer: Callable[[bytes], object], memory: int, *, is_kept: bool) -> None:
        self.is_kept = is_kept
        self.has_ended = False
        source, self._questions = os.pipe()
        self._replies, sink = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            answer_and_exit(answer, source, sink, memory, is_kept=is_kept)
        os.close(source)
        os.close(sink)

    def ask(self, question: bytes, limit_s: float) -> bytes:
        """The reply. The child is ended by the time, by END, and by the end of the input."""
        try:
            write(self._questions, QUESTION.pack(limit_s, len(question)))
            write(self._questions, question)
        except BrokenPipeError:
            return framed(self._end(Outcome.DIED), None)
        ends_at, reply, length = time.monotonic() + limit_s, bytearray(), 0
        while not length or len(reply) < length:
            ready, _, _ = select.select([self._replies, 0], [], [], max(0.0, ends_at - time.monotonic()))
            if self._replies not in ready:
                if ready:
                    read(0, QUESTION.size)
                return framed(self._end(Outcome.OUT_OF_TIME), None)
            piece = os.read(self._replies, 1 << 20)
            reply += piece
            if not piece or len(reply) > MAX_ANSWER:
                return framed(self._end(Outcome.DIED), None)
            if not length and len(reply) >= REPLY.size:
                length = REPLY.size + REPLY.unpack_from(reply)[1]
        if not self.is_kept:
            self._end(Outcome.ANSWER)
        return bytes(reply) if len(reply) == length else framed(self._end(Outcome.DIED), None)

    def _end(self, outcome: Outcome) -> Outcome:
        """Kill the child. Returns the outcome, or OUT_OF_TIME if its processor time was used up."""
        if self.has_ended:
            return outcome
        self.has_ended = True
        os.close(self._questions)
        os.close(self._replies)
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        return Outcome.OUT_OF_TIME if os.WIFSIGNALED(status) and os.WTERMSIG(status) in OUT_OF_CPU else outcome


def answer_and_exit(
    answer: Callable[[bytes], object], source: int, sink: int, memory: int, *, is_kept: bool
) -> NoReturn:
    """In the child."""
    code = 1
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # without a parent it ends without a word
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # its parent's questions and replies are not its own
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE + 2) for fd in (source, sink)]
        source, sink = (os.dup2(fd, FIRST_FREE + number) for number, fd in enumerate(high))
        os.closerange(FIRST_FREE + 2, MAX_FILES)
        limit_resources(memory)
        while head := read(source, QUESTION.size):
            limit_s, length = QUESTION.unpack(head)
            limit_processor(limit_s)
            question = read(source, length)
            if not is_kept:
                os.close(source)
            write(sink, reply_to(answer, question))
            if not is_kept:
                break
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


def limit_resources(memory: int) -> None:
    """memory: bytes beyond those that the process has now."""
    bounds = {resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: MAX_FILES, resource.RLIMIT_NPROC: 0}
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            bounds[resource.RLIMIT_AS] = int(file.read().split()[0]) * resource.getpagesize() + memory
    for each, bound in bounds.items():
        resource.setrlimit(each, (bound, bound))


def limit_processor(limit_s: float) -> None:
    """The processor time from now on, if no parent is left to kill this process."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + limit_s) + 1, hard_limit))
