"""Scripted model that answers correctly in every role of the tiny world."""

from __future__ import annotations

import json

from spell_jax.data import tiny_world as world


def documents_of(prompt: str) -> list[str]:
    return [line for line in prompt.splitlines() if line.startswith("- ")]


def perfect(role: str, prompt: str, sibling: int, model: str) -> str:
    texts = documents_of(prompt)
    if role == "responder":
        truth = world.oracle_choice if "(A)" in prompt else world.oracle
        return f"<think> so </think>answer is {truth(prompt, texts)}"
    if role == "verifier":
        *_, answer_line, reference_line, _ = prompt.split("\n")
        same = world.canonical(answer_line.split(": ")[1]) == world.canonical(
            reference_line.split(": ")[1]
        )
        return f"<think> hm </think>[[{'YES' if same else 'NO'}]]"
    return questioner(prompt, right=True)


def questioner(prompt: str, right: bool) -> str:
    texts = documents_of(prompt)
    (name, _), city = next(iter(world.read_facts(texts).items()))
    ask = prompt.rpartition("\n")[2]
    if "math" in ask:
        text = f"sales of {name} plus costs of {name}"
        answer = int(world.oracle(text, texts) or 0) + (not right) * 1000
        return json.dumps({"question": text, "answer": str(answer)})
    text = f"city of {name}"
    if "general" in ask:
        return json.dumps({"question": text, "answer": city if right else "Nowhere"})
    letter = ask[-2]
    wrong = [c for c, _ in world.CITIES if world.canonical(c) != world.canonical(city)]
    options = dict(zip("ABCD", wrong, strict=False)) | {letter: city}
    answer = letter if right else "ABCD"[("ABCD".index(letter) + 1) % 4]
    return json.dumps({"question": text, "options": options, "answer": answer})
