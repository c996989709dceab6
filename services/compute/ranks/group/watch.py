"""GroupWatch: the thread that ends this process when a rank of its group has died, hangs, or is cut off.

Every rank tells rank 0 that it lives, and rank 0 tells every rank, on connections of their own:
a long step, or a full connection for commands, delays no sign of life. The end is `os._exit`, since
the main thread may wait in native code for a rank that will never come.
"""

import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, NoReturn

import msgpack

from services.compute.ranks.group.peer import Peer
from shared.process.telemetry import get_logger
from shared.wire.stage import STOP_TIMEOUT_S

log = get_logger("penstock.compute")

BEAT_S = 0.5
FAREWELL_S = 1.0  # for a peer to read why the group ends
LOST_S = 5.0  # within which a lost connection is understood
STARTUP_ERROR = 2  # exit code: starting again will not help
Kind = Literal["lives", "fails", "leaves", "closes"]


class GroupWatch(threading.Thread):
    def __init__(self, peers: Sequence[Peer], timeout_s: float) -> None:
        """timeout_s: silence of a peer that ends this process; it may be changed at any time."""
        super().__init__(name="group", daemon=True)
        self.peers = tuple(peers)
        self.timeout_s = timeout_s
        self.busy: tuple[float, str] | None = (
            None  # monotonic, s: since when the main thread carries a command out, and its name
        )
        self.step_timeout_s: float | None = None  # how long that may take
        self._is_ended = False
        self.is_closing = False  # rank 0 has said that the work is done
        self._stops_at: float | None = None  # monotonic, s: it has been told to stop, and waits for rank 0 until then
        self._lock = threading.Lock()  # a watch that was stopped ends no process
        self._wakes, self._wake = socket.socketpair()

    def run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wakes, selectors.EVENT_READ)
                for peer in self.peers:
                    selector.register(peer.watch, selectors.EVENT_READ, (peer, msgpack.Unpacker()))
                self._watch(selector)
        except Exception as error:  # a mistake of ours: unwatched, the group could hang for ever
            log.exception("the watch failed, ending the process", error=repr(error))
            os._exit(1)

    def _watch(self, selector: selectors.BaseSelector) -> None:
        beat_at = looked_at = time.monotonic()
        while not self._is_ended:
            if (now := time.monotonic()) >= beat_at:
                beat_at = now + BEAT_S
                self.tell("lives")
            ready = selector.select(max(0.0, beat_at - now))
            now = time.monotonic()
            if (
                now - looked_at > BEAT_S + self.timeout_s / 2
            ):  # this process was stopped: it has not read what the others said
                for peer in self.peers:
                    peer.heard_at = now
            looked_at = now
            for key, _ in ready:
                if key.data is not None:
                    self._read(*key.data)
            self._check(now)

    def _read(self, peer: Peer, unpacker: msgpack.Unpacker) -> None:
        try:
            data = peer.watch.recv(1 << 16)
        except OSError:  # a time-out or a reset of TCP
            data = b""
        if not data:
            self._end(f"{peer} died: {peer.why_it_died()}")
            return
        peer.heard_at = time.monotonic()
        unpacker.feed(data)
        for kind, reason, code in unpacker:
            if kind == "fails":
                self._end(f"{peer}: {reason}", code, of=peer)
            elif kind == "closes":
                self.is_closing = True
            elif kind == "leaves":
                log.info("a rank was asked to stop, so the group stops", rank=str(peer))
                os.kill(os.getpid(), signal.SIGTERM)

    def _check(self, now: float) -> None:
        silent = next((peer for peer in self.peers if now - peer.heard_at > self.timeout_s), None)
        if silent is not None:
            self._end(
                f"{silent} has been silent for {now - silent.heard_at:.1f} s: it is stopped, or cut off "
                f"(--group-timeout-s {self.timeout_s:g})"
            )
        busy = self.busy
        if busy is not None and self.step_timeout_s is not None and now - busy[0] > self.step_timeout_s:
            self.fail(f"its {busy[1]} takes longer than --step-timeout-s {self.step_timeout_s:g}")
        if self._stops_at is not None and now > self._stops_at:
            os._exit(0)

    def tell(self, kind: Kind, reason: str = "", code: int = 0, but: Peer | None = None) -> None:
        """Give all peers, but for one, a sign. A peer that does not read gets none: it will be found
        silent."""
        sign = msgpack.packb((kind, reason, code))
        for peer in self.peers:
            if peer is not but:
                with suppress(OSError):
                    peer.watch.send(sign, socket.MSG_DONTWAIT)

    def part(self, reason: str, code: int, but: Peer | None = None) -> None:
        """Tell all peers, but for one, why the group ends; and wait a moment, until those of other hosts
        have read it: TCP forgets what it has not delivered if an end closes with bytes unread."""
        self.tell("fails", reason, code, but)
        deadline = time.monotonic() + FAREWELL_S
        for peer in self.peers:
            if peer is not but and peer.process is None and not peer.is_parent:
                with suppress(OSError):
                    peer.watch.shutdown(socket.SHUT_WR)
                    peer.watch.settimeout(FAREWELL_S)
                    while time.monotonic() < deadline and peer.watch.recv(1 << 16):
                        pass

    def fail(self, reason: str) -> NoReturn:
        """End the group because of this rank."""
        log.error("this rank ends its group", reason=reason)
        self.part(reason, 1)
        self._exit(1)

    def leave(self) -> None:
        """This rank was asked to stop: so is rank 0, which ends the group when its work is handed
        on. If it does not, this process ends."""
        self._stops_at = time.monotonic() + STOP_TIMEOUT_S
        self.tell("leaves")

    def close(self) -> None:
        """The group's work is done: the peers end with 0, whatever they are doing."""
        self.tell("closes")
        self.stop()

    def stop(self) -> None:
        """Peers may end after this call. Safe to call twice."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
        self._wake.send(b"\0")
        if self.is_alive():
            self.join()
        self._wake.close()
        self._wakes.close()

    def _end(self, reason: str, code: int = 1, of: Peer | None = None) -> None:
        """of: the peer that gave the reason."""
        with self._lock:
            if self._is_ended:
                return
            if self.is_closing:  # the main thread is in a step whose result is not read
                self._exit(0)
            if of is None or not of.is_parent:  # the parent says it itself, to the same terminal
                self._say(reason, code)
            self.part(reason, code, but=of)
            if of is not None:
                of.await_end()  # it may have a traceback to write
            self._exit(code)

    def _say(self, reason: str, code: int) -> None:
        if code == STARTUP_ERROR:
            sys.stderr.write(f"penstock: {reason}\n")
        else:
            log.error("the group ends", reason=reason)

    def _exit(self, code: int) -> NoReturn:
        for peer in self.peers:
            peer.kill()
        os._exit(code)

    def await_end(self, peer: Peer, error: Any) -> NoReturn:
        """The main thread lost its connection to a peer: this thread will see why, and end the
        process."""
        time.sleep(LOST_S)
        self.fail(f"it lost its connection to {peer}: {error!r}")
