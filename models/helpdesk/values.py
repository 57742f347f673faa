"""Random values for help-desk dialogues: order numbers, e-mails, dates, amounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

Value = str | int | float

FIRST_NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Felix",
    "Grace",
    "Hugo",
    "Irene",
    "Jonas",
    "Karin",
    "Leo",
    "Maria",
    "Nora",
    "Oscar",
    "Paula",
    "Quentin",
    "Rosa",
    "Simon",
    "Tara",
    "Ulrich",
    "Vera",
    "Walter",
    "Xenia",
    "Yusuf",
    "Zoe",
    "Amir",
    "Bianca",
    "Chen",
    "Dora",
)
LAST_NAMES = (
    "Adler",
    "Baker",
    "Costa",
    "Duarte",
    "Engel",
    "Fischer",
    "Garcia",
    "Hansen",
    "Ivanov",
    "Jansen",
    "Keller",
    "Lopez",
    "Moreau",
    "Novak",
    "Olsen",
    "Petit",
    "Quinn",
    "Rossi",
    "Silva",
    "Tanaka",
    "Ueda",
    "Vogel",
    "Weber",
    "Young",
    "Zeller",
    "Lindt",
    "Marsh",
    "Nguyen",
    "Ortega",
    "Price",
)
DOMAINS = ("example.com", "mail.example", "post.example", "inbox.example", "work.example", "home.example")
CITIES = (
    "Berlin",
    "Lyon",
    "Porto",
    "Madrid",
    "Vienna",
    "Oslo",
    "Ghent",
    "Milan",
    "Prague",
    "Dublin",
    "Warsaw",
    "Zurich",
    "Lisbon",
    "Athens",
    "Turin",
    "Leeds",
    "Nantes",
    "Graz",
    "Basel",
    "Malmo",
)
STREETS = (
    "Mill Road",
    "Station Street",
    "Park Lane",
    "Church Street",
    "Garden Way",
    "Lake Road",
    "King Street",
    "Hill Avenue",
    "Bridge Street",
    "Forest Drive",
)
PRODUCTS = (
    "desk lamp",
    "backpack",
    "coffee grinder",
    "keyboard",
    "rain jacket",
    "water bottle",
    "headset",
    "office chair",
    "phone case",
    "notebook",
    "running shoes",
    "kettle",
    "tent",
    "camera bag",
    "bike light",
)
PROBLEMS = (
    "broken zipper",
    "missing charger",
    "wrong size",
    "scratched screen",
    "login does not work",
    "app crashes at start",
    "payment was taken twice",
    "package arrived open",
    "invoice has the wrong name",
    "coupon is not accepted",
    "battery does not charge",
    "delivery never came",
    "color is different",
    "one part is missing",
    "screen stays black",
)
COMPANIES = (
    "Northwind",
    "Blue Harbor",
    "Alpine Goods",
    "Maple Store",
    "Quick Parts",
    "Sunrise Home",
    "River Books",
    "City Bikes",
    "Green Desk",
    "Polar Tech",
)


def _digits(rng: Random, n: int) -> str:
    return str(rng.randint(1, 9)) + "".join(str(rng.randint(0, 9)) for _ in range(n - 1))


def _amount(rng: Random) -> float:
    # The last digit is never 0, so that text and JSON spell the amount alike.
    return float(f"{rng.randint(3, 480)}.{rng.randint(0, 9)}{rng.randint(1, 9)}")


def _email(rng: Random) -> str:
    tail = str(rng.randint(2, 99)) if rng.random() < 0.3 else ""
    first, last = rng.choice(FIRST_NAMES).lower(), rng.choice(LAST_NAMES).lower()
    return f"{first}.{last}{tail}@{rng.choice(DOMAINS)}"


def _date(rng: Random) -> str:
    return f"{rng.choice((2026, 2027))}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: Random) -> str:
    return f"{rng.randint(8, 19):02d}:{rng.choice((0, 15, 30, 45)):02d}"


SAMPLERS: Mapping[str, Callable[[Random], Value]] = {
    # Digits only, because a leading letter has another token after a space than after a quotation mark.
    "order_id": lambda rng: _digits(rng, 6),
    "ticket_id": lambda rng: f"T-{_digits(rng, 4)}",
    "refund_id": lambda rng: f"R-{_digits(rng, 5)}",
    "invoice_id": lambda rng: f"INV-{_digits(rng, 5)}",
    "callback_id": lambda rng: f"CB-{_digits(rng, 4)}",
    "customer_id": lambda rng: f"C-{_digits(rng, 6)}",
    "tracking_number": lambda rng: _digits(rng, 10),
    "sku": lambda rng: f"{_digits(rng, 2)}-{_digits(rng, 4)}",
    "amount": _amount,
    "email": _email,
    "date": _date,
    "time": _time,
    "city": lambda rng: rng.choice(CITIES),
    "street": lambda rng: f"{rng.randint(1, 199)} {rng.choice(STREETS)}",
    "person": lambda rng: f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
    "agent": lambda rng: rng.choice(FIRST_NAMES),
    "product": lambda rng: rng.choice(PRODUCTS),
    "subject": lambda rng: rng.choice(PROBLEMS),
    "quantity": lambda rng: rng.randint(1, 400),
    "minutes": lambda rng: rng.choice((10, 15, 20, 30, 45, 60)),
    "days": lambda rng: rng.randint(2, 14),
    "order_status": lambda rng: rng.choice(("shipped", "in preparation", "delayed", "ready for pickup")),
    "invoice_status": lambda rng: rng.choice(("paid", "open", "overdue")),
    "plan": lambda rng: rng.choice(("basic", "plus", "premium")),
    "carrier": lambda rng: rng.choice(("DHL", "UPS", "GLS", "PostNord", "FedEx")),
    "answer": lambda rng: rng.choice(("approved", "pending")),
}
