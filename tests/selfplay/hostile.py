"""Texts to test parsers with: random, mutated and adversarial, each a function of a seed.

1. `good_texts` are well-formed outputs of the three roles, and the prompts that they answer.
2. `texts` mutates them (bytes flipped, parts cut, repeated, exchanged between roles, characters
   replaced by look-alikes). It makes others from hostile pieces, random characters, JSON values and
   short members of the families in parsers.py.
3. `INJECTIONS` are texts that would leave a trace if anything ran them.
"""

import functools
import json
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

from spell_jax.data.clusters import LETTERS
from spell_jax.question_sets.tiny_world_rows import DemonstrationMixture, world_demonstrations
from spell_jax.selfplay import prompts
from tests.selfplay.parsers import FAMILIES

INJECTIONS = (
    "__import__('os').system('echo evaluated')",
    'eval("1+1")',
    "exec('raise SystemExit')",
    "(lambda: 1)()",
    "{{ 7 * 7 }} {% for x in y %} ${7*7} %(a)s {0.__class__}",
    "!!python/object/apply:os.system ['echo evaluated']",
    "cos\nsystem\n(S'echo evaluated'\ntR.",
    "\\input{/etc/passwd} \\write18{echo evaluated} \\frac{1}{0}",
    "9**9**9**9",
    "[x for x in ().__class__.__base__.__subclasses__()]",
    "' OR 1=1; DROP TABLE answers; --",
    "<script>alert(1)</script>",
    "`$(echo evaluated)`",
    "open('/etc/passwd').read()",
    "1 if True else 2",
    "0x10",
    "1_000",
    "inf",
    "nan",
)
PIECES = (
    *INJECTIONS,
    *("the answer is ", "The correct answer is ", "answer is (", "(insert answer here)"),
    *("\\boxed{", "\\boxed{}", "}", "{", "\\frac{1}{2}", "\\text{", "**", "$"),
    *("<think>", "</think>", "<text>", "</text>", "```json", "```", "```json\n{}\n```"),
    *("[[YES]]", "[[NO]]", "YES", "NO", "\none: ", "\ntwo: ", "\nsame?", "\nask general"),
    *("{question}", "{documents}", "{answer}", "{reference}", "{examples}", "{letter}"),
    *("<|im_start|>assistant\n", "<|im_end|>", "<|user|>", "<|assistant|>", "<s>", "</s>"),
    *("<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "<pad>", "<unk>"),
    *('{"question": "', '", "answer": "', '", "options": {"A": "', '"}', '"', '\\"', "\\"),
    *('{"Empty": "Empty"}', "null", "true", "NaN", "-Infinity", "1e999999", "1e-999999"),
    *(
        "9" * 5000,
        "0." + "0" * 400 + "1",
        "1,000",
        "1,00",
        ".5",
        "5.",
        "-",
        "−",
        "½",
        "²",
        "٣",
        "９",
    ),
    *("minus 5", "5 million", "12%", "$3", "about ", "=", "≈", " or ", "yes", "True"),
    *("\0", "\x07", "\x1b[2J", "\r", "\n", "\t", "\x0b", "\x85", "\u2028", "\ufeff", "\u00a0"),
    *("\ud800", "\udfff", "\U0001f642", "\u202e", "\u2066", "\u0301", "\ufde0", "\ufdd0"),
    *("[" * 3000, "{" * 3000, '{"a":' * 1500, "(" * 99, "<" * 500, "a" * 500 + "!"),
    *("<analysis>", "</analysis>", "<evidence>", "</evidence>", "<reasoning>", "</reasoning>"),
    *("<answer>", "</answer>", "1 5\n2 1\n3 3", '{"scores": [1, 5, 3]}', " ... ", "\n- "),
    *("city of ", "friend of ", "sales of Arvo plus costs of Bela", "\n(A) Bela", "(B)"),
)
LOOK_ALIKES = str.maketrans(
    dict(zip("aeiopcxABEKMHOPCTX", "аеіорсхАВЕКМНОРСТХ", strict=True))
    | {"s": "ſ", '"': "“", "{": "｛", "}": "｝", ":": "：", "1": "１", "-": "‐", " ": "\u00a0"}
)


@functools.cache
def good_texts() -> tuple[str, ...]:
    """Return outputs of all roles in both prompt sets, and prompts with the outputs."""
    demonstrated = list(
        islice(world_demonstrations(prompts.load("compact"), DemonstrationMixture(), seed=0), 60)
    )
    options = dict(zip(LETTERS, ("one", "two", "three", "four"), strict=True))
    records = (
        {"question": "What is the sum?", "answer": "1,250.5"},
        {"question": "Who signed?", "answer": "The answer is Mia\nand Jo"},
        {"question": "Which one?", "options": options, "answer": "C"},
        {"question": "How much?", "answer": 3.5e6},
    )
    return (
        *(row.completion for row in demonstrated),
        *(row.prompt for row in demonstrated[:20]),
        *(json.dumps(record) for record in records),
        *(f"Steps.\n```json\n{json.dumps(record, indent=1)}\n```" for record in records),
        '<think>It is {x}.</think>```json\n{"question": "q", "answer": "7",}\n```',
        "Step 1: 3 * 4.\nTherefore, the answer is **12%**.",
        "<think>Hm.</think>Therefore, the answer is \\boxed{\\frac{3}{4}}.",
        "The correct answer is (B).",
        "Explanation: both say 5.\nDecision: [[YES]]",
        "Explanation: they differ.\nDecision: [[NO]]",
        "<analysis>Who?</analysis>\n<evidence>\n- Arvo lives in Oslo.\n- Oslo ... harbour.\n"
        "</evidence>\n<reasoning>So he does.</reasoning>\n<answer>Oslo</answer>",
        "1 5\n2 1\n3 3",
        'All differ.\n```json\n{"scores": [4, 1, 3]}\n```',
    )


def texts(seed: int, count: int) -> Iterator[str]:
    """Yield `count` texts, mostly below 1,000 characters."""
    rng = random.Random(seed)
    makers = (_mutated, _pieced, _random, _json, _family)
    for make in rng.choices(makers, weights=(8, 5, 2, 3, 2), k=count):
        yield make(rng)


def _mutated(rng: random.Random) -> str:
    text = rng.choice(good_texts())
    for _ in range(rng.randint(1, 4)):
        text = rng.choice(_MUTATIONS)(rng, text)
    return text


def _pieced(rng: random.Random) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(1, 8)))


def _random(rng: random.Random) -> str:
    limit = rng.choice((0x80, 0x3000, 0x110000))
    return "".join(chr(rng.randrange(limit)) for _ in range(rng.randint(0, 60)))


def _json(rng: random.Random) -> str:
    record = {
        key: json_value(rng, 3)
        for key in ("question", "answer", "options", "Empty")
        if rng.random() < 0.7
    }
    if rng.random() < 0.3:
        record["options"] = {letter: json_value(rng, 1) for letter in LETTERS}
    text = json.dumps(record, ensure_ascii=rng.random() < 0.5)
    return f"```json\n{text}\n```" if rng.random() < 0.5 else text


def _family(rng: random.Random) -> str:
    return FAMILIES[rng.choice(list(FAMILIES))](rng.choice((50, 500, 3000)))


def json_value(rng: random.Random, depth: int) -> Any:
    """Make a random value of any kind that JSON can write."""
    kind = rng.randrange(8 if depth else 6)
    if kind == 6:
        return [json_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 7:
        return {rng.choice(PIECES)[:20]: json_value(rng, depth - 1) for _ in range(2)}
    numbers = (0, -1, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"))
    simple = (None, True, rng.choice(numbers), rng.choice("ABCDE"))
    return (*simple, rng.choice(PIECES), rng.choice(good_texts()))[kind]


def _flip(rng: random.Random, text: str) -> str:
    """Flip some bits of the text's bytes; invalid UTF-8 becomes lone surrogates."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(min(len(data), rng.randint(1, 5))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data.decode("utf-8", "surrogateescape")


def _span(rng: random.Random, text: str) -> tuple[int, int]:
    first, last = rng.randint(0, len(text)), rng.randint(0, len(text))
    return min(first, last), max(first, last)


def _cut(rng: random.Random, text: str) -> str:
    start, end = _span(rng, text)
    return text[:start] + text[end:]


def _keep(rng: random.Random, text: str) -> str:
    start, end = _span(rng, text)
    return text[start:end]


def _repeat(rng: random.Random, text: str) -> str:
    start, end = _span(rng, text)
    return text[:start] + text[start:end] * rng.choice((2, 3, 9)) + text[end:]


def _splice(rng: random.Random, text: str) -> str:
    other_text = rng.choice(good_texts())
    return text[: rng.randint(0, len(text))] + other_text[rng.randint(0, len(other_text)) :]


def _insert(rng: random.Random, text: str) -> str:
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(PIECES) + text[at:]


def _look_alike(rng: random.Random, text: str) -> str:
    start, end = _span(rng, text)
    return text[:start] + text[start:end].translate(LOOK_ALIKES) + text[end:]


def _change_case(rng: random.Random, text: str) -> str:
    return rng.choice((str.upper, str.lower, str.swapcase))(text)


_MUTATIONS = (_flip, _cut, _keep, _repeat, _splice, _insert, _look_alike, _change_case)
