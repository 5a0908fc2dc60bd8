"""Numbers as people read them: three significant figures, thousands apart, minutes and hours."""

import math
import re
from numbers import Integral


def three(value: float) -> str:
    """Three significant figures: 1.6 -> "1.60", 1234.5 -> "1,234", 0.00001 -> "1.00e-05"; whole numbers stay whole."""
    if isinstance(value, Integral) or (math.isfinite(value) and abs(value) >= 1000):
        return f"{round(value):,}"
    return f"{float(value):#.3g}".removesuffix(".") if value else "0"


def percent(share: float) -> str:
    """A share of 0 to 1 as a percentage: 0.4567 -> "45.7 %", never parted; only 1 itself reads "100 %"."""
    if 0.9995 <= share < 1:
        return "99.9\u00a0%"
    return f"{100 * share:.0f}\u00a0%" if share in (0, 1) else f"{three(100 * share)}\u00a0%"


def duration(seconds: float) -> str:
    """41.6 -> "42 s", 185 -> "3 min 05 s", 4321 -> "1 h 12 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 1 else f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def between(low: float, high: float) -> str:
    """An interval: "1.55 to 1.69"."""
    return f"{three(low)} to {three(high)}"


def tied(text: str) -> str:
    """`text` with each number tied to its percent sign, so that no line ends between them."""
    return re.sub(r"(\d) %", "\\1\u00a0%", text)
