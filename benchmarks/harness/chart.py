"""Draw figures as horizontal bars in an SVG that is readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.harness.fresh_processes import Spread

_WIDTH, _LABELS, _VALUES = 760, 270, 90
_BAR, _STEP = 20, 30
# A ground of its own: not every viewer knows prefers-color-scheme.
_STYLE = """
  .ground { fill: #ffffff }
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600 } .small { font-size: 12px; fill: #59636e }
  .bar { fill: #8c959f } .own { fill: #1a7f37 } .mark { stroke: #cf222e; stroke-dasharray: 4 3 }
  .range { stroke: #1f2328 } .met { fill: #1a7f37 } .missed { fill: #cf222e }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 }
    text { fill: #f0f6fc } .small { fill: #9198a1 } .bar { fill: #656c76 } .own { fill: #3fb950 }
    .range { stroke: #f0f6fc } .mark { stroke: #f85149 } .met { fill: #3fb950 } .missed { fill: #f85149 }
  }
"""


@dataclass(frozen=True)
class Panel:
    """Bars on one scale.

    Attributes:
        title: what the bars show, with the unit and which direction is good.
        bars: label, value with its range, and whether the row is prejit's.
        unit: text after each value.
        mark: value of a line across the bars, with its label.
    """

    title: str
    bars: Sequence[tuple[str, Spread, bool]]
    unit: str
    mark: tuple[float, str] | None = None


def draw(panels: Sequence[Panel], goals: Sequence[tuple[str, bool]]) -> str:
    """Return the SVG.

    Args:
        panels: groups of bars, drawn below each other.
        goals: text of each target, and whether it is met.
    """
    parts: list[str] = []
    top = 26
    for panel in panels:
        parts += _panel(panel, top)
        top += 20 + _STEP * len(panel.bars) + 34
    for text, met in goals:
        kind, sign = ("met", "✓ met") if met else ("missed", "✗ missed")
        parts.append(f'<text x="12" y="{top}" class="{kind}">{sign}</text>')
        parts.append(f'<text x="90" y="{top}">{escape(text)}</text>')
        top += 21
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" width="{_WIDTH}" '
        f'height="{top}" role="img" aria-label="benchmark of prejit">\n'
        f"<style>{_STYLE}</style>\n"
        f'<rect width="{_WIDTH}" height="{top}" rx="6" class="ground"/>\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, top: int) -> list[str]:
    values = [spread.high for _, spread, _ in panel.bars] + ([panel.mark[0]] if panel.mark else [])
    scale = (_WIDTH - _LABELS - _VALUES) / max(values)
    parts = [f'<text x="12" y="{top}" class="title">{escape(panel.title)}</text>']
    y = top + 14
    if panel.mark:
        x = _LABELS + panel.mark[0] * scale
        bottom = y + _STEP * len(panel.bars)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{bottom}" class="mark"/>')
        label = escape(panel.mark[1])
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="end" class="small">{label}</text>'
        )
    for name, spread, own in panel.bars:
        middle = y + _BAR / 2
        low, high = _LABELS + spread.low * scale, _LABELS + spread.high * scale
        value = f"{spread.median:.2f}" if spread.median < 10 else f"{spread.median:.1f}"
        parts += [
            f'<text x="{_LABELS - 8}" y="{middle + 5}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{_LABELS}" y="{y}" width="{spread.median * scale:.1f}" height="{_BAR}" rx="2" '
            f'class="{"own" if own else "bar"}"/>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" class="range"/>',
            f'<text x="{_WIDTH - _VALUES + 12}" y="{middle + 5}">{value} {escape(panel.unit)}</text>',
        ]
        y += _STEP
    return parts
