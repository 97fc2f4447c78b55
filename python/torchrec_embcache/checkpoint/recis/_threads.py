"""Threads that read and write blocks, as many as the available memory allows."""

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
    """An executor with a limited number of threads, each started when there is a task for it and memory for a thread.

    The standard library's pool waits indefinitely for a thread that starts but cannot allocate its memory. This executor starts a
    thread only if there is memory for it. Without any thread, the submitting thread runs the task.

    Only one thread submits tasks. It takes no lock that the worker threads take too, because a KeyboardInterrupt inside such a lock
    could leave it locked and block the workers indefinitely.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        """`max_threads`: maximum number of threads. `name`: prefix of the thread names."""
        self._max_threads, self._name = max_threads, name
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._submitted = 0
        self._done: deque[None] = deque()  # one entry per finished task: append is atomic
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `fn(*args, **kwargs)` on one of the threads, or immediately in the caller if no thread can be started."""
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
        """Accepts no more tasks. `wait` waits for submitted tasks. `cancel_futures` cancels tasks that have not started."""
        self._closed = True
        while cancel_futures and not self._tasks.empty():
            task = self._tasks.get()
            if task is not None:
                task[0].cancel()
        self._tasks.put(None)
        if wait:
            for thread in self._threads:
                # An interrupt may have occurred between the registration of a thread and its start.
                if thread.ident is not None:
                    thread.join()

    def _start_thread(self) -> None:
        if len(self._threads) == self._max_threads or not _native.has_memory_for_threads():
            return
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        # Registered before its start: after an interrupt, every started thread is joined.
        self._threads.append(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # the OS cannot start a thread
            self._threads.remove(thread)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._run_task(task)
        # One sentinel stops all threads: each passes it on.
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
