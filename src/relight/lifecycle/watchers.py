"""Watchers: whoever waits for news of a run."""

from __future__ import annotations

from collections.abc import Callable, Container

from relight.model.run import Run

Watcher = Callable[[Run | None], None]


class Watchers:
    """By run id. A watcher is told a run's final row, or None: something may have changed, look at the store."""

    def __init__(self) -> None:
        self._watchers: dict[str, list[Watcher]] = {}

    def add(self, run_id: str, watcher: Watcher) -> Callable[[], None]:
        """Returns what takes it back."""
        self._watchers.setdefault(run_id, []).append(watcher)

        def remove() -> None:
            watchers = self._watchers.get(run_id, [])
            if watcher in watchers:
                watchers.remove(watcher)
            if not watchers:
                self._watchers.pop(run_id, None)

        return remove

    def tell(self, run_id: str, row: Run | None = None) -> None:
        for watcher in list(self._watchers.get(run_id, ())):
            watcher(row)

    def tell_all_but(self, run_ids: Container[str]) -> None:
        """Whoever watches a run that is not one of these should look."""
        for run_id in [run_id for run_id in self._watchers if run_id not in run_ids]:
            self.tell(run_id)
