"""The type of a call whose result an async flow awaits and a sync flow gets directly.

No type means "a T here and a coroutine of T there", and no checker knows in which kind of flow a call is made. So
`SyncOrAsync[T]` comes as close as possible. If it is awaited, or given to create_task, gather or a TaskGroup, it is a
coroutine of T. If it is used directly, checkers accept it as any type: that is right in a sync flow, and unchecked.
`relight.sync` has the same functions for programs without async: there every call has the type of its result.

This is for type checkers only. At run time a call gives a `call.Call`, or the result.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:

    class SyncOrAsync(Coroutine[object, object, T_co], Any):  # type: ignore[misc]  # Any is what this class is for
        """In an async flow a coroutine of T; in a sync flow, T."""
