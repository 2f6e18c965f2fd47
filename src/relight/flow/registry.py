"""The flows an engine knows, by name. Recovery finds a run's code here, so an engine uses a name only if it means one flow.

`@flow` registers into REGISTRY, which all engines of the process share unless they are given flows of their own. Two flows of
one name may be defined in one process: two engines may know one each (`Relight(flows=[...])`), as two tests do. An engine that
finds both refuses the name, and says where they are defined.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from relight.errors import DefinitionError, UnknownFlowError

if TYPE_CHECKING:
    from relight.flow.definitions import Flow, Step

# The steps of this process, by name, then by place. All registries share them: steps are called, not looked up.
_steps: dict[str, weakref.WeakValueDictionary[str, Step[..., Any]]] = {}


class Registry:
    """Names to flows. `@flow` registers into REGISTRY, which engines use unless they are given flows of their own."""

    def __init__(self, flows: Iterable[Flow[..., Any]] = ()) -> None:
        self._flows: dict[str, dict[str, Flow[..., Any]]] = {}  # by name, then by place
        self._listeners: list[Callable[[str], None]] = []
        for flow in flows:
            self.add(flow)
            if self.shared_name(flow.name):
                raise DefinitionError(self.shared_name(flow.name))

    def add(self, flow: Flow[..., Any]) -> None:
        """Register a flow. It replaces the flow that was defined in the same place before (a reload)."""
        self._flows.setdefault(flow.name, {})[flow.place] = flow
        for listener in list(self._listeners):
            listener(flow.name)

    def get(self, name: str) -> Flow[..., Any]:
        """The flow of this name. Raises UnknownFlowError if there is none, DefinitionError if there are several."""
        found = self.find(name)
        if found is not None:
            return found
        if self.shared_name(name):
            raise DefinitionError(self.shared_name(name))
        raise UnknownFlowError(self.why_unknown(name, f" (registered: {', '.join(sorted(self._flows)) or 'none'})"))

    def why_unknown(self, name: str, aside: str = "") -> str:
        """Why `find` finds no flow of this name, and what to do."""
        if self.shared_name(name):
            return self.shared_name(name)
        if self is not REGISTRY and name in REGISTRY.names():
            return f"flow {name!r} is imported, but Relight(flows=[...]) does not list it{aside}; add it to flows="
        return f"flow {name!r} is not registered in this process{aside}; import or register it"

    def shared_name(self, name: str) -> str:
        """Why this name cannot be used, if several flows have it; otherwise empty."""
        found = self._flows.get(name, {})
        if len(found) < 2:
            return ""
        places = " and ".join(found)
        return (
            f"flow name {name!r} means {len(found)} flows: {places} define them; give all but one another name with "
            "@flow(name=...), or give each engine its own with Relight(flows=[...])"
        )

    def shared_names(self) -> list[str]:
        """`shared_name` of each name that several flows have."""
        return [why for name in self._flows if (why := self.shared_name(name))]

    def check(self, flow: Flow[..., Any]) -> None:
        """DefinitionError unless this flow is registered under its name: recovery would call the registered one."""
        known = self.get(flow.name)
        if known is flow:
            return
        if known.place == flow.place:
            raise DefinitionError(
                f"{flow!r} is not the flow registered as {flow.name!r}: the function around it was called again since, and "
                "made another; pass what differs between the two as an argument, or give each its own @flow(name=...)"
            )
        raise DefinitionError(f"{flow!r} is not the flow registered as {flow.name!r}: {known!r} is")

    def find(self, name: str) -> Flow[..., Any] | None:
        """The flow of this name, if there is exactly one."""
        found = self._flows.get(name)
        return next(iter(found.values())) if found is not None and len(found) == 1 else None

    def names(self) -> list[str]:
        """The names of all flows that `find` finds."""
        return [name for name, found in self._flows.items() if len(found) == 1]

    def remove(self, name: str) -> None:
        """Forget a flow: for tests and for flows whose source is gone."""
        self._flows.pop(name, None)

    def add_step(self, step: Step[..., Any]) -> None:
        """Register a step's name. Several steps may share a name: steps are called, not looked up."""
        _steps.setdefault(step.name, weakref.WeakValueDictionary())[step.place] = step

    def changed(self, recorded: Iterable[tuple[str, str]]) -> tuple[str, ...]:
        """Of recorded steps, given as pairs of key and fingerprint, the keys of those whose code has changed. A name
        that is unknown here is skipped: replay of its flow will show what became of the step."""
        return tuple(key for key, fingerprint in recorded if self._is_changed(key, fingerprint))

    def _is_changed(self, key: str, fingerprint: str) -> bool:
        known = _steps.get(key.rpartition("/")[2].partition(":")[0])
        return bool(known) and all(step.fingerprint != fingerprint for step in list((known or {}).values()))

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of every flow registered from now on, in the thread that registers it."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[str], None]) -> None:
        self._listeners.remove(listener)


REGISTRY = Registry()
