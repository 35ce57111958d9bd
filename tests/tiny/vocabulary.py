"""The one vocabulary of all tiny models: byte-level BPE with a few merges."""

import gguf

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "i n", "a n", "th e", "Ġ th", "Ġ a", "o n")


def byte_letters() -> list[str]:
    """The printable stand-ins GPT-2's byte-level BPE has for the 256 bytes.

    Source: the byte encoder of the GPT-2 tokenizer: printable Latin-1 stands for itself, the rest follow from U+0100.
    """
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters, fresh = {}, 256
    for byte in range(256):
        letters[byte] = chr(byte) if byte in own else chr(fresh)
        fresh += byte not in own
    return [letters[byte] for byte in range(256)]


def vocabulary() -> tuple[list[str], list[int]]:
    """Tokens and their types: every byte, a few merges, one user-defined word, the control tokens."""
    tokens = byte_letters() + [merge.replace(" ", "") for merge in MERGES]
    types = [gguf.TokenType.NORMAL] * len(tokens)
    tokens += ["<tool>", *CONTROL]
    types += [gguf.TokenType.USER_DEFINED, *[gguf.TokenType.CONTROL] * len(CONTROL)]
    return tokens, [int(kind) for kind in types]


def add_vocabulary(writer: gguf.GGUFWriter, *, template: str | None, bos: bool, pre: str = "qwen2") -> None:
    tokens, types = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(bos)
    if template is not None:
        writer.add_chat_template(template)
