"""Conversations about countries: single questions, follow-ups, comparisons, yes or no, lists, JSON, longer answers."""

import json
import random
from dataclasses import replace

from scripts.demo.chatter import greeting
from scripts.demo.countries import Country, join_words
from scripts.demo.documents import Document, Mode, conversation, draw_mode
from scripts.demo.facts import Turn, as_typed, ask_fact, capitalised, follow_up, said_name, state, switch_country
from scripts.demo.phrasings import PHRASINGS, SYSTEM_PROMPTS

_JSON_FIELDS = ("capital", "currency", "languages", "region", "population")
_SUMMARY_KINDS = ("region", "capital", "population", "area", "languages", "currency")


class CountryDialogs:
    """Draws conversations about the countries, never asking what is held out.

    `kinds` are the fact kinds that may be asked, per country code. All draws come from `rng`: same seed, same corpus.
    """

    def __init__(self, rng: random.Random, countries: list[Country], kinds: dict[str, list[str]]):
        self.rng = rng
        self.countries = [country for country in countries if kinds[country.code]]
        self.kinds = kinds
        # Those of whom everything may be asked: the others never stand in summaries or reversed questions.
        self.open = [country for country in self.countries if set(country.facts) == set(kinds[country.code])]

    def _document(self, turns: list[Turn], mode: Mode) -> Document:
        prompt = self.rng.choice(SYSTEM_PROMPTS) if self.rng.random() < 0.3 else None
        return conversation(self.rng, "factbook", turns, mode=mode, prompt=prompt)

    def singles(self) -> list[Document]:
        """Every fact on its own, `weight` times; first asked plainly, once with thinking and once without."""
        documents = []
        for country in self.countries:
            for kind in self.kinds[country.code]:
                for mode in (Mode(thinking=True), Mode(thinking=False)):
                    turn = ask_fact(self.rng, country, kind, mode, question=PHRASINGS[kind].asked[0])
                    documents.append(conversation(self.rng, "factbook", [turn], mode=mode))
                for _ in range(PHRASINGS[kind].weight - 2):
                    mode = draw_mode(self.rng)
                    documents.append(self._document([ask_fact(self.rng, country, kind, mode)], mode))
        return documents

    def chains(self, count: int) -> list[Document]:
        """Several turns: about one country, the same fact of several, or a mix."""
        documents = []
        for _ in range(count):
            mode, country = draw_mode(self.rng), self.rng.choice(self.countries)
            kinds = self.kinds[country.code]
            turns = [greeting(self.rng)] if self.rng.random() < 0.15 else []
            turns.append(ask_fact(self.rng, country, self.rng.choice(kinds), mode))
            shape = self.rng.random()
            for _ in range(self.rng.randint(1, 4)):
                if shape < 0.5:
                    turns.append(follow_up(self.rng, country, self.rng.choice(kinds), mode))
                else:
                    country = self.rng.choice(self.countries)
                    turns.append(ask_fact(self.rng, country, self.rng.choice(self.kinds[country.code]), mode))
            documents.append(self._document(turns, mode))
        return documents

    def switches(self, count: int) -> list[Document]:
        """One fact, then the same of other countries ("And Spain?")."""
        documents = []
        for _ in range(count):
            mode, kind = (
                draw_mode(self.rng),
                self.rng.choice(("capital", "capital", "currency", "languages", "population", "area", "location")),
            )
            able = [country for country in self.countries if kind in self.kinds[country.code]]
            first, *others = self.rng.sample(able, self.rng.randint(2, 4))
            turns = [ask_fact(self.rng, first, kind, mode)] + [
                switch_country(self.rng, other, kind, mode) for other in others
            ]
            documents.append(self._document(turns, mode))
        return documents

    def _reversed_capital(self) -> Turn:
        country = self.rng.choice([country for country in self.open if "capital" in country.facts])
        city = country.facts["capital"].text
        question = self.rng.choice(
            (
                "{} is the capital of which country?",
                "Which country has the capital {}?",
                "What country is {} the capital of?",
                "Of which country is {} the capital?",
                "{} is the capital of what?",
            )
        )
        reasoning = f"The user names the capital {city}. {city} is the capital of {country.said}."
        return as_typed(self.rng, question.format(city)), reasoning, f"{city} is the capital of {country.said}."

    def _yes_or_no(self) -> Turn:
        country, other = self.rng.sample([country for country in self.open if "capital" in country.facts], 2)
        right = country.facts["capital"].text
        city = right if self.rng.random() < 0.5 else other.facts["capital"].text
        question = self.rng.choice(("Is {} the capital of {}?", "Is it true that {} is the capital of {}?")).format(
            city, country.said
        )
        reasoning = f"The capital of {country.said} is {right}. The user says {city}."
        said = "Yes, the" if city == right else "No, the"
        return as_typed(self.rng, question), reasoning, f"{said} capital of {country.said} is {right}."

    def _neighbour(self) -> Turn:
        able = [country for country in self.countries if "borders" in country.facts]
        country = self.rng.choice(able)
        names = country.facts["borders"].text
        if self.rng.random() < 0.5:
            other = self.rng.choice(country.borders)
        else:
            other = self.rng.choice(
                [other.name for other in able if other.name not in country.borders and other is not country]
            )
        question = self.rng.choice(("Does {} border {}?", "Is {} next to {}?")).format(country.said, other)
        said = "Yes" if other in country.borders else "No"
        return (
            as_typed(self.rng, question),
            f"{capitalised(country.said)} borders {names}. The user asks about {other}.",
            (f"{said}, {country.said} {'borders' if said == 'Yes' else 'does not border'} {other}."),
        )

    def _landlocked(self) -> Turn:
        country = self.rng.choice(self.countries)
        question = self.rng.choice(("Is {} landlocked?", "Does {} have a coast?")).format(country.said)
        coast = "has no coast and is landlocked" if country.landlocked else "has a coast and is not landlocked"
        agrees = country.landlocked == ("landlocked" in question)
        return (
            as_typed(self.rng, question),
            f"{capitalised(country.said)} {coast}.",
            f"{'Yes' if agrees else 'No'}, {country.said} {coast}.",
        )

    def _larger(self) -> Turn:
        kind = self.rng.choice(("area", "population"))
        able = [country for country in self.countries if kind in country.facts]
        size = {country.code: country.area_km2 if kind == "area" else country.population for country in able}
        first, second = self.rng.sample(able, 2)
        more = first if size[first.code] >= size[second.code] else second
        word = "larger" if kind == "area" else "more populous"
        question = self.rng.choice(("Which is {}, {} or {}?", "Which country is {}: {} or {}?")).format(
            word, first.said, second.said
        )
        parts = [f"{capitalised(country.said)}: {country.facts[kind].text}." for country in (first, second)]
        return as_typed(self.rng, question), " ".join(parts), f"{capitalised(more.said)} is {word}."

    def _in_region(self) -> Turn:
        region = (
            self.rng.choice([country for country in self.countries if "region" in country.facts]).facts["region"].text
        )
        there = [
            country
            for country in self.countries
            if "region" in country.facts and country.facts["region"].text == region
        ]
        named = sorted(there, key=lambda country: -country.population)[: self.rng.choice((1, 3, 3, 5, 10))]
        many = (
            "a country" if len(named) == 1 else f"{len(named)} countries" if len(named) == len(there) else "countries"
        )
        question = self.rng.choice(("Name {} in {}.", "Tell me {} in {}.", "List {} in {}.")).format(many, region)
        said = join_words([country.said for country in named])
        return question, f"The largest countries in {region}: {said}.", f"In {region}: {said}."

    def json_objects(self, count: int) -> list[Document]:
        """Facts as JSON, asked for in words, with `response_format`, or both."""
        documents = []
        for _ in range(count):
            country = self.rng.choice(self.open)
            known = [kind for kind in _JSON_FIELDS if kind in country.facts]
            if not known:
                continue
            fields, name = known, said_name(self.rng, country)
            question = self.rng.choice(
                ("Describe {} as JSON.", "Give me the facts about {} in JSON.", "{} as JSON, please.")
            ).format(name)
            response_format = {"type": "json_object"} if self.rng.random() < 0.3 else None
            draw = self.rng.random()
            if draw < 0.6:
                fields = sorted(self.rng.sample(known, self.rng.randint(1, min(3, len(known)))), key=_JSON_FIELDS.index)
                question = f"Give me a JSON object with the name and {join_words(fields)} of {country.said}."
            if draw < 0.3:
                keys = ["name", *fields]
                schema = {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "required": keys}
                response_format = {"type": "json_schema", "json_schema": {"name": "country", "schema": schema}}
                question = self.rng.choice(
                    ("Tell me about {}.", "What do you know about {}?", "Describe {} as JSON.")
                ).format(name)
            body = json.dumps({"name": country.name} | {kind: country.facts[kind].text for kind in fields})
            mode = draw_mode(self.rng)
            turn = (as_typed(self.rng, capitalised(question)), f"I write the facts about {country.said} as JSON.", body)
            documents.append(replace(self._document([turn], mode), response_format=response_format))
        return documents

    def _summary(self) -> Turn:
        country = self.rng.choice(self.open)
        kinds = [kind for kind in _SUMMARY_KINDS if kind in country.facts]
        question = self.rng.choice(
            (
                "Tell me about {}.",
                "What do you know about {}?",
                "Describe {}.",
                "Give me a summary of {}.",
                "What is {}?",
                "Introduce {} to me.",
            )
        )
        said = " ".join(capitalised(state(PHRASINGS[kind].answers[0], country, country.facts[kind])) for kind in kinds)
        reasoning = f"The user wants to know about {country.said}. I give the main facts: {', '.join(kinds)}."
        return (
            as_typed(self.rng, question.format(said_name(self.rng, country))),
            reasoning,
            said or f"I know little about {country.said}.",
        )

    def _history(self) -> Turn:
        country = self.rng.choice([country for country in self.countries if country.background])
        question = self.rng.choice(
            ("Tell me the history of {}.", "What is the history of {}?", "Give me some background on {}.")
        )
        return (
            question.format(country.said),
            f"The user asks for the history of {country.said}. I tell what I know.",
            country.background,
        )

    def mixed(self, count: int) -> list[Document]:
        """Everything that is not one fact: yes or no, comparisons, lists, summaries, history."""
        makers = (
            self._reversed_capital,
            self._yes_or_no,
            self._neighbour,
            self._landlocked,
            self._larger,
            self._in_region,
            self._summary,
            self._history,
        )
        drawn = self.rng.choices(makers, (5, 3, 3, 2, 4, 2, 6, 1), k=count)
        return [self._document([make()], draw_mode(self.rng)) for make in drawn]

    def after_long_text(self, passages: list[str], count: int) -> list[Document]:
        """A question after a page of unrelated text, so that a long prompt does not throw the model off."""
        documents = []
        for _ in range(count):
            mode, country = draw_mode(self.rng), self.rng.choice(self.countries)
            question, reasoning, answer = ask_fact(self.rng, country, self.rng.choice(self.kinds[country.code]), mode)
            text = self.rng.choice(passages)
            frame = self.rng.choice(
                ("{text}\n\n{q}", "Here is a text.\n\n{text}\n\nQuestion: {q}", "Ignore this text: {text}\n\n{q}")
            )
            documents.append(
                self._document([(frame.replace("{text}", text).replace("{q}", question), reasoning, answer)], mode)
            )
        return documents
