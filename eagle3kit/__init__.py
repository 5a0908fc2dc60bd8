"""Train and measure an EAGLE-3 draft, one notebook a question.

Importing the package is light: no torch, no vLLM, no pydantic. What a notebook needs first comes on first use.
"""

from eagle3kit.errors import KitError

__all__ = ["KitError", "open_stage"]


def __getattr__(name: str):
    if name == "open_stage":
        from eagle3kit.stage import open_stage

        return open_stage
    # The rooms, as `eagle3kit.samples`: names like `target` would hide the parameter sections of a notebook.
    from importlib import import_module, util

    if not name.startswith("_") and util.find_spec(f"eagle3kit.{name}"):
        return import_module(f"eagle3kit.{name}")
    raise AttributeError(f"module 'eagle3kit' has no attribute {name!r}")
