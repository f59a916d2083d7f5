"""What people look at: image grids, the curve, the Deck page. In: pixels and numbers. Out: PNG bytes and HTML."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

UPSCALE_TO = 96
"""Small images are enlarged (nearest neighbour) to at least so many pixels of height."""


def grid(pixels: Any, count: int, columns: int = 8) -> bytes:
    """A PNG of the first `count` images of uint8 [N, 3, H, W], with a thin white border between them."""
    import numpy as np
    from PIL import Image

    shown = pixels[:count].numpy().transpose(0, 2, 3, 1)
    scale = max(1, UPSCALE_TO // shown.shape[1])
    shown = shown.repeat(scale, axis=1).repeat(scale, axis=2)
    shown = np.pad(shown, ((0, 0), (2, 2), (2, 2), (0, 0)), constant_values=255)
    shown = np.concatenate([shown, np.full((-len(shown) % columns, *shown.shape[1:]), 255, np.uint8)])
    rows = [np.concatenate(list(shown[start : start + columns]), axis=1) for start in range(0, len(shown), columns)]
    return _png(Image.fromarray(np.concatenate(rows, axis=0)))


def before_after(before: Any, after: Any, title_before: str, title_after: str, count: int = 32) -> bytes:
    """A PNG with two grids side by side under their titles."""
    from PIL import Image, ImageDraw, ImageFont

    left, right = (Image.open(io.BytesIO(grid(pixels, count, columns=4))) for pixels in (before, after))
    gap, head = 24, 44
    page = Image.new("RGB", (left.width + right.width + gap, max(left.height, right.height) + head), "white")
    draw = ImageDraw.Draw(page)
    font = ImageFont.load_default(size=24)
    for x, image, title in ((0, left, title_before), (left.width + gap, right, title_after)):
        draw.text((x + 4, 8), title, fill="black", font=font)
        page.paste(image, (x, head))
    return _png(page)


def curve(series: Mapping[str, Sequence[tuple[float, float]]], title: str, y_label: str) -> bytes:
    """A PNG line chart: name -> (iteration, value) points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in series.items():
        marker = "o" if len(points) < 20 else None
        axes.plot([x for x, _ in points], [y for _, y in points], marker=marker, label=name, linewidth=1.6)
    axes.set(title=title, xlabel="iteration", ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def evaluation_page(metas: Sequence[Mapping[str, Any]], grid_png: bytes | None) -> str:
    """HTML of the evaluations so far: samples of the newest, the curve, the numbers and their protocol."""
    newest = metas[-1]
    series: dict[str, list[tuple[float, float]]] = {}
    for meta in metas:
        for variant, numbers in meta["numbers"].items():
            for name, value in numbers.items():
                if name.endswith("/exact_match"):
                    series.setdefault(f"{name} ({variant})", []).append((meta["step"], value))
    parts = [f"<h2>Evaluation after {newest['step']} iterations</h2>"]
    if grid_png:
        parts.append(_image(grid_png, "samples"))
    if series:
        parts.append(_image(curve(series, "exact match on unseen prompts", "fraction"), "curve"))
    names = sorted({name for numbers in newest["numbers"].values() for name in numbers})
    variants = list(newest["numbers"])
    parts.append("<table><tr><th>measure</th>" + "".join(f"<th>{html.escape(v)}</th>" for v in variants) + "</tr>")
    parts += ["<tr><td>" + html.escape(name) + "</td>"
              + "".join(f"<td>{newest['numbers'][v].get(name, float('nan')):.4f}</td>" for v in variants) + "</tr>"
              for name in names]
    protocol = ", ".join(f"{name} = {value}" for name, value in newest["protocol"].items())
    parts.append(f"</table><p>Protocol: {html.escape(protocol)}</p>")
    return "\n".join(parts)


def _image(png: bytes, label: str) -> str:
    return f'<p><img alt="{label}" src="data:image/png;base64,{base64.b64encode(png).decode()}"/></p>'


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
