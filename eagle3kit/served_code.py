"""What the installed vLLM does with a draft's config: told from its own source, for versions differ and none of them says."""

import ast
from importlib import util
from pathlib import Path

from eagle3kit.errors import KitError
from eagle3kit.server import vllm_version

MODELS = {"llama": ("llama_eagle3.py", "llama.py"), "qwen3": ("qwen3_eagle3.py",)}
CONVERTED = "transformers_utils/configs/speculators/algos.py"


def honoured(model_type: str, converted: bool) -> tuple[set[str] | None, str]:
    """(names that vLLM's EAGLE-3 code reads from a config, vLLM's version); (None, the reason) where it cannot be looked up.

    A name counts when the model's source mentions it as text (`getattr(config, "norm_output", …)`) or attribute. A
    speculators config (`converted`) is first rewritten by another file, which must carry the name too. vLLM itself is not
    imported: only its files are read.
    """
    spec = util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None, "vLLM is not installed here"
    root = Path(next(iter(spec.submodule_search_locations)))
    files = [root / "model_executor" / "models" / name for name in MODELS.get(model_type, ())]
    files = [path for path in files if path.is_file()]
    try:
        version = vllm_version()
    except KitError:
        version = "of unknown version"
    if not files:
        return None, f"vLLM {version} has no EAGLE-3 code for layers of kind {model_type}"
    reads = set().union(*(_names(path) for path in files))
    if converted and (root / CONVERTED).is_file():
        # What it does not carry over is lost; the layer's own fields (layer_types, sliding_window) pass as they are.
        carried = _names(root / CONVERTED)
        reads = {name for name in reads if name in carried or not name.startswith(("norm_", "fc_norm"))}
    return reads, version


def _names(path: Path) -> set[str]:
    """All text constants and attribute names in a Python file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found
