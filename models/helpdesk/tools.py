"""The tools of the help desk: schemas, wordings of requests and answers, and results.

Wordings are data. `{name}` in a request is an argument; in an answer it is an argument or a result field.
Each answer has a brief and a friendly form, and the system prompt selects one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A question that an earlier result already answers, without a new call."""

    questions: tuple[str, ...]
    brief: str
    friendly: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `arguments` and `result` map fields to samplers. An answer must state `values`."""

    name: str
    description: str
    arguments: Mapping[str, str]
    requests: tuple[str, ...]
    result: Mapping[str, str]
    brief: str
    friendly: str
    values: tuple[str, ...]
    # Requests without the argument `asked`, which the agent asks for and the user then states.
    partial: tuple[str, ...] = ()
    asked: str = ""
    # Requests that refer to the last mentioned order or e-mail.
    again: tuple[str, ...] = ()
    missing: str = ""
    follow_up: FollowUp | None = None
    enums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Wordings of a request with an enumerated argument: value -> sentences.
    hints: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def schema(self) -> dict[str, Any]:
        """The tool as an OpenAI function declaration."""
        properties: dict[str, Any] = {}
        for name, sampler in self.arguments.items():
            properties[name] = {"type": "number" if sampler == "amount" else "string"}
            if name in self.enums:
                properties[name]["enum"] = list(self.enums[name])
        parameters = {"type": "object", "properties": properties, "required": list(self.arguments)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


ASK: Mapping[str, tuple[str, str]] = {
    "order_id": ("May I have the order number?", "Of course. Could you give me the order number, please?"),
    "email": ("May I have the e-mail address?", "Of course. Could you give me the e-mail address, please?"),
    "sku": ("May I have the SKU?", "Of course. Could you give me the SKU, please?"),
    "tracking_number": (
        "May I have the tracking number?",
        "Of course. Could you give me the tracking number, please?",
    ),
    "invoice_id": (
        "May I have the invoice number?",
        "Of course. Could you give me the invoice number, please?",
    ),
}

REPLIES = (
    "It is {value}.",
    "{value}",
    "Sure, {value}.",
    "The number is {value}.",
    "Yes: {value}",
    "Here: {value}.",
)
EMAIL_REPLIES = ("It is {value}.", "{value}", "Sure, {value}.", "My address is {value}.", "Here: {value}.")

TOOLS: tuple[Tool, ...] = (
    Tool(
        name="get_order_status",
        description="Look up the status of an order.",
        arguments={"order_id": "order_id"},
        requests=(
            "Where is my order {order_id}?",
            "Can you check the status of order {order_id}?",
            "What is the status of {order_id}?",
            "I am waiting for order {order_id}. When will it arrive?",
            "Please look up order {order_id}.",
            "Has order {order_id} been shipped yet?",
        ),
        partial=("Where is my order?", "Can you check the status of my order?", "When will my order arrive?"),
        asked="order_id",
        again=("What is the status of that order?", "And where is that order now?"),
        result={"status": "order_status", "eta": "date", "carrier": "carrier"},
        brief="Order {order_id} is {status}. Expected arrival: {eta}.",
        friendly="Good news, I found it. Your order {order_id} is {status} and should arrive on {eta}.",
        values=("order_id", "status", "eta"),
        missing="order_id",
        follow_up=FollowUp(
            questions=("Who delivers it?", "Which carrier brings it?", "Who is the carrier?"),
            brief="The carrier is {carrier}.",
            friendly="It will be delivered by {carrier}.",
            values=("carrier",),
        ),
    ),
    Tool(
        name="refund_order",
        description="Refund an amount for an order.",
        arguments={"order_id": "order_id", "amount": "amount"},
        requests=(
            "Please refund {amount} euros for order {order_id}.",
            "I want {amount} euros back for order {order_id}.",
            "Order {order_id} was damaged. Can I get a refund of {amount} euros?",
            "Can you refund {amount} euros on {order_id}?",
        ),
        again=(
            "Please refund {amount} euros for that order.",
            "Can I get {amount} euros back for that order?",
        ),
        result={"refund_id": "refund_id", "status": "answer", "days": "days"},
        brief="Refund {refund_id} over {amount} euros is {status}.",
        friendly=(
            "I am sorry for the trouble. The refund of {amount} euros is {status}. Its number is {refund_id}."
        ),
        values=("refund_id", "amount", "status"),
        missing="order_id",
        follow_up=FollowUp(
            questions=("How long does the refund take?", "When will I have the money?"),
            brief="It takes {days} days.",
            friendly="The money will be with you in {days} days.",
            values=("days",),
        ),
    ),
    Tool(
        name="cancel_order",
        description="Cancel an order.",
        arguments={"order_id": "order_id"},
        requests=(
            "Please cancel order {order_id}.",
            "I do not need order {order_id} any more. Cancel it, please.",
            "Can you cancel {order_id} for me?",
            "I want to cancel my order {order_id}.",
        ),
        partial=("I want to cancel my order.", "Please cancel my order."),
        asked="order_id",
        again=("Please cancel that order.", "Then cancel that order, please."),
        result={"refund": "amount", "refund_id": "refund_id"},
        brief="Order {order_id} is cancelled. Refund: {refund} euros.",
        friendly="Your order {order_id} is cancelled, and you will get {refund} euros back.",
        values=("order_id", "refund"),
        missing="order_id",
        follow_up=FollowUp(
            questions=("What is the refund number?", "Can I have the refund number?"),
            brief="The refund number is {refund_id}.",
            friendly="Certainly, the refund number is {refund_id}.",
            values=("refund_id",),
        ),
    ),
    Tool(
        name="update_address",
        description="Change the delivery address of an order.",
        arguments={"order_id": "order_id", "street": "street", "city": "city"},
        requests=(
            "Please send order {order_id} to {street}, {city}.",
            "I moved. Change the address of order {order_id} to {street}, {city}.",
            "Can you deliver {order_id} to {street} in {city}?",
        ),
        again=("Please send that order to {street}, {city}.",),
        result={"eta": "date"},
        brief="Order {order_id} goes to {street}, {city}. Expected arrival: {eta}.",
        friendly="All set. Your order {order_id} now goes to {street}, {city} and should arrive on {eta}.",
        values=("order_id", "street", "city", "eta"),
        missing="order_id",
    ),
    Tool(
        name="create_ticket",
        description="Open a support ticket.",
        arguments={"subject": "subject", "priority": "priority"},
        requests=(
            "I have a problem: {subject}.",
            "Please open a ticket: {subject}.",
            "Something is wrong: {subject}.",
            "I want to report a problem: {subject}.",
        ),
        result={"ticket_id": "ticket_id", "agent": "agent"},
        brief="Ticket {ticket_id} is open.",
        friendly=(
            "I am sorry to hear that. I opened ticket {ticket_id} for you, and we will look into it soon."
        ),
        values=("ticket_id",),
        enums={"priority": ("low", "normal", "high")},
        hints={
            "priority": {
                "low": (" There is no hurry.", " It can wait."),
                "normal": ("", ""),
                "high": (" It is urgent!", " I need help right now.", " This is very urgent."),
            }
        },
        follow_up=FollowUp(
            questions=("Who works on it?", "Who looks after the ticket?"),
            brief="{agent} works on it.",
            friendly="Our colleague {agent} takes care of it.",
            values=("agent",),
        ),
    ),
    Tool(
        name="lookup_customer",
        description="Find a customer by e-mail.",
        arguments={"email": "email"},
        requests=(
            "Can you find my account? My e-mail is {email}.",
            "Please look up the customer {email}.",
            "Which plan do I have? My address is {email}.",
            "What is my customer number? I am {email}.",
        ),
        partial=("Can you find my account?", "Which plan do I have?"),
        asked="email",
        again=("And which plan does that e-mail have?",),
        result={"name": "person", "customer_id": "customer_id", "plan": "plan"},
        brief="{name}, customer {customer_id}, plan {plan}.",
        friendly="Thank you. I found {name} with customer number {customer_id} and the {plan} plan.",
        values=("name", "customer_id", "plan"),
        missing="email",
    ),
    Tool(
        name="check_stock",
        description="Check how many items are in stock.",
        arguments={"sku": "sku"},
        requests=(
            "Do you have {sku} in stock?",
            "Is {sku} available?",
            "How many of {sku} do you have?",
            "Please check the stock of {sku}.",
        ),
        partial=("Is my item in stock?", "Can you check the stock for me?"),
        asked="sku",
        result={"product": "product", "in_stock": "quantity", "price": "amount"},
        brief="{product}, {sku}: {in_stock} in stock.",
        friendly="Yes, we have {in_stock} pieces of the {product} with the SKU {sku} in stock.",
        values=("product", "sku", "in_stock"),
        missing="sku",
        follow_up=FollowUp(
            questions=("How much is it?", "What does it cost?", "And the price?"),
            brief="The price is {price} euros.",
            friendly="It costs {price} euros.",
            values=("price",),
        ),
    ),
    Tool(
        name="schedule_callback",
        description="Book a phone call with an agent.",
        arguments={"date": "date", "time": "time"},
        requests=(
            "Please call me on {date} at {time}.",
            "Can somebody call me on {date} at {time}?",
            "I want a call back on {date} at {time}.",
            "Book a call for {date} at {time}, please.",
        ),
        result={"callback_id": "callback_id", "agent": "agent"},
        brief="{agent} calls you on {date} at {time}. Booking: {callback_id}.",
        friendly=(
            "With pleasure. {agent} will call you on {date} at {time}. Your booking number is {callback_id}."
        ),
        values=("agent", "date", "time", "callback_id"),
    ),
    Tool(
        name="track_parcel",
        description="Find a parcel by tracking number.",
        arguments={"tracking_number": "tracking_number"},
        requests=(
            "Where is the parcel {tracking_number}?",
            "Please track {tracking_number}.",
            "My tracking number is {tracking_number}. Where is it now?",
            "Can you track parcel {tracking_number} for me?",
        ),
        partial=("Where is my parcel?", "Can you track my parcel?"),
        asked="tracking_number",
        result={"city": "city", "eta": "date", "carrier": "carrier"},
        brief="Parcel {tracking_number} is in {city}. Expected arrival: {eta}.",
        friendly="I found it. Your parcel {tracking_number} is in {city} and should arrive on {eta}.",
        values=("tracking_number", "city", "eta"),
        missing="tracking_number",
    ),
    Tool(
        name="reset_password",
        description="Send a link that resets a password.",
        arguments={"email": "email"},
        requests=(
            "I forgot my password. My e-mail is {email}.",
            "Please reset the password for {email}.",
            "I cannot log in as {email}. Can you reset my password?",
        ),
        partial=("I forgot my password.", "Can you reset my password?"),
        asked="email",
        again=("Please also reset the password for that e-mail.",),
        result={"valid_minutes": "minutes"},
        brief="A link was sent to {email}. It is valid for {valid_minutes} minutes.",
        friendly="No problem. I sent a link to {email}, and it is valid for {valid_minutes} minutes.",
        values=("email", "valid_minutes"),
        missing="email",
    ),
    Tool(
        name="get_invoice",
        description="Look up an invoice.",
        arguments={"invoice_id": "invoice_id"},
        requests=(
            "How much is invoice {invoice_id}?",
            "Can you look up invoice {invoice_id}?",
            "I have a question about invoice {invoice_id}. Is it paid?",
            "Please check {invoice_id}.",
        ),
        partial=("Can you look up my invoice?", "How much is my invoice?"),
        asked="invoice_id",
        result={"amount": "amount", "status": "invoice_status", "due": "date"},
        brief="Invoice {invoice_id}: {amount} euros, {status}.",
        friendly="I looked it up. Invoice {invoice_id} is over {amount} euros and is {status}.",
        values=("invoice_id", "amount", "status"),
        missing="invoice_id",
        follow_up=FollowUp(
            questions=("When is it due?", "What is the due date?"),
            brief="It is due on {due}.",
            friendly="The due date is {due}.",
            values=("due",),
        ),
    ),
)

TOOLS_BY_NAME: Mapping[str, Tool] = {tool.name: tool for tool in TOOLS}

# Answers after a call that found nothing, by the argument of the search.
NOT_FOUND: Mapping[str, tuple[str, str]] = {
    "order_id": (
        "Order {value} was not found.",
        "I am sorry, I cannot find order {value}. Is the number right?",
    ),
    "email": ("{value} was not found.", "I am sorry, I cannot find {value}. Is the address right?"),
    "sku": ("SKU {value} was not found.", "I am sorry, I cannot find the SKU {value}. Is it right?"),
    "tracking_number": (
        "Parcel {value} was not found.",
        "I am sorry, I cannot find parcel {value}. Is the number right?",
    ),
    "invoice_id": (
        "Invoice {value} was not found.",
        "I am sorry, I cannot find invoice {value}. Is the number right?",
    ),
}
