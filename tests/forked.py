"""A plugin of pytest, `-p tests.forked --forks N`: it collects once, and N processes that are forked then run the files.

Each has imported all that tests import, which takes an interpreter's own start ten seconds. A free
process takes the next file, in the order in which they were collected. Fixtures of a session live as
long as their process.
"""

import gc
import os
import pickle
import queue
import signal
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest
from _pytest.reports import TestReport

NUMBER_BYTES = 4  # of a file, in the pipe that has those that nobody has taken


class Reporting:
    """A plugin of a forked process: its reports go to the process that shows and counts them."""

    def __init__(self, config: pytest.Config, to: BinaryIO) -> None:
        self.config = config
        self.to = to

    def pytest_runtest_logreport(self, report: TestReport) -> None:
        pickle.dump(self.config.hook.pytest_report_to_serializable(config=self.config, report=report), self.to)
        self.to.flush()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=1, help="how many processes run the files")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop says so
    files: dict[Path, list[pytest.Item]] = defaultdict(list)
    for item in session.items:
        files[item.path].append(item)
    free = numbers_in_a_pipe(len(files))
    base = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()  # a collection in a forked process would write to every page
    processes = [fork(session, list(files.values()), free, base / str(number)) for number in range(session.config.option.forks)]
    gc.unfreeze()
    os.close(free)
    try:
        log_reports(session, [reports for _, reports in processes])
    except BaseException:
        for pid, _ in processes:
            os.kill(pid, signal.SIGTERM)
        raise
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in processes]
    if died := [code for code in codes if code]:
        print(f"\nprocesses that ended before their tests, by exit code or signal: {died}")
    return True


def numbers_in_a_pipe(count: int) -> int:
    """The reading end of a pipe that holds the numbers below `count`, and then ends. A read of NUMBER_BYTES takes one."""
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(NUMBER_BYTES, "little") for number in range(count)))
    os.close(writing)
    return reading


def fork(session: pytest.Session, files: list[list[pytest.Item]], free: int, base: Path) -> tuple[int, BinaryIO]:
    """A process that runs files as long as there are some: its id, and its reports."""
    reading, writing = os.pipe()
    if pid := os.fork():
        os.close(writing)
        return pid, os.fdopen(reading, "rb")
    code = 1
    try:
        os.close(reading)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt, so that fixtures are torn down
        base.mkdir()
        session.config._tmp_path_factory._basetemp = base  # type: ignore[attr-defined]
        own_output(session.config)
        session.config.pluginmanager.register(Reporting(session.config, os.fdopen(writing, "wb")))
        run(session, (item for number in iter(lambda: os.read(free, NUMBER_BYTES), b"") for item in files[int.from_bytes(number, "little")]))
        code = 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends one, and then the parent the other
            signal.signal(number, signal.SIG_IGN)
        with suppress(BaseException):
            session._setupstate.teardown_exact(None)
        os._exit(code)


def own_output(config: pytest.Config) -> None:
    """Capture the output of tests in files of this process. Anything else that it writes is lost."""
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    with open(os.devnull, "r+b") as nothing:
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)
    capture.start_global_capturing()
    capture.suspend_global_capture()


def run(session: pytest.Session, items: Iterator[pytest.Item]) -> None:
    """Run one after the other. Before the last one of a file, the next file is taken: what fixtures end with depends on what comes next."""
    parent = os.getppid()
    item = next(items, None)
    while item is not None and os.getppid() == parent:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following


def log_reports(session: pytest.Session, sources: list[BinaryIO]) -> None:
    """Show and count what the processes report. A test without a report has failed: its process died in it, or before it came to it."""
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
    for source in sources:
        threading.Thread(target=read_reports, args=(source, arrived), daemon=True).start()
    left = {item.nodeid: item for item in session.items}
    num_reading = len(sources)
    while num_reading:
        if (data := arrived.get()) is None:
            num_reading -= 1
            continue
        report = session.config.hook.pytest_report_from_serializable(config=session.config, data=data)
        session.config.hook.pytest_runtest_logreport(report=report)
        if report.when == "teardown":
            left.pop(report.nodeid, None)
            session.config.hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
    for item in left.values():
        lost = TestReport(item.nodeid, item.location, {}, "failed", "the process that ran this file died, in this test or before it", "call")
        session.config.hook.pytest_runtest_logreport(report=lost)


def read_reports(source: BinaryIO, arrived: "queue.SimpleQueue[object]") -> None:
    """Ends with a None."""
    with source, suppress(EOFError, pickle.UnpicklingError):  # the last one may be a part of a report
        while True:
            arrived.put(pickle.load(source))
    arrived.put(None)
