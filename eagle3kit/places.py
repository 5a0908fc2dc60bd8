"""Where things lie: found from the package, never from the current folder.

papermill runs a notebook in the shell's folder, JupyterLab in the notebook's own: a relative path means two things.
"""

import os
from pathlib import Path

from eagle3kit.errors import KitError


def root() -> Path:
    """The folder that holds `notebooks/` and `params/`: $EAGLE3KIT_ROOT, or the one the package was installed from.

    Raises KitError when there are no notebooks in it.
    """
    place = Path(os.environ.get("EAGLE3KIT_ROOT") or Path(__file__).parent.parent).resolve()
    if not (place / "notebooks").is_dir():
        raise KitError(
            f"no notebooks/ folder in {place}; install the checkout itself (pip install -e .) "
            "or set EAGLE3KIT_ROOT to the folder that holds notebooks/"
        )
    return place


def outputs() -> Path:
    """The folder of all runs: $EAGLE3KIT_OUTPUTS, or `outputs/` in the root."""
    moved = os.environ.get("EAGLE3KIT_OUTPUTS")
    return Path(moved).resolve() if moved else root() / "outputs"


def notebook(stage: str) -> Path:
    """The source of a stage."""
    return root() / "notebooks" / f"{stage}.ipynb"


def shown(path: Path) -> str:
    """`path` as the reader can paste it: relative when it lies below the current folder, whole otherwise."""
    path, here = Path(path).resolve(), Path.cwd().resolve()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
