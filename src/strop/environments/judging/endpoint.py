"""One OpenAI-compatible endpoint: a chat completion asked for, tried again where that can help, paid for, and kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from strop.environments.judging.purse import Bill, Cache, Purse
from strop.errors import AttemptError, ConfigError
from strop.rollouts import FailureKind, Message

if TYPE_CHECKING:
    import httpx

    from strop.config import JudgeSettings

T = TypeVar("T")
#: Statuses after which the same call may succeed.
_PASSING = frozenset({408, 409, 425, 429})
#: Seconds before a second try; doubled each time, up to the longest.
_PAUSE, _LONGEST_PAUSE = 0.5, 20.0


class Endpoint:
    """Asks a judge model.

    Args:
        settings: of the judge.
        purse: pays.
        cache: of answers.

    Raises:
        ConfigError: the environment variable with the key is not set.
    """

    def __init__(self, settings: JudgeSettings, purse: Purse, cache: Cache) -> None:
        self.settings, self.purse, self.cache = settings, purse, cache
        self.key = key_of(settings)
        self._places = asyncio.Semaphore(settings.in_flight)
        self._asking: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()
        self._client: httpx.AsyncClient | None = None

    async def ask(self, messages: Sequence[Message], read: Callable[[str], T]) -> T:
        """Ask, and read the answer.

        Args:
            messages: the whole conversation.
            read: makes sense of an answer, or raises ValueError. Only answers that it can read are kept.

        Raises:
            AttemptError: with FailureKind.SCORER, if no answer came that can be read.
            BudgetError: there is too little left for it.
        """
        body = {
            "model": self.settings.model,
            "messages": list(messages),
            "temperature": self.settings.temperature,
            "max_tokens": self.settings.max_tokens,
        }
        asked = hashlib.sha256(json.dumps([self.settings.url, body], sort_keys=True).encode()).hexdigest()
        lock = self._asking.setdefault(asked, asyncio.Lock())  # attempts that are alike are judged once
        async with lock:
            if (known := self.cache.get(asked)) is not None:
                self.purse.ledger.buy("judge", 0.0, cached=1)
                return read(known)
            why = "it was never asked"
            for number in range(self.settings.tries):
                if number:
                    await asyncio.sleep(min(_LONGEST_PAUSE, _PAUSE * 2 ** (number - 1)))
                try:
                    answer = await self._call({**body, "seed": number})
                    found = read(answer)
                except _AgainError as error:
                    why = str(error)
                except ValueError as error:
                    why = f"its answer can't be read ({error})"
                else:
                    self.cache.keep(asked, answer)
                    return found
        raise AttemptError(FailureKind.SCORER, f"the judge {self.settings.model}: {why}")

    async def _call(self, body: dict[str, Any]) -> str:
        import httpx

        settings = self.settings
        self._client = self._client or httpx.AsyncClient(timeout=settings.seconds)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        async with self._places, self.purse.paying(self._most(body), settings.budget_usd) as bill:
            try:
                async with asyncio.timeout(settings.seconds):
                    response = await self._client.post(
                        f"{settings.url.rstrip('/')}/chat/completions", json=body, headers=headers
                    )
            except httpx.ConnectError as error:
                bill.usd = 0.0  # nobody heard it
                raise _AgainError(f"it can't be reached at {settings.url} ({error})") from error
            except (httpx.HTTPError, TimeoutError) as error:
                said = str(error) or f"no answer within {settings.seconds:g} s"
                raise _AgainError(f"{type(error).__name__}: {said}") from error
            if response.status_code >= 400:
                bill.usd = 0.0
                said = f"status {response.status_code}: {response.text[:200]}"
                if response.status_code in _PASSING or response.status_code >= 500:
                    raise _AgainError(said)
                raise AttemptError(FailureKind.SCORER, f"the judge {settings.model} refused: {said}")
            return self._answer(response, bill)

    def _answer(self, response: httpx.Response, bill: Bill) -> str:
        """The text of an answer; what it cost goes on the bill."""
        try:
            said = response.json()
            usage = said.get("usage") or {}
            if "prompt_tokens" in usage and "completion_tokens" in usage:
                bill.prompt, bill.completion = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
                bill.usd = self._price(bill.prompt, bill.completion)
            return str(said["choices"][0]["message"]["content"] or "")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise _AgainError(f"what it sent is no chat completion ({type(error).__name__}: {error})") from error

    def _price(self, prompt: int, completion: int) -> float:
        settings = self.settings
        per_million = settings.usd_per_million_prompt * prompt + settings.usd_per_million_completion * completion
        return per_million / 1e6

    def _most(self, body: dict[str, Any]) -> float:
        """Dollars that a call can cost: a token is at least one byte, and a message's frame a few tokens more."""
        prompt = len(json.dumps(body["messages"], ensure_ascii=False).encode()) + 16 * len(body["messages"])
        return self._price(prompt, self.settings.max_tokens)

    async def close(self) -> None:
        """Let go of connections and files."""
        if self._client is not None:
            await self._client.aclose()
        self.cache.close()


class _AgainError(Exception):
    """The same call may succeed."""


def key_of(settings: JudgeSettings) -> str:
    """The API key.

    Raises:
        ConfigError: its environment variable is not set.
    """
    if not settings.key_variable:
        return ""
    if not (key := os.environ.get(settings.key_variable)):
        raise ConfigError("judge.key_variable", f"{settings.key_variable} is not set", "Export it, or name another")
    return key
