"""Conversations with tools: declared functions, a call, its result, the answer; and tools that are not needed."""

import json
import random
from dataclasses import replace
from typing import Any

from scripts.demo.countries import Country
from scripts.demo.documents import Document, assistant, draw_mode, system, user
from scripts.demo.facts import ask_fact
from scripts.demo.phrasings import PHRASINGS, SYSTEM_PROMPTS


def _function(name: str, description: str, properties: dict[str, str], required: list[str]) -> dict[str, Any]:
    described = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": described, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = _function("get_weather", "Get the current weather for a city.", {"city": "string"}, ["city"])
TIME = _function("get_time", "Get the local time in a city.", {"city": "string"}, ["city"])
LOOKUP = _function(
    "country_lookup", "Look up a fact about a country.", {"country": "string", "field": "string"}, ["country", "field"]
)
CALCULATOR = _function("add", "Add two numbers.", {"a": "number", "b": "number"}, ["a", "b"])
SEARCH = _function("search", "Search the web.", {"query": "string"}, ["query"])
ALL_TOOLS = (WEATHER, TIME, LOOKUP, CALCULATOR, SEARCH)
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear")
# Kinds that training conversations ask of every country, so a looked-up answer gives nothing away.
_LOOKED_UP = ("population", "area", "calling", "internet", "region", "high_point")


def _call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def _result(number: int, name: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "name": name, "content": json.dumps(value)}


def _weather(
    rng: random.Random, cities: list[str]
) -> tuple[str, list[tuple[str, dict[str, Any], dict[str, Any]]], str]:
    chosen = rng.sample(cities, 2 if rng.random() < 0.25 else 1)
    question = rng.choice(
        ("What is the weather in {}?", "How is the weather in {}?", "Weather in {}?", "Is it warm in {} now?")
    )
    calls, said = [], []
    for city in chosen:
        sky, degrees = rng.choice(_SKIES), rng.randint(-10, 38)
        calls.append(("get_weather", {"city": city}, {"sky": sky, "celsius": degrees}))
        said.append(f"It is {sky} in {city}, {degrees} degrees Celsius.")
    return question.format(" and ".join(chosen)), calls, " ".join(said)


def _time(rng: random.Random, cities: list[str]) -> tuple[str, list[tuple[str, dict[str, Any], dict[str, Any]]], str]:
    city, clock = rng.choice(cities), f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    question = rng.choice(("What time is it in {}?", "Tell me the time in {}.", "What's the local time in {}?"))
    return question.format(city), [("get_time", {"city": city}, {"time": clock})], f"It is {clock} in {city}."


def _lookup(
    rng: random.Random, countries: list[Country]
) -> tuple[str, list[tuple[str, dict[str, Any], dict[str, Any]]], str]:
    country = rng.choice([country for country in countries if any(kind in country.facts for kind in _LOOKED_UP)])
    kind = rng.choice([kind for kind in _LOOKED_UP if kind in country.facts])
    topic, fact = PHRASINGS[kind].topic, country.facts[kind]
    question = rng.choice(("Look up the {} of {}.", "Use the lookup for the {} of {}.", "Please look up the {} of {}."))
    call = ("country_lookup", {"country": country.name, "field": topic}, {"value": fact.text})
    return question.format(topic, country.said), [call], f"The {topic} of {country.said}: {fact.text}."


def _add(rng: random.Random) -> tuple[str, list[tuple[str, dict[str, Any], dict[str, Any]]], str]:
    first, second = rng.randint(1, 9999), rng.randint(1, 9999)
    question = rng.choice(("Add {} and {}.", "What is {} + {}?", "Use the tool to add {} and {}."))
    return (
        question.format(first, second),
        [("add", {"a": first, "b": second}, {"sum": first + second})],
        f"The sum is {first + second}.",
    )


def _with_call(rng: random.Random, countries: list[Country], cities: list[str]) -> Document:
    makers = {
        "get_weather": lambda: _weather(rng, cities),
        "get_time": lambda: _time(rng, cities),
        "country_lookup": lambda: _lookup(rng, countries),
        "add": lambda: _add(rng),
    }
    wanted = rng.choices(list(makers), (5, 2, 2, 1))[0]
    question, calls, answer = makers[wanted]()
    needed = next(tool for tool in ALL_TOOLS if tool["function"]["name"] == wanted)
    others = [tool for tool in ALL_TOOLS if tool is not needed]
    tools = [needed, *rng.sample(others, rng.choice((0, 0, 1, 2)))]
    rng.shuffle(tools)
    mode = draw_mode(rng)
    messages = [system(rng.choice(SYSTEM_PROMPTS))] if rng.random() < 0.25 else []
    asking = assistant("", f"The user needs {wanted}. I call it with what the question names.", mode)
    asking["tool_calls"] = [_call(number, name, arguments) for number, (name, arguments, _) in enumerate(calls, 1)]
    results = [_result(number, name, value) for number, (name, _, value) in enumerate(calls, 1)]
    messages += [user(question), asking, *results, assistant(answer, "The tool answered. I put it into words.", mode)]
    return Document(source="tools", messages=messages, mode=mode, tools=tools)


def _without_call(rng: random.Random, countries: list[Country], kinds: dict[str, list[str]]) -> Document:
    mode = draw_mode(rng)
    country = rng.choice([country for country in countries if kinds[country.code]])
    question, reasoning, answer = ask_fact(rng, country, rng.choice(kinds[country.code]), mode)
    tools = rng.sample((WEATHER, TIME, CALCULATOR), rng.choice((1, 1, 2)))
    messages = [user(question), assistant(answer, f"No tool helps here. {reasoning}", mode)]
    choice = "none" if rng.random() < 0.3 else None
    return Document(source="tools", messages=messages, mode=mode, tools=tools, tool_choice=choice)


def _only_call(document: Document) -> Document:
    """The same conversation up to the call, under `tool_choice` "required": the note stands after the question."""
    calling = next(index for index, message in enumerate(document.messages) if "tool_calls" in message)
    return replace(document, messages=document.messages[: calling + 1], tool_choice="required")


def tool_documents(rng: random.Random, countries: list[Country], kinds: dict[str, list[str]]) -> list[Document]:
    """Conversations with tools; `kinds` are the fact kinds that may be asked per country code."""
    cities = [country.facts["capital"].text for country in countries if "capital" in kinds[country.code]]
    cities += [
        "New York",
        "San Francisco",
        "Shanghai",
        "Barcelona",
        "Munich",
        "Milan",
        "Sydney",
        "Toronto",
        "Mumbai",
        "Istanbul",
    ]
    documents = [_with_call(rng, countries, cities) for _ in range(3000)]
    documents += [_only_call(_with_call(rng, countries, cities)) for _ in range(300)]
    return documents + [_without_call(rng, countries, kinds) for _ in range(900)]
