"""Which contract a tensor file is of, told from its headers, and where it breaks that contract.

    sample, v1    data_N.pt {"input_ids" [T], "loss_mask" [T], "hidden_states": [[T, H], …]}: speculators 0.3 to 0.7
    sample, v0    data_N.pt {"input_ids" [T], "loss_mask" [T], "hidden_state" [T, n·H], "target" [T, H]}: speculators 0.3
                  (train/data.py, standardize_data_v1 and _v0; the last state of v1 is v0's "target")
    states        hs_N.safetensors {"hidden_states" [T, n + 1, H], "token_ids" [T]} beside an Arrow data set: speculators
                  0.5 to 0.9; under any other name vLLM's connector wrote it (example_hidden_states_connector.py)
    states, fp8   the same in float8_e4m3fn with "hidden_states_scales" float32 [T, 1, 1] (hs_connectors/fp8_utils.py)
    t2d           bool [V]; d2t: int64 [D]; token_freq: int64 [V] or a dictionary token id -> count

T tokens, H the target's hidden size, n auxiliary layers, V and D the target's and the draft's vocabulary.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3kit.faults import Fault
from eagle3kit.headers import Headers, TensorInfo

FLOATS = ("float32", "bfloat16", "float16")
WHOLE = ("int64", "int32")
MASKS = (*WHOLE, "bool", "uint8", "int8")
MAPPING = ("t2d", "d2t", "token_freq")
SAMPLE_NAME = re.compile(r"(?:data|hs)_(\d+)\.(?:pt|ckpt|safetensors)$")
LEAST_VOCABULARY = 256  # a byte each: no vocabulary is smaller
CONVERT = "write the samples anew with `eagle3kit convert SRC DST --to pt`"
REMAKE = "extract the states of this sample again"


@dataclass(frozen=True)
class Contract:
    """What a file is: `kind` ("sample", "states", "t2d", "d2t", "token_freq", or "mapping" for several of these), its `version`
    in words, tokens T, number of states and width H (0 where it has none), its keys with T for the number of tokens, and
    where it breaks the contract."""

    kind: str
    version: str
    tokens: int
    states: int
    width: int
    signature: str
    faults: tuple[Fault, ...] = ()


def number(path: Path) -> int | None:
    """The number in a sample's name: 12 for data_12.pt and hs_12.safetensors; None for another name."""
    fits = SAMPLE_NAME.match(path.name)
    return int(fits[1]) if fits and len(fits[1]) < 12 and str(int(fits[1])) == fits[1] else None  # data_01.pt is no data_1.pt


def recognise(headers: Headers) -> Contract | None:
    """The contract of a file; None when it is of no kind known here."""
    content, name = headers.content, headers.path.name
    if isinstance(content, dict):
        keys = {key for key in content if isinstance(key, str)}
        if "aux_hidden_state" in keys and "input_ids" in keys:
            return _Look(headers).specforge()
        if keys & {"hidden_state", "target"} and "input_ids" in keys:
            return _Look(headers).v0()
        if "token_ids" in keys or ("hidden_states" in keys and headers.container == "safetensors"):
            return _Look(headers).states()
        if len(keys & {"hidden_states", "input_ids", "loss_mask"}) > 1:
            return _Look(headers).v1()
        if (content and _is_table(content)) or ("token_freq" in name and not headers.tensors):
            return _Look(headers).table()
        inside = [key for key in MAPPING if key in keys]
        if inside and len(inside) == len(content):
            looked = _Look(headers)
            return looked.both(inside) if len(inside) > 1 else looked.mapping(inside[0], content[inside[0]])
        return None
    stem = next((kind for kind in MAPPING if kind in name), None)
    if isinstance(content, TensorInfo) and len(content.shape) <= 2:
        if stem is None and content.dtype == "bool" and len(content.shape) == 1 and content.shape[0] >= LEAST_VOCABULARY:
            found = _Look(headers).mapping("t2d", content)
            return replace(found, version=f"{found.version} (by its number type, no name says so)")
        return _Look(headers).mapping(stem, content) if stem else None
    return None


def _is_table(content: dict[Any, Any]) -> bool:
    return all(type(key) is int and type(value) is int for key, value in content.items())


class _Look:
    """One file being looked at: collects its faults."""

    def __init__(self, headers: Headers):
        self.headers, self.content, self.faults = headers, headers.content, []
        self.tokens = 0

    def fault(self, key: str, found: str, expected: str, causes: str, way_out: str) -> None:
        self.faults.append(Fault(str(self.headers.path), key, expected, found, causes, way_out))

    def tensor(self, key: str, dtypes: tuple[str, ...], causes: str, way_out: str = REMAKE) -> TensorInfo | None:
        """The tensor under `key` if it is there and of one of `dtypes`; a fault otherwise."""
        value = self.content.get(key)
        if key not in self.content:
            names = ", ".join(map(str, list(self.content)[:8]))
            self.fault(key, f"missing (the file has {names})", "a tensor", causes, way_out)
        elif not isinstance(value, TensorInfo):
            self.fault(key, f"a {type(value).__name__}", "a tensor", "trainers call its methods and stop", CONVERT)
        elif value.dtype not in dtypes:
            self.fault(key, value.dtype, " or ".join(dtypes), causes, way_out)
        else:
            return value
        return None

    def row(self, key: str, dtypes: tuple[str, ...], causes: str) -> None:
        """A tensor [T]; the first one met says what T is."""
        value = self.tensor(key, dtypes, causes)
        if value is None:
            return
        if len(value.shape) == 2 and value.shape[0] == 1:
            self.fault(key, f"{list(value.shape)}", f"[{value.shape[1]}]", "the leading dimension of one is taken for the "
                       "tokens: a sample of one token", CONVERT)  # fmt: skip
        elif len(value.shape) != 1 or not value.shape[0]:
            self.fault(key, f"{list(value.shape)}", "[T], one number a token", "nothing can be learned from it", REMAKE)
        elif self.tokens and value.shape[0] != self.tokens:
            self.fault(key, f"[{value.shape[0]}]", f"[{self.tokens}], one for each of the input_ids",
                       "tokens and mask are out of step", REMAKE)  # fmt: skip
        else:
            self.tokens = value.shape[0]

    def state(self, key: str, value: Any, width: int | None, dtypes: tuple[str, ...] = FLOATS) -> int:
        """A tensor [T, H] of states; returns H, 0 when it is none."""
        shape = list(value.shape) if isinstance(value, TensorInfo) else type(value).__name__
        wanted = f"[{self.tokens or 'T'}, {width or 'H'}]"
        if not isinstance(value, TensorInfo) or len(value.shape) != 2 or not value.shape[1]:
            self.fault(key, f"{shape}", wanted, "the trainer cannot join the states of a token", CONVERT)
        elif value.dtype not in dtypes:
            self.fault(key, value.dtype, " or ".join(dtypes), "the draft's first layer takes floats", REMAKE)
        elif self.tokens and value.shape[0] != self.tokens:
            few = value.shape[0] < self.tokens
            causes = "the states belong to other tokens" + (": with prefix caching vLLM computes none for a shared start" if few
                                                            else "")  # fmt: skip
            self.fault(key, f"{shape}", wanted, causes, f"{REMAKE}, with prefix caching off")
        elif width and value.shape[1] != width:
            self.fault(key, f"{shape}", wanted, "states of another model, or cut", REMAKE)
        else:
            return value.shape[1]
        return 0

    def tokens_and_mask(self) -> None:
        self.row("input_ids", WHOLE, "no token, no embedding")
        self.row("loss_mask", MASKS, "the trainer does not know which tokens to learn")

    def done(self, kind: str, version: str, states: int = 0, width: int = 0) -> Contract:
        return Contract(kind, version, self.tokens, states, width, signature(self.content, self.tokens), tuple(self.faults))

    def v1(self) -> Contract:
        self.tokens_and_mask()
        value, width, count = self.content.get("hidden_states"), 0, 0
        if isinstance(value, TensorInfo) and len(value.shape) == 3 and all(value.shape):
            self.fault("hidden_states", f"one tensor {list(value.shape)}", "a list of tensors [T, H]",
                       "speculators joins the list and stops at a tensor", CONVERT)  # fmt: skip
        elif not isinstance(value, (list, tuple)) or len(value) < 2:
            what = "missing" if "hidden_states" not in self.content else f"{type(value).__name__} of {len(value)}" if isinstance(
                value, (list, tuple)) else type(value).__name__  # fmt: skip
            self.fault("hidden_states", what, "a list of tensors [T, H]: auxiliary layers, then the last",
                       "there is nothing for the draft to read", REMAKE)  # fmt: skip
        else:
            count = len(value)
            for place, state in enumerate(value):
                width = self.state(f"hidden_states[{place}]", state, width) or width
            kinds = {state.dtype for state in value if isinstance(state, TensorInfo) and state.dtype in FLOATS}
            if len(kinds) > 1:
                self.fault("hidden_states", "states of several number types", "one", "one layer is rounded more than others",
                           REMAKE)  # fmt: skip
        return self.done("sample", "data_N.pt v1 (speculators 0.3 to 0.7)", count, width)

    def v0(self) -> Contract:
        self.tokens_and_mask()
        width = self.state("target", self.content.get("target", "missing"), None)
        wide = self.state("hidden_state", self.content.get("hidden_state", "missing"), None)
        last, joined = self.content.get("target"), self.content.get("hidden_state")
        if width and wide and last.dtype != joined.dtype:
            self.fault("target", last.dtype, f"{joined.dtype}, as hidden_state", "one layer is rounded more than others", REMAKE)
        if width and wide and (wide % width or wide == 0):
            self.fault("hidden_state", f"width {wide}", f"a multiple of the target's {width}",
                       "it cannot be taken apart into layers", REMAKE)  # fmt: skip
        return self.done("sample", "data_N.pt v0 (speculators 0.3)", wide // width + 1 if width and wide else 0, width)

    def specforge(self) -> Contract:
        """Another trainer's: "aux_hidden_state" [1, T, n·H], "hidden_state" [1, T, H] the last, which SGLang's recorder gives
        after the final norm."""
        self.fault("aux_hidden_state", "the layout of SpecForge", "data_N.pt or hs_N.safetensors of speculators",
                   "neither speculators nor this kit reads it, and its last state may lie after the final norm",
                   "extract the states again; or, where you know that the last is before the norm, save aux_hidden_state[0] "
                   "as hidden_state and hidden_state[0] as target")  # fmt: skip
        return self.done("sample", "a sample of SpecForge")

    def states(self) -> Contract:
        self.row("token_ids", WHOLE, "nobody can tell whose states these are")
        value = self.tensor("hidden_states", (*FLOATS, "float8_e4m3fn"), "there is nothing for the draft to read")
        count = width = 0
        if value is not None and len(value.shape) == 3 and value.shape[0] != self.tokens == value.shape[1] > 0:
            self.fault("hidden_states", f"{list(value.shape)}", f"[{self.tokens}, {value.shape[0]}, {value.shape[2]}]",
                       "layers and tokens stand in each other's place", "transpose the first two dimensions")  # fmt: skip
        elif value is not None and (len(value.shape) != 3 or value.shape[1] < 2 or not value.shape[2]):
            self.fault("hidden_states", f"{list(value.shape)}", "[T, states, H], at least one auxiliary and the last",
                       "a state is missing; older vLLM drops the last of some architectures", REMAKE)  # fmt: skip
        elif value is not None:
            count, width = value.shape[1:]
            if self.tokens and value.shape[0] != self.tokens:
                self.fault("hidden_states", f"{list(value.shape)}", f"[{self.tokens}, {count}, {width}]",
                           "the states belong to other tokens: with prefix caching vLLM computes none for a shared start",
                           f"{REMAKE}, with prefix caching off")  # fmt: skip
        fp8 = value is not None and value.dtype.startswith("float8")
        if fp8:
            scales = self.tensor("hidden_states_scales", ("float32",), "without its scales the numbers mean nothing")
            if scales is not None and scales.shape != (value.shape[0], 1, 1):
                self.fault("hidden_states_scales", f"{list(scales.shape)}", f"[{value.shape[0]}, 1, 1]",
                           "scales of other tokens", REMAKE)  # fmt: skip
        own = number(self.headers.path) is not None
        version = "hs_N.safetensors (speculators 0.5 to 0.9)" if own else "vLLM's connector file"
        scaled = f", fp8 with{'' if 'hidden_states_scales' in self.content else 'out'} scales" if fp8 else ""
        return self.done("states", version + scaled, count, width)

    def mapping(self, kind: str, value: Any) -> Contract:
        wanted = {"t2d": "bool", "d2t": "int64", "token_freq": "int64"}[kind]
        causes = {"t2d": "the head's rows are picked by it", "d2t": "draft tokens are taken for other words",
                  "token_freq": "tokens are ranked by it"}[kind]  # fmt: skip
        if not isinstance(value, TensorInfo) or value.dtype != wanted or len(value.shape) != 1 or not value.shape[0]:
            found = f"{value.dtype} {list(value.shape)}" if isinstance(value, TensorInfo) else type(value).__name__
            size = "D" if kind == "d2t" else "V"
            self.fault(kind, found, f"{wanted} [{size}]", causes, "build the mapping again from the token frequencies")
        return self.done(kind, f"{kind} as {self.headers.container}")

    def both(self, inside: list[str]) -> Contract:
        """Several parts of a mapping in one file, as SpecForge and its kin write them."""
        for key in inside:
            self.mapping(key, self.content[key])
        return self.done("mapping", f"{' and '.join(inside)} in one file")

    def table(self) -> Contract:
        def counts(key: Any, value: Any) -> bool:
            return type(key) is int and type(value) is int and key >= 0 and 0 <= value < 1 << 63

        wrong = next((key for key, value in self.content.items() if not counts(key, value)), None)
        if wrong is not None:
            self.fault(f"token_freq[{str(wrong)[:40]}]", f"{type(wrong).__name__} -> {str(self.content[wrong])[:40]}",
                       "token ids and counts, whole numbers of at least 0", "it fails as an index", "count the tokens again")
        elif not self.content:
            self.fault("token_freq", "nothing was counted", "a count a token id", "the vocabulary is then the lowest token ids",
                       "count the tokens again")  # fmt: skip
        found = Contract("token_freq", "token_freq as dictionary (speculators)", 0, 0, 0,
                         f"{len(self.content):,} token ids -> counts", tuple(self.faults))  # fmt: skip
        return found


def signature(content: Any, tokens: int) -> str:
    """Keys, number types and shapes in one line, T for the number of tokens, equal neighbours of a list told once:
    `input_ids int64 [T], loss_mask int64 [T], hidden_states 4 × bfloat16 [T, 576]`."""

    def told(value: Any) -> str:
        if isinstance(value, TensorInfo):
            whole = ["T" if tokens and place == 0 and n == tokens else str(n) for place, n in enumerate(value.shape)]
            return f"{value.dtype} [{', '.join(whole)}]"
        if isinstance(value, (list, tuple)):
            parts = [told(inner) for inner in value[:16]]
            return f"{len(value)} × {parts[0]}" if parts and len(set(parts)) == 1 else f"({'; '.join(parts)})"
        return type(value).__name__

    if isinstance(content, dict):
        return ", ".join(f"{key} {told(value)}" for key, value in list(content.items())[:16])
    return told(content)
