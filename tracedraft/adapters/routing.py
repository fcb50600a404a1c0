"""A draft for each domain, and who says which domain a conversation belongs to (OSD's routing, arXiv 2310.07177)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from tracedraft.adapters.blocks import BlockLearner
from tracedraft.adapters.transaction import not_learnt
from tracedraft.interfaces import OuterAdapter
from tracedraft.types import Conversation, Lesson


class Routing(Enum):
    none = "none"
    label = "label"
    classifier = "classifier"


class Router(ABC):
    """Names the domain of a conversation."""

    @abstractmethod
    def domain(self, conversation: Conversation) -> str: ...

    @abstractmethod
    def state(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state(self, state: dict[str, Any]) -> None: ...


class LabelRouter(Router):
    """Believes what the workload says."""

    def domain(self, conversation: Conversation) -> str:
        return conversation.domain

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: dict[str, Any]) -> None: ...


class ClassifierRouter(Router):
    """Believes what the workload says of the first conversations, and then a classifier that learnt from these.

    It reads the words of the first turn: logistic regression over TF-IDF, by scikit-learn.
    """

    def __init__(self, warm_up: int):
        self.warm_up = warm_up
        self.seen: list[tuple[str, str]] = []
        self.classifier: Any = None

    def domain(self, conversation: Conversation) -> str:
        if len(self.seen) < self.warm_up:
            self.seen.append((conversation.turns[0], conversation.domain))
            return conversation.domain
        if len({domain for _, domain in self.seen}) == 1:
            return self.seen[0][1]
        self.classifier = self.classifier or self._fitted()
        return str(self.classifier.predict([conversation.turns[0]])[0])

    def _fitted(self) -> Any:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline

        texts, domains = zip(*self.seen, strict=True)
        vectorizer = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2))
        return make_pipeline(vectorizer, LogisticRegression(max_iter=1000)).fit(texts, domains)

    def state(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.seen = [(text, domain) for text, domain in state["seen"]]


class RoutedLearner(OuterAdapter):
    """A learner for each domain, all from the same start; the domain's own serves each conversation.

    Args:
        new: a learner from the start, which serves through the one draft there is.
    """

    def __init__(self, new: Callable[[], BlockLearner], router: Router):
        self.new, self.router = new, router
        self.learners: dict[str, BlockLearner] = {}
        self.current: str | None = None
        self.route: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}  # bytes of each learner, which change with a block alone

    def begin_conversation(self, conversation: Conversation) -> bool:
        began = time.perf_counter()
        domain, last = self.router.domain(conversation), self.current
        self._serve(domain)
        seconds = time.perf_counter() - began
        self.route = {"domain": domain, "label": conversation.domain, "seconds": seconds}
        return domain != last

    def _serve(self, domain: str) -> None:
        if domain not in self.learners:
            self._add(domain)
        if domain != self.current:
            self.learners[domain].student.serve()
        self.current = domain

    def _add(self, domain: str) -> BlockLearner:
        self.learners[domain] = self.new()
        self._weigh(domain)
        return self.learners[domain]

    def _weigh(self, domain: str) -> None:
        learner = self.learners[domain]
        self.sizes[domain] = _nbytes([learner.student.weights, learner.initial, learner.rule.state()])

    def observe(self, lesson: Lesson) -> None:
        self._learner.observe(lesson)

    @property
    def _learner(self) -> BlockLearner:
        assert self.current is not None
        return self.learners[self.current]

    def end_conversation(self, seconds: float | None) -> dict[str, Any] | None:
        """Always something: which draft served, the memory of all, and the seconds that choosing it took, which
        ``seconds`` hold too."""
        began = time.perf_counter()
        found = self._learner.end_conversation(seconds) or not_learnt("", seconds)
        if found["block"] is not None:
            assert self.current is not None
            self._weigh(self.current)
        route = self.route | {"drafts": len(self.learners), "memory_mib": sum(self.sizes.values()) / 2**20}
        spent = route["seconds"] + time.perf_counter() - began
        if seconds is None:
            spent = route["seconds"] = None
        return found | {"seconds": spent, "route": route}

    def rest(self, resting: bool) -> None:
        pass

    def close(self) -> None:
        pass

    def state(self) -> dict[str, Any]:
        learners = {domain: learner.state() for domain, learner in self.learners.items()}
        return {"learners": learners, "router": self.router.state(), "current": self.current}

    def weights(self) -> dict[str, Any]:
        return {domain: learner.weights() for domain, learner in self.learners.items()}

    def load_state(self, state: dict[str, Any], weights: dict[str, Any] | None) -> None:
        self.router.load_state(state["router"])
        for domain, kept in state["learners"].items():
            self._add(domain).load_state(kept, (weights or {}).get(domain))
            self._weigh(domain)
        self.current = None
        if state["current"] is not None:
            self._serve(state["current"])


def _nbytes(value: Any) -> int:
    """Of all tensors inside."""
    if isinstance(value, Tensor):
        return value.nbytes
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(_nbytes, inside))
