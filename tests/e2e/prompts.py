"""The varied prompts of the exactness tests: seeded, so that everyone compares the same texts."""

from __future__ import annotations

import random

_LINES = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "La capitale de l'Italie est",
    "Die Hauptstadt von Deutschland ist",
    "日本の首都は",
    "Столица России —",
    "서울은 대한민국의",
    "👩‍🚀🚀 The astronaut said:",
    "SELECT name, COUNT(*) FROM users WHERE",
    "<html>\n<head>\n<title>",
    '{"name": "Ada", "age": 36, "languages": [',
    "1, 1, 2, 3, 5, 8, 13,",
    "To be, or not to be,",
    "In physics, the second law of thermodynamics states that",
    "Recipe: pancakes\nIngredients:\n- flour\n-",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "A haiku about autumn:\n",
    "The three primary colours are",
    "    \t  \n\n  indented text",
    "!!!???...",
    "ZzZzZz",
    "Translate to Spanish: Good morning, my friend.\nTranslation:",
    "List of planets: Mercury, Venus,",
    "Breaking news: scientists have discovered",
    "Water boils at",
]

_WORDS = [
    "river",
    "stone",
    "lantern",
    "quiet",
    "market",
    "copper",
    "signal",
    "orchard",
    "winter",
    "engine",
    "paper",
    "mirror",
    "garden",
    "captain",
    "thunder",
    "velvet",
    "bridge",
    "harvest",
    "island",
    "compass",
    "meadow",
    "ember",
    "anchor",
    "cedar",
    "falcon",
    "marble",
    "prairie",
    "violet",
]

_QUESTIONS = [
    "What is the capital of France?",
    "Explain what a hash table is in two sentences.",
    "Write a short poem about rain.",
    "Why is the sky blue?",
    "Give me three tips for learning to cook.",
    "What is the difference between a list and a tuple in Python?",
    "Summarise the story of Romeo and Juliet.",
    "How many legs does a spider have?",
    "Convert 100 degrees Fahrenheit to Celsius.",
    "Who wrote Pride and Prejudice?",
]


def varied_prompts(n: int, *, seed: int = 20) -> list[str]:
    """`n` texts: sentences in several scripts, code, chats in the default model's template, and word lists
    whose lengths run from a few tokens to several hundred, some sharing long beginnings."""
    rng = random.Random(seed)
    prompts = list(_LINES)
    prompts += [
        "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        for question in _QUESTIONS
    ]
    stem = " ".join(rng.choices(_WORDS, k=120))
    while len(prompts) < n:
        kind = len(prompts) % 4
        if kind == 0:
            prompts.append(" ".join(rng.choices(_WORDS, k=rng.randint(3, 40))))
        elif kind == 1:
            prompts.append(stem[: rng.randint(100, len(stem))] + " " + rng.choice(_LINES))
        elif kind == 2:
            prompts.append(" ".join(rng.choices(_WORDS, k=rng.randint(150, 400))) + ".\nThe first word was")
        else:
            prompts.append("\n".join(rng.choices(_LINES, k=rng.randint(2, 8))))
    return prompts[:n]
