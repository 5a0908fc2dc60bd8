"""Tables and token strips, shown in a notebook and carried into the report as they are."""

import hashlib
import html
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from IPython.display import HTML, display

from eagle3kit.words import percent, three

LEFT = [("text-align", "left")]
LONG, WIDE = 60, [("min-width", "12rem")]  # letters from which a text would else stand one word a line beside other columns
RIGHT = [("text-align", "right"), ("font-variant-numeric", "tabular-nums")]

# Translucent, so that the same colour works on a white, a dark and a printed page; the underline does without colour.
TOKENS_CSS = """
.tokens p { font-family: ui-monospace, monospace; font-size: .875rem; line-height: 1.9; overflow-wrap: anywhere }
.tokens mark { color: inherit; background: rgba(0, 114, 178, .2); border-bottom: 2px solid #0f84c4; border-radius: 2px;
  print-color-adjust: exact; -webkit-print-color-adjust: exact }
.tokens .special { border: 1px solid currentColor; border-radius: 3px; padding: 0 .2em; margin: 0 .1em }
.tokens i { font-style: normal; opacity: .45 }
"""
VISIBLE = {" ": "<i>·</i>", "\t": "<i>→</i>", "\n": "<i>⏎</i><br>"}


def table(frame: pd.DataFrame, caption: str, formats: Mapping[str, Callable[[Any], str]] | None = None) -> None:
    """Show `frame` without its index: words to the left, numbers to the right with three significant figures.

    Whole numbers stay whole, yes and no are written so, and what is missing is a dash. `formats` maps a column to the
    function that writes its values.
    """
    styler = frame.style.hide(axis="index").set_caption(html.escape(caption))
    numeric = [pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in frame.dtypes]
    looks = []
    for place, right in enumerate(numeric):
        long = not right and any(len(str(cell)) >= LONG for cell in frame.iloc[:, place])
        looks.append({"selector": f".col{place}", "props": RIGHT if right else LEFT + WIDE if long else LEFT})
    # The id makes the rules this table's own; from the content, so that the same run gives the same page.
    styler.set_uuid(hashlib.sha256(frame.to_csv().encode() + caption.encode()).hexdigest()[:10])
    styler.set_table_styles(looks).format(_cell, escape="html")
    for column, write in (formats or {}).items():
        styler.format(write, subset=[column], escape="html")
    display(styler)


def html_tokens(pieces: Sequence[str], mask: Sequence[int], title: str, special: Sequence[bool] | None = None) -> None:
    """Show one sample token by token: supervised ones underlined on a tint, white space visible, special ones boxed.

    `pieces` [T] are the tokens as text, `mask` [T] is the loss mask, `special` [T] marks special tokens (without it,
    those that look like <this> or <|this|>).
    """
    if len(pieces) != len(mask):
        raise ValueError(f"{len(pieces)} tokens but a loss mask of {len(mask)}")
    if special is None:
        special = [len(piece) > 2 and piece[0] == "<" and piece[-1] == ">" for piece in pieces]
    spans = []
    for piece, supervised, boxed in zip(pieces, mask, special, strict=True):
        text = "".join(VISIBLE.get(letter) or html.escape(letter) for letter in piece)
        text = f'<span class="special">{text}</span>' if boxed else text
        spans.append(f"<mark>{text}</mark>" if supervised else f"<span>{text}</span>")
    count = sum(map(bool, mask))
    share = percent(count / len(mask)) if len(mask) else "none"
    caption = f"{title}. {count:,} of {len(mask):,} tokens are supervised ({share}): underlined."
    display(HTML(f'<style>{TOKENS_CSS}</style><figure class="tokens"><figcaption>{html.escape(caption)}</figcaption>'
                 f"<p>{'<wbr>'.join(spans)}</p></figure>"))


def _cell(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if value is None or value is pd.NA or value != value:  # NaN alone differs from itself
        return "–"
    return three(value) if isinstance(value, Real) else str(value)
