"""Where an assistant's turn begins and ends in each family's text, written down by hand: the rule that masks are held against.

It knows nothing of the kit's own way: no prompt is compared with a chat, no stand-in is rendered. A turn of the assistant
is what stands between the words that open it and the first token that ends it, that token included. What the chats say is
recognisable: every assistant's word begins with ans or thk or is an argument, everybody else's with usr, sys or out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

CHATML = r"<\|im_start\|>assistant\n"
LLAMA = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n"
DEEPSEEK = r"<｜Assistant｜>"
KIMI = r"<\|im_assistant\|>assistant<\|im_middle\|>"
# After the results of a tool these families open no turn anew: the target goes on behind them.
RESULTS = r"(?:</result>\n</function_results>\n\n|<｜tool▁outputs?▁end｜>(?!\n?<｜tool▁output))"


@dataclass(frozen=True)
class Turn:
    """`opens`: the text before what the target writes, as a pattern; `ends`: the tokens that close its turn.

    `closes`, a pattern, stands in for `ends` where a token closes the turn in some places only.
    """

    opens: str
    ends: tuple[str, ...]
    closes: str = ""

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The assistant's turns in `text` as spans of characters; one that nothing closes is left out."""
        found: list[tuple[int, int]] = []
        closes = re.compile(self.closes or "|".join(map(re.escape, self.ends)))
        for match in re.finditer(self.opens, text):
            end = closes.search(text, match.end())
            if end and not (found and match.end() < found[-1][1]):
                found.append((match.end(), end.end()))
        return found


def wrong(turn: Turn, tokenizer, conversation, samples: Sequence) -> str:
    """What is wrong with the masks of `samples`, "" if nothing is.

    Each supervised span must be exactly the tokens that lie wholly within one of the rule's turns; all of them together
    say every answer of the conversation once, whole, in order, and nobody else's words.
    """
    said: list[str] = []
    for sample in samples:
        text = tokenizer.decode(sample.input_ids, skip_special_tokens=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded["input_ids"] != sample.input_ids:
            return "the ids are not those of their text"
        places = encoded["offset_mapping"]
        covered: list[int] = []
        for start, end in sample.turns:
            inside = [(a, b) for a, b in turn.spans(text) if a <= places[start][0] and b == places[end - 1][1]]
            if len(inside) != 1:
                return f"{text[places[start][0] : places[end - 1][1]]!r} is no turn of {text!r}"
            ((a, b),) = inside
            expected = [k for k, (x, y) in enumerate(places) if a <= x < y <= b]
            if expected != list(range(start, end)):
                return f"{tokenizer.decode(sample.input_ids[start:end])!r} where {text[a:b]!r} is the turn"
            covered += expected
            said.append(text[a:b])
        if [k for k, one in enumerate(sample.loss_mask) if one] != covered:
            return "the mask is not its turns"
    answers = [message for message in conversation.messages if message["role"] == "assistant"]
    if len(said) != len(answers):
        return f"{len(said)} turns are supervised, {len(answers)} were written"
    for message, words in zip(answers, said, strict=True):
        arguments = [value for call in message.get("tool_calls", ()) for value in call["function"]["arguments"].values()]
        own = [*message["content"].split("\n"), *message.get("reasoning_content", "").split("\n"), *map(str, arguments)]
        if missing := [part for part in own if part not in words]:
            return f"{missing[0]!r} is not in {words!r}"
        if re.search("usr[A-Z]|sys[A-Z]|out[A-Z]", words):
            return f"somebody else's words are in {words!r}"
    return ""


def _call(number: int, city: str) -> dict:
    function = {"name": "weather", "arguments": {"city": city, "days": 3}}
    return {"id": f"callnr00{number}", "type": "function", "function": function}


def _said(words: str, thought: str = "", *calls: dict) -> dict:
    more = {"reasoning_content": f"{thought} easy.\nVery."} if thought else {}
    return {"role": "assistant", "content": words, **more, **({"tool_calls": list(calls)} if calls else {})}


def _asked(words: str) -> dict:
    return {"role": "user", "content": words}


def _result(number: int, words: str) -> dict:
    return {"role": "tool", "content": words, "tool_call_id": f"callnr00{number}", "name": "weather"}


TOOLS = ({"type": "function", "function": {
    "name": "weather", "description": "Tells it.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}}},)
THREE = (_asked("usrA one?"), _said("ansA Paris."), _asked("usrB two? Café ☕ 数"), _said("ansB well — 12, 🦊!\n\nansB2 yes"),
         _asked("usrC three?"), _said("ansC"))
SYSTEM = ({"role": "system", "content": "sysA be short"},)
CASES: dict[str, tuple[tuple, tuple]] = {
    "one": (THREE[:2], ()),
    "several": (THREE, ()),
    "system": (SYSTEM + THREE, ()),
    "thought": ((_asked("usrA?"), _said("ansA.", "thkA")), ()),
    "thoughts": ((_asked("usrA?"), _said("ansA.", "thkA"), _asked("usrB?"), _said("ansB.", "thkB")), ()),
    "last thought": ((_asked("usrA?"), _said("ansA."), _asked("usrB?"), _said("ansB.", "thkB")), ()),
    "in words": ((_asked("usrA?"), _said("<think>\nthkA easy.\n</think>\n\nansA.")), ()),
    "declared": (SYSTEM + THREE, TOOLS),
    "call": ((_asked("usrA?"), _said("", "", _call(1, "Paris")), _result(1, "outA 12"), _said("ansA."), _asked("usrB?"),
              _said("ansB.")), TOOLS),
    "words, call": ((_asked("usrA?"), _said("ansX look.", "", _call(1, "Paris")), _result(1, "outA 12"), _said("ansA.")), TOOLS),
    "two calls": ((_asked("usrA?"), _said("", "", _call(1, "Paris"), _call(2, "Rome")), _result(1, "outA 12"),
                   _result(2, "outB 9"), _said("ansA.")), TOOLS),
    "thought, call": ((_asked("usrA?"), _said("", "thkA", _call(1, "Paris"))), TOOLS),
    "thoughts, call": ((_asked("usrA?"), _said("", "thkA", _call(1, "Paris")), _result(1, "outA 12"), _said("ansA.", "thkB")),
                       TOOLS),
}  # fmt: skip


def _all(turn: Turn, *names: str) -> dict[str, Turn]:
    return dict.fromkeys(names, turn)


ENDED = ("<|im_end|>",)
TURNS = {
    **_all(Turn(CHATML, ENDED), "Bielik-11B-v3.0-Instruct", "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-8B-A1B",
           "LFM2.5-Instruct", "MiMo-VL", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
           "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B", "Qwen3-Coder",
           "openbmb-MiniCPM5-1B", "Qwen-QwQ-32B"),
    # The prompt opens the reasoning.
    **_all(Turn(CHATML + r"(?:<think>\n)?", ENDED), "Qwen3.5-4B", "StepFun3.5-Flash"),
    **_all(Turn(CHATML + r"(?:<think></think>|<think>\n)?", ENDED), "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
    **_all(Turn(LLAMA, ("<|eot_id|>", "<|eom_id|>")), "meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct",
           "meta-llama-Llama-3.3-70B-Instruct", "meetkai-functionary-medium-v3.1", "fireworks-ai-llama-3-firefunction-v2"),
    **_all(Turn(LLAMA + ">>>", ("<|eot_id|>",)), "meetkai-functionary-medium-v3.2"),
    **_all(Turn(KIMI, ENDED), "Kimi-K2-Instruct", "Kimi-K2-Thinking", "moonshotai-Kimi-K2"),
    **_all(Turn(r'<\|open\|>message role="assistant"<\|sep\|><\|open\|>think<\|sep\|>', ("<|end_of_msg|>",)), "Kimi-K3"),
    **_all(Turn(f"{DEEPSEEK}<think></think>|{RESULTS}", ("<｜end▁of▁sentence｜>",)), "deepseek-ai-DeepSeek-V3.1"),
    **_all(Turn(f"(?:{DEEPSEEK}|{RESULTS})</think>", ("<｜end▁of▁sentence｜>",)), "deepseek-ai-DeepSeek-V3.2",
           "deepseek-ai-DeepSeek-V4", "deepseek-ai-DeepSeek-V4-Flash-0731"),
    **_all(Turn(f"{DEEPSEEK}|{RESULTS}", ("<｜end▁of▁sentence｜>",)), "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
           "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "llama-cpp-deepseek-r1"),
    # Reasoning and answer are messages of their own, all of one turn; an earlier answer ends with <|end|>.
    **_all(Turn(r"<\|start\|>assistant", ("<|return|>", "<|call|>"),
                r"<\|return\|>|<\|call\|>|<\|end\|>(?!<\|start\|>assistant)"), "openai-gpt-oss-120b"),
    **_all(Turn(r"<\|begin\|>assistant", ("<|end|>", "<|calls|>")), "upstage-Solar-Open-100B"),
    **_all(Turn(r"<\|start\|>assistant", ("<|eot|>",)), "muse-glimmer"),
    **_all(Turn(r"<\|assistant_start\|>", ("<|assistant_end|>",)), "Apertus-8B-Instruct"),
    **_all(Turn(r"\n<\|begin_assistant\|>\n(?:Here are my reasoning steps:\n)?", ("<|end|>",)), "Apriel-1.6-15b-Thinker-fixed"),
    **_all(Turn(r"<\|assistant\|>\n", ("<|end|>",)), "unsloth-Apriel-1.5", "microsoft-Phi-3.5-mini-instruct"),
    **_all(Turn(r"<seed:bos>assistant\n", ("<seed:eos>",)), "ByteDance-Seed-OSS"),
    **_all(Turn(r"<\|CHATBOT_TOKEN\|>(?:<\|START_TEXT\|>|<\|START_THINKING\|>)?", ("<|END_OF_TURN_TOKEN|>",)), "Cohere2MoE",
           "CohereForAI-c4ai-command-r-plus-tool_use"),
    **_all(Turn(r"<\|CHATBOT_TOKEN\|>(?:<\|START_RESPONSE\|>|<\|START_THINKING\|><\|END_THINKING\|>)?",
                ("<|END_OF_TURN_TOKEN|>",)), "CohereForAI-c4ai-command-r7b-12-2024-tool_use"),
    **_all(Turn(r"<\|assistant\|>\n?(?:</think>)?", ("<|user|>", "<|observation|>")), "GLM-4.6", "GLM-4.7-Flash"),
    **_all(Turn(r"assistant<\|role_sep\|>\n", ("<|message_sep|>",)), "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B"),
    **_all(Turn(r"<beginning_of_sentence>ai name=assistant\n", ("<end_of_sentence>",)), "MiniMax-M1"),
    **_all(Turn(r"\]~b\]ai\n(?:<think>\n)?", ("[e~[",)), "MiniMax-M2", "MiniMax-M3"),
    **_all(Turn(r"\[/INST\]|\[/TOOL_RESULTS\](?!\[TOOL_RESULTS\])", ("<EOS>",)), "Mistral-Small-3.2-24B-Instruct-2506",
           "mistralai-Ministral-3-14B-Reasoning-2512", "mistralai-Mistral-Nemo-Instruct-2407",
           "unsloth-mistral-Devstral-Small-2507"),
    **_all(Turn(r"<SPECIAL_11>Assistant\n(?:<think>\n)?", ("<SPECIAL_12>",)), "NVIDIA-Nemotron-Nano-v2"),
    **_all(Turn(r"assistant:", ("<sep>",)), "Reka-Edge"),
    **_all(Turn(r"<\|Bot\|>(?:</?think>)?", ("<｜end▁of▁sentence｜>",)), "Spark2.5"),
    **_all(Turn(r"<start_of_turn>model\n", ("<end_of_turn>",)), "google-gemma-2-2b-it"),
    **_all(Turn(r"<\|turn>model\n", ("<turn|>",)), "google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved"),
    **_all(Turn(r"<\|start_of_role\|>assistant<\|end_of_role\|>", ("<|end_of_text|>",)), "ibm-granite-granite-3.3-2B-Instruct",
           "ibm-granite-granite-4.0", "ibm-granite-granite-4.1"),
    **_all(Turn(r"<role>ASSISTANT</role>\n<think>", ("<|role_end|>",)), "inclusionai-ling-3.0-flash"),
    **_all(Turn(r"\n\nAssistant:", ("\n\nUser",)), "llama-cpp-rwkv-world"),
    **_all(Turn(r"<assistant><think>", ("</assistant>",)), "poolside-Laguna-S-2.1"),
    **_all(Turn(r"<assistant>\n</think>", ("</assistant>",)), "poolside-Laguna-XS-2.1", "poolside-Laguna-XS.2"),
    **_all(Turn(r"<｜hy_Assistant:opensource｜>(?:<think:opensource></think:opensource>)?", ("<｜hy_eos:opensource｜>",)),
           "tencent-Hy3"),
    # The same with thinking switched on.
    **_all(Turn(f"{DEEPSEEK}<think>|{RESULTS}", ("<｜end▁of▁sentence｜>",)), "deepseek-ai-DeepSeek-V3.1-thinking"),
    **_all(Turn(f"(?:{DEEPSEEK}|{RESULTS})</?think>", ("<｜end▁of▁sentence｜>",)), "deepseek-ai-DeepSeek-V3.2-thinking",
           "deepseek-ai-DeepSeek-V4-thinking", "deepseek-ai-DeepSeek-V4-Flash-0731-thinking"),
}
