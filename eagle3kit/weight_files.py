"""The weight files of a model directory, read no further than their headers: what is stored where, and is it whole."""

import json
import struct
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError
from eagle3kit.files import read_json

# Parts of a weight's name that put it outside the language model's own trunk.
ASIDE = {"layers", "vision_model", "vision_tower", "visual", "audio_tower", "mtp", "talker", "draft", "encoder", "vision_encoder",
         "audio_encoder", "code2wav", "token2wav", "tts", "apm", "vpm", "resampler"}  # fmt: skip
# How families name embedding, head and final norm; the norm stands beside the embedding. The first is nearly everyone's.
STYLES = (
    ("embed_tokens.weight", "lm_head.weight", "norm.weight"),
    ("tok_embeddings.weight", "output.weight", "norm.weight"),  # InternLM2
    ("word_embeddings.weight", "lm_head.weight", "norm.weight"),  # Bailing, Ling
    ("backbone.embeddings.weight", "lm_head.weight", "norm_f.weight"),  # Nemotron-H
)
PLAIN = {"BF16", "F16", "F32"}


def index(folder: Path) -> dict[str, str]:
    """Weight name -> file name, from the index or from the single file's header."""
    listed = folder / "model.safetensors.index.json"
    if listed.is_file():
        files = read_json(listed).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise KitError(f"{listed} has no weight_map; copy the file again")
        missing = sorted({file for file in files.values() if not (folder / file).is_file()})
        if missing:
            raise KitError(f"{folder} lacks {len(missing)} weight file(s) named in {listed.name}, first {missing[0]}; "
                           f"copy or download the model again")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return dict.fromkeys(header(single), single.name)
    other = sorted(file.name for file in folder.glob("*.bin")) + sorted(file.name for file in folder.glob("*.gguf"))
    hint = f" ({other[0]} is not read: convert it to safetensors)" if other else ""
    raise KitError(f"{folder} has no weights: looked for {single.name} and {listed.name}{hint}")


def header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file (name -> dtype, shape, offsets); KitError when it is cut short or not one."""
    size = file.stat().st_size
    try:
        with open(file, "rb") as source:
            (length,) = struct.unpack("<Q", source.read(8))
            if length > size:
                raise ValueError
            header = json.loads(source.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise KitError(f"{file} is not a safetensors file or is cut short ({size} bytes); copy it again") from None
    if size != end:
        raise KitError(f"{file} is {'cut short' if size < end else 'too long'}: {size} bytes, its header says {end}; "
                       f"copy it again")
    return header


def shared(folder: Path, names: tuple[str, ...], tied: bool) -> dict[str, str]:
    """Asked name -> weight name. The final norm must stand beside the embedding: no layer's norm passes for it.

    Kimi-K2.5: embed language_model.model.embed_tokens.weight, head language_model.lm_head.weight, final_norm
    language_model.model.norm.weight.

    Raises:
        KitError: a weight is missing, or more than one fits.
    """
    keys = list(index(folder))

    def only(ending: str) -> str:
        found = _fitting(keys, ending)
        if len(found) != 1:
            what = f"{len(found)} weights fit: {', '.join(found)}" if found else f"none of its {len(keys)} weights fits"
            raise KitError(f"{folder}: looked for the one weight named [...]{ending}, but {what}")
        return found[0]

    embed, head, norm = _style(keys)
    found = {}
    for name in names:
        if name == "embed" or (name == "head" and tied):
            found[name] = only(embed)
        elif name == "head":
            found[name] = only(head)
        elif name == "final_norm":
            last = ".".join(embed.split(".")[-2:])  # "backbone." belongs to what both share
            found[name] = only(embed).removesuffix(last) + norm
            if found[name] not in keys:
                raise KitError(f"{folder} has no final norm: there is no weight {found[name]}")
        else:
            raise KitError(f"no weight called {name!r}: embed, head and final_norm are known")
    return found


def stores_head(folder: Path) -> bool:
    """Do the weights in `folder`, if there are any, hold a head of their own?"""
    try:
        keys = list(index(folder))
    except KitError:  # no weights, or a broken index: whoever wants to read them is told
        return False
    return bool(_fitting(keys, _style(keys)[1]))


def _fitting(keys: list[str], ending: str) -> list[str]:
    """Names of the language model's own trunk and head that end in `ending`."""
    return [key for key in keys if (key == ending or key.endswith("." + ending)) and not ASIDE & set(key.split("."))]


def _style(keys: list[str]) -> tuple[str, str, str]:
    """How these weights name embedding, head and final norm."""
    return next((style for style in STYLES if _fitting(keys, style[0])), STYLES[0])


def require_plain(folder: Path, keys: dict[str, str]) -> None:
    """KitError unless the weights `keys` (as `shared` gives them) are numbers as they stand, of sizes that go together."""
    files, shapes = index(folder), {}
    for name, key in keys.items():
        entry = header(folder / files[key])[key]
        if entry["dtype"] not in PLAIN:
            raise KitError(f"{folder / files[key]}: {key} is stored as {entry['dtype']}, so it is quantized, and a draft is "
                           f"built from plain numbers ({', '.join(sorted(PLAIN))}); take a checkpoint that leaves it plain")
        shapes[name] = entry["shape"]
    widths = {name: shape[-1] if shape else 0 for name, shape in shapes.items()}
    if len(set(widths.values())) > 1 or any(len(shape) != (1 if name == "final_norm" else 2) for name, shape in shapes.items()):
        said = ", ".join(f"{keys[name]} {shape}" for name, shape in shapes.items())
        raise KitError(f"{folder}: the shapes of the weights do not go together: {said}; copy or download the model again")
