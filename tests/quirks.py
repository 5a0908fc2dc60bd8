"""Small chat templates, each with the quirks of one family, and what becomes of each of `turnrules.CASES` under it.

What is expected is the number of samples, or words from the reason of the refusal.
"""

from dataclasses import dataclass

from turnrules import Turn

DROPPED = "leaves part of the answer out"
UNSHOWN = "leaves out what a tool is called with"
FIELD = ".reasoning_content: the chat template " + DROPPED


@dataclass(frozen=True)
class Quirk:
    """A template, where its turns stand, and what comes of each case; `others` of those not named."""

    template: str
    turn: Turn
    expected: dict[str, str]
    others: str = "1"


def _calls(before: str, after: str) -> str:
    """The calls of message `m`: each name and its arguments between two texts."""
    return ("{% for c in m.tool_calls or [] %}{{ '" + before + "' + c.function.name + ' ' + c.function.arguments | tojson + '"
            + after + "' }}{% endfor %}")


OPEN = "{{ '<|im_start|>' + m.role + '\n' }}"
CLOSE = "{{ '<|im_end|>\n' }}"
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
CALLS = _calls("\\n<call>", "</call>")
CHATML = r"<\|im_start\|>assistant\n"
THOUGHT = "<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n"
# True for what comes after the last question: only there does the reasoning stay.
LATE = ("{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
        "{% endif %}{% endfor %}")
SHOWN = ("{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '" + THOUGHT + "' }}{% endif %}")
TAIL = "<｜tail｜>"

QUIRKS = {
    # As Qwen2.5: what is said is shown, reasoning is not known.
    "plain": Quirk("{% for m in messages %}" + OPEN + "{{ m.content }}" + CALLS + CLOSE + "{% endfor %}" + ASK,
                   Turn(CHATML, ("<|im_end|>",)),
                   {case: FIELD for case in ("thought", "thoughts", "last thought", "thought, call", "thoughts, call")}),
    # As Qwen3: the last turn has a reasoning, if an empty one, earlier ones have none.
    "reasoning of the last": Quirk(
        LATE + "{% for m in messages %}" + OPEN + SHOWN + "{{ m.content }}" + CALLS + CLOSE + "{% endfor %}" + ASK,
        Turn(CHATML, ("<|im_end|>",)),
        {"several": "3", "system": "3", "declared": "3", "thoughts": "2", "last thought": "2", "call": "2"}),
    # As Qwen3.5: the prompt opens the reasoning, too.
    "reasoning opened": Quirk(
        LATE + "{% for m in messages %}" + OPEN + SHOWN + "{{ m.content }}" + CALLS + CLOSE + "{% endfor %}"
        + ASK.replace("assistant\n", "assistant\n<think>\n"),
        Turn(CHATML + r"(?:<think>\n)?", ("<|im_end|>",)),
        {"several": "3", "system": "3", "declared": "3", "thoughts": "2", "last thought": "2", "call": "2"}),
    # As the R1 distills: the prompt opens a reasoning, no chat shows one, and what was thought within the words is cut off.
    "reasoning never": Quirk(
        "{% for m in messages %}" + OPEN + "{{ m.content.split('</think>')[-1] }}" + CLOSE + "{% endfor %}"
        + ASK.replace("assistant\n", "assistant\n<think>\n"),
        Turn(CHATML, ("<|im_end|>",)),
        {"one": "1", "several": "1", "system": "1", "declared": "1",
         "in words": "messages[1].content: the chat template " + DROPPED,
         "call": UNSHOWN, "words, call": UNSHOWN, "two calls": UNSHOWN, "thought, call": UNSHOWN, "thoughts, call": UNSHOWN},
        others=FIELD),
    # As DeepSeek-V3.2 without thinking: prompt and chat close an empty reasoning in two ways; the target goes on behind results.
    "reasoning closed": Quirk(
        "{% set ns = namespace(asked=false) %}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ ('<｜bot｜></think>' if ns.asked else '</think>') + m.content }}" + CALLS + "{{ '" + TAIL + "' }}"
        "{% elif m.role == 'tool' %}{{ '<result>' + m.content + '</result>\n' }}{% set ns.asked = false %}"
        "{% else %}{{ '<｜' + m.role + '｜>' + m.content }}{% set ns.asked = m.role == 'user' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜bot｜><think></think>' if ns.asked else '<think></think>' }}{% endif %}",
        Turn(r"(?:<｜bot｜>|</result>\n)</think>", (TAIL,)),
        {case: FIELD for case in ("thought", "thoughts", "last thought", "thought, call", "thoughts, call")}),
    # As Kimi-K3: all reasoning stays, parts of an answer close with special tokens of their own.
    "parts": Quirk(
        "{% for m in messages %}{{ '<|open|>message ' + m.role + '<|sep|>' }}{% if m.role == 'assistant' %}"
        "{{ '<|open|>think<|sep|>' + (m.reasoning_content or '') + '<|close|>think<|sep|><|open|>words<|sep|>' + m.content "
        "+ '<|close|>words<|sep|>' }}" + _calls("<|open|>call<|sep|>", "<|close|>call<|sep|>")
        + "{% else %}{{ m.content }}{% endif %}{{ '<|close|>message<|sep|><|done|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|open|>message assistant<|sep|><|open|>think<|sep|>' }}{% endif %}",
        Turn(r"<\|open\|>message assistant<\|sep\|><\|open\|>think<\|sep\|>", ("<|done|>",)), {}),
    # As gpt-oss: today's date, other ends for the last turn and for calls, reasoning (under another name) in the last one only,
    # and that of a call until an answer follows.
    "channels": Quirk(
        "{{ '<|start|>system<|message|>Today is ' + strftime_now('%Y-%m-%d') + '<|end|>' }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}{% set ns = namespace(after=false) %}{% for n in messages[loop.index:] %}"
        "{% if n.role == 'assistant' and not n.tool_calls %}{% set ns.after = true %}{% endif %}{% endfor %}"
        "{% set thought = m.thinking or (m.content if m.tool_calls else '') %}"
        "{% if thought and not ns.after and (m.tool_calls or not add_generation_prompt) %}"
        "{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}"
        "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
        "{{ '<|start|>assistant to=' + c.name + '<|message|>' + c.arguments | tojson + '<|call|>' }}"
        "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
        "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        Turn(r"<\|start\|>assistant", ("<|return|>", "<|call|>"), r"<\|return\|>|<\|call\|>|<\|end\|>(?!<\|start\|>assistant)"),
        {"several": "3", "system": "3", "declared": "3", "thoughts": "2", "last thought": "2", "call": "2", "two calls": UNSHOWN,
         "words, call": "rewrites the turns before this answer", "thoughts, call": "its place is unsure"}),
    # As Gemma-2: no system turn, no tools; words are trimmed.
    "no system": Quirk(
        "{% for m in messages %}{% if m.role in ('system', 'tool') %}{{ raise_exception('no ' + m.role + ' turns') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}" + CLOSE + "{% endfor %}" + ASK,
        Turn(CHATML, ("<|im_end|>",)),
        {"one": "1", "several": "1", "in words": "1", "system": "no system turns", "declared": "no system turns", "call": UNSHOWN,
         "words, call": UNSHOWN, "two calls": UNSHOWN, "thought, call": UNSHOWN, "thoughts, call": UNSHOWN}, others=FIELD),
    # As Llama-3.2: the date of the day, one call a turn, no words beside a call.
    "one call": Quirk(
        "{{ 'Today: ' + strftime_now('%d %b %Y') + '<|eot|>' }}{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}"
        "{% set c = m.tool_calls[0].function %}"
        "{{ '<|head|>assistant<|/head|>\n\n' + c.name + ' ' + c.arguments | tojson + '<|eot|>' }}"
        "{% else %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}",
        Turn(r"<\|head\|>assistant<\|/head\|>\n\n", ("<|eot|>",)),
        {"thought": FIELD, "thoughts": FIELD, "last thought": FIELD, "thought, call": FIELD, "thoughts, call": FIELD,
         "words, call": "messages[1].content: the chat template " + DROPPED, "two calls": "one call at once"}),
    # As Mistral-Nemo: the system's words stand in the last question, so an answer takes them away from its own question.
    "moving system": Quirk(
        "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}"
        "{% elif m.role == 'user' %}{{ '<|im_start|>' + (ns.system if loop.last else '') + m.content }}"
        "{% else %}{{ '<|bot|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|bot|>' }}"
        "{% endif %}",
        Turn(r"<\|bot\|>", ("<|im_end|>",)),
        {"one": "1", "several": "1", "in words": "1", "system": "rewrites the turns before this answer",
         "declared": "rewrites the turns before this answer", "call": UNSHOWN, "words, call": UNSHOWN, "two calls": UNSHOWN,
         "thought, call": UNSHOWN, "thoughts, call": UNSHOWN}, others=FIELD),
    # As GLM: nothing ends the last turn; the next one's beginning does.
    "no end": Quirk(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|assistant|>' }}{% endif %}",
        Turn(r"<\|assistant\|>", ("<|user|>",)),
        {"call": UNSHOWN, "words, call": UNSHOWN, "two calls": UNSHOWN, "thought, call": UNSHOWN, "thoughts, call": UNSHOWN},
        others="the chat template ends the turn without a special token"),
}  # fmt: skip
