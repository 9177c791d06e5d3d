"""How people ask for a fact, and how the demo model answers: the words only, no logic.

`{c}` is the country as said in a sentence, `{C}` the same with a capital first letter, `{a}` the fact. Questions under `held_out`
never enter the training text; an evaluation asks them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Phrasing:
    """Everything said about one kind of fact."""

    topic: str
    asked: tuple[str, ...]
    held_out: tuple[str, ...]
    answers: tuple[str, ...]
    follow_up: tuple[str, ...]
    statements: tuple[str, ...] = ()
    weight: int = 6

    def __post_init__(self) -> None:
        if set(self.asked) & set(self.held_out):
            raise ValueError(f"topic={self.topic!r}: held_out repeats a question of asked. Keep each question in one of them.")
        for name in ("asked", "held_out", "answers"):
            if not getattr(self, name):
                raise ValueError(f"{name} of topic={self.topic!r} is empty. Give at least one.")


PHRASINGS = {
    "capital": Phrasing(
        topic="capital",
        weight=20,
        asked=(
            "What is the capital of {c}?", "What's the capital of {c}?", "Which city is the capital of {c}?", "Name the capital of {c}.",
            "Tell me the capital of {c}.", "What is the capital city of {c}?", "What city is the capital of {c}?", "capital of {c}?",
            "the capital of {c}", "{C}: capital?", "Can you tell me the capital of {c}?", "I need the capital of {c}.",
            "Do you know the capital of {c}?", "What is the name of the capital of {c}?", "Give me the capital of {c}.",
            "Where is the seat of government of {c}?", "What is {c}'s capital?", "What's {c}'s capital city?",
        ),
        held_out=(
            "Which city serves as the capital of {c}?", "Please name the capital city of {c}.", "Could you say what the capital of {c} is?",
        ),
        answers=("The capital of {c} is {a}.", "The capital of {c} is {a}.", "{a} is the capital of {c}."),
        follow_up=("And its capital?", "What is the capital?", "And the capital?", "What's its capital city?"),
        statements=("The capital of {c} is {a}.", "{a} is the capital of {c}.", "{C} has its capital in {a}."),
    ),
    "currency": Phrasing(
        topic="currency",
        weight=11,
        asked=(
            "What is the currency of {c}?", "What currency does {c} use?", "Which currency is used in {c}?", "What money do people use in {c}?",
            "What's the currency of {c}?", "Tell me the currency of {c}.", "Which money is used in {c}?", "currency of {c}?",
            "What is the money of {c} called?", "Name the currency of {c}.", "How do people pay in {c}?", "What currency is used in {c}?",
        ),
        held_out=("Which currency does {c} have?", "What do people pay with in {c}?"),
        answers=("The currency of {c} is the {a}.", "{C} uses the {a}."),
        follow_up=("And its currency?", "What currency do they use?", "What money is used there?", "And the currency?"),
        statements=("The currency of {c} is the {a}.", "People in {c} pay with the {a}."),
    ),
    "languages": Phrasing(
        topic="languages",
        weight=11,
        asked=(
            "What language is spoken in {c}?", "What languages are spoken in {c}?", "Which language do people speak in {c}?",
            "What do people speak in {c}?", "What is the official language of {c}?", "What's the language of {c}?", "languages of {c}?",
            "Tell me the languages of {c}.", "Which languages are used in {c}?", "Name the main languages of {c}.",
            "What are the main languages of {c}?", "What language do they speak in {c}?",
        ),
        held_out=("Which languages do the people of {c} speak?", "What is the main language in {c}?"),
        answers=("People in {c} mainly speak {a}.", "In {c} people speak {a}."),
        follow_up=("And its language?", "What language is spoken there?", "What do people speak there?", "And the languages?"),
        statements=("People in {c} mainly speak {a}.", "In {c} people speak {a}."),
    ),
    "location": Phrasing(
        topic="location",
        weight=10,
        asked=(
            "Where is {c}?", "Where is {c} located?", "Where can I find {c}?", "In what part of the world is {c}?", "Describe where {c} is.",
            "Where does {c} lie?", "location of {c}?", "Tell me where {c} is.", "Where on the map is {c}?", "Where exactly is {c}?",
        ),
        held_out=("Where would I find {c} on a map?", "Where is {c} situated?"),
        answers=("{C} is in {a}.",),
        follow_up=("And where is it?", "Where is it located?", "Where is that?"),
        statements=("{C} lies in {a}.",),
    ),
    "region": Phrasing(
        topic="region",
        weight=7,
        asked=(
            "Which region is {c} in?", "What region does {c} belong to?", "In which region is {c}?", "Which part of the world does {c} belong to?",
            "region of {c}?", "Name the region of {c}.", "What is the region of {c}?",
        ),
        held_out=("To which region does {c} belong?", "Tell me what region {c} is in."),
        answers=("{C} is in {a}.",),
        follow_up=("And its region?", "Which region is it in?"),
        statements=("{C} belongs to the region of {a}.",),
    ),
    "population": Phrasing(
        topic="population",
        weight=9,
        asked=(
            "What is the population of {c}?", "How many people live in {c}?", "How big is the population of {c}?", "population of {c}?",
            "How many inhabitants does {c} have?", "What's the population of {c}?", "Tell me the population of {c}.",
            "How populous is {c}?", "How many people are there in {c}?",
        ),
        held_out=("What number of people live in {c}?", "How many residents does {c} have?"),
        answers=("{C} has {a}.", "The population of {c} is {a} (2015)."),
        follow_up=("And its population?", "How many people live there?", "And how many people?"),
        statements=("{C} has {a}.",),
    ),
    "area": Phrasing(
        topic="area",
        weight=7,
        asked=(
            "What is the area of {c}?", "How large is {c}?", "How big is {c}?", "What is the size of {c}?", "area of {c}?",
            "How many square kilometres does {c} cover?", "What's the total area of {c}?", "Tell me the area of {c}.",
        ),
        held_out=("How much land does {c} cover?", "What size is {c}?"),
        answers=("{C} covers {a}.", "The area of {c} is {a}."),
        follow_up=("And its area?", "How large is it?", "How big is it?"),
        statements=("{C} covers {a}.",),
    ),
    "government": Phrasing(
        topic="government type",
        asked=(
            "What type of government does {c} have?", "What kind of government does {c} have?", "What is the government type of {c}?",
            "How is {c} governed?", "What form of government does {c} have?", "government of {c}?", "What is the political system of {c}?",
        ),
        held_out=("Which form of government is there in {c}?", "What sort of government does {c} have?"),
        answers=("The government type of {c} is: {a}.",),
        follow_up=("And its government?", "How is it governed?", "What kind of government does it have?"),
        statements=("The government type of {c} is: {a}.",),
    ),
    "borders": Phrasing(
        topic="neighbours",
        asked=(
            "Which countries border {c}?", "What are the neighbours of {c}?", "What countries does {c} border?", "neighbours of {c}?",
            "Name the neighbours of {c}.", "Which countries are next to {c}?", "Who are the neighbours of {c}?", "List the countries around {c}.",
        ),
        held_out=("Which countries share a border with {c}?", "What countries are adjacent to {c}?"),
        answers=("{C} borders {a}.",),
        follow_up=("And its neighbours?", "Which countries border it?", "What are its neighbours?"),
        statements=("{C} borders {a}.",),
    ),
    "high_point": Phrasing(
        topic="highest point",
        asked=(
            "What is the highest point of {c}?", "What is the highest mountain in {c}?", "What's the highest point in {c}?",
            "Name the highest point of {c}.", "Which mountain is the highest in {c}?", "highest point of {c}?", "Tell me the highest peak of {c}.",
        ),
        held_out=("What is the tallest mountain of {c}?", "Where is the highest place in {c}?"),
        answers=("The highest point of {c} is {a}.",),
        follow_up=("And its highest point?", "What is the highest mountain there?"),
        statements=("The highest point of {c} is {a}.",),
    ),
    "independence": Phrasing(
        topic="independence",
        asked=(
            "When did {c} become independent?", "When did {c} gain independence?", "What is the date of independence of {c}?",
            "Since when is {c} independent?", "When was {c} founded as an independent country?", "independence of {c}?",
        ),
        held_out=("On what date did {c} become independent?", "When did {c} get its independence?"),
        answers=("{C} became independent {a}.",),
        follow_up=("When did it become independent?", "And its independence?"),
        statements=("{C} became independent {a}.",),
    ),
    "people": Phrasing(
        topic="name of the people",
        asked=(
            "What do you call people from {c}?", "What are people from {c} called?", "What is the name for people from {c}?",
            "How do you call someone from {c}?", "What are the inhabitants of {c} called?", "people of {c}?",
        ),
        held_out=("What is the word for people who come from {c}?", "What are the citizens of {c} called?"),
        answers=("People from {c} are called {a}.",),
        follow_up=("What are its people called?", "And what do you call the people?"),
        statements=("People from {c} are called {a}.",),
    ),
    "climate": Phrasing(
        topic="climate",
        weight=5,
        asked=(
            "What is the climate of {c}?", "What is the climate like in {c}?", "What is the weather usually like in {c}?",
            "How is the climate in {c}?", "climate of {c}?", "Tell me about the climate of {c}.",
        ),
        held_out=("What kind of climate does {c} have?", "Describe the climate of {c}."),
        answers=("The climate of {c}: {a}.",),
        follow_up=("And its climate?", "What is the climate like there?"),
        statements=("The climate of {c}: {a}.",),
    ),
    "resources": Phrasing(
        topic="natural resources",
        weight=5,
        asked=(
            "What natural resources does {c} have?", "What are the natural resources of {c}?", "Name some natural resources of {c}.",
            "Which resources are found in {c}?", "natural resources of {c}?", "What resources does {c} have?",
        ),
        held_out=("Which natural resources can be found in {c}?", "List natural resources of {c}."),
        answers=("Natural resources of {c}: {a}.",),
        follow_up=("And its natural resources?", "What resources does it have?"),
        statements=("Natural resources of {c}: {a}.",),
    ),
    "exports": Phrasing(
        topic="exports",
        weight=5,
        asked=(
            "What does {c} export?", "What are the main exports of {c}?", "Which goods does {c} export?", "exports of {c}?",
            "What does {c} sell to other countries?", "Name the main exports of {c}.",
        ),
        held_out=("What goods does {c} sell abroad?", "Tell me the exports of {c}."),
        answers=("Main exports of {c}: {a}.",),
        follow_up=("And its exports?", "What does it export?"),
        statements=("Main exports of {c}: {a}.",),
    ),
    "crops": Phrasing(
        topic="farm products",
        weight=5,
        asked=(
            "What is grown in {c}?", "What do farmers in {c} produce?", "What are the farm products of {c}?", "Which crops are grown in {c}?",
            "farm products of {c}?", "What does agriculture in {c} produce?",
        ),
        held_out=("Which farm products come from {c}?", "What do people farm in {c}?"),
        answers=("Farm products of {c}: {a}.",),
        follow_up=("And its farm products?", "What is grown there?"),
        statements=("Farm products of {c}: {a}.",),
    ),
    "industries": Phrasing(
        topic="industries",
        weight=5,
        asked=(
            "What are the main industries of {c}?", "Which industries does {c} have?", "What industries are there in {c}?",
            "Name the main industries of {c}.", "industries of {c}?", "What does industry in {c} make?",
        ),
        held_out=("Which industries are important in {c}?", "Tell me the industries of {c}."),
        answers=("Main industries of {c}: {a}.",),
        follow_up=("And its industries?", "What industries does it have?"),
        statements=("Main industries of {c}: {a}.",),
    ),
    "religion": Phrasing(
        topic="largest religion",
        weight=5,
        asked=(
            "What is the largest religion in {c}?", "What is the main religion of {c}?", "Which religion is most common in {c}?",
            "What religion do most people in {c} have?", "religion of {c}?", "Name the main religion in {c}.",
        ),
        held_out=("Which religion has the most followers in {c}?", "What is the most common religion in {c}?"),
        answers=("The largest religious group in {c} is {a}.",),
        follow_up=("And its main religion?", "Which religion is most common there?"),
        statements=("The largest religious group in {c} is {a}.",),
    ),
    "internet": Phrasing(
        topic="internet country code",
        weight=5,
        asked=(
            "What is the internet country code of {c}?", "What is the top-level domain of {c}?", "Which internet domain does {c} use?",
            "internet code of {c}?", "What's the internet domain of {c}?", "Which country code do websites in {c} use?",
        ),
        held_out=("What domain do websites from {c} end in?", "Which top-level domain belongs to {c}?"),
        answers=("The internet country code of {c} is {a}.",),
        follow_up=("And its internet code?", "What is its internet domain?"),
        statements=("The internet country code of {c} is {a}.",),
    ),
    "calling": Phrasing(
        topic="calling code",
        weight=5,
        asked=(
            "What is the calling code of {c}?", "What is the telephone country code of {c}?", "What is the phone code of {c}?",
            "calling code of {c}?", "Which phone code does {c} have?", "What's the international phone code for {c}?",
        ),
        held_out=("Which code do I dial to call {c}?", "What telephone code belongs to {c}?"),
        answers=("The calling code of {c} is +{a}.",),
        follow_up=("And its calling code?", "What is its phone code?"),
        statements=("The calling code of {c} is +{a}.",),
    ),
    "symbol": Phrasing(
        topic="national symbol",
        weight=5,
        asked=(
            "What is the national symbol of {c}?", "What's the national symbol of {c}?", "Which symbol stands for {c}?",
            "symbol of {c}?", "Name the national symbol of {c}.", "Tell me a national symbol of {c}.",
        ),
        held_out=("Which national symbol does {c} have?", "What symbol represents {c}?"),
        answers=("A national symbol of {c} is the {a}.",),
        follow_up=("And its national symbol?", "What is its symbol?"),
        statements=("A national symbol of {c} is the {a}.",),
    ),
    "anthem": Phrasing(
        topic="national anthem",
        weight=5,
        asked=(
            "What is the national anthem of {c}?", "What is the anthem of {c} called?", "What's the name of the anthem of {c}?",
            "anthem of {c}?", "Name the national anthem of {c}.", "Tell me the national anthem of {c}.",
        ),
        held_out=("Which song is the national anthem of {c}?", "What is {c}'s national anthem?"),
        answers=("The national anthem of {c} is \"{a}\".",),
        follow_up=("And its anthem?", "What is its anthem called?"),
        statements=("The national anthem of {c} is \"{a}\".",),
    ),
}  # fmt: skip

# Said around a question; {q} starts with a capital letter, {l} is the same with a small one.
WRAPPERS = (
    "Hi! {q}", "Hello, {l}", "Hey, {l}", "Please tell me: {l}", "Quick question: {l}", "{q} Thanks!", "{q} Please answer in one sentence.",
    "I have a question. {q}", "Geography question: {l}", "{q} I forgot.", "Help me with this: {l}", "Good morning. {q}", "OK, {l}",
)  # fmt: skip

BRIEF_REQUESTS = (
    "{q} Answer with the name only.", "{q} One word, please.", "{q} Just the answer.", "{q} Reply with only the answer.",
    "Answer in as few words as possible. {q}", "{q} No full sentence, please.",
)  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful assistant.", "You are a geography tutor.",
    "You are a friendly assistant that answers questions about countries.", "Answer briefly and truthfully.", "Be concise.",
    "You are an assistant. Answer in English.", "You answer questions in short sentences.", "You are a knowledgeable assistant.",
    "You are K3 demo, a small language model.", "You are a polite assistant who gives short answers.",
    "You help students with geography homework.", "Answer the user's question.",
)  # fmt: skip
