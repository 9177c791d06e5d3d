"""Turn a fact into one exchange: the question as people type it, a short reasoning, a short answer."""

import random

from scripts.demo.countries import Country, Fact, takes_article
from scripts.demo.documents import Mode
from scripts.demo.phrasings import BRIEF_REQUESTS, PHRASINGS, WRAPPERS

Turn = tuple[str, str, str]


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def fill(template: str, country: Country, *, said: str | None = None) -> str:
    """Put the country's name into a template that asks no fact."""
    said = said or country.said
    return template.replace("{c}", said).replace("{C}", capitalised(said))


def state(template: str, country: Country, fact: Fact) -> str:
    return fill(template, country).replace("{a}", fact.text)


def said_name(rng: random.Random, country: Country) -> str:
    """The name, or one of its other names now and then."""
    if not country.aliases or rng.random() < 0.6:
        return country.said
    alias = rng.choice(country.aliases)
    return f"the {alias}" if takes_article(alias) else alias


def as_typed(rng: random.Random, question: str) -> str:
    """Add what surrounds a question in a chat box: greetings, missing capitals, missing question marks."""
    draw = rng.random()
    if draw < 0.22:
        small = question[0].lower() + question[1:]
        question = rng.choice(WRAPPERS).replace("{q}", question).replace("{l}", small)
    if rng.random() < 0.08:
        question = question.lower()
    if rng.random() < 0.07:
        question = question.rstrip("?.")
    return question


def reasoning_about(rng: random.Random, topic: str, subject: str, answer: str, effort: str) -> str:
    """Longer with more effort, always a line or two."""
    if effort == "low":
        return f"The {topic} of {subject}: {answer}."
    if effort == "high":
        return f"The question is about the {topic} of {subject}. I recall: {answer}."
    opening = rng.choice(("The user asks about", "The user wants to know"))
    return f"{opening} the {topic} of {subject}. The {topic} of {subject}: {answer}. I answer in one short sentence."


def ask_fact(rng: random.Random, country: Country, kind: str, mode: Mode, *, question: str | None = None) -> Turn:
    """One question about one fact; `question` is a template, drawn from the training phrasings when None."""
    phrasing, fact = PHRASINGS[kind], country.facts[kind]
    drawn = question is None
    asked = fill(question or rng.choice(phrasing.asked), country, said=said_name(rng, country) if drawn else None)
    reasoning = reasoning_about(rng, phrasing.topic, country.said, fact.text, mode.effort)
    if drawn and rng.random() < 0.05:
        brief = rng.choice(BRIEF_REQUESTS).replace("{q}", asked)
        return brief, reasoning.replace("in one short sentence", "with the name only"), capitalised(fact.text)
    answer = capitalised(state(rng.choice(phrasing.answers), country, fact))
    return as_typed(rng, asked) if drawn else asked, reasoning, answer


def follow_up(rng: random.Random, country: Country, kind: str, mode: Mode) -> Turn:
    """A question that leans on the turn before ("And its currency?")."""
    phrasing = PHRASINGS[kind]
    _, reasoning, answer = ask_fact(rng, country, kind, mode, question="{c}")
    return rng.choice(phrasing.follow_up), reasoning, answer


def switch_country(rng: random.Random, country: Country, kind: str, mode: Mode) -> Turn:
    """The same question for another country ("And Spain?")."""
    _, reasoning, answer = ask_fact(rng, country, kind, mode, question="{c}")
    return (
        rng.choice(("And {c}?", "What about {c}?", "And for {c}?", "Same for {c}?")).replace("{c}", country.said),
        reasoning,
        answer,
    )
