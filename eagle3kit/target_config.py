"""What a target's config.json says of how it is built: where its language model lies in it, and what else there is beside."""

from pathlib import Path
from typing import Any

from eagle3kit.files import read_json

# Where configs of models with a language model inside keep that part; the first is a shell around another such config.
INNER = ("thinker_config", "text_config", "llm_config", "language_config")
SENSES = ("vision", "audio")  # a config of a vision tower, of an audio encoder


def described(folder: Path | str) -> dict[str, Any]:
    """The config.json in directory `folder`, or nothing where `folder` is none (a hub id, that vLLM would fetch itself)."""
    path = Path(folder) / "config.json"
    return read_json(path) if path.is_file() else {}


def language_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model: `config` itself, or what lies in it, however deep.

    {"thinker_config": {"text_config": {"hidden_size": 64}}} -> {"hidden_size": 64}
    """
    found = next((config[name] for name in INNER if isinstance(config.get(name), dict)), None)
    return config if found is None else language_part(found)


def is_latent(config: dict[str, Any]) -> bool:
    """Does the language model of a config.json keep keys and values in a latent space (MLA: DeepSeek, Kimi)?"""
    return bool(language_part(config).get("kv_lora_rank"))


def wraps(config: dict[str, Any]) -> bool:
    """Does a config.json describe more than a language model: one that also sees or hears?

    Kimi-K2.5 (text_config beside vision_config) -> True; Llama -> False.
    """
    return language_part(config) is not config or any(isinstance(config.get(f"{part}_config"), dict) for part in SENSES)
