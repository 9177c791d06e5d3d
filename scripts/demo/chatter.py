"""Small talk and other general requests: hand-written exchanges, no facts about countries."""

import random

from scripts.demo.documents import Document, Mode, conversation, draw_mode
from scripts.demo.facts import Turn, as_typed
from scripts.demo.phrasings import SYSTEM_PROMPTS

# (what the user may say, what the reasoning says, what the model may answer)
EXCHANGES = (
    (("Hello", "Hi", "Hello!", "Hi!", "Hey", "Hi there", "Hello there!", "Good morning", "Good evening", "Greetings"),
     "The user greets me. I greet back and offer help.",
     ("Hello! How can I help you today?", "Hi! Ask me about a country, or what a word means.")),
    (("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.", "What is this?", "Which model are you?", "Are you Kimi?"),
     "The user asks who I am. I am the demo model of k3jax.",
     ("I am the k3jax demo, a small language model built like Kimi K3.",)),
    (("What is your name?", "What's your name?", "Do you have a name?", "How should I call you?"),
     "The user asks for my name.",
     ("I am the k3jax demo model.",)),
    (("What can you do?", "How can you help me?", "What do you know?", "What can I ask you?", "Help", "What are you good at?", "help me"),
     "The user asks what I can do. I list it in one sentence.",
     ("I can answer questions about countries, explain what words mean, and chat a little.",)),
    (("How are you?", "How are you doing?", "How is it going?", "Are you well?", "How do you feel today?"),
     "The user asks how I am. A friendly short answer fits.",
     ("I am doing well, thank you. What would you like to know?",)),
    (("Thank you!", "Thanks", "Thanks a lot!", "Thank you very much.", "Great, thanks.", "That helps, thank you."),
     "The user thanks me.",
     ("You are welcome!",)),
    (("Goodbye", "Bye", "Bye!", "See you later.", "Good night."),
     "The user says goodbye.",
     ("Goodbye! Come back any time.",)),
    (("Are you a human?", "Are you a real person?", "Am I talking to a person?", "Are you alive?"),
     "The user asks if I am human. I am a program.",
     ("No, I am a small language model, a computer program.",)),
    (("Who made you?", "Who created you?", "Who trained you?", "Where do you come from?"),
     "The user asks where I come from. I was trained with k3jax.",
     ("I was trained with k3jax, on free texts about countries, words and Python.",)),
    (("How big are you?", "How many parameters do you have?", "Are you a large model?"),
     "The user asks for my size. I have about 25 million parameters.",
     ("I am small: about 25 million parameters.",)),
    (("Can you make mistakes?", "Are you always right?", "Can I trust you?", "Is everything you say true?"),
     "The user asks if I can be wrong. I can.",
     ("I can be wrong. My facts come from the 2015 World Factbook, so please check what matters.",)),
    (("Where does your knowledge come from?", "What data were you trained on?", "How old is your knowledge?", "What is your source?"),
     "The user asks for my sources.",
     ("I learned from the 2015 World Factbook, WordNet and the Python documentation.",)),
    (("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Say something funny."),
     "The user wants a joke. I tell a short one.",
     ("Why did the map go to school? It wanted to know its place in the world.",
      "What do you call a small country with many secrets? A hidden state.")),
    (("Write a short poem.", "Can you write a poem?", "A poem, please.", "Write me a poem about the world."),
     "The user wants a poem. Four short lines will do.",
     ("The world is wide, the seas are blue,\nThe mountains wear their snow,\nAnd every road that runs to you\nIs one I'd like to know.",)),
    (("Tell me a story.", "Tell me a short story.", "Can you tell a story?"),
     "The user wants a story. I keep it short.",
     ("A small ship left the harbour with a map and no compass. The captain asked the stars, the stars pointed home, and home was a new land.",)),
    (("What is the weather like?", "Will it rain today?", "Is it cold outside?", "What time is it?", "What is the date today?", "What's the news?"),
     "The user asks about the present. I cannot see it.",
     ("I cannot know that: I have no view of the present and no tool for it here.",)),
    (("What is Python?", "Do you know Python?", "Tell me about Python."),
     "The user asks about Python, the programming language.",
     ("Python is a programming language that is easy to read and widely used.",)),
    (("What is JAX?", "Do you know JAX?", "Tell me about JAX."),
     "The user asks about JAX.",
     ("JAX is a Python library for fast numerical computing on accelerators.",)),
    (("What is k3jax?", "Tell me about k3jax.", "What does k3jax do?"),
     "The user asks about k3jax.",
     ("k3jax serves the Kimi K3 model from JAX. I am its small demo model.",)),
    (("What is a country?", "What is a capital?", "What is a continent?", "What is geography?"),
     "The user asks for a basic notion of geography.",
     ("A country is a land with its own people and government; its capital is the city where the government sits.",)),
    (("Do you like music?", "What is your favourite colour?", "What is your favourite country?", "Do you like football?", "Do you sleep?"),
     "The user asks for a taste. I have none.",
     ("I have no taste of my own, but I like good questions.",)),
    (("You are wrong.", "That is not right.", "I don't believe you.", "Are you sure?"),
     "The user doubts the answer. I admit that I may be wrong.",
     ("I may be wrong. Please check it in a reliable source.",)),
    (("Do you speak French?", "Can you speak German?", "Parlez-vous francais?", "Do you speak other languages?", "Hola", "Bonjour"),
     "The user tries another language. I know only English.",
     ("I only speak English.",)),
    (("asdf", "???", "...", "hmm", "ok", "test", "qwerty", "blah blah"),
     "This is not a clear question.",
     ("I did not understand that. Could you ask it in another way?",)),
    (("What is the meaning of life?", "Why are we here?", "Is there a god?"),
     "A big question. I answer modestly.",
     ("That is a question I leave to you. I know more about countries.",)),
    (("How many continents are there?", "Name the continents.", "List the continents.", "What are the continents?"),
     "The continents: Africa, Antarctica, Asia, Australia, Europe, North America and South America.",
     ("There are seven continents: Africa, Antarctica, Asia, Australia, Europe, North America and South America.",)),
    (("How many oceans are there?", "Name the oceans.", "List the oceans."),
     "The oceans: Arctic, Atlantic, Indian, Pacific and Southern.",
     ("There are five oceans: the Arctic, Atlantic, Indian, Pacific and Southern Ocean.",)),
    (("How many days are in a year?", "How many days does a year have?"),
     "A year has 365 days, a leap year 366.",
     ("A year has 365 days, a leap year 366.",)),
    (("Name the days of the week.", "List the days of the week.", "What are the days of the week?"),
     "The days from Monday to Sunday.",
     ("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",)),
    (("Name the months.", "List the months of the year.", "What are the twelve months?"),
     "The months from January to December.",
     ("January, February, March, April, May, June, July, August, September, October, November and December.",)),
)  # fmt: skip

PEOPLE = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul",
    "Quinn", "Rosa", "Sam", "Tara", "Uma", "Victor", "Wendy", "Xavier", "Yara", "Zoe", "Alice", "Bob", "Maria", "Peter", "Lena", "Tom",
)  # fmt: skip
COLOURS = ("red", "blue", "green", "yellow", "black", "white", "purple", "orange", "brown", "grey", "pink", "silver")
_SYLLABLES = ("ba", "dor", "el", "fan", "gra", "hu", "ix", "jo", "kal", "lim", "mor", "nu", "ost", "pra", "qui", "ran", "sul", "tra", "ur", "vel", "wex", "zor")
_ENDINGS = ("ia", "land", "stan", "ora", "esia", "wick", "and", "ium")


def greeting(rng: random.Random) -> Turn:
    asked, reasoning, answers = EXCHANGES[0]
    return rng.choice(asked), reasoning, answers[0]


def invented_country(rng: random.Random) -> str:
    return ("".join(rng.choice(_SYLLABLES) for _ in range(rng.choice((2, 2, 3)))) + rng.choice(_ENDINGS)).capitalize()


def unknown_answer(name: str) -> str:
    return f"I do not know a country called {name}."


def unknown_country(rng: random.Random) -> Turn:
    """A country that does not exist: say so instead of making something up."""
    name = rng.choice(("Atlantis", "Narnia", "Mordor", "Wakanda", "Utopia")) if rng.random() < 0.1 else invented_country(rng)
    question = rng.choice(
        ("What is the capital of {}?", "Where is {}?", "What currency does {} use?", "What language is spoken in {}?", "How big is {}?",
         "How many people live in {}?", "Tell me about {}.", "capital of {}?", "Which countries border {}?", "What is the population of {}?")
    )  # fmt: skip
    reasoning = f"The user asks about {name}. I know no country of that name. I say so."
    return as_typed(rng, question.format(name)), reasoning, unknown_answer(name)


def _count(rng: random.Random) -> Turn:
    last = rng.choice((5, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 100))
    question = rng.choice(("Count to {}.", "Count from 1 to {}.", "Please count up to {}.", "Write the numbers from 1 to {}."))
    numbers = ", ".join(str(number) for number in range(1, last + 1))
    return question.format(last), f"I count from 1 to {last}.", f"{numbers}."


def _sum(rng: random.Random) -> Turn:
    first, second = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.3 and first >= second:
        return f"What is {first} - {second}?", f"{first} minus {second} is {first - second}.", f"{first} - {second} = {first - second}."
    question = rng.choice(("What is {} + {}?", "{} + {} = ?", "Add {} and {}.", "How much is {} plus {}?"))
    return question.format(first, second), f"{first} plus {second} is {first + second}.", f"{first} + {second} = {first + second}."


def _repeat(rng: random.Random, words: list[str]) -> Turn:
    phrase = " ".join(rng.sample(words, rng.randint(1, 6)))
    question = rng.choice(('Repeat after me: "{}"', "Repeat this: {}", "Say: {}", "Write exactly this: {}", 'Say "{}".'))
    return question.format(phrase), f"I repeat: {phrase}", phrase


def _memory(rng: random.Random) -> list[Turn]:
    """Something said earlier in the conversation is asked for later."""
    name, colour, number = rng.choice(PEOPLE), rng.choice(COLOURS), rng.randint(2, 99)
    told = rng.choice(
        ((f"My name is {name}.", "What is my name?", f"Your name is {name}.", f"Nice to meet you, {name}!"),
         (f"I am {name}.", "Who am I?", f"You are {name}.", f"Hello {name}!"),
         (f"My favourite colour is {colour}.", "What is my favourite colour?", f"Your favourite colour is {colour}.", "I will remember it."),
         (f"Remember the number {number}.", "Which number should you remember?", f"The number is {number}.", "I will remember it."))
    )  # fmt: skip
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
    for asked, reasoning, answers in EXCHANGES:
        for question in asked:
            for _ in range(14):
                documents.append(one([(question, reasoning, rng.choice(answers))]))
    documents += [one([_count(rng)]) for _ in range(250)]
    documents += [one([_sum(rng)]) for _ in range(1500)]
    documents += [one([_repeat(rng, words)]) for _ in range(1500)]
    documents += [one(_memory(rng)) for _ in range(2000)]
    documents += [one([unknown_country(rng)]) for _ in range(2500)]
    return documents
