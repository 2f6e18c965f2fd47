"""The plot of docs/benchmarks.md: one small SVG with text as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.measure import Section, number

COLOURS = {"relight": "#d9480f", "dbos": "#5c7cfa", "dbos-wal": "#91a7ff", "duroxide": "#40c057"}
GREY = "#868e96"


def draw(sections: list[Section], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "relight", "font.size": 9, "font.family": "sans-serif"}
    )
    from matplotlib import pyplot

    data = {section.name: section.data for section in sections}
    panels = [
        (name, panel)
        for name, panel in (
            ("throughput", _throughput),
            ("latency", _latency),
            ("starting", _starting),
            ("restore", _restore),
        )
        if data.get(name)
    ]
    if not panels:
        return
    figure, axes = pyplot.subplots(
        (len(panels) + 1) // 2, 2, figsize=(10, 3.4 * ((len(panels) + 1) // 2)), squeeze=False
    )
    for axis, (name, panel) in zip(axes.flat, panels, strict=False):
        panel(axis, data[name])
        axis.spines[["top", "right"]].set_visible(False)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _throughput(axis: Any, data: dict[str, Any]) -> None:
    rates = data["500"]["steps_per_second"]
    _bars(axis, {who: rates[who] for who in rates if who != "raw-append"}, "steps per second, 500 runs at once")


def _latency(axis: Any, data: dict[str, Any]) -> None:
    _bars(axis, data["median_us"], "µs per step, one run at a time")


def _starting(axis: Any, data: dict[str, Any]) -> None:
    _bars(axis, {who: rates["start"] for who, rates in data["500"].items()}, "start() per second, 500 starters")


def _bars(axis: Any, values: dict[str, float], title: str) -> None:
    names = list(values)[::-1]
    bars = axis.barh(names, [values[name] for name in names], color=[COLOURS.get(name, GREY) for name in names])
    axis.bar_label(bars, [number(values[name]) for name in names], padding=3)
    axis.set_xscale("log")
    axis.set_xlim(right=max(values.values()) * 4)
    axis.set_title(f"{title} (log scale)", loc="left")


def _restore(axis: Any, data: dict[str, Any]) -> None:
    points = {tuple(map(int, key.split("/"))): found["resumed"] for key, found in data.items()}
    alone = sorted((unfinished, seconds) for (unfinished, ended), seconds in points.items() if not ended)
    axis.plot(*zip(*alone, strict=True), "o-", color=COLOURS["relight"], label="no finished runs in the file")
    for (unfinished, ended), seconds in points.items():
        if ended:
            axis.plot(
                [unfinished], [seconds], "s", color="#212529", mfc="none", ms=9, label=f"beside {ended:,} finished runs"
            )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("unfinished runs")
    axis.set_title("restore after SIGKILL, seconds", loc="left")
    axis.legend(frameon=False)
