"""The team of a sharded trainer: rank 0 says what is to be called, and every rank calls it on its own objects.

    team.make("policy", ShardedPolicy, path, ...)      every rank makes its own and keeps it by that name
    team.everywhere("optimizer", "_step")              every rank calls that method; rank 0 gets all results
    team.each("policy", "_compute", [(a,), (b,)])      the same, each rank with its own arguments

So a method is ordinary code that every rank runs alike, collectives of torch.distributed included. Orders and results
are small and go over one TCP connection per follower (`Line`), which also tells both ends at once that the
other has died, whatever it does meanwhile. What is large (weights, gradients) goes through collectives: gloo on CPUs,
NCCL on GPUs. Within a called method, further calls are local.

A rank that fails ends the run (law 7): its traceback comes over its line, a rank that dies without a word closes it.
Rank 0 raises TeamError wherever it looks next: in a call, at `check`, or in `explain` after whatever that has broken.

| waits for | deadline | unblocked by |
| --- | --- | --- |
| an order (follower) | none: rank 0 may wait for hours | the order, rank 0's end, its host's silence (30 s) |
| a result (rank 0), a collective (both) | DEADLINE | the result, the end of any rank |
| a collective with a dead rank | GRACE | the follower ends; NCCL's is aborted on rank 0, gloo notices by itself |
"""

import contextlib
import functools
import hmac
import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from grpo.distributed import Place

DEADLINE = 1200.0  # seconds for one call; loading a model is one
GRACE = 5.0  # seconds from the end of a rank to that of those who wait for it in a collective
LAST_WORDS = 3.0  # seconds for a rank's traceback to arrive, when a collective has broken
SILENT = "it ended without a word: killed, or out of memory"


class TeamError(RuntimeError):
    """A rank has failed or died. The message holds its traceback."""


class Line:
    """A connection between rank 0 and a follower, for Python objects. `peer` is the rank at the other end.

    A follower shows the run's key first; nothing is unpickled from whoever cannot.
    """

    def __init__(self, connection: socket.socket, peer: int) -> None:
        self.peer = peer
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes closes nothing: after 15 s of silence the kernel asks, three times.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)  # ms for what was sent

    @classmethod
    def connected(cls, host: str, port: int, key: bytes, rank: int) -> "Line":
        """A follower's end."""
        connection = socket.create_connection((host, port), timeout=DEADLINE)
        connection.sendall(key + struct.pack("!Q", rank))
        return cls(connection, 0)

    @classmethod
    def accepted(cls, listener: socket.socket, key: bytes) -> "Line | None":
        """Rank 0's end of the next one; None for a stranger. Raises TimeoutError by the listener's deadline."""
        connection, _ = listener.accept()
        connection.settimeout(GRACE)
        with contextlib.suppress(OSError):
            shown = _exactly(connection, len(key) + 8)
            if hmac.compare_digest(shown[: len(key)], key):
                return cls(connection, struct.unpack("!Q", shown[len(key) :])[0])
        connection.close()
        return None

    def send(self, content: Any) -> None:
        """Raises OSError when the other end is gone, or takes nothing for DEADLINE seconds."""
        data = pickle.dumps(content, protocol=5)
        self._socket.settimeout(DEADLINE)
        self._socket.sendall(struct.pack("!Q", len(data)))
        self._socket.sendall(data)

    def receive(self, timeout: float | None) -> Any:
        """The next object. Raises EOFError when the other end is gone, TimeoutError."""
        try:
            self._socket.settimeout(timeout)
            (size,) = struct.unpack("!Q", _exactly(self._socket, 8))
            return pickle.loads(_exactly(self._socket, size))
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError(str(error)) from error

    def ready(self, timeout: float) -> bool:
        """Whether `receive` would not wait."""
        watch = select.poll()
        watch.register(self._socket, select.POLLIN)
        return bool(watch.poll(1000 * timeout))

    def wait_for_end(self) -> None:
        """Until the other end has closed, however it ended; reads nothing."""
        watch = select.poll()
        watch.register(self._socket, select.POLLRDHUP)
        watch.poll()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Team:
    """One rank's view. `lines`: rank 0 has one to each follower, a follower the one to rank 0.

    `device` is this rank's own, `mesh` has every rank. `objects` are this rank's, by name.
    """

    def __init__(self, here: Place, device: str, store: Any, lines: dict[int, Line]) -> None:
        self.rank, self.ranks = here.rank, here.ranks
        self.device = torch.device("cuda", here.local_rank) if device == "cuda" else torch.device(device)
        self.objects: dict[str, Any] = {"team": self}
        self.failures: dict[int, tuple[bool, str]] = {}  # rank -> (may be a consequence, why)
        self._lines = lines
        self._lock = threading.RLock()  # a weight sync calls from a thread of its own
        self._calling = self._torn = self._closing = False
        for line in lines.values():
            threading.Thread(target=self._watch, args=(line,), name=f"rank-{line.peer}", daemon=True).start()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        try:
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=dist.PrefixStore("grpo", store),  # type: ignore[attr-defined]
                rank=self.rank,
                world_size=self.ranks,
                timeout=timedelta(seconds=DEADLINE),
                device_id=self.device if self.device.type == "cuda" else None,
            )
        except RuntimeError as error:
            self.explain(error)
            raise
        self.mesh = init_device_mesh(self.device.type, (self.ranks,))

    # ---- rank 0 ----

    def make(self, name: str, kind: Callable[..., Any], /, *arguments: Any, **settings: Any) -> Any:
        """Every rank's `kind(*arguments, team=..., name=name, **settings)`; rank 0's is returned."""
        self.everywhere("team", "_make", name, kind, arguments, settings)
        return self.objects[name]

    def everywhere(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """The same call on every rank; the results by rank. Within a call: here alone."""
        return self.each(name, method, [arguments] * self.ranks)

    def each(self, name: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`arguments[r]` are those of rank r. Raises what rank 0's own call raises, or TeamError."""
        with self._lock:
            if self._calling:
                return [getattr(self.objects[name], method)(*arguments[self.rank])]
            self.check()
            if self._torn:
                raise TeamError("an earlier call was broken off, so the ranks are not in step")
            self._calling = self._torn = True
            try:
                for rank, line in self._lines.items():
                    self._guarded(rank, functools.partial(line.send, (name, method, arguments[rank])))
                own = getattr(self.objects[name], method)(*arguments[0])
                results = [own, *(self._result(rank) for rank in range(1, self.ranks))]
                self._torn = False
                return results
            except RuntimeError as error:
                self.explain(error)
                raise
            finally:
                self._calling = False

    def check(self) -> None:
        """Raises TeamError when a follower has failed or is gone. Reads what has come, and waits for nothing."""
        if self.rank or not self._lock.acquire(blocking=False):  # a call that goes on hears it itself
            return
        try:
            if not self._calling:
                self._listen(0.0)
                if self.failures:
                    raise TeamError(self._reason())
        finally:
            self._lock.release()

    def explain(self, error: BaseException) -> None:
        """Raises TeamError from `error` when a follower is gone; waits a little for its words where one must be."""
        if self.rank or isinstance(error, TeamError):
            return
        self._listen(LAST_WORDS if isinstance(error, RuntimeError) else 0.5)
        if self.failures:
            raise TeamError(self._reason()) from error

    def close(self) -> None:
        """Every follower ends, and so does the process group."""
        self._closing = True
        for line in self._lines.values():
            with contextlib.suppress(OSError):
                line.send(None)
            line.close()
        if self.device.type == "cpu" or not (self.failures or self._torn):  # NCCL would wait for the dead
            dist.destroy_process_group()

    def _result(self, rank: int) -> Any:
        kind, content = self._guarded(rank, lambda: self._lines[rank].receive(DEADLINE))
        if kind == "failed":
            self.failures[rank] = content
            self._listen(0.5)  # the others' words: it may be that this one only saw another die
            raise TeamError(self._reason())
        return content

    def _guarded(self, rank: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except TimeoutError as error:
            raise TeamError(f"rank {rank} did not answer within {DEADLINE:g} s") from error
        except (EOFError, OSError):
            self.failures.setdefault(rank, (False, SILENT))
            self._listen(0.5)
            raise TeamError(self._reason()) from None

    def _listen(self, seconds: float) -> None:
        """Take in what followers say of their end; at most so long, and not after the first that no other explains."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, line in self._lines.items():
                while rank not in self.failures and line.ready(0.0):
                    try:
                        kind, content = line.receive(GRACE)
                    except (EOFError, TimeoutError):
                        kind, content = "failed", (False, SILENT)
                    if kind == "failed":  # else the result of a call that was broken off
                        self.failures[rank] = content
            settled = any(not consequence for consequence, _ in self.failures.values())
            if settled or time.monotonic() >= deadline:
                return
            time.sleep(0.05)

    def _reason(self) -> str:
        # First whoever fell by itself: the others' collectives broke because of it.
        rank, (_, why) = min(self.failures.items(), key=lambda item: (item[1][0], item[0]))
        return f"rank {rank} of {self.ranks} failed: {why}"

    # ---- a follower ----

    def follow(self) -> None:
        """Do what rank 0 says until it says that this is all. Raises what fails, EOFError when rank 0 is gone."""
        line = self._lines[0]
        self._calling = True  # whatever a method calls in turn is local
        while (order := line.receive(None)) is not None:
            name, method, arguments = order
            line.send(("done", getattr(self.objects[name], method)(*arguments)))
        self._closing = True
        dist.destroy_process_group()

    # ---- both ----

    def _make(self, name: str, kind: Callable[..., Any], arguments: Any, settings: dict[str, Any]) -> None:
        self.objects[name] = kind(*arguments, team=self, name=name, **settings)

    def _watch(self, line: Line) -> None:
        """Nobody waits for ever in a collective whose other side is gone."""
        line.wait_for_end()
        time.sleep(GRACE)
        if self._closing:
            return
        if self.rank:
            os._exit(1)  # a follower has nothing to put in order
        if self._calling and self.device.type == "cuda":
            dist.distributed_c10d._abort_process_group()


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise ConnectionResetError("the other end has closed")
        view = view[got:]
    return data
