"""A streamed answer as server-sent events; its row is durable before the chunk that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Mapping
from typing import Any, Protocol

import numpy as np
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenplane.engine_adapter.call_path.call_path import OnTokens
from tokenplane.engine_adapter.call_path.call_types import CallOutcome, ChatPrompt, ModelCall
from tokenplane.engine_adapter.chat.text import AnswerText
from tokenplane.engine_adapter.server.openai_answers import (
    chat_chunk,
    closing_chunks,
    content_of,
    text_chunk,
)
from tokenplane.engine_adapter.server.openai_errors import error_body, internal_error_body
from tokenplane.engine_adapter.server.openai_requests import ParsedRequest
from tokenplane.schemas.errors import LedgerError, TokenplaneError

logger = logging.getLogger("tokenplane.server")

_DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": waiting\n\n"


class Serve(Protocol):
    """``CallPath.serve``, or something round it."""

    def __call__(
        self, call: ModelCall, *, on_tokens: OnTokens | None = None
    ) -> Awaitable[CallOutcome]: ...


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete."""


async def until_disconnect[T](receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away.

    Raises:
        ClientGoneError: the client went away first; ``work`` has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await _cancel(task)
            raise ClientGoneError
        return task.result()
    finally:
        await _cancel(task, gone)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel and wait until all have ended. What they raise then is nobody's."""
    left = {task for task in tasks if task.cancel()}
    if left:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(left)
    for task in left:
        if task.done() and not task.cancelled():
            task.exception()


class StreamedCall:
    """One call whose text is sent while it is generated. Made within a running event loop.

    With tools, thoughts to be split off, or log-probabilities, nothing is sent before the whole
    answer is known: a beginning of it could be taken back by what follows.

    Args:
        heartbeat_s: a stream with nothing to say for so long sends a comment.
    """

    def __init__(
        self,
        serve: Serve,
        parsed: ParsedRequest,
        text: AnswerText,
        *,
        buffered: bool,
        heartbeat_s: float,
    ) -> None:
        self._parsed = parsed
        self._buffered = buffered
        self._heartbeat_s = heartbeat_s
        self._decoder = text.stream()
        self._events: asyncio.Queue[list[int] | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._first: list[int] | None = None
        self._task = asyncio.ensure_future(serve(parsed.call, on_tokens=self._on_tokens))
        self._task.add_done_callback(lambda _task: self._events.put_nowait(None))

    async def start(self) -> None:
        """Wait for the first sign of life, so that a refused request still gets its status.

        Raises: what ``CallPath.serve`` raises before the first token.
        """
        try:
            self._first = await self._events.get()
        except asyncio.CancelledError:
            await _cancel(self._task)
            raise
        if self._first is None:
            self._task.result()

    def _on_tokens(self, ids: np.ndarray) -> None:
        """On the engine's thread: hand over, and never raise."""
        with contextlib.suppress(RuntimeError):  # the loop has ended; so has everybody who reads
            self._loop.call_soon_threadsafe(self._events.put_nowait, ids.tolist())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's bytes. Closing this iterator early cancels the call."""
        call = self._parsed.call
        chat = isinstance(call.prompt, ChatPrompt)
        make = chat_chunk if chat else text_chunk
        try:
            ids = self._first
            if ids is not None and chat:
                opening = {"role": "assistant", "content": ""}
                yield _event(chat_chunk(call.answer_id, call.created, call.model, opening))
            while ids is not None:
                text = "" if self._buffered else self._decoder.push(ids)
                if text:
                    delta: Any = {"content": text} if chat else text
                    yield _event(make(call.answer_id, call.created, call.model, delta))
                while True:
                    try:
                        ids = await asyncio.wait_for(self._events.get(), self._heartbeat_s)
                        break
                    except TimeoutError:
                        yield _HEARTBEAT
            async for piece in self._ending(chat):
                yield piece
        finally:
            await _cancel(self._task)

    async def _ending(self, chat: bool) -> AsyncGenerator[bytes, None]:
        try:
            outcome = self._task.result()
        except TokenplaneError as error:
            yield _event(error_body(error))
            return
        except Exception:
            logger.exception("a stream broke off")
            yield _event(internal_error_body())
            return
        body = outcome.body
        if self._first is not None and body["id"] != self._parsed.call.answer_id:
            # Another server's run of the same request was staged first. What was sent is another
            # answer and cannot be taken back; the request again gets the one that counts.
            yield _event(error_body(_superseded()))
            return
        if self._first is None and chat:
            opening = {"role": "assistant", "content": ""}
            yield _event(chat_chunk(body["id"], body["created"], body["model"], opening))
        rest = self._decoder.rest(content_of(body))
        for chunk in closing_chunks(body, rest, include_usage=self._parsed.include_usage):
            yield _event(chunk)
        # A comment: clients skip it, people see it. The headers left before this was known.
        yield f": tokenplane-capture {outcome.status} {outcome.model_call_id or '-'}\n\n".encode()
        yield _DONE


def _superseded() -> LedgerError:
    return LedgerError(
        "another run of this request was staged first; send it again for its answer",
        code="idempotency_superseded",
    )


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


class EventStreamResponse(Response):
    """Sends a started call's events, and notices a client that goes away."""

    media_type = "text/event-stream"

    def __init__(self, call: StreamedCall, headers: Mapping[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-store", **headers})
        del self.headers["content-length"]  # nobody knows it yet
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the stream ends or the client is gone."""
        with contextlib.suppress(ClientGoneError):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._call.events()) as events:
            async for piece in events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
