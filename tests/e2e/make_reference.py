"""Writes tests/e2e/reference/smollm2_greedy.json: what transformers generates greedily, in float32, for the
varied prompts, with the distance between its two best logits at every position.

    .venv/bin/python -m tests.e2e.make_reference [--check N]

`--check N` computes only N of them (evenly spread) and compares them with the file.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from tests.e2e.prompts import varied_prompts

REFERENCE = Path(__file__).with_name("reference") / "smollm2_greedy.json"
N_PROMPTS = 112
N_NEW = 40


def load_transformers(gguf: Path) -> tuple[Any, Any]:
    """transformers' own reading of the GGUF: (model in float32, tokenizer)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    return model.eval(), tokenizer


def greedy(model: Any, ids: list[int], n_new: int) -> tuple[list[int], list[float]]:
    """(tokens, distance between the two best logits at each); EOS does not end it."""
    import torch

    tokens: list[int] = []
    gaps: list[float] = []
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        for _ in range(n_new):
            best = out.logits[0, -1].double().topk(2)
            tokens.append(int(best.indices[0]))
            gaps.append(round(float(best.values[0] - best.values[1]), 6))
            out = model(
                input_ids=torch.tensor([[tokens[-1]]]), past_key_values=out.past_key_values, use_cache=True
            )
    return tokens, gaps


def compute(model: Any, tokenizer: Any, indices: list[int]) -> list[dict[str, Any]]:
    prompts = varied_prompts(N_PROMPTS)
    rows = []
    for i in indices:
        ids = tokenizer(prompts[i], add_special_tokens=False)["input_ids"]
        tokens, gaps = greedy(model, ids, N_NEW)
        rows.append({"index": i, "prompt_ids": ids, "tokens": tokens, "gaps": gaps})
    return rows


def main() -> None:
    from checkpoint.resolve import resolve

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", type=int, default=0)
    args = parser.parse_args()
    import torch
    import transformers

    model, tokenizer = load_transformers(resolve("smollm2").path)
    if args.check:
        known = {row["index"]: row for row in json.loads(REFERENCE.read_text())["rows"]}
        step = max(1, N_PROMPTS // args.check)
        for row in compute(model, tokenizer, list(range(0, N_PROMPTS, step))[: args.check]):
            assert row["tokens"] == known[row["index"]]["tokens"], row["index"]
        print(f"{args.check} prompts agree with {REFERENCE.name}")
        return
    rows = compute(model, tokenizer, list(range(N_PROMPTS)))
    REFERENCE.parent.mkdir(exist_ok=True)
    body = {
        "model": "SmolLM2-135M-Instruct Q4_1 (GGUF), dequantised to float32",
        "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "command": "python -m tests.e2e.make_reference",
        "n_new": N_NEW,
        "rows": rows,
    }
    REFERENCE.write_text(
        json.dumps(body, separators=(",", ":"), ensure_ascii=False).replace('{"index"', '\n{"index"') + "\n"
    )
    print(f"wrote {len(rows)} rows to {REFERENCE}")


if __name__ == "__main__":
    main()
