"""Pictures with matplotlib, which the extra ``plot`` brings: imported when one is drawn, such as that of a timeline."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from roundpipe.core.errors import ConfigError

Row = tuple[str, str, Sequence[tuple[str, float, float]]]
"""Device, lane, and name, start and end in seconds of each span."""

_FORWARD, _FUSED, _BACKWARD, _RECOMPUTED = "#4c8fd0", "#8656b0", "#d9803b", "#ecbd8f"
_COLORS = {
    "waits": "#d8d8d8",
    "upload": "#58b09c",
    "weights": "#2e7d6b",
    "download": "#a7c957",
    "gradients": "#6a994e",
    "home": "#b5a642",
    "converted": "#d9cf8f",
    "update": "#c1436d",
    "hand-over": "#e59ab4",
    "averaging": "#7a5195",
    "other ranks": "#d3c6de",
}
_WAITS = {
    "weights": "#b5d8d0",
    "values": "#cfe8e2",
    "optimizer": "#f0c4d4",
    "gradients": "#d5e3c5",
    "overhead": "#f1f1f1",
}
"""By a word of the name; other waits are grey."""
_LEGEND = {
    _FORWARD: "forward",
    _FUSED: "forward, loss and backward",
    _BACKWARD: "backward",
    _RECOMPUTED: "recomputation",
    _COLORS["waits"]: "other waits",
    **{color: f"wait for {what}" for what, color in _WAITS.items()},
    _WAITS["overhead"]: "overhead",
    _COLORS["upload"]: "values up",
    _COLORS["weights"]: "weights up",
    _COLORS["download"]: "values down",
    _COLORS["gradients"]: "gradients down",
    _COLORS["home"]: "gradients added",
    _COLORS["converted"]: "gradients converted",
    _COLORS["update"]: "update",
    _COLORS["hand-over"]: "hand-over",
    _COLORS["averaging"]: "averaging",
    _COLORS["other ranks"]: "wait for other ranks",
}
"""What the colours mean, in the order of the legend."""
_TITLE_INCHES, _LEGEND_INCHES = 0.25, 0.55
_WIDTH_INCHES, _ROW_INCHES, _DOTS_PER_INCH = 11.0, 0.2, 110
_LETTER_INCHES = 0.055
_LABEL_INCHES = 1.7


def matplotlib_modules(picture: str, otherwise: str, *names: str) -> list[ModuleType]:
    """The modules below ``matplotlib.``; a `ConfigError` if it is missing says what is drawn, and what needs none."""
    try:
        return [importlib.import_module(f"matplotlib.{name}") for name in names]
    except ImportError as error:
        raise ConfigError(
            f"{picture} as .png needs the package matplotlib: pip install 'roundpipe[plot]'; {otherwise} needs nothing"
        ) from error


def matplotlib_parts() -> list[ModuleType]:
    """What `draw` needs; errors as for `matplotlib_modules`."""
    return matplotlib_modules("a timeline", ".json", "figure", "collections", "patches", "backends.backend_agg")


def draw(path: Path, rows: Sequence[Row], title: str) -> None:
    """Write a picture of a timeline: a row per lane in the given order, a band of rows per device, a legend below."""
    figure, collections, patches, agg = matplotlib_parts()
    start_s = min(start for *_, spans in rows for _, start, _ in spans)
    length_s = max(end for *_, spans in rows for *_, end in spans) - start_s or 1.0
    scale, unit = (1.0, "s") if length_s >= 2 else (1e3, "ms") if length_s >= 2e-3 else (1e6, "us")
    places = _places(rows)
    height = _ROW_INCHES * (places[-1] + 1) + 0.75 + _TITLE_INCHES + _LEGEND_INCHES
    picture = figure.Figure(figsize=(_WIDTH_INCHES, height), dpi=_DOTS_PER_INCH)
    agg.FigureCanvasAgg(picture)
    inner_inches = _WIDTH_INCHES - _LABEL_INCHES - 0.1
    axes = picture.add_axes(
        (
            _LABEL_INCHES / _WIDTH_INCHES,
            (0.42 + _LEGEND_INCHES) / height,
            inner_inches / _WIDTH_INCHES,
            (height - 0.62 - _TITLE_INCHES - _LEGEND_INCHES) / height,
        )
    )
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_xlim(0, length_s * scale)
    axes.set_ylim(places[-1] + 0.6, -0.9)
    for place, (_, lane, spans) in zip(places, rows, strict=True):
        boxes, colors = [], []
        for name, start, end in spans:
            left, right = (start - start_s) * scale, (end - start_s) * scale
            bottom, top = place - 0.42, place + 0.42
            boxes.append([(left, bottom), (right, bottom), (right, top), (left, top)])
            colors.append(_color(lane, name))
            text = _fitting(name, (end - start) / length_s * inner_inches)
            if text:
                axes.text((left + right) / 2, place, text, ha="center", va="center", fontsize=5.5, clip_on=True)
        axes.add_collection(collections.PolyCollection(boxes, facecolors=colors, edgecolors="white", linewidths=0.3))
    axes.set_yticks(places, [lane for _, lane, _ in rows], fontsize=6.5)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel(unit, fontsize=7)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for device in dict.fromkeys(device for device, *_ in rows):
        first = min(place for place, row in zip(places, rows, strict=True) if row[0] == device)
        axes.text(
            -_LABEL_INCHES / inner_inches + 0.005, first - 0.62, device,
            transform=axes.get_yaxis_transform(), fontsize=7, fontweight="bold", va="center",
        )  # fmt: skip
    shown = {_color(lane, name) for _, lane, spans in rows for name, _, _ in spans}
    entries = [patches.Patch(color=color, label=what) for color, what in _LEGEND.items() if color in shown]
    picture.legend(handles=entries, loc="lower center", ncols=8, fontsize=6.5, frameon=False)
    picture.savefig(path, format="png")


def _places(rows: Sequence[Row]) -> list[float]:
    """Where each row lies, with room for the device's name above its first one."""
    places: list[float] = []
    at, before = 0.0, None
    for device, *_ in rows:
        at += 1.2 if device != before and before is not None else 0.3 if before is None else 0.0
        places.append(at)
        at, before = at + 1.0, device
    return places


def _color(lane: str, name: str) -> str:
    if lane == "waits":
        return next((color for word, color in _WAITS.items() if word in name), _COLORS[lane])
    if lane != "compute":
        return _COLORS.get(lane, "#999999")
    if "recompute" in name:
        return _RECOMPUTED
    return {"F": _FORWARD, "U": _FUSED}.get(name[:1], _BACKWARD)


def _fitting(name: str, inches: float) -> str:
    """As much of a name as can be read within a width: all of it, or without the layers, or nothing."""
    head, _, tail = name.partition("[")
    short = head + (" " + tail.partition("]")[2].strip() if tail else "")
    for text in (name, short.strip()):
        if len(text) * _LETTER_INCHES < inches:
            return text
    return ""
