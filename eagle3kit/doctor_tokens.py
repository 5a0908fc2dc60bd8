"""What tokens and loss masks betray beside the target's tokenizer: empty or shifted masks, turns without an end, templates."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from eagle3kit import chat_template as templates
from eagle3kit.errors import KitError
from eagle3kit.rows import Unfit
from eagle3kit.signs import Sign, sign, unchecked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from eagle3kit.samples import StatesSample

# How other families mark a turn; where one stands in the text but not in the target's template, the samples are theirs.
MARKERS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "[INST]", "<|user|>", "<|im_assistant|>", "<|User|>",
           "<|start|>", "### Assistant", "### Response", "ASSISTANT:")  # fmt: skip
OFFSETS = (0, 1, -1, 2, -2)  # how many tokens late a mask may be, the likeliest first


def of_tokens(
    samples: Sequence[tuple[str, "StatesSample"]], tokenizer: "PreTrainedTokenizerBase", stops: Collection[int], vocab_size: int,
    chat_template: str | None = None,
) -> list[Sign]:
    """The signs of token ids and loss masks. `stops` end a turn of the target; `chat_template` stands in for its own."""
    outside = sum(int(((row.input_ids < 0) | (row.input_ids >= vocab_size)).sum()) for _, row in samples)
    tokens = sum(len(row.input_ids) for _, row in samples)
    empty = [name for name, row in samples if not bool(row.loss_mask.any())]
    told = f"{len(empty)} without any, first {empty[0]}" if empty else "every sample has some"
    first = [
        sign("token ids", outside, tokens, f"{outside:,} outside the target's vocabulary of {vocab_size:,}" if outside else
             f"all within the target's vocabulary of {vocab_size:,}"),
        sign("supervised tokens", len(empty) / max(1, len(samples)), len(samples), told),
    ]  # fmt: skip
    if outside:
        return [*first, *(unchecked(name, "no tokens of this target") for name in ("chat template", "mask place", "end of turn"))]
    rows = [(row.input_ids.tolist(), spans(row.loss_mask.tolist())) for _, row in samples]
    return [*first, *_prompts(rows, tokenizer, chat_template), _ends(rows, stops)]


def spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of supervised tokens as [start, end): [0, 1, 1, 0, 1] -> [(1, 3), (4, 5)]."""
    edges = [0, *(1 if value else 0 for value in mask), 0]
    starts = [place for place in range(1, len(edges)) if edges[place] > edges[place - 1]]
    ends = [place for place in range(1, len(edges)) if edges[place] < edges[place - 1]]
    return [(start - 1, end - 1) for start, end in zip(starts, ends, strict=True)]


def generation_prompt(tokenizer: "PreTrainedTokenizerBase", chat_template: str | None = None) -> list[int]:
    """The tokens that stand before every answer: what prompts of different words end with alike, four at most.

    ChatML: ["<|im_end|>", "\\n", "<|im_start|>", "assistant", "\\n"], of which the last four. KitError, Unfit: no template.
    """
    asked = [templates.next_prompt(tokenizer, [{"role": "user", "content": words}], chat_template) for words in ("Why?", "two")]
    alike = 0
    while alike < min(map(len, asked)) and asked[0][-1 - alike] == asked[1][-1 - alike]:
        alike += 1
    return asked[0][-min(alike, 4) :] if alike else []


def _prompts(rows: list, tokenizer: "PreTrainedTokenizerBase", chat_template: str | None) -> list[Sign]:
    try:
        ahead = generation_prompt(tokenizer, chat_template)
    except (KitError, Unfit) as error:
        return [unchecked(name, str(error)) for name in ("chat template", "mask place")]
    if not ahead:
        return [unchecked(name, "the target's template marks no answer's beginning") for name in ("chat template", "mask place")]
    # How far the supervised span begins from where the generation prompt ends: 0 is right, 1 is a token late.
    found: dict[int | None, int] = {}
    for ids, parts in rows:
        for start, _ in parts:
            stands = (start - off for off in OFFSETS)
            off = next((start - end for end in stands if end >= len(ahead) and ids[end - len(ahead) : end] == ahead), None)
            found[off] = found.get(off, 0) + 1
    n = sum(found.values())
    known = n - found.get(None, 0)
    shown = repr(tokenizer.decode(ahead))
    words = f"{known:,} of {n:,} answers follow {shown}"
    if known < n:
        words += _foreign(rows, tokenizer, chat_template)
    template = sign("chat template", known / max(1, n), n, words)
    if not known:
        return [template, unchecked("mask place", f"no answer stands near {shown}")]
    off = max((key for key in found if key is not None), key=lambda key: found[key])
    far = f"{abs(off)} token{'s' if abs(off) > 1 else ''} {'late' if off > 0 else 'early'}"
    note = f"the mask is shifted: most spans begin {far}, counted from {shown}" if off else "spans begin where the prompt ends"
    return [template, sign("mask place", found.get(0, 0) / known, known, note)]


def _foreign(rows: list, tokenizer: "PreTrainedTokenizerBase", chat_template: str | None) -> str:
    """Markers of other families in the text before the first answers."""
    own = str(chat_template or tokenizer.chat_template)
    text = "".join(tokenizer.decode(ids[max(0, parts[0][0] - 64) : parts[0][0] + 1]) for ids, parts in rows[:16] if parts)
    strangers = [marker for marker in MARKERS if marker in text and marker not in own]
    return f"; the text holds {', '.join(strangers)}, which is of another template" if strangers else ""


def _ends(rows: list, stops: Collection[int]) -> Sign:
    """Whether spans end with an end-of-turn token, or leave it to the prompt."""
    every = [(ids, start, end) for ids, parts in rows for start, end in parts]
    longest = max((end - start for _, start, end in every), default=0)
    inside = sum(ids[end - 1] in stops for ids, _, end in every)
    left = sum(ids[end - 1] not in stops and end < len(ids) and ids[end] in stops and end - start < longest
               for ids, start, end in every)  # fmt: skip
    if inside + left == 0:
        return unchecked("end of turn", f"none of the {len(every):,} answers looked at ends: all are cut")
    note = f"{inside:,} answers end with a supervised end-of-turn token, {left:,} with one that the mask leaves out"
    return sign("end of turn", inside / (inside + left), inside + left, note)
