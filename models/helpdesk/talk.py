"""Talk without tools: system prompts with a company's facts, greetings, thanks, questions on the facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from models.helpdesk.values import CITIES, COMPANIES, PRODUCTS


@dataclass(frozen=True, slots=True)
class Company:
    """The agent's company. `facts`: topic -> its value in the system prompt."""

    name: str
    friendly: bool
    facts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of the system prompt, with wordings of the statement, of questions and of answers."""

    statement: str
    questions: tuple[str, ...]
    brief: str
    friendly: str


FACTS: Mapping[str, Fact] = {
    "hours": Fact(
        "Opening hours: {value}.",
        ("When are you open?", "What are your opening hours?", "How long are you open today?"),
        "We are open {value}.",
        "We are open {value}, and we look forward to hearing from you.",
    ),
    "returns": Fact(
        "Returns are possible within {value} days.",
        ("How long can I return an item?", "What is your return policy?", "Can I send something back?"),
        "Returns are possible within {value} days.",
        "You can return any item within {value} days.",
    ),
    "shipping": Fact(
        "Shipping costs {value} euros.",
        ("How much is shipping?", "What does shipping cost?", "Do I pay for delivery?"),
        "Shipping costs {value} euros.",
        "Shipping costs {value} euros for every order.",
    ),
    "store": Fact(
        "The store is in {value}.",
        ("Where is your store?", "Do you have a store?", "In which city are you?"),
        "Our store is in {value}.",
        "You are welcome in our store in {value}.",
    ),
    "warranty": Fact(
        "The warranty lasts {value} months.",
        ("How long is the warranty?", "Do I have a warranty?", "What about the warranty?"),
        "The warranty lasts {value} months.",
        "Every item has a warranty of {value} months.",
    ),
}

# (what the user says, the brief reply, the friendly reply)
SMALL_TALK: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Hello!", "Hi there.", "Good morning.", "Hello, is anybody there?"),
        "Hello. How can I help?",
        "Hello and welcome to {company}! How can I help you today?",
    ),
    (
        ("Who are you?", "Am I talking to a person?", "What are you?"),
        "I am the assistant of {company}.",
        "I am the assistant of {company}, a small program that helps with orders.",
    ),
    (
        ("What can you do?", "How can you help me?", "What can I ask you?"),
        "I can look things up with my tools.",
        "I can look things up for you with my tools. Just tell me what you need.",
    ),
    (
        ("What is an SKU?", "What does SKU mean?"),
        "An SKU is the number of an item.",
        "An SKU is the number that we give to every item in our store.",
    ),
    (
        ("How are you?", "How is your day?"),
        "Fine. How can I help?",
        "I am doing well, thank you! How can I help you today?",
    ),
)

CLOSINGS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Thanks!", "Thank you very much.", "Great, thanks.", "Perfect, thank you."),
        "You are welcome.",
        "You are very welcome! Is there anything else I can do?",
    ),
    (
        ("That is all. Bye!", "Goodbye.", "No, that was all.", "Bye, have a nice day."),
        "Goodbye.",
        "Goodbye, and have a nice day!",
    ),
)

UNABLE = (
    "I have no tool for that.",
    "I am sorry, I have no tool for that. Is there anything else I can do?",
)

_OPENINGS = (
    "You are the help desk of {company}.",
    "You are the support assistant of {company}.",
    "You answer the customers of {company}.",
)
_BRIEF = ("Answer briefly.", "Keep answers short.", "Be brief.")
_FRIENDLY = ("Be friendly.", "Answer in a friendly way.", "Be warm and polite.")

_POLICIES = (
    "Never promise a discount.",
    "Do not speak about other companies.",
    "Use a tool when a customer asks about an order, a parcel, an invoice or an account.",
    "State the values that a tool returns exactly as they are.",
    "If a tool finds nothing, say so and ask whether the number is right.",
    "Do not guess an order number.",
    "Gift cards cannot be exchanged for money.",
    "The {product} is sold in the store in {city} only.",
    "Customers from {city} can pick up the {product} on the same day.",
    "Ask for the number of the order when the customer does not give it.",
    "The {product} ships from {city} in two boxes.",
    "Repairs of the {product} are done in {city}.",
)


def sample_company(rng: Random) -> Company:
    """A company with random facts."""
    facts = {
        "hours": f"from {rng.randint(7, 10)}:00 to {rng.randint(16, 21)}:00",
        "returns": str(rng.choice((14, 21, 28, 30, 45, 60, 90))),
        "shipping": f"{rng.randint(2, 9)}.{rng.randint(1, 9)}{rng.randint(1, 9)}",
        "store": rng.choice(CITIES),
        "warranty": str(rng.choice((6, 12, 18, 24, 36, 48))),
    }
    topics = rng.sample(sorted(facts), rng.randint(1, 3))
    return Company(rng.choice(COMPANIES), rng.random() < 0.5, {topic: facts[topic] for topic in topics})


def system_prompt(rng: Random, company: Company, *, policies: int) -> str:
    """The system prompt: who the agent is, the wanted style, the facts, `policies` further sentences."""
    parts = [rng.choice(_OPENINGS).format(company=company.name)]
    parts.append(rng.choice(_FRIENDLY if company.friendly else _BRIEF))
    parts += [FACTS[topic].statement.format(value=value) for topic, value in company.facts.items()]
    for _ in range(policies):
        sentence = rng.choice(_POLICIES)
        parts.append(sentence.format(product=rng.choice(PRODUCTS), city=rng.choice(CITIES)))
    return " ".join(parts)
