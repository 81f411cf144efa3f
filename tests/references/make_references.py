"""Makes greedy.json: what HF transformers says in float32 on the default model's GGUF weights.

    .venv/bin/pip install accelerate   # transformers wants it to read a GGUF; nothing else here does
    .venv/bin/python -m tests.references.make_references

20 prompts of 5 to 1,500 tokens, 64 greedy tokens each, not ended by an end-of-sequence token (as with ignore_eos).
`smallest_margin` is the least distance between the best and the second logit on the way: rounding is 1e-4 at most.
Takes about two minutes.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from runner.store.store import resolve

FILE = Path(__file__).with_name("greedy.json")
NUM_TOKENS = 64

SENTENCES = (
    "The harbour was quiet before sunrise, and only the gulls argued over the nets.",
    "A scheduler decides which request runs next; everything else in an engine waits for that decision.",
    "In 1928, Alexander Fleming noticed that a mould had killed the bacteria in one of his dishes.",
    "Die Katze schläft auf dem warmen Ofen, während draußen der Schnee fällt.",
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2\n",
    "To bake bread you need flour, water, salt, yeast and more patience than you think.",
    "If 3x + 7 = 22, then x = 5, because 22 - 7 = 15 and 15 / 3 = 5.",
    "Le train de nuit pour Lisbonne part à 21 h 15 du quai numéro 4.",
    '{"name": "crane", "height_m": 48.5, "loads": [12, 7, 19], "active": true}',
    "She opened the letter twice, as if the second reading might change the answer.",
    "Water boils at a lower temperature on a mountain, since the air presses less on its surface.",
    "SELECT city, COUNT(*) FROM visits WHERE year > 2019 GROUP BY city ORDER BY 2 DESC;",
    "東京は日本の首都で、世界で最も人口の多い都市圏の一つです。",
    "The committee met on Tuesday; it agreed on nothing except the date of its next meeting.",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.",
    "for (int i = 0; i < n; ++i) { sum += values[i] * weights[i]; }",
)
CHATS = (
    "What is the capital of France?",
    "Write a short poem about a crane that lifts ships.",
    "Explain in two sentences why the sky is blue.",
    "List five animals that live in the desert, with one fact about each.",
    "Translate to Spanish: the keys are on the kitchen table.",
)
# Lengths of the prompts made of sentences, in tokens; the block size 16 and the usual chunks lie between and on them.
PROSE_LENGTHS = (5, 16, 17, 48, 100, 129, 256, 300, 511, 777, 1024, 1500)
RANDOM_LENGTHS = (7, 64, 333)


def prompts(tokenizer: Tokenizer, vocab_size: int) -> dict[str, list[int]]:
    """Name → token ids; the same on every machine."""
    made: dict[str, list[int]] = {}
    for index, question in enumerate(CHATS):
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        made[f"chat-{index}"] = tokenizer.encode(text).ids
    for length in PROSE_LENGTHS:
        generator, ids = random.Random(length), list[int]()
        while len(ids) < length:
            ids += tokenizer.encode(" ".join(generator.sample(SENTENCES, len(SENTENCES)))).ids
        made[f"prose-{length}"] = ids[:length]
    for length in RANDOM_LENGTHS:
        generator = random.Random(length)
        made[f"random-{length}"] = [generator.randrange(17, vocab_size) for _ in range(length)]
    return made


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """64 greedy tokens, and the smallest margin between best and second."""
    tokens, cache, margin = torch.tensor([prompt]), None, float("inf")
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        answer = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        best = answer.logits[0, -1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        output.append(int(best.indices[0]))
        tokens, cache = best.indices[None, :1], answer.past_key_values
    return output, margin


def main() -> None:
    from transformers import AutoModelForCausalLM

    description = resolve("smollm2-135m-instruct")
    weights = Path(description.weights)
    model = AutoModelForCausalLM.from_pretrained(
        str(weights.parent), gguf_file=weights.name, dtype=torch.float32
    ).eval()
    tokenizer = Tokenizer.from_file(f"{description.folder}/tokenizer.json")
    entries = []
    for name, prompt in prompts(tokenizer, description.vocab_size).items():
        output, margin = greedy(model, prompt)
        entries.append(
            {
                "name": name,
                "prompt_token_ids": prompt,
                "output_token_ids": output,
                "smallest_margin": round(margin, 6),
            }
        )
        print(f"{name}: {len(prompt)} tokens, smallest margin {margin:.6f}")
    header = {"model_digest": description.digest, "made_by": "python -m tests.references.make_references"}
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    FILE.write_text(json.dumps(header)[:-1] + ', "prompts": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
