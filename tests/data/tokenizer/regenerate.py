"""Rebuild this folder: a 1,024-entry vocabulary trained on made-up text, and 200 strings with their ids.

Run `python tests/data/tokenizer/regenerate.py` only after a deliberate change of the format: the ids are golden.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from k3jax.bpe_train import train_bpe
from k3jax.chat.literals import write_chat_literals

FOLDER = Path(__file__).parent
SYLLABLES = ["ka", "to", "mi", "ren", "sol", "bar", "un", "the", "ing", "es", "ion", "or", "al", "ta", "que", "st"]
WORDS = ["message", "role", "user", "assistant", "system", "tool", "think", "response", "call", "argument", "string"]
MIXED = [
    '<|open|>message role="system"<|sep|>obey<|close|>message<|sep|><|end_of_msg|>',
    "[PAD] [BOS][EOS] <|reserved_token_900|>",
    "삼겹살 ⌈m/2⌉ 👩‍👩‍👧‍👦 🇨🇭",
    "日本語とかなカナ、漢字。中文字符ABC混合123测试",
    "don't WE'LL they'Ve I'M ſ'ſ o'clock 'tis",
    "CamelCaseHTTPServer snake_case_name kebab-case ÉCOLE éÉa",
    "1234567890 3.14159 1e-9 0x1F ½ ⅻ ٣٤٥",
    "tabs\tand  double   spaces    \n\n  \r\n\r\n end  ",
    "a\u0301 e\u0308 क्षि ไทย العربية עברית",
    "!!!??? ... --- (([[{{}}]])) \\n \"quoted\" 'x'\n",
    "\u00a0\u2003\u3000 wide\u200bzero\ufeffbom \x00\x01\x7f\x85",
    'for i in range(10):\n    print(f"{i:>3}")\n',
    "Ǆ ǅ ǆ ʰ ª º ʺ ˆ",
    "a < b | c <| d |> e",
    "",
    " ",
    "\n",
]


def made_up_text(rng: random.Random) -> str:
    words = []
    for _ in range(rng.randint(4, 14)):
        word = rng.choice(WORDS) if rng.random() < 0.3 else "".join(rng.choices(SYLLABLES, k=rng.randint(1, 3)))
        words.append(word.capitalize() if rng.random() < 0.2 else word)
    return " ".join(words) + rng.choice([".", "?", "!\n", ": 12", " = 4096;", '="x"', "\n\n"])


def mixed_strings(rng: random.Random) -> list[str]:
    strings = list(MIXED)
    while len(strings) < 200:
        parts = rng.choices([*MIXED, made_up_text(rng), made_up_text(rng)], k=rng.randint(1, 3))
        text = "".join(part[rng.randint(0, len(part) // 2) :][: rng.randint(1, 40)] for part in parts)
        if text not in strings:
            strings.append(text)
    return strings


def main() -> None:
    rng = random.Random(20)
    tokenizer = train_bpe([made_up_text(rng) for _ in range(3000)], 1024, FOLDER)
    write_chat_literals(FOLDER)
    golden = {
        "control_ids": tokenizer.control_ids,
        "strings": [[text, tokenizer.encode(text)] for text in mixed_strings(rng)],
    }
    (FOLDER / "golden.json").write_text(json.dumps(golden, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
