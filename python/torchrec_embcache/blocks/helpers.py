"""Threads that read and write blocks, where the system has room for them."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from torchrec_embcache import _native

__all__ = ["BoundedExecutor"]

P = ParamSpec("P")
T = TypeVar("T")

_Task = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class BoundedExecutor(Executor):
    """A limited number of threads. Each is started when there is a task for it and the system has memory for a thread.

    The standard library's pool waits for ever for a thread that starts and then gets no memory of its own. Here a thread is started
    only where there is memory for one. Where there is none, whoever submits a task does it.

    One thread submits tasks. It takes no lock that the other threads take too, because a Ctrl-C within such a lock could leave it
    locked, and the others would wait for it for ever.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        """`max_threads`: the most threads. `name`: how the threads' names begin."""
        self._max_threads, self._name = max_threads, name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._submitted = 0
        self._done: deque[None] = deque()  # one for each task that is done: to append is atomic
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Do `fn(*args, **kwargs)` on one of the threads, or at once in the caller where the system gives no thread."""
        if self._closed:
            raise RuntimeError("these threads have ended")
        future: Future[T] = Future()
        task: _Task = (future, fn, args, kwargs)
        self._submitted += 1
        if self._submitted - len(self._done) > len(self._threads):
            self._start_thread()
        if self._threads:
            self._tasks.put(task)
        else:
            self._run_task(task)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks. `wait` for those that were submitted. `cancel_futures` cancels those that no thread has begun."""
        self._closed = True
        while cancel_futures and not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task[0].cancel()
        self._tasks.put(None)
        if wait:
            for thread in self._threads:
                # An interrupt may have come between the listing of a thread and its start.
                if thread.ident is not None:
                    thread.join()

    def _start_thread(self) -> None:
        if len(self._threads) == self._max_threads or not _native.has_memory_for_threads():
            return
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        # It is listed first: an interrupt after its start cannot leave a thread that nobody waits for.
        self._threads.append(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # the system gives no thread
            self._threads.remove(thread)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._run_task(task)
        # One end serves all threads, however many there are.
        self._tasks.put(None)

    def _run_task(self, task: _Task) -> None:
        future, fn, args, kwargs = task
        if future.set_running_or_notify_cancel():
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._done.append(None)
