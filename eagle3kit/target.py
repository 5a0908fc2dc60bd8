"""The target: find or make its directory, read its geometry, and load only the tensors that a draft shares with it."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3kit import gguf_target, places, weight_files
from eagle3kit.errors import KitError
from eagle3kit.files import read_json
from eagle3kit.target_config import INNER, language_part

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "tekken.json", "vocab.json", "spiece.model")
NAMES = {"hidden_size": ("hidden_size", "n_embd", "d_model"), "layers": ("num_hidden_layers", "n_layer", "num_layers"),
         "vocab_size": ("vocab_size",), "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
         "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")}
# Families whose norms multiply by (1 + weight) instead of weight.
ADDS_ONE = re.compile(r"(gemma|gemma2|gemma3|vaultgemma|recurrent_gemma|qwen3_next|qwen3_5|qwen3_5_moe|step3p5|step3p7"
                      r"|minimax_m3_vl)(_text)?")


@dataclass(frozen=True)
class Geometry:
    """A target in numbers: `dtype` as text ("bfloat16"), `tied` when the head is the embedding, positions in tokens.

    `norm_adds_one`: the norms multiply by 1 + weight (Gemma, Qwen3.5), which whoever applies the final norm must know.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    dtype: str
    architecture: str
    tied: bool
    max_positions: int
    rms_norm_eps: float
    norm_adds_one: bool


def locate(model: str, *, revision: str | None = None, base: Path | None = None) -> Path:
    """The checked model directory of `model`: a bundled name, a local folder, or a hub id "owner/name" (downloaded).

    A relative folder is taken from `base` (default: the root of the kit). `revision` is for the hub only.
    KitError says what was looked for and where.
    """
    if model in gguf_target.BUNDLED:
        try:
            return check(gguf_target.directory(model))
        except KitError:
            return check(gguf_target.make(model))
    folder = Path(model).expanduser()
    if not folder.is_absolute():
        folder = (base or places.root()) / folder
    if folder.is_dir():
        return check(folder)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
        return check(_download(model, revision, folder))
    near = get_close_matches(model, gguf_target.BUNDLED, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise KitError(f"no target {model!r}: not a bundled name ({', '.join(gguf_target.BUNDLED)}), not a folder "
                   f"({folder}) and not a hub id (owner/name).{hint} Set target.model")


def check(folder: Path) -> Path:
    """`folder`, if it holds config, whole weights and a tokenizer; else KitError naming the missing or broken file."""
    if not (folder / "config.json").is_file():
        raise KitError(f"{folder} is not a model directory: it has no config.json")
    for file in sorted(set(weight_files.index(folder).values())):
        weight_files.header(folder / file)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise KitError(f"{folder} has no tokenizer: looked for {', '.join(TOKENIZERS)}")
    return folder


def language_config(path: Path | str, trust_remote_code: bool = False) -> Any:
    """transformers' config object of the language model in directory `path`; KitError when transformers cannot make one.

    What vLLM takes as the model's text: `text_config` and its other names, of wrappers around wrappers too.
    """
    folder = Path(path)
    found = _known_config(folder, trust_remote_code)
    if found is None:
        kind = read_json(folder / "config.json").get("model_type")
        raise KitError(f"transformers cannot make a config of {folder / 'config.json'} (model_type {kind!r})"
                       f"{_own_code(folder, trust_remote_code) or '; is it newer than the transformers installed here?'}")
    return found


def geometry(path: Path | str, trust_remote_code: bool = False) -> Geometry:
    """The geometry of the language model in directory `path`, also when its config is nested in a multimodal one.

    config.json is believed first; what it leaves to a default is asked of transformers. KitError names what is unknown.
    """
    folder = Path(path)
    outer = read_json(folder / "config.json")
    inner = language_part(outer)
    asked: list[Any] = []

    def value(names: tuple[str, ...]) -> Any:
        for part in (inner, outer):
            for name in names:
                if part.get(name) is not None:
                    return part[name]
        if not asked:
            asked.append(_known_config(folder, trust_remote_code))
        return next((found for name in names if (found := getattr(asked[0], name, None)) is not None), None)

    numbers = {field: value(names) for field, names in NAMES.items()}
    missing = [NAMES[field][0] for field, number in numbers.items() if number is None]
    if missing:
        own = "; if the model brings its own code, set target.trust_remote_code" * (not trust_remote_code)
        raise KitError(f"{folder / 'config.json'} does not say {', '.join(missing)}, and transformers does not know "
                       f"model_type {outer.get('model_type')!r}"
                       f"{_own_code(folder, trust_remote_code) or _parts(outer) or own}")
    said = [part[name] for part in (inner, outer) for name in ("dtype", "torch_dtype") if part.get(name)]
    dtype = str(said[0]) if said else None
    if dtype is None:  # the config does not say: the embedding does
        key = weight_files.shared(folder, ("embed",), True)["embed"]
        short = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        stored = weight_files.header(folder / weight_files.index(folder)[key])[key]["dtype"]
        dtype = short.get(stored, stored)
    kind = str(inner.get("model_type") or outer.get("model_type") or "")
    architecture = (outer.get("architectures") or inner.get("architectures") or [kind])[0]
    return Geometry(**numbers, dtype=dtype.removeprefix("torch."), architecture=architecture,
                    tied=_tied(folder, trust_remote_code), norm_adds_one=bool(ADDS_ONE.fullmatch(kind)))


def weights(
    path: Path | str, names: tuple[str, ...] = ("embed", "head", "final_norm"), *, trust_remote_code: bool = False
) -> dict[str, "Tensor"]:
    """Only the tensors asked for, on the CPU, in their stored dtype: embed and head [V, H], final_norm [H].

    They are views of the mapped files, which the system reads as they are used: a head of 163,840 x 7,168 costs no memory
    until then, and none but the file's own pages after. A tied target's head is its embedding.

    Raises:
        KitError: a tensor is missing, its name is not the only one to fit, it is quantized, or the sizes do not agree.
    """
    from safetensors import safe_open

    folder = Path(path)
    files = weight_files.index(folder)
    keys = weight_files.shared(folder, names, "head" in names and _tied(folder, trust_remote_code))
    weight_files.require_plain(folder, keys)
    found = {}
    for name, key in keys.items():
        with safe_open(folder / files[key], framework="pt") as file:
            found[name] = file.get_tensor(key)
    return found


def tokenizer(path: Path | str, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    """The tokenizer of directory `path`; KitError with transformers' own words when it cannot be loaded.

    One that is code of its own (Kimi's) and comes without a tokenizer.json is not guessed at: without trust it is an error.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    own = _own_code(folder, trust_remote_code, "tokenizer_config.json")
    if own and not (folder / "tokenizer.json").is_file():
        raise KitError(f"the tokenizer in {folder} cannot be loaded without its own code{own}")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise KitError(f"the tokenizer in {path} cannot be loaded: {error}{own}") from error


def stops(path: Path | str, words: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """The token ids that end a turn of the target in directory `path`, by all who name them, sorted.

    They are its generation config, its config and its tokenizer `words`; the server stops at what any of them names.
    """
    folder = Path(path)
    found = {words.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        said = read_json(folder / name) if (folder / name).is_file() else {}
        for part in (said, language_part(said)):
            ends = part.get("eos_token_id")
            found.update(ends if isinstance(ends, list) else [ends])
    return tuple(sorted(i for i in found if isinstance(i, int)))


def _download(model: str, revision: str | None, folder: Path) -> Path:
    from huggingface_hub import snapshot_download

    unwanted = ["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "consolidated*"]
    try:
        return Path(snapshot_download(model, revision=revision, ignore_patterns=unwanted))
    except Exception as error:  # the hub's client raises a dozen unrelated kinds
        said = str(error).strip().splitlines()
        raise KitError(f"target {model} (revision {revision or 'main'}) cannot be had from the model hub: "
                       f"{said[0] if said else type(error).__name__}. There is no folder {folder} either. Set "
                       f"target.model to a bundled name ({', '.join(gguf_target.BUNDLED)}) or a local folder") from None


def _tied(folder: Path, trust_remote_code: bool) -> bool:
    """Is the head the embedding? Not where the files hold a head, whatever the config says: vLLM and transformers load it, and
    tie only what is equal. Else as the language model's own config says, or its wrapper's; these often differ, for it is the
    wrapper that sees both tensors. Where neither says, by transformers' defaults."""
    if weight_files.stores_head(folder):
        return False
    outer = read_json(folder / "config.json")
    said = [part.get("tie_word_embeddings") for part in (language_part(outer), outer)]
    said = [one for one in said if one is not None] or [
        getattr(_known_config(folder, trust_remote_code), "tie_word_embeddings", None)]  # fmt: skip
    return any(said)


def _known_config(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' config of the language model inside, or None when it knows no such model."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception:  # a config that brings its own code, or one newer than this transformers
        return None
    while (inner := next((part for name in INNER if (part := getattr(config, name, None)) is not None), None)) is not None:
        config = inner
    return config


def _own_code(folder: Path, trust_remote_code: bool, file: str = "config.json") -> str:
    """The rest of a message for a model that brings code which nobody has allowed to run; empty when that is not so."""
    said = read_json(folder / file) if (folder / file).is_file() else {}
    named = said.get("auto_map") if isinstance(said, dict) else None
    if trust_remote_code or not isinstance(named, dict) or not named:
        return ""
    flat = [one for value in named.values() for one in (value if isinstance(value, list) else [value]) if one]
    modules = sorted({f"{str(one).rpartition('--')[2].split('.')[0]}.py" for one in flat})
    return (f": it is code that comes with the model ({', '.join(modules)}), which is run only if target.trust_remote_code is "
            f"true; read it first")


def _parts(outer: dict[str, Any]) -> str:
    """The rest of a message for a config whose language model may lie under a name that we do not know."""
    names = [name for name, value in outer.items() if isinstance(value, dict) and "hidden_size" in value]
    return f"; its parts are {', '.join(names)}, but the language model is looked for under {', '.join(INNER)}" if names else ""


def identity(folder: Path) -> str:
    """A short hash that changes when another model is put into `folder`: of its config, and of the name, size and first
    MiB of each weight file. Hashing all of a large model would take minutes."""
    import hashlib

    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted({folder / file for file in weight_files.index(folder).values()}):
        with open(path, "rb") as file:
            found.update(f"{path.name} {path.stat().st_size}".encode() + file.read(2**20))
    return found.hexdigest()[:16]
