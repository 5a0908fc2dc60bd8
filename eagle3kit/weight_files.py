"""The weight files of a model directory, read no further than their headers: what is stored where, and is it whole."""

import json
import struct
from pathlib import Path
from typing import Any

from eagle3kit.errors import KitError
from eagle3kit.files import read_json

# Parts of a weight's name that put it outside the language model's own trunk.
ASIDE = {"layers", "vision_model", "vision_tower", "visual", "audio_tower", "mtp", "talker", "draft", "encoder"}


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
    """Asked name -> weight name. The final norm must stand beside the embedding: no layer's norm passes for it."""
    keys = list(index(folder))
    own = [key for key in keys if not ASIDE & set(key.split("."))]

    def only(ending: str) -> str:
        fits = [key for key in own if key == ending or key.endswith("." + ending)]
        if len(fits) != 1:
            what = f"{len(fits)} weights fit: {', '.join(fits)}" if fits else f"none of its {len(keys)} weights fits"
            raise KitError(f"{folder}: looked for the one weight named [...]{ending}, but {what}")
        return fits[0]

    found = {}
    for name in names:
        if name == "embed" or (name == "head" and tied):
            found[name] = only("embed_tokens.weight")
        elif name == "head":
            found[name] = only("lm_head.weight")
        elif name == "final_norm":
            found[name] = only("embed_tokens.weight").removesuffix("embed_tokens.weight") + "norm.weight"
            if found[name] not in keys:
                raise KitError(f"{folder} has no final norm: there is no weight {found[name]}")
        else:
            raise KitError(f"no weight called {name!r}: embed, head and final_norm are known")
    return found
