# SPDX-License-Identifier: Apache-2.0
"""One chart: speed over length, a column for 16 heads and one for 128, a row for each cache dtype."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from races import Race

COLOURS = {
    "mla-oracle": "#c8400a", "numpy": "#56789a", "torch bmm": "#2f6f4f", "torch sdpa": "#7a9a3a",
    "vLLM": "#7b5ea7", "SGLang": "#3a6ea5",
}  # fmt: skip


SMALL = {"fontsize": 7.5, "color": "#666666"}


def accuracy(races: dict[int, Race]) -> str:
    """How large errors are, ours and the others'."""
    found = {name: [race[name].error for race in races.values() if name in race] for name in COLOURS}
    ours = max(found.pop("mla-oracle"))
    others = [error for errors in found.values() for error in errors]
    text = f"error / max output: mla-oracle up to {ours:.0e}"
    return f"{text}, others {min(others):.0e} to {max(others):.0e}" if others else text


def spread(places: list[float], gap: float) -> list[float]:
    """The places, moved apart until neighbours are `gap` away, in the given order."""
    order = sorted(range(len(places)), key=places.__getitem__)
    moved = list(places)
    for _ in range(200):
        for low, high in pairwise(order):
            lack = gap - (moved[high] - moved[low])
            if lack > 1e-9:
                moved[low] -= lack / 2
                moved[high] += lack / 2
    return moved


def draw(races: dict[tuple[int, str, int], Race], path: str, machine: str) -> None:
    """Write the chart to `path`; its ending picks the format."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "mla-oracle"})
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(9, 7), sharex=True, sharey="row")
    ends: dict[Any, dict[str, tuple[int, float]]] = {}
    for row, dtype in enumerate(("f32", "bf16")):
        for column, H in enumerate((16, 128)):
            chosen = {L: race for (h, d, L), race in races.items() if (h, d) == (H, dtype)}
            axes = panels[row][column]
            ends[axes] = lines(axes, chosen)
            axes.set_title(f"{dtype} cache, {H} heads", loc="left", fontsize=10, pad=16)
            axes.text(0, 1.02, accuracy(chosen), transform=axes.transAxes, **SMALL)
        panels[row][0].set_ylabel("share of the f32 FMA peak")
    for axes in panels[1]:
        axes.set_xlabel("cached tokens")
    figure.suptitle("MLA decode on one CPU thread (log scales; higher is faster)", x=0.01, ha="left")
    figure.text(0.01, 0.008, machine, **SMALL)
    figure.tight_layout(rect=(0, 0.02, 0.93, 1), w_pad=6)
    for axes, places in ends.items():
        label(axes, places)
    metadata: dict[str, Any] = {"Date": None} if path.endswith(".svg") else {}
    figure.savefig(path, metadata=metadata, dpi=120)


def lines(axes: Any, races: dict[int, Race]) -> dict[str, tuple[int, float]]:
    """One line for each contestant; where each ends: {name: (L, share)}."""
    from matplotlib.ticker import FixedLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.axhline(1, color="#bbbbbb", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(1, 1.03, "peak", transform=axes.get_yaxis_transform(), ha="right", **SMALL)
    ends = {}
    for name, colour in COLOURS.items():
        known = [(L, race[name].share) for L, race in sorted(races.items()) if name in race]
        points = [(L, share) for L, share in known if share]
        if points:
            width = 2.4 if name == "mla-oracle" else 1.2
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=width, zorder=width + 1)
            ends[name] = points[-1]
    lengths = sorted(races)
    axes.set_xlim(lengths[0], lengths[-1])
    ticks = lengths[::2] if len(lengths) > 4 else lengths
    axes.set_xticks(ticks, [f"{L // 1024}k" if L >= 1024 else str(L) for L in ticks])
    axes.yaxis.set_major_locator(FixedLocator([0.05, 0.1, 0.2, 0.5, 1, 2, 4]))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    return ends


def label(axes: Any, ends: dict[str, tuple[int, float]]) -> None:
    """Names at the lines' right ends, a line of text apart."""
    low, high = (math.log10(y) for y in axes.get_ylim())
    height = axes.get_window_extent().height / axes.figure.dpi * 72  # points
    places = spread([math.log10(share) for _, share in ends.values()], 11 * (high - low) / height)
    for name, place in zip(ends, places, strict=True):
        weight = "bold" if name == "mla-oracle" else "normal"
        axes.annotate(
            name, (axes.get_xlim()[1], 10**place), xytext=(5, 0), textcoords="offset points", va="center",
            color=COLOURS[name], fontweight=weight, annotation_clip=False,
        )  # fmt: skip
