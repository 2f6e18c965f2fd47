"""The type of a call whose result an async flow awaits and a sync flow gets directly.

No type says "a T here and a coroutine of T there", and no checker knows in which kind of flow a call stands. So
`SyncOrAsync[T]` says as much as can be said. Awaited, or given to create_task, gather or a TaskGroup, it is a coroutine of
T. Used directly it passes for anything: that is right in a sync flow, and unchecked. `relight.sync` has the same functions for
programs without async: there every call has the type of its result.

This is for type checkers only. At run time a call gives a `call.Call`, or the result.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:

    class SyncOrAsync(Coroutine[object, object, T_co], Any):  # type: ignore[misc]  # that it passes for anything is its purpose
        """In an async flow a coroutine of T; in a sync flow, T."""
