"""One self-contained HTML file: the sheet, the scripts of `static/` and the data, nothing from a network.

The data is JSON in a script element that no browser executes. Everything outside ASCII is escaped, and so are <, > and
&, so that no text can end the element or be markup; the scripts put text into text nodes only. A content security
policy with the hashes of the one sheet and the one script forbids everything else, network requests included.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
SCRIPTS = {
    "run": ("base", "table", "chart", "figures", "tokens", "rollouts", "time", "sections", "run", "page"),
    "sweep": ("base", "table", "chart", "figures", "sweep", "sweep_plots", "page"),
}
MAX_TEXT = 20_000

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src '{style_hash}'; \
script-src '{script_hash}'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#page">Skip the navigation</a>
<main id="page"><noscript>This page needs JavaScript; the data stands in the files beside it.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render(data: Mapping[str, Any], title: str) -> str:
    """data["kind"]: "run" or "sweep"; the rest is for that page's script."""
    style = (STATIC / "style.css").read_text("utf-8")
    script = "\n".join((STATIC / f"{name}.js").read_text("utf-8") for name in SCRIPTS[data["kind"]])
    return TEMPLATE.format(
        title=escape(printable(title)),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=to_json(data),
    )


def write(path: Path, html: str) -> Path:
    """Aside, then renamed: whoever has the page open or opens it now never sees half of it."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(html, "utf-8")
    aside.replace(path)
    return path


def to_json(value: Any) -> str:
    """JSON in ASCII that can stand in a script element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def clean(value: Any, depth: int = 6) -> Any:
    """A value out of a file, made safe for the page: texts and lists bounded, no NaN, no bottomless nesting."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT // 2]} [...] {value[-MAX_TEXT // 2 :]}"
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth and isinstance(value, Mapping):
        return {str(key)[:200]: clean(item, depth - 1) for key, item in list(value.items())[:300]}
    if depth and isinstance(value, list):
        return [clean(item, depth - 1) for item in value[:300]]
    return str(value)[:200]


def printable(text: str) -> str:
    """For the title: no controls, no lone surrogates (a file name may hold them)."""
    return "".join(char if char.isprintable() else "�" for char in text)


def built_now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode()
