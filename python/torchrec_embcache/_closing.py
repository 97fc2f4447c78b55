"""A mixin that closes an object at the end of a `with` statement."""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

__all__ = ["CloseOnExitMixin", "first_error"]


class CloseOnExitMixin:
    """Closes the object at the end of a `with` statement.

    If the block raised an error, an error of closing is added to it as a note.
    """

    @abstractmethod
    def close(self) -> None:
        """Closes the object. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"closing the {type(self).__name__} failed too: {failure}")


def first_error(calls: Iterable[Callable[[], None]]) -> Exception | None:
    """Calls every function. Returns the first error."""
    first: Exception | None = None
    for call in calls:
        try:
            call()
        except Exception as error:
            first = first or error
    return first
