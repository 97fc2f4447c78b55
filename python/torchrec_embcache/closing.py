"""What a `with` statement does at its end with an object that is to be closed."""

from abc import abstractmethod
from types import TracebackType
from typing import Self

__all__ = ["CloseOnExitMixin"]


class CloseOnExitMixin:
    """Closes the object at the end of a `with` statement.

    Where the statement ends by an error, an error of closing becomes a note of that one.
    """

    @abstractmethod
    def close(self) -> None:
        """Close the object; harmless twice."""

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
