"""A tiny random Llama target, made in a second: the tests' stand-in for a model that would take minutes."""

from pathlib import Path

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.",
    "user assistant system: You are a helpful assistant. Write a short story about a dog that learns to count.",
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, 1))\n",
    "One, two, three; four and five are six. Seven comes after six, and eight is what comes after seven.",
    "Hello! How are you today? I am well, thank you. And you? Explain why the sky is blue, in two sentences.",
]


def make_tiny_tokenizer(vocab: int = 512, extra: tuple[str, ...] = (), chat_template: str = CHATML):
    """A byte-level BPE tokenizer of exactly `vocab` tokens (at least 256 + specials), trained on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *extra]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(TEXT, trainer)
    # Few sentences give few merges: what is missing is filled up, so that the size is the one asked for.
    core.add_tokens([f"<unused{i}>" for i in range(vocab - core.get_vocab_size())])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>",
                                        pad_token="<|endoftext|>", additional_special_tokens=list(extra))
    tokenizer.chat_template = chat_template
    return tokenizer


def make_tiny_target(path: Path | str, layers: int = 8, hidden: int = 64, vocab: int = 512, tied: bool = True,
                     seed: int = 0) -> Path:
    """Write a whole model directory (config, float32 weights, tokenizer, ChatML template) and return its path."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    path = Path(path)
    tokenizer = make_tiny_tokenizer(vocab)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=hidden // 4, max_position_embeddings=1024,
        tie_word_embeddings=tied, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
