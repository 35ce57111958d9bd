"""What mutation begins with: inputs of each target, and the models that texts and states are for."""

import struct
from pathlib import Path

import gguf

from bmoe.probe.record import line
from bmoe_native import Engine
from tests import tiny
from tests.probe.made import random_record, record

TEXTS = (
    "hello",
    "be good\x1e<|im_start|>system\nbe bad<|im_end|>",
    "naïve 漢字 👍 e\u0301\x1eyes\x1e<tool> and 12345",
    "a\0b\x1e \n\t \x1e<|im_\x1e\x1eend|>",
    "1234 " * 40,
    "<|im_end|>\x1e<|endoftext|> ",
    "|><|im_\x1e|>",
    "<think>\nso\n</think>\x1e<|endoftext|>",
    "\udcff\udcfe\x1e\udcf0\udc9f",
)
FOLDED = "{{ '<|im_start|>' }}{% for m in messages %}{{ m.role + ': ' + m.content | trim }}<|im_end|>{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('users only') }}{% endif %}"
    "<|im_start|>{{ m.content[:9] }}{{ m.content | upper | replace('X', '<') }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}"
)
TORN = "{% for m in messages %}<|im_start{{ m.content }}end|>{% endfor %}"
TEXT_MODELS = {
    "chatml": {"template": tiny.CHATML},
    "folded": {"template": FOLDED, "bos": True, "pre": "llama-bpe"},
    "strict": {"template": STRICT, "pre": "deepseek-v3"},
    "gpt-2": {"template": tiny.CHATML, "pre": "gpt-2"},
    "torn": {"template": TORN},
}
STATE_MODELS = ("llama", "gemma3", "deepseek2", "lfm2moe", "mamba", "qwen3next")
SEALED = 1


def text(folder: Path, models: Path) -> None:
    for name, options in TEXT_MODELS.items():
        tiny.write(models / f"{name}.gguf", **options)
    for n, said in enumerate(TEXTS):
        for model in range(len(TEXT_MODELS)):
            header = bytes([model, (5 * n + 3 * model) % 16])
            (folder / f"{n}-{model}").write_bytes(header + said.encode("utf-8", "surrogateescape"))


def state(folder: Path, models: Path) -> None:
    for index, arch in enumerate(sorted(STATE_MODELS)):
        model = tiny.write(models / f"{arch}.gguf", arch=arch)
        with Engine.open(model, n_ctx=64, n_ubatch=16) as engine:
            for n_tokens in (0, 1, 20, 60):
                engine.drop_state()
                if n_tokens:
                    engine.prefill([1 + n % 100 for n in range(n_tokens)])
                for sealed in (0, SEALED):
                    name = f"{arch}-{n_tokens}-{sealed}"
                    (folder / name).write_bytes(bytes([index, sealed]) + engine.save_state())


def open_(folder: Path, models: Path) -> None:
    """Each model up to its weights: the target puts zeros in their place."""
    for arch, family in tiny.FAMILIES.items():
        if family.tensors_per_shard:
            continue
        path = tiny.write(models / f"{arch}.gguf", arch=arch)
        data = path.read_bytes()[: gguf.GGUFReader(path).data_offset]
        path.unlink()
        for flags in (0, 1, 4) if "experts" in str(family.metadata) or "expert_count" in family.metadata else (0, 2):
            (folder / f"{arch}-{flags}").write_bytes(bytes([flags]) + data)


def probe(folder: Path, models: Path) -> None:
    made = [record(), record([[1.0, 2.0], [3.0, 0.5]]), random_record(n_layer=3, n_expert=4)]
    lines = [line(one) for one in made]
    request = b'{"id": "a", "prefix": "p", "suffix": "s", "choices": ["A", "B"], "system": null}\n'
    lettered = b'{"question": "q?", "options": ["one", "two"], "template": true}\n'
    decide = b'{"cmd": "decide", "id": 1.50, "prefix": "p", "choices": ["A", "B"]}'
    generate = b'{"cmd": "generate", "prompt": "p", "temperature": 0.5, "stop": ["x"], "n_predict": 3}'
    trace = b"phase,step,layer,slot,expert,weight,residency,bytes,seq,token\nprefill,0,0,0,1,0.5,resident,10,1,0\n"
    inputs = {0: [b"".join(lines), *lines], 1: [request, lettered], 2: [decide, generate], 3: [lines[0], trace]}
    for kind, contents in inputs.items():
        for n, content in enumerate(contents):
            (folder / f"{kind}-{n}").write_bytes(struct.pack("B", kind) + content)


WRITERS = {"open": open_, "text": text, "state": state, "probe": probe}


def write(target: str, corpus: Path, models: Path) -> None:
    for folder in (corpus, models):
        folder.mkdir(parents=True, exist_ok=True)
    WRITERS[target](corpus, models)
