"""What TraceDraft's settings may be; each is explained where it is used, in ``trace.TraceSpec``."""

from enum import Enum


class Scope(Enum):
    conversation = "conversation"
    stream = "stream"


class Supervision(Enum):
    prompt = "prompt"
    response = "response"
    balanced = "balanced"


class Inputs(Enum):
    slots = "slots"
    chain = "chain"
    both = "both"


class Selection(Enum):
    recent = "recent"
    reservoir = "reservoir"


class Optimizer(Enum):
    sgd = "sgd"
    adam = "adam"


class Trained(Enum):
    norm = "norm"
    head = "head"
    both = "both"
