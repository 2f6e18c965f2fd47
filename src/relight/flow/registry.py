"""The flows this process knows, by name. Recovery finds a run's code here, so a name must mean one flow."""

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
        self._flows: dict[str, Flow[..., Any]] = {}
        self._listeners: list[Callable[[str], None]] = []
        for flow in flows:
            self.add(flow)

    def add(self, flow: Flow[..., Any]) -> None:
        """Register a flow. The same place in the source may register again (a reload); another place must not."""
        known = self._flows.get(flow.name)
        if known is not None and known.place != flow.place:
            raise DefinitionError(
                f"flow name {flow.name!r} is taken: {known.place} has it, and {flow.place} wants it too; "
                "give one of them another name with @flow(name=...)"
            )
        self._flows[flow.name] = flow
        for listener in list(self._listeners):
            listener(flow.name)

    def get(self, name: str) -> Flow[..., Any]:
        found = self._flows.get(name)
        if found is None:
            known = ", ".join(sorted(self._flows)) or "none"
            raise UnknownFlowError(
                f"no flow named {name!r} is registered in this process (registered: {known}); import it"
            )
        return found

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
        return self._flows.get(name)

    def names(self) -> list[str]:
        return list(self._flows)

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
