"""Curves as SVG text: axes, lines, bands and stage marks, coloured by CSS variables. No drawing library, no script."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]
#: From data to SVG coordinates.
Place = Callable[[float, float], Point]

#: Room around the plot, in SVG units: left for numbers, right for the last value, top for stage names, bottom for x.
LEFT, RIGHT, TOP, BOTTOM = 46.0, 14.0, 18.0, 24.0


@dataclass(frozen=True, slots=True)
class Series:
    """One line.

    Attributes:
        name: what the legend and the pointer's label call it.
        segments: lists of (x, y); the line is broken between them.
        band: (x, low, high) of an interval around it.
        dots: mark each point.
        labels: (x, y, text) written above points of it.
    """

    name: str
    segments: Sequence[Sequence[Point]]
    band: Sequence[tuple[float, float, float]] = ()
    dots: bool = False
    labels: Sequence[tuple[float, float, str]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of one or a few lines over training steps.

    Attributes:
        series: the lines, coloured in their order.
        stages: (name, first x, last x) of each stage, marked along the top.
        form: Python format of values, for example ".0%".
        log: logarithmic y axis; points that aren't positive are left out.
        low, high: fixed ends of the y axis; None fits the data.
        width, height: in pixels at full size.
        x_name: what is along the bottom.
    """

    series: Sequence[Series]
    stages: Sequence[tuple[str, float, float]] = ()
    form: str = ".3g"
    log: bool = False
    low: float | None = None
    high: float | None = None
    width: float = 380.0
    height: float = 190.0
    x_name: str = "step"

    def svg(self, *, standalone: bool = False) -> str:
        """The chart as an <svg> element.

        Args:
            standalone: as a file of its own, with its colours, for light and dark.
        """
        x_low, x_high = self._x_range()
        y_low, y_high, ticks = self._y_range()
        scale_x = (self.width - LEFT - RIGHT) / (x_high - x_low)
        scale_y = (self.height - TOP - BOTTOM) / (y_high - y_low)

        def at(x: float, y: float) -> Point:
            value = math.log10(y) if self.log else y
            value = min(max(value, y_low), y_high)
            return LEFT + (x - x_low) * scale_x, self.height - BOTTOM - (value - y_low) * scale_y

        parts = [*self._stage_marks(at, y_low), *self._grid(at, ticks, x_low, x_high)]
        for number, series in enumerate(self.series):
            parts += self._line(series, number % 6, at)
        head = f'<svg class="chart" viewBox="0 0 {self.width:g} {self.height:g}" role="img"'
        if standalone:
            head += f' xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}"'
            parts = [f"<style>{STANDALONE_STYLE}</style>", '<rect class="page" width="100%" height="100%"/>', *parts]
        data = {
            "x": [LEFT, x_low, scale_x],
            "plot": [TOP, self.height - BOTTOM],
            "name": self.x_name,
            "series": [
                [s.name, [[x, y, f"{y:{self.form}}"] for segment in s.segments for x, y in segment]]
                for s in self.series
            ],
        }
        attribute = "" if standalone else f' data-chart="{escape(json.dumps(data, separators=(",", ":")))}"'
        return f"{head}{attribute}>{''.join(parts)}</svg>"

    def _points(self) -> list[Point]:
        points = [point for series in self.series for segment in series.segments for point in segment]
        points += [(x, y) for series in self.series for x, low, high in series.band for y in (low, high)]
        return [(x, y) for x, y in points if math.isfinite(y) and (y > 0 or not self.log)]

    def _x_range(self) -> tuple[float, float]:
        xs = [x for x, _ in self._points()] + [edge for _, *edges in self.stages for edge in edges]
        low, high = (min(xs), max(xs)) if xs else (0.0, 1.0)
        return (low, high) if high > low else (low - 0.5, high + 0.5)

    def _y_range(self) -> tuple[float, float, list[float]]:
        """Lowest and highest y on the axis (as logarithms if it is logarithmic), and the values to mark."""
        ys = [y for _, y in self._points()] or [0.0 if not self.log else 1.0]
        if self.log:
            lowest = math.floor(math.log10(min(ys)))
            highest = max(math.ceil(math.log10(max(ys))), lowest + 1)
            every = max(1, math.ceil((highest - lowest) / 4))
            return float(lowest), float(highest), [10.0**power for power in range(lowest, highest + 1, every)]
        low = min(ys) if self.low is None else self.low
        high = max(ys) if self.high is None else self.high
        if high <= low:
            high, low = high + (abs(high) or 1.0) * 0.5, low - (abs(low) or 1.0) * 0.5 if self.low is None else low
        step = nice_step((high - low) / 3.2)
        low = math.floor(low / step + 1e-9) * step if self.low is None else low
        high = math.ceil(high / step - 1e-9) * step if self.high is None else high
        count = math.floor((high - low) / step + 1e-9)
        return low, high, [low + step * number for number in range(count + 1)]

    def _grid(self, at: Place, ticks: Sequence[float], x_low: float, x_high: float) -> list[str]:
        parts = []
        for tick in ticks:
            _, y = at(x_low, tick)
            parts.append(f'<line class="grid" x1="{LEFT:g}" x2="{self.width - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f"{tick:.0e}".replace("e-0", "e-").replace("e+0", "e") if self.log else _tick_text(tick, self.form)
            parts.append(
                f'<text class="tick" x="{LEFT - 6:g}" y="{y + 3.5:.1f}" text-anchor="end">{escape(text)}</text>'
            )
        step = max(1.0, nice_step((x_high - x_low) / 5))
        x = math.ceil(x_low / step) * step
        anchor, text = "start", f"{self.x_name} {x:g}"
        while x <= x_high + 1e-9:
            place = LEFT + (x - x_low) * (self.width - LEFT - RIGHT) / (x_high - x_low)
            where = f'x="{place:.1f}" y="{self.height - 8:g}" text-anchor="{anchor}"'
            parts.append(f'<text class="tick" {where}>{escape(text)}</text>')
            x += step
            anchor, text = "middle", f"{x:g}"
        return parts

    def _stage_marks(self, at: Place, y_low: float) -> list[str]:
        parts = []
        y = 10.0**y_low if self.log else y_low
        for number, (name, first, last) in enumerate(self.stages):
            left, right = at(first, y)[0], at(last, y)[0]
            if number % 2 == 0 and len(self.stages) > 1:
                height = self.height - TOP - BOTTOM
                parts.append(
                    f'<rect class="stage" x="{left:.1f}" y="{TOP:g}" width="{right - left:.1f}" height="{height:g}"/>'
                )
            if len(self.stages) > 1 and right - left > 7.5 * len(name) + 6:
                parts.append(f'<text class="stage-name" x="{left + 4:.1f}" y="{TOP - 6:g}">{escape(name)}</text>')
        return parts

    def _line(self, series: Series, colour: int, at: Place) -> list[str]:
        parts = []
        if series.band:
            upper = [at(x, high) for x, _, high in series.band]
            lower = [at(x, low) for x, low, _ in series.band]
            parts.append(f'<polygon class="band c{colour}" points="{_path(upper + lower[::-1])}"/>')
            for (x, low_y), (_, high_y) in zip(lower, upper, strict=True):
                parts.append(
                    f'<line class="whisker c{colour}" x1="{x:.1f}" x2="{x:.1f}" y1="{low_y:.1f}" y2="{high_y:.1f}"/>'
                )
        for segment in series.segments:
            places = [at(x, y) for x, y in segment if math.isfinite(y) and (y > 0 or not self.log)]
            if len(places) > 1:
                parts.append(f'<polyline class="line c{colour}" points="{_path(places)}"/>')
            if series.dots or len(places) == 1:
                parts += [f'<circle class="dot c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3.2"/>' for x, y in places]
        for x, y, text in series.labels:
            left, top = at(x, y)
            side = "end" if left > self.width - 60 else "start" if left < LEFT + 20 else "middle"
            parts.append(
                f'<text class="value" x="{left:.1f}" y="{top - 9:.1f}" text-anchor="{side}">{escape(text)}</text>'
            )
        return parts


def nice_step(rough: float) -> float:
    """The next of 1, 2, 2.5, 5 × 10ⁿ that is at least `rough`."""
    if rough <= 0 or not math.isfinite(rough):
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if factor * power >= rough * (1 - 1e-9))


def _tick_text(tick: float, form: str) -> str:
    if form.endswith("%"):
        return f"{tick:.0%}" if abs(tick * 100 - round(tick * 100)) < 1e-6 else f"{tick:.1%}"
    if tick and (abs(tick) >= 10_000 or abs(tick) < 0.001):
        return f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{tick:.4g}"


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


#: What a chart needs to stand alone: the page's own style sheet has the same classes.
STANDALONE_STYLE = """
svg{--page:#fff;--ink:#1c2128;--dim:#667085;--grid:#e6e8ec;--stage:#f5f7fa;--c0:#2563c9;--c1:#d2691e;--c2:#1a8f5a;--c3:#8250c4;--c4:#c2334d;--c5:#5b6472}
@media (prefers-color-scheme:dark){svg{--page:#14171c;--ink:#e4e7eb;--dim:#98a2b3;--grid:#2a2f37;--stage:#1a1e25;--c0:#6ea8ff;--c1:#ffa05c;--c2:#4cc38a;--c3:#b996f5;--c4:#ff7a90;--c5:#a5afbd}}
.page{fill:var(--page)}text{font:11px system-ui,sans-serif;fill:var(--dim)}.grid{stroke:var(--grid)}.stage{fill:var(--stage)}
.value{font-weight:650;font-size:12px;fill:var(--ink);paint-order:stroke;stroke:var(--page);stroke-width:3px}.stage-name{font-weight:600}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.band{opacity:.14;stroke:none}.whisker{opacity:.55;stroke-width:1.5}
.line.c0,.whisker.c0{stroke:var(--c0)}.dot.c0,.band.c0{fill:var(--c0)}
.line.c1,.whisker.c1{stroke:var(--c1)}.dot.c1,.band.c1{fill:var(--c1)}
"""
