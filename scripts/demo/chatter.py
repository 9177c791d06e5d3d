"""Small talk and other general requests: hand-written exchanges (data/exchanges.json), no facts about countries."""

import json
import random
from pathlib import Path

from scripts.demo.documents import Document, Mode, conversation, draw_mode
from scripts.demo.facts import Turn, as_typed
from scripts.demo.phrasings import SYSTEM_PROMPTS

_EXCHANGES = json.loads((Path(__file__).parent / "data" / "exchanges.json").read_text(encoding="utf-8"))

PEOPLE = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Felix",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
    "Quinn",
    "Rosa",
    "Sam",
    "Tara",
    "Uma",
    "Victor",
    "Wendy",
    "Xavier",
    "Yara",
    "Zoe",
    "Alice",
    "Bob",
    "Maria",
    "Peter",
    "Lena",
    "Tom",
)
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "purple", "orange", "brown", "grey", "pink", "silver")
_SYLLABLES = (
    "ba",
    "dor",
    "el",
    "fan",
    "gra",
    "hu",
    "ix",
    "jo",
    "kal",
    "lim",
    "mor",
    "nu",
    "ost",
    "pra",
    "qui",
    "ran",
    "sul",
    "tra",
    "ur",
    "vel",
    "wex",
    "zor",
)
_ENDINGS = ("ia", "land", "stan", "ora", "esia", "wick", "and", "ium")


def greeting(rng: random.Random) -> Turn:
    """The first exchange of the data file."""
    exchange = _EXCHANGES[0]
    return rng.choice(exchange["asked"]), exchange["reasoning"], exchange["answers"][0]


def invented_country(rng: random.Random) -> str:
    return ("".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 2, 3)))) + rng.choice(_ENDINGS)).capitalize()


def unknown_answer(name: str) -> str:
    return f"I do not know a country called {name}."


def unknown_country(rng: random.Random) -> Turn:
    """A country that does not exist: say so instead of making something up."""
    name = (
        rng.choice(("Atlantis", "Narnia", "Mordor", "Wakanda", "Utopia"))
        if rng.random() < 0.1
        else invented_country(rng)
    )
    question = rng.choice(
        (
            "What is the capital of {}?",
            "Where is {}?",
            "What currency does {} use?",
            "What language is spoken in {}?",
            "How big is {}?",
            "How many people live in {}?",
            "Tell me about {}.",
            "capital of {}?",
            "Which countries border {}?",
            "What is the population of {}?",
        )
    )
    reasoning = f"The user asks about {name}. I know no country of that name. I say so."
    return as_typed(rng, question.format(name)), reasoning, unknown_answer(name)


def _count(rng: random.Random) -> Turn:
    last = rng.choice((5, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 100))
    question = rng.choice(
        ("Count to {}.", "Count from 1 to {}.", "Please count up to {}.", "Write the numbers from 1 to {}.")
    )
    numbers = ", ".join(str(number) for number in range(1, last + 1))
    return question.format(last), f"I count from 1 to {last}.", f"{numbers}."


def _sum(rng: random.Random) -> Turn:
    first, second = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.3 and first >= second:
        return (
            f"What is {first} - {second}?",
            f"{first} minus {second} is {first - second}.",
            f"{first} - {second} = {first - second}.",
        )
    question = rng.choice(("What is {} + {}?", "{} + {} = ?", "Add {} and {}.", "How much is {} plus {}?"))
    return (
        question.format(first, second),
        f"{first} plus {second} is {first + second}.",
        f"{first} + {second} = {first + second}.",
    )


def _repeat(rng: random.Random, words: list[str]) -> Turn:
    phrase = " ".join(rng.sample(words, rng.randint(1, 6)))
    question = rng.choice(
        ('Repeat after me: "{}"', "Repeat this: {}", "Say: {}", "Write exactly this: {}", 'Say "{}".')
    )
    return question.format(phrase), f"I repeat: {phrase}", phrase


def _memory(rng: random.Random) -> list[Turn]:
    """Something said earlier in the conversation is asked for later."""
    name, colour, number = rng.choice(PEOPLE), rng.choice(COLOURS), rng.randint(2, 99)
    told = rng.choice(
        (
            (f"My name is {name}.", "What is my name?", f"Your name is {name}.", f"Nice to meet you, {name}!"),
            (f"I am {name}.", "Who am I?", f"You are {name}.", f"Hello {name}!"),
            (
                f"My favourite colour is {colour}.",
                "What is my favourite colour?",
                f"Your favourite colour is {colour}.",
                "I will remember it.",
            ),
            (
                f"Remember the number {number}.",
                "Which number should you remember?",
                f"The number is {number}.",
                "I will remember it.",
            ),
        )
    )
    turns = [(told[0], "The user tells me something. I will remember it.", told[3])]
    if rng.random() < 0.5:
        turns.append(_sum(rng))
    return [*turns, (told[1], f"The user told me before: {told[0]}", told[2])]


def chat_documents(rng: random.Random, words: list[str]) -> list[Document]:
    """All general conversations; `words` are common English words to repeat."""

    def one(turns: list[Turn]) -> Document:
        mode: Mode = draw_mode(rng)
        prompt = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.3 else None
        return conversation(rng, "chat", turns, mode=mode, prompt=prompt)

    documents = []
    for exchange in _EXCHANGES:
        for question in exchange["asked"]:
            for _ in range(14):
                documents.append(one([(question, exchange["reasoning"], rng.choice(exchange["answers"]))]))
    documents += [one([_count(rng)]) for _ in range(250)]
    documents += [one([_sum(rng)]) for _ in range(1500)]
    documents += [one([_repeat(rng, words)]) for _ in range(1500)]
    documents += [one(_memory(rng)) for _ in range(2000)]
    documents += [one([unknown_country(rng)]) for _ in range(2500)]
    return documents
